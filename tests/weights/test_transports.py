from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.testing.transport_contract import TransportContract
from posttrain.weights import memory
from posttrain.weights.memory import attach, shared_region, sweep
from posttrain.weights.shm import ShmTransport


class TestInproc(TransportContract):
    plugin = "inproc"


class TestShm(TransportContract):
    plugin = ShmTransport


class TestNixl(TransportContract):
    plugin = "nixl"


def test_another_process_sees_what_was_written_and_may_write():
    region = shared_region(8)
    region.buffer.copy_(torch.arange(8, dtype=torch.uint8))
    code = (
        "import sys; from posttrain.weights.memory import attach; r = attach(sys.argv[1]); "
        "print(r.buffer.tolist()); r.buffer[0] = 99; r.release()"
    )
    result = subprocess.run([sys.executable, "-c", code, region.path], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(list(range(8)))
    assert region.buffer[0] == 99
    assert Path(region.path).exists(), "only the owner unlinks"
    region.release()
    assert not Path(region.path).exists()


def test_attach_to_memory_that_is_gone():
    region = shared_region(8)
    path = region.path
    region.release()
    with pytest.raises(WeightSyncError, match="is gone"):
        attach(path)


def test_a_view_outlives_the_release():
    region = shared_region(16)
    region.buffer.fill_(3)
    view = region.buffer[4:8]
    region.release()
    assert view.tolist() == [3, 3, 3, 3]


def test_memory_of_a_dead_owner_is_swept_and_that_of_a_living_one_kept():
    mine = shared_region(8)
    code = "import os; from posttrain.weights.memory import shared_region as r; m = r(8); print(m.path, flush=True); os._exit(9)"
    orphan = Path(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip())
    assert orphan.exists(), "an owner that is killed cannot unlink"
    assert orphan in sweep(memory.shared_folder())
    assert not orphan.exists() and Path(mine.path).exists()
    mine.release()


def test_memory_of_another_pid_namespace_is_left_alone(tmp_path, monkeypatch):
    """Containers that share /dev/shm: a pid of the other one looks dead here, or is somebody else."""
    folder, dead, mine = tmp_path, "999999999.1", memory.ProcessId.current()
    monkeypatch.setattr(memory, "shared_folder", lambda: folder)
    here = memory.pid_namespace()
    foreign = [folder / f"posttrain-{namespace}-{owner}-0" for namespace in (f"1{here}", "2") for owner in (dead, mine)]
    unknown = [folder / name for name in (f"posttrain-{dead}-0", f"posttrain-{here}-0", "posttrain-", f"posttrain-{here}-x-0")]
    orphan, own = folder / f"posttrain-{here}-{dead}-0", folder / f"posttrain-{here}-{mine}-0"
    for path in (*foreign, *unknown, orphan, own):
        path.touch()
    assert sweep() == [orphan]
    memory.release_own()
    assert set(folder.iterdir()) == {*foreign, *unknown}


def test_shared_memory_is_named_after_its_owner_in_its_namespace():
    region = shared_region(8)
    assert memory.owner_of(Path(region.path)) == memory.ProcessId.current()
    assert Path(region.path).name.startswith(f"posttrain-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}.")
    region.release()


def test_an_owner_that_ends_normally_leaves_nothing():
    code = "from posttrain.weights.memory import shared_region; r = shared_region(8); print(r.path)"
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert path and not Path(path).exists()


def test_too_small_shared_memory_is_said_at_once_with_its_fix(monkeypatch):
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(memory.os, "posix_fallocate", full)
    before = set(memory.shared_folder().glob("posttrain-*"))
    with pytest.raises(WeightSyncError, match="the weights need 64 MiB") as caught:
        shared_region(64 * 2**20)
    assert "--shm-size" in caught.value.fix and not caught.value.retryable
    assert set(memory.shared_folder().glob("posttrain-*")) == before
