"""The driver's end of a role, without a cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from posttrain.errors import RunAborted, RunInterrupted
from posttrain.placement.cluster import Seat
from posttrain.placement.host import Outcome, Place, RoleSpec, boot_id
from posttrain.placement.out_of_memory import ran_out
from posttrain.placement.remote import Fleet, Remote, _collect
from posttrain.weights.owner import ProcessId


def test_a_thread_that_comes_late_starts_no_cluster() -> None:
    """A collective call that fails after the cluster was left kills its roles: Ray would start a cluster to do so."""
    import ray

    spec = RoleSpec("policy-0", "m:f", {}, "logs", ProcessId.current(), boot_id())
    role = Remote(spec, Seat("policy", 0, 0, 1.0, 0.0), actor=object())
    failed: Future[Any] = Future()
    failed.set_result(Outcome(failure=RunAborted("policy-0 failed")))
    with pytest.raises(RunAborted, match="policy-0 failed"):
        _collect({failed: role}, "train_step", 1.0)
    with pytest.raises(TimeoutError, match="policy-0 did not finish save within 0.1 s"):
        _collect({Future(): role}, "save", 0.1)
    assert role.ended and not ray.is_initialized()


def test_a_collective_call_that_tells_everybody_ends_nobody() -> None:
    roles = [
        Remote(RoleSpec(name, "m:f", {}, "logs", ProcessId.current(), boot_id()), Seat("policy", 0, 0, 1.0, 0.0), actor=object())
        for name in ("policy-0", "policy-1")
    ]
    said: list[Future[Any]] = [Future(), Future()]
    for number, future in enumerate(said):
        future.set_result(Outcome(failure=RunAborted(f"policy-{number} failed in write: OSError: No space left on device")))
    with pytest.raises(RunAborted, match="No space left on device"):
        _collect(dict(zip(said, roles, strict=True)), "write", 1.0, kill=False)
    assert not any(role.ended for role in roles)


# ---- what a log says of the process that wrote it

CANARY = "E1130 08:00:00.1 7 ucx_utils.cpp:582] VRAM memory is detected as host by UCX, check the UCX installation"
HELD = "[n1:244946:0:370571] Caught signal 11 (Segmentation fault: address not mapped to object at address 0xd0)"


def a_role(logs: Path, before: str = "") -> Remote:
    """Of a run that is gone on with: `before` is what the log says already."""
    logs.joinpath("policy-0.log").write_text(before)
    spec = RoleSpec("policy-0", "m:f", {}, str(logs), ProcessId.current(), boot_id())
    return Remote(spec, Seat("policy", 0, 0, 1.0, 0.0), actor=object())


def says(role: Remote, line: str) -> None:
    with role.log.path.open("a") as log:
        log.write(f"{line}\n")


def test_what_an_earlier_process_printed_explains_no_death(tmp_path: Path) -> None:
    role = a_role(tmp_path, f"{CANARY}\nlast words of another\n")
    assert role.died(RuntimeError("End of file")).cause == "End of file"
    says(role, "a word")
    assert role.died(RuntimeError("End of file")).cause == "End of file; a word"
    says(role, CANARY)
    died = role.died(RuntimeError("End of file"))
    assert "UCX does not see this machine's GPUs" in died.cause and "start NIXL first" in died.fix


def test_a_process_that_takes_the_place_of_another_begins_its_own_part_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = a_role(tmp_path)
    says(role, CANARY)
    fleet = Fleet(None, 1.0, {"policy-0": role})  # type: ignore[arg-type]
    new = MagicMock()
    monkeypatch.setattr(fleet, "_actor", lambda *_: new)

    def begun() -> Future[Any]:  # its log is opened after the old one has said something more
        says(role, HELD)
        place, future = Place("n", "::1", ProcessId.current(), "", "", log_start=role.log.path.stat().st_size), Future[Any]()
        future.set_result(Outcome(place))
        return future

    new.begin.remote.return_value.future = begun
    fleet.replace("policy-0", 5.0)
    assert role.place is not None and role.log.last_lines() == []
    assert role.died(RuntimeError("End of file")).cause == "End of file"


def test_a_nixl_process_that_ucx_ended_is_not_the_death_of_its_role(tmp_path: Path) -> None:
    role = a_role(tmp_path)
    says(role, "INFO posttrain.weights: nixl process 19: [vm:19:0:20] ucp_request.inl:356  Fatal: unexpected error: timeout")
    assert "UCX" not in role.died(RuntimeError("End of file")).cause.split(";")[0] and role.log.announced() is None


def test_a_crash_that_ucx_holds_is_no_mere_silence(tmp_path: Path) -> None:
    role = a_role(tmp_path)
    assert "stopped, frozen in a fault" in role.stuck(60).cause
    says(role, HELD)
    stuck, late = role.stuck(60), asyncio.run(role.late("publish", 5.0))
    for error in (stuck, late):
        assert HELD in error.cause and "UCX's handler caught a crash" in error.cause and "backtrace" in error.fix
    assert stuck.code == "role-stuck" and "--resume" in stuck.fix
    assert "policy-0 does not answer heartbeats either: UCX's handler" in late.cause and "policy-0.log" in late.fix


def test_a_process_that_died_before_its_log_was_open_left_words_with_ray(tmp_path: Path) -> None:
    role = a_role(tmp_path, f"{HELD}\n")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "worker-ab12-01000000-77.err").write_text(f":job_id:01000000\n{CANARY}\n")
    (tmp_path / "ray" / "worker-cd34-01000000-78.err").write_text(f"{HELD}\n")
    assert "VRAM memory is detected as host" in role.died(RuntimeError("The actor died\n\tpid: 77\n\tip: 192.0.2.1")).cause
    assert "UCX" not in role.died(RuntimeError("The actor died\n\tpid: 7")).cause


def test_what_was_printed_before_the_log_was_open_is_its_beginning(tmp_path: Path) -> None:
    """As in a worker of Ray's: the output goes to files of its own, and the role begins later."""
    log = tmp_path / "policy-0.log"
    log.write_text("of another process\n")
    code = f"""
import os, pathlib
os.write(2, b":job_id:01000000\\n{CANARY}\\n")
print("up")
from posttrain.placement.host import _redirect
print(_redirect(pathlib.Path({str(log)!r})))
"""
    with (tmp_path / "w.out").open("w") as out, (tmp_path / "w.err").open("w") as err:
        subprocess.run([sys.executable, "-c", code], stdout=out, stderr=err, check=True)
    assert log.read_text() == f"of another process\nup\n{CANARY}\n('{log}', 19)\n"


# ---- a process that Ray, or the kernel, ended for its memory

LOW = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.1, ID: 95b3) was "
    "22.89GB used / 23.54GB limit (0.97)\nOOM kill reason: Memory usage 24578064152B exceeded threshold of 24012190715B\n"
)
"""What Ray 2.60 says when its memory monitor ends an actor: the beginning of some thirty lines."""
ENDED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed "
    "by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly due "
    "to SIGSEGV or another unexpected error. If the process was killed by the kernel OOM killer (verifiable by checking for "
    "OOM in dmesg of the OOMing node), consider enabling resource isolation"
)


def test_a_role_that_ray_ended_for_its_memory_is_one_that_ran_out_of_it(tmp_path: Path) -> None:
    from ray.exceptions import OutOfMemoryError

    died = a_role(tmp_path).died(OutOfMemoryError(LOW + "x" * 5000))
    said = ran_out(died)
    assert said is not None and said.startswith("1 worker(s) were killed due to the node running low on memory")
    assert died.code == "role-died" and len(died.cause) <= 300


def test_what_ray_guesses_of_any_death_is_no_lack_of_memory(tmp_path: Path) -> None:
    from ray.exceptions import RayActorError

    lost = RayActorError(error_msg=ENDED)
    try:
        raise a_role(tmp_path).died(lost) from lost
    except RunInterrupted as died:
        assert ran_out(died) is None and "connection error code 2" in died.cause and "OOM" not in died.cause
