import contextlib
import errno
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from posttrain.errors import DataError, RunInterrupted
from posttrain.loop import checkpoint


def save(folder):
    (folder / "weights.bin").write_bytes(b"w" * 100)


def test_written_whole_and_found_in_order_of_the_number(tmp_path):
    for step in (4, 20, 8):
        checkpoint.write(tmp_path, step, save, {"step": step})
    assert [c.step for c in checkpoint.find(tmp_path)] == [4, 8, 20]
    assert checkpoint.find(tmp_path)[-1].loop_state() == {"step": 20}
    assert not list(tmp_path.glob("tmp_*"))


def test_case_data_5_foreign_folders_are_neither_read_nor_deleted(tmp_path):
    for name in ("step_20-hf", "tmp_step_24"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "loop.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("mine")
    for step in (4, 8, 20):
        checkpoint.write(tmp_path, step, save, {"step": step})
    assert checkpoint.find(tmp_path)[-1].step == 20
    assert checkpoint.prune(tmp_path, keep_last=2, keep_every=None) == [4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step_20", "step_20-hf", "step_8", "tmp_step_24"]


def test_retention_keeps_the_newest_and_the_multiples(tmp_path):
    for step in range(10, 101, 10):
        checkpoint.write(tmp_path, step, save, {})
    checkpoint.prune(tmp_path, keep_last=2, keep_every=50)
    assert [c.step for c in checkpoint.find(tmp_path)] == [50, 90, 100]


def test_no_limit_keeps_everything(tmp_path):
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step, save, {})
    assert checkpoint.prune(tmp_path, keep_last=None, keep_every=None) == []


@pytest.mark.parametrize("crash_after", range(6))
def test_a_crash_at_any_file_leaves_the_last_good_one(tmp_path, monkeypatch, crash_after):
    checkpoint.write(tmp_path, 1, save, {"step": 1})
    calls = iter(range(100))
    real = checkpoint.sync

    def dying(path):
        if next(calls) == crash_after:
            raise KeyboardInterrupt
        real(path)

    monkeypatch.setattr(checkpoint, "sync", dying)
    with contextlib.suppress(KeyboardInterrupt):
        checkpoint.write(tmp_path, 2, save, {"step": 2})
    found = checkpoint.find(tmp_path)
    assert found[0].loop_state() == {"step": 1}
    assert all((c.path / "policy" / "weights.bin").stat().st_size == 100 for c in found)
    monkeypatch.setattr(checkpoint, "sync", real)
    assert checkpoint.write(tmp_path, 2, save, {"step": 2}).loop_state() == {"step": 2}


def test_all_of_it_is_on_the_disk_before_it_has_its_name_and_the_name_is_too(tmp_path, monkeypatch):
    """Asked of the system, not of the function that is to do it."""
    done, fsync, rename = [], os.fsync, Path.rename

    def recorded(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def renamed(path, target):
        files = {str(one) for one in (path, *path.rglob("*"))}
        assert len(files) > 4 and files <= set(done)
        done.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Path, "rename", renamed)
    found = checkpoint.write(tmp_path, 1, save, {"step": 1})
    assert found.path.is_dir() and done == [str(tmp_path)]


def test_a_full_disk_is_said_and_loses_nothing(tmp_path):
    checkpoint.write(tmp_path, 1, save, {"step": 1})

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunInterrupted, match="step 2 was not written") as caught:
        checkpoint.write(tmp_path, 2, full, {})
    assert "the disk is full" in str(caught.value) and caught.value.exit_code == 75
    assert [c.step for c in checkpoint.find(tmp_path)] == [1]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB, where this machine lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)  # lazily: a failed torch.save keeps its file open for a while


def with_safetensors(folder):
    save_file({"a": torch.zeros(200_000)}, folder / "model.safetensors")


def with_torch(folder):
    torch.save({"a": torch.zeros(200_000)}, folder / "policy.pt")


@pytest.mark.parametrize("writer", [with_safetensors, with_torch])
def test_the_real_writers_on_a_disk_that_is_really_full(small_disk, writer):
    checkpoint.write(small_disk, 1, save, {"step": 1})
    with pytest.raises(RunInterrupted, match="step 2 was not written") as caught:
        checkpoint.write(small_disk, 2, writer, {})
    assert "the disk is full" in str(caught.value)
    assert [p.name for p in small_disk.iterdir()] == ["step_1"]


def test_a_checkpoint_that_is_half_deleted_is_no_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint.write(tmp_path, step, save, {})

    def dying(path):
        (path / "policy" / "weights.bin").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.shutil, "rmtree", dying)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.prune(tmp_path, keep_last=1, keep_every=None)
    assert [c.step for c in checkpoint.find(tmp_path)] == [2]


def test_writing_a_step_again_keeps_the_old_one_aside(tmp_path):
    checkpoint.write(tmp_path, 2, save, {"take": 1})
    checkpoint.write(tmp_path, 2, save, {"take": 2})
    assert checkpoint.find(tmp_path)[-1].loop_state() == {"take": 2}
    assert json.loads((tmp_path / "step_2.superseded" / "loop.json").read_text()) == {"take": 1}


def test_resume_takes_a_run_or_a_checkpoint(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    checkpoint.write(folder, 3, save, {})
    checkpoint.write(folder, 7, save, {})
    assert checkpoint.locate(tmp_path / "run")[1].step == 7
    run, found = checkpoint.locate(folder / "step_3")
    assert (run, found.step) == (tmp_path / "run", 3)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda p: p / "nowhere", "nothing to resume"),
        (lambda p: p, "has no complete checkpoint"),
    ],
)
def test_resume_says_what_is_wrong(tmp_path, make, text):
    with pytest.raises(DataError, match=text) as caught:
        checkpoint.locate(make(tmp_path))
    assert caught.value.fix and caught.value.exit_code == 3


def test_a_damaged_checkpoint_names_the_way_out(tmp_path):
    made = checkpoint.write(tmp_path, 5, save, {})
    (made.path / "loop.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read") as caught:
        checkpoint.find(tmp_path)[0].loop_state()
    assert "--resume" in caught.value.fix
