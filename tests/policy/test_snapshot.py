"""One snapshot at a time, written once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from posttrain.errors import OutOfMemory
from posttrain.policy import saving
from posttrain.policy.snapshot import Snapshots


class Held:
    """What a snapshot holds."""

    def __call__(self, folder: Path) -> None:
        folder.mkdir()


def test_a_snapshot_is_written_once_and_then_free(tmp_path: Path) -> None:
    snapshots, held = Snapshots(), Held()
    watched = weakref.ref(held)
    snapshot = snapshots.take(lambda held=held: held)  # type: ignore[misc]
    del held
    with pytest.raises(RuntimeError, match="snapshot before this one is not written yet; await its writer, or drop it"):
        snapshots.take(Held)
    snapshot(str(tmp_path / "a"))
    gc.collect()
    assert (tmp_path / "a").is_dir() and watched() is None
    with pytest.raises(RuntimeError, match="a snapshot is written once"):
        snapshot(tmp_path / "b")
    snapshots.take(Held)


def test_a_snapshot_that_failed_or_was_dropped_makes_room(tmp_path: Path) -> None:
    snapshots = Snapshots()
    failed = snapshots.take(Held)
    with pytest.raises(FileExistsError):
        failed(tmp_path)
    dropped = snapshots.take(Held)
    del dropped
    snapshots.take(Held)


def test_a_policy_writes_what_it_was(make_policy, rows_of_groups, tmp_path) -> None:  # type: ignore[no-untyped-def]
    policy, rows = make_policy(), rows_of_groups([4, 4])
    policy.train_step(rows)
    policy.save(tmp_path / "now")
    write = policy.snapshot()
    policy.train_step(rows)
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="not written yet"):
        policy.save(tmp_path / "other")
    write(tmp_path / "later")
    for name in (saving.WEIGHTS, saving.STATE):
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()


def test_a_copy_that_does_not_fit_says_so(make_policy, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(saving, "snapshot", full)
    with pytest.raises(OutOfMemory, match="ran out of memory while copying a checkpoint"):
        make_policy().snapshot()
