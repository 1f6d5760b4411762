"""What is loaded is seen, in which order NIXL may start is enforced, and what UCX prints is understood."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from posttrain.errors import WeightSyncError
from posttrain.weights import nixl, nixl_agent, ucx
from posttrain.weights.nixl import NixlTransport
from posttrain.weights.nixl_agent import bindings, package
from posttrain.weights.ucx import Loaded, in_maps, nccl_in_use, order_problem, scan_ucx_log, warm_nixl

ROOT = Path(__file__).parents[2]
OWN = "/env/nixl_cu13.libs"
MAPS = """\
7f00-7f01 r-xp 00000000 fe:00 1 /env/nixl_cu13.libs/libucp-b39b3ed9.so.0.0.0
7f01-7f02 r--p 00000000 fe:00 2 /env/nixl_cu13.libs/libucs-14c218c5.so.0.0.0
7f02-7f03 r-xp 00000000 fe:00 3 /env/nixl_cu13.libs/ucx/libuct_cma.so.0.0.0
7f03-7f04 r-xp 00000000 fe:00 4 /env/torch/lib/libnccl.so.2
7f04-7f05 rw-p 00000000 00:00 0 [heap]
7f05-7f06 rw-p 00000000 fe:00 5 /home/libucp/notes.txt
"""
MPI = "7f06-7f07 r-xp 00000000 fe:00 6 /opt/mpi/lib/libucs.so.0 (deleted)\n"


def test_directories_of_ucx_and_nccl_are_read_from_maps() -> None:
    assert in_maps(MAPS) == Loaded(frozenset({OWN}), frozenset({"/env/torch/lib"}))
    assert in_maps(MAPS + MPI).ucx == {OWN, "/opt/mpi/lib"}
    assert in_maps("") == Loaded(frozenset(), frozenset())


def test_a_mapped_nccl_is_no_problem_and_one_in_use_is() -> None:
    assert order_problem(in_maps(MAPS), OWN) is None
    problem = order_problem(Loaded(frozenset(), frozenset(), ("a process group over nccl",)), OWN)
    assert problem is not None and problem.code == "nixl-order" and not problem.retryable
    assert "NCCL is already in use" in problem.message and "a process group over nccl" in problem.cause
    assert "before init_process_group" in problem.fix and "UCX_NET_DEVICES" not in str(problem)


def test_a_second_ucx_is_named() -> None:
    for loaded, own in ((in_maps(MPI), OWN), (in_maps(MAPS + MPI), None)):
        problem = order_problem(loaded, own)
        assert problem is not None and "/opt/mpi/lib" in problem.cause and "LD_LIBRARY_PATH" in problem.fix
    assert order_problem(in_maps(MPI), None) is None, "a NIXL that was built on the system's UCX uses that one"


def test_process_groups_and_threads_of_nccl_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.distributed_c10d as c10d

    assert list(nccl_in_use(["python\n", "posttrain\n"])) == []
    for backend in ("cpu:gloo,cuda:nccl", "gloo"):
        monkeypatch.setitem(c10d._world.pg_map, object(), (backend, None))
    assert list(nccl_in_use(["NCCL Service\n"])) == ["a process group over cpu:gloo,cuda:nccl", "a thread named NCCL Service"]
    with pytest.raises(WeightSyncError, match="NCCL is already in use"):
        monkeypatch.setattr(ucx, "_agent", None)
        warm_nixl()


@pytest.mark.parametrize(("device", "gpu", "started"), [("cuda:0", True, 1), ("cuda:0", False, 0), ("cpu", True, 0)])
def test_an_end_whose_slots_are_a_gpu_s_starts_nixl_as_it_is_made(
    monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool, started: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(nixl, "warm_nixl", lambda: calls.append(1))
    NixlTransport(NixlTransport.Options(device=device))
    assert len(calls) == started


BUILD = package(None)
OTHER = next((name for name in ("nixl_cu12", "nixl_cu13") if name != BUILD and find_spec(name) is not None), None)


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(OTHER is None, reason="only one build of NIXL is installed")
def test_a_second_ucx_that_is_really_loaded_is_refused_before_anything_crashes() -> None:
    code = f"""
import ctypes, glob, importlib.util, os
libs = os.path.dirname(importlib.util.find_spec({OTHER!r}).origin) + ".libs"
for name in ("libucs", "libuct", "libucp"):
    for path in glob.glob(libs + "/" + name + "-*.so*"):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
from posttrain.errors import WeightSyncError
from posttrain.weights.ucx import warm_nixl
try:
    warm_nixl(build={BUILD!r})
except WeightSyncError as exc:
    print(exc.code, libs in exc.cause, exc.message)
"""
    assert python(code) == "nixl-order True NIXL cannot be started: another UCX is loaded in this process\n"


def test_nixl_starts_once_with_its_own_ucx_only_and_without_torch() -> None:
    code = f"""
import sys
from posttrain.weights.ucx import loaded_now, warm_nixl
before = loaded_now()
agent = warm_nixl(build={BUILD!r})
print(len(before.ucx), len(loaded_now().ucx), warm_nixl() is agent, "torch" in sys.modules)
"""
    assert python(code) == "0 1 True False\n"


def test_importing_everything_makes_no_process_group_and_loads_neither_nccl_nor_ucx() -> None:
    names = [
        ".".join(path.relative_to(ROOT / "core").with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "core" / "posttrain").rglob("*.py")
        if path.stem != "__main__"
    ]
    code = f"""
import importlib, torch
from posttrain.weights.ucx import loaded_now
before = loaded_now()
for name in {names!r}:
    importlib.import_module(name)
after = loaded_now()
print(sorted(after.ucx - before.ucx), sorted(after.nccl - before.nccl), after.started, torch.distributed.is_initialized())
"""
    assert python(code) == "[] [] () False\n"


# ---- what UCX prints

CANARIES = [
    "(Body pid=7) W1130 08:00:00.1 7 ucx_utils.cpp:628] 8 NVIDIA GPU(s) were detected, but UCX CUDA support was not found!",
    "E1130 08:00:00.1 7 ucx_utils.cpp:582] VRAM memory is detected as host by UCX, check the UCX installation",
]


@pytest.mark.parametrize("line", CANARIES)
def test_the_canary_lines_are_a_named_failure(line: str) -> None:
    failure = scan_ucx_log(f"INFO worker up\n{line}\nINFO step 1\n")
    assert failure is not None and failure.code == "ucx" and line in failure.message
    assert "does not see this machine's GPUs" in failure.message and "warm_nixl" in failure.fix
    assert "UCX_NET_DEVICES" not in str(failure), "lo is not a fix"


def test_the_trace_of_a_crash_and_the_abort_of_a_peer_are_named() -> None:
    trace = "nixlAgent::registerMem -> nixlUcxEngine::registerMem -> ucp_mem_unmap -> SIGSEGV"
    crash, abort = (
        scan_ucx_log(trace),
        scan_ucx_log("[vm:19:0:20] ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout"),
    )
    assert crash is not None and "registered memory" in crash.message
    assert abort is not None and "ended its own process" in abort.message


ASSERTION = "Assertion `ep->flags & 1' failed"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (f"[vm:19:0:20]       ucp_ep.c:1234 {ASSERTION}: endpoint", "ended its own process"),
        (f"[n-1.site:244946:a:370571] tcp_ep.c:77   {ASSERTION}", "ended its own process"),
        (f"python: ucs_mpool.c:12: ucs_mpool_get: {ASSERTION}", "ended its own process"),
        ("[hpc:5187 :0] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x12)", "caught a crash"),
        ("[cnXX:25027:0] Process frozen...", "caught a crash"),
        (f"../aten/src/ATen/native/cuda/Indexing.cu:1289: f: block: [0,0,0], thread: [0,0,0] {ASSERTION}.", None),
        (f"[08:00:00] graph.cc:12: {ASSERTION}", None),
        (f"python: alloc.c:12: grow: {ASSERTION}", None),
        ("torch: Fatal: unexpected error", None),
        ("INFO Caught signal 15 (Terminated)", None),
    ],
)
def test_an_assertion_and_a_crash_are_of_ucx_only_where_the_line_is(line: str, what: str | None) -> None:
    failure = scan_ucx_log(line)
    assert (failure is None) if what is None else (failure is not None and what in failure.message)


def test_other_lines_are_nothing() -> None:
    assert scan_ucx_log("") is None
    assert scan_ucx_log("srun: error: Prolog hung on node n7\npyxis: mkdir failed: File exists\n") is None
    assert scan_ucx_log("E1130 nixl_agent.cpp:1198] postXferReq: remote agent 'a' was disconnected\n") is None


# ---- the installed NIXL


@pytest.mark.parametrize(("installed", "accepted"), [("1.5.1", True), ("1.5.9", True), ("1.4.2", False), ("1.6.0", False)])
def test_only_versions_that_the_adapter_was_written_for(monkeypatch: pytest.MonkeyPatch, installed: str, accepted: bool) -> None:
    monkeypatch.setattr(nixl_agent, "version", lambda name: installed)
    if accepted:
        assert bindings(BUILD).nixlAgent
        return
    with pytest.raises(WeightSyncError, match=f"NIXL {installed} is installed") as caught:
        bindings(BUILD)
    assert "pip install 'nixl>=1.5,<1.6'" in caught.value.fix and not caught.value.retryable


def test_an_unfit_nixl_is_told_where_a_run_is_prepared_and_nothing_of_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "import_module", lambda name: pytest.fail(f"{name} was loaded"))
    NixlTransport.preflight()
    monkeypatch.setattr(nixl_agent, "version", lambda name: "1.4.2")
    with pytest.raises(WeightSyncError, match="NIXL 1.4.2 is installed"):
        NixlTransport.preflight()
    monkeypatch.setattr(nixl_agent, "find_spec", lambda name: None)
    with pytest.raises(WeightSyncError, match="not installed"):
        NixlTransport.preflight()


def test_a_name_that_the_installed_nixl_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nixl_agent._USED, "nixlAgent", ("createBackend", "teleport"))
    monkeypatch.setitem(nixl_agent._USED, "nixlWormhole", ())
    with pytest.raises(WeightSyncError) as caught:
        bindings(BUILD)
    assert caught.value.cause == "it lacks nixlAgent.teleport, nixlWormhole"


def test_no_nixl_is_said_with_what_else_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "find_spec", lambda name: None)
    with pytest.raises(WeightSyncError, match="not installed") as caught:
        package("12.9")
    assert caught.value.cause == "none of nixl_cu12 can be imported" and "weights.transport=shm" in caught.value.fix
