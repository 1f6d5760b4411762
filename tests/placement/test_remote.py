"""The driver's end of a role, without a cluster."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from posttrain.errors import RunAborted
from posttrain.placement.cluster import Seat
from posttrain.placement.host import Outcome, RoleSpec, boot_id
from posttrain.placement.remote import Remote, _collect
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
