from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.testing.transport_contract import TransportContract
from posttrain.weights import shared_files
from posttrain.weights.memory import attach, copy, shared_region
from posttrain.weights.owner import ProcessId, pid_namespace
from posttrain.weights.shared_files import shared_folder, sweep
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
    assert orphan in sweep(shared_folder())
    assert not orphan.exists() and Path(mine.path).exists()
    mine.release()


def test_memory_of_another_pid_namespace_is_left_alone(tmp_path, monkeypatch):
    """Containers that share /dev/shm: a pid of the other one looks dead here, or is somebody else."""
    folder, dead, mine = tmp_path, "999999999.1", ProcessId.current()
    monkeypatch.setattr(shared_files, "shared_folder", lambda: folder)
    here = pid_namespace()
    foreign = [folder / f"posttrain-{namespace}-{owner}-0" for namespace in (f"1{here}", "2") for owner in (dead, mine)]
    unknown = [folder / name for name in (f"posttrain-{dead}-0", f"posttrain-{here}-0", "posttrain-", f"posttrain-{here}-x-0")]
    orphan, own = folder / f"posttrain-{here}-{dead}-0", folder / f"posttrain-{here}-{mine}-0"
    for path in (*foreign, *unknown, orphan, own):
        path.touch()
    assert sweep() == [orphan]
    shared_files.release_own()
    assert set(folder.iterdir()) == {*foreign, *unknown}


def test_shared_memory_is_named_after_its_owner_in_its_namespace():
    region = shared_region(8)
    assert shared_files.owner_of(Path(region.path)) == ProcessId.current()
    assert Path(region.path).name.startswith(f"posttrain-{os.stat('/proc/self/ns/pid').st_ino}-{os.getpid()}.")
    region.release()


def test_an_owner_that_ends_normally_leaves_nothing():
    code = "from posttrain.weights.memory import shared_region; r = shared_region(8); print(r.path)"
    path = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert path and not Path(path).exists()


def test_too_small_shared_memory_is_said_at_once_with_its_fix(monkeypatch):
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = set(shared_folder().glob("posttrain-*"))
    with pytest.raises(WeightSyncError, match="the weights need 64 MiB") as caught:
        shared_region(64 * 2**20)
    assert "--shm-size" in caught.value.fix and not caught.value.retryable
    assert set(shared_folder().glob("posttrain-*")) == before


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_a_copy_is_torch_s_copy(threads, dtype):
    """By memcpy or not: one thread or more, neighbours in memory or not, values cast or as they are, and nothing at all."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = (torch.randn(6, 5) * 3).to(dtype)
        for source in (values, values.t(), values[:0], values[1:3, 2], values.flatten()[3], torch.nn.Parameter(values.double())):
            found, wanted = (torch.zeros(source.shape, dtype=dtype) for _ in range(2))
            with torch.no_grad():
                copy(source, found)
                wanted.copy_(source)
            assert torch.equal(found, wanted)
        row = torch.zeros(3, dtype=dtype)
        copy(values[0, :1], row)  # broadcast
        assert torch.equal(row, values[0, :1].expand(3))
    finally:
        torch.set_num_threads(before)
