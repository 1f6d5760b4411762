"""The nixl transport against publishers that die, stall, lie or lose their NIXL process: real processes, real UCX.

A policy process publishes; the lane is here. Each fault ends within its deadline, names the publisher and the bucket, and leaves
no process, no shared memory and an untouched engine. A stopped process is no stall over CMA (the kernel reads its memory all the
same), so stalls go over TCP.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from nixl_policy import policy
from weight_toys import ToyEngine, trained

from posttrain.errors import WeightSyncError
from posttrain.weights import nixl
from posttrain.weights.failure import PeerFailure
from posttrain.weights.memory import Region, private_region
from posttrain.weights.nixl import NixlTransport
from posttrain.weights.nixl_process import NixlProcess
from posttrain.weights.owner import ProcessId
from posttrain.weights.plan import Bucket
from posttrain.weights.publication import complete_digests
from posttrain.weights.receiver import Receiver
from posttrain.weights.shared_files import owner_of, shared_folder, sweep
from posttrain.weights.transport import views

FIRST, MIDDLE, LAST = 0, 3, 5


class Policy:
    """The policy's process as seen from here; `server` is the NIXL process beside it."""

    def __init__(self, tls: str = "all") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "posttrain.weights.nixl"])
        self.tls, self.version = tls, 0
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=policy, args=(theirs, tls), daemon=True)
        self.process.start()
        theirs.close()
        self.publication = self.publish()

    def ask(self, *request: Any) -> Any:
        self.pipe.send(request)
        assert self.pipe.poll(30), "the policy's process does not answer"
        return self.pipe.recv()

    def publish(self) -> Any:
        self.version += 1
        self.publication, self.digests = self.ask("publish", self.version)
        return self.publication

    @property
    def server(self) -> ProcessId:
        found = ProcessId.parse(self.publication.handles[0]["server"])
        assert found is not None
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @property
    def alive(self) -> bool:
        return self.process.is_alive()


_pool: dict[str, Policy] = {}


def _policy(tls: str) -> Policy:
    """One process for all tests of a transport of UCX; only one that was killed is started again."""
    if tls not in _pool or not _pool[tls].alive:
        _pool[tls] = Policy(tls)
    return _pool[tls]


@pytest.fixture(params=["all"])
def publisher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Policy:
    """With a publication that nobody has damaged."""
    monkeypatch.setenv("UCX_TLS", request.param)
    publisher = _policy(request.param)
    publisher.publish()
    return publisher


over_tcp = pytest.mark.parametrize("publisher", ["tcp"], indirect=True)


@pytest.fixture(scope="module", autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    for one in _pool.values():
        if one.alive:
            one.pipe.send(None)
            one.process.join(10)
    _pool.clear()
    nothing_of(os.getpid())


# ---- the lane, here


class Trapped(Receiver):
    """Does `act` once, before it pulls bucket `at`."""

    at, act = -1, staticmethod(lambda: None)

    def _pull(self, publication: Any, bucket: Bucket, known: Any, staging: Any) -> None:
        if bucket.index == self.at:
            self.at = -1
            self.act()
        super()._pull(publication, bucket, known, staging)


@contextmanager
def a_lane(at: int = -1, act: Callable[[], Any] = lambda: None, **options: Any) -> Iterator[Trapped]:
    """A lane whose engine holds version 100. Afterwards nothing is left of it, and its engine was not touched."""
    engine = ToyEngine()
    engine.version, engine.weights = 100, trained(100)
    lane = Trapped(engine, NixlTransport(NixlTransport.Options(**options)), name="rollout-0", grace_s=0.2)
    lane.at, lane.act = at, staticmethod(act)
    lane._transport.warm("pull")  # type: ignore[attr-defined]
    try:
        yield lane
        assert engine.version == 100 and engine.writes == 0, "phase 1 touched the engine"
    finally:
        asyncio.run(lane.close())
    nothing_of(os.getpid())


def stage(lane: Receiver, publisher: Policy, *, anew: bool = True, timeout: float = 20.0) -> None:
    """Stage and prove what is published now, or what was."""
    publication = publisher.publish() if anew else publisher.publication

    async def staged() -> None:
        await lane.stage(publication, timeout=timeout)
        await lane.prove(complete_digests(publication, publisher.digests))

    asyncio.run(staged())


def fails(lane: Receiver, publisher: Policy, *, within: float, timeout: float = 20.0) -> PeerFailure:
    began = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        stage(lane, publisher, anew=False, timeout=timeout)
    assert time.monotonic() - began < within
    assert lane.lane.state == "aborted" and caught.value.peer == "rollout-0"
    return caught.value


def holds(lane: Receiver, version: int) -> None:
    assert lane._staged is not None
    got = dict(views(lane._staged.plan, lane._staged.region.buffer))
    assert all(torch.equal(got[name], want) for name, want in trained(version).items()) and len(got) == len(trained(version))


def _left_by(pid: int) -> list[str]:
    """NIXL processes that are children of `pid`, and shared memory of it or of the dead."""
    sweep(shared_folder())
    owners = {path.name: owner_of(path) for path in shared_folder().glob("posttrain-*")}
    found = [name for name, owner in owners.items() if owner is not None and owner.pid == pid]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if "nixl_process" in command and parent == pid:
            found.append(command.replace("\0", " "))
    return found


def nothing_of(pid: int, within: float = 3.0) -> None:
    until = time.monotonic() + within
    while (left := _left_by(pid)) and time.monotonic() < until:
        time.sleep(0.02)
    assert left == []


def stop(process: ProcessId) -> None:
    """SIGSTOP, and wait until each of its threads has stopped: until then it goes on answering."""
    os.kill(process.pid, signal.SIGSTOP)
    while any("State:\tT" not in (task / "status").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()):
        assert process.alive()
        time.sleep(0.001)


@pytest.fixture
def server(publisher: Policy) -> Iterator[ProcessId]:
    """The publisher's NIXL process; the next test gets another one."""
    process = publisher.server
    yield process
    if process.alive():
        os.kill(process.pid, signal.SIGKILL)
        assert gone(process)


def gone(process: ProcessId, within: float = 5.0) -> bool:
    until = time.monotonic() + within
    while process.alive() and time.monotonic() < until:
        time.sleep(0.01)
    return not process.alive()


# ---- faults


@pytest.mark.parametrize("bucket", [FIRST, MIDDLE, LAST])
def test_a_publisher_that_is_killed_is_named_at_once(publisher: Policy, bucket: int) -> None:
    with a_lane(bucket, publisher.kill) as lane:
        failure = fails(lane, publisher, within=10)
    assert failure.bucket == bucket and "died" in failure.message
    assert f"was not pulled from process {publisher.process.pid} on " in failure.message
    assert gone(publisher.server), "the NIXL process outlived its owner"
    nothing_of(publisher.process.pid or 0)


@pytest.mark.parametrize("bucket", [FIRST, LAST])
def test_a_nixl_process_that_is_killed_costs_one_update(publisher: Policy, server: ProcessId, bucket: int) -> None:
    with a_lane(bucket, lambda: os.kill(server.pid, signal.SIGKILL) or gone(server)) as lane:
        failure = fails(lane, publisher, within=10)
        assert failure.bucket == bucket and "died" in failure.message
        stage(lane, publisher)
        holds(lane, publisher.version)
    assert publisher.alive and publisher.server != server


@pytest.mark.parametrize("bucket", [FIRST, MIDDLE, LAST])
@over_tcp
def test_a_stall_ends_with_its_deadline_and_the_publisher_goes_on(publisher: Policy, server: ProcessId, bucket: int) -> None:
    """UCX may abort the process that serves when a reader goes away half-way: the policy must not be that process."""
    with a_lane(bucket, lambda: stop(server)) as lane:
        failure = fails(lane, publisher, timeout=3.0, within=10)
        assert failure.bucket == bucket and failure.code == "deadline"
        os.kill(server.pid, signal.SIGCONT)
        try:
            stage(lane, publisher)
        except PeerFailure:  # UCX ended it when it woke up
            assert gone(server)
            stage(lane, publisher)
        holds(lane, publisher.version)
    assert publisher.alive


@over_tcp
def test_a_bucket_has_a_deadline_of_its_own(publisher: Policy, server: ProcessId) -> None:
    with a_lane(MIDDLE, lambda: stop(server), timeout_s=2.0) as lane:
        failure = fails(lane, publisher, within=10)
    assert failure.bucket == MIDDLE and failure.code == "deadline"
    assert f"was not pulled from process {publisher.process.pid} on " in failure.message


@pytest.mark.parametrize("version", [None, 77], ids=["corrupt", "wrong epoch"])
@pytest.mark.parametrize("bucket", [FIRST, MIDDLE, LAST])
def test_bytes_that_are_not_the_published_ones_are_noticed(publisher: Policy, bucket: int, version: int | None) -> None:
    publisher.ask("overwrite", bucket, version)
    with a_lane() as lane:
        failure = fails(lane, publisher, within=10)
    assert failure.bucket == bucket and "arrived damaged" in failure.message


@pytest.mark.parametrize("bucket", [FIRST, LAST])
def test_a_lane_whose_nixl_process_died_pulls_through_another(publisher: Policy, bucket: int) -> None:
    with a_lane(bucket) as lane:

        def kill() -> None:
            process = lane._transport._processes["pull"]
            process._process.kill()
            process._process.wait()
            process._process.returncode = None  # as if nobody had asked yet

        lane.act = kill
        stage(lane, publisher, anew=False)
        holds(lane, publisher.version)


@over_tcp
def test_a_nixl_process_that_dies_during_a_pull_is_named(publisher: Policy, server: ProcessId) -> None:
    with a_lane(MIDDLE) as lane:

        def stall_and_kill() -> None:
            stop(server)
            threading.Timer(0.5, lambda: lane._transport._processes["pull"]._process.kill()).start()

        lane.act = stall_and_kill
        failure = fails(lane, publisher, within=10)
    assert failure.bucket == MIDDLE and "the NIXL process ended (SIGKILL)" in failure.message


@over_tcp
def test_closing_a_lane_ends_its_pull(publisher: Policy, server: ProcessId) -> None:
    plan, handle = publisher.publication.plan, publisher.publication.handles[0]
    lane = NixlTransport()
    staging = lane.staging(plan.nbytes)
    lane.register(staging)
    stop(server)
    raised: list[WeightSyncError] = []

    def pull() -> None:
        try:
            lane.pull(handle, plan.buckets[0].pieces, staging)
        except WeightSyncError as exc:
            raised.append(exc)

    thread = threading.Thread(target=pull)
    thread.start()
    time.sleep(0.5)
    began = time.monotonic()
    lane.close()
    thread.join(5)
    assert time.monotonic() - began < 2 and raised and raised[0].code == "stopped"
    assert "the lane was closed" in raised[0].message
    with pytest.raises(WeightSyncError, match="the lane was closed"):
        lane.pull(handle, plan.buckets[0].pieces, staging)
    staging.release()


# ---- the rest of the contract


def test_two_slots_and_many_publications_from_one_agent(publisher: Policy) -> None:
    with a_lane() as lane:
        for _ in range(3):
            stage(lane, publisher)
            holds(lane, publisher.version)
            asyncio.run(lane.abort("the next one"))


def test_neither_nixl_nor_ucx_writes_to_the_screen(
    publisher: Policy, server: ProcessId, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "posttrain.weights")
    plan, handle = publisher.publication.plan, publisher.publication.handles[0]
    lane = NixlTransport()
    staging = lane.staging(plan.nbytes)
    lane.register(staging)
    os.kill(server.pid, signal.SIGKILL)
    assert gone(server)
    handle = {**handle, "place": "another machine"}  # nothing says that it is dead: NIXL must find out, and complains
    with pytest.raises(WeightSyncError, match="the peer (cannot be reached|disconnected)") as caught:
        lane.pull(handle, plan.buckets[0].pieces, staging)
    lane.close()
    staging.release()
    assert handle["peer"] in caught.value.message
    said = [record.getMessage() for record in caplog.records]
    assert any("nixl_agent.cpp" in line for line in said)
    assert capfd.readouterr() == ("", "")


def test_a_nixl_process_is_small(publisher: Policy) -> None:
    mapped = Path(f"/proc/{publisher.server.pid}/maps").read_text()
    assert "nixl" in mapped and "libtorch" not in mapped


def test_a_nixl_process_that_does_not_start_is_ended() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WeightSyncError, match="NIXL unknown is installed"):
        NixlProcess("no_such_build", serve=False)
    assert len(os.listdir("/proc/self/fd")) == before
    nothing_of(os.getpid(), within=0.0)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("ucp_request.inl:356  Fatal: unexpected error: Endpoint timeout", "ucx"),
        ("libcuda.so: not here", "nixl"),
    ],
)
def test_what_ucx_printed_before_its_end_is_the_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, code: str
) -> None:
    program = tmp_path / "dies"
    program.write_text(f"#!/bin/sh\necho '{line}' >&2\nkill -ABRT $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(WeightSyncError, match=r"the NIXL process ended \(SIGABRT\)") as caught:
        NixlProcess("nixl_cu12", serve=True)
    assert caught.value.code == code and line in str(caught.value)


PULLS_ONCE = """
import ctypes, os, torch
from posttrain.weights.nixl import NixlTransport
from posttrain.weights.plan import Piece
here = (ctypes.c_char * 8)()
span = (ctypes.c_size_t * 2)(ctypes.addressof(here), 8)
print(ctypes.CDLL(None).process_vm_readv(os.getpid(), span, 1, span, 1, 0))
publisher = NixlTransport()
slot, handle = publisher.allocate(2**20)
slot.buffer.copy_(torch.randint(0, 256, (2**20,), dtype=torch.uint8))
lane = publisher.fresh()
staging = lane.staging(2**20)
lane.pull(handle, [Piece("", 0, 0, 0, 0, 2**20)], staging)
print(torch.equal(slot.buffer, staging.buffer))
lane.close()
publisher.close()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter names system calls of x86-64")
@pytest.mark.parametrize("tls", ["all", "^cma"])
def test_where_the_kernel_copies_nothing_between_processes_tcp_does(tls: str) -> None:
    """A container without CMA: UCX notices, nothing fails, nothing is printed."""
    wrapper = [sys.executable, str(Path(__file__).with_name("without_cma.py"))] if tls == "all" else []
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", PULLS_ONCE], capture_output=True, text=True, env={**os.environ, "UCX_TLS": tls}
    )
    assert done.stdout.split() == ["-1" if wrapper else "8", "True"], done.stderr
    assert done.stderr == ""


def test_private_memory_is_refused(publisher: Policy) -> None:
    lane = NixlTransport()
    with pytest.raises(WeightSyncError, match="private memory"):
        lane.pull(publisher.publication.handles[0], publisher.publication.plan.buckets[0].pieces, private_region(10**6))
    lane.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_slots_on_a_gpu_need_one() -> None:
    with pytest.raises(WeightSyncError, match="no slot can be allocated on cuda:0"):
        NixlTransport(NixlTransport.Options(device="cuda:0")).allocate(64)


# ---- an end by itself


def test_an_end_that_is_warm_serves_with_the_process_that_it_has() -> None:
    end = NixlTransport()
    end.warm("serve")
    process = end._processes["serve"]
    assert process.alive and end.allocate(64)[1]["server"] == str(process.id)
    end.close()


def test_slots_of_a_gpu_are_forgotten_by_nixl_before_their_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an agent and a GPU that are none: `vram` of tests/gpu/check_gpu.py has both."""
    agent, events = MagicMock(), []
    agent.register.side_effect = ["first", "second"]
    agent.metadata.return_value = b""
    agent.deregister.side_effect = lambda descriptors: events.append(descriptors)
    monkeypatch.setattr(nixl, "warm_nixl", lambda: agent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    monkeypatch.setattr(Region, "release", lambda region: events.append("released"))
    end = NixlTransport()
    for number in (0, 1):
        end._slots[number] = Region(torch.empty(8, dtype=torch.uint8))
        assert end._serve(number)["device"] == -1
    end.close()
    end.close()
    assert sorted(events[:2]) == ["first", "second"] and events[2:] == ["released", "released"]
    assert not end._slots


def test_nixl_forgets_what_is_deregistered() -> None:
    code = """
import ctypes
from posttrain.weights.nixl_agent import package
from posttrain.weights.ucx import warm_nixl
agent, memory = warm_nixl(build=package(None)), ctypes.create_string_buffer(4096)
before = agent.metadata()
descriptors = agent.register(ctypes.addressof(memory), 4096)
during = agent.metadata()
agent.deregister(descriptors)
print(before != during, agent.metadata() == before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True True\n", done.stderr


def test_a_nixl_process_that_ucx_holds_is_no_mere_silence() -> None:
    process = object.__new__(NixlProcess)
    process._printed = deque(["[n1:19:0:20] Caught signal 11 (Segmentation fault: address not mapped to object)"])
    silent = process._why_silent(2.0)
    assert silent.code == "deadline" and "did not answer within 2 s: UCX's handler caught a crash" in silent.message
    process._printed.clear()
    assert process._why_silent(2.0).message == "the NIXL process did not answer within 2 s"
