"""What is decided about a cluster without one."""

from __future__ import annotations

import pytest

from posttrain.errors import ConfigError, RunInterrupted
from posttrain.loop.cluster import check_machines
from posttrain.placement.host import Place
from posttrain.placement.out_of_memory import ran_out
from posttrain.weights.owner import ProcessId


def place(node: str, boot: str) -> Place:
    return Place(node, "192.0.2.1", ProcessId.current(), boot, "log")


def test_shared_memory_does_not_cross_machines() -> None:
    check_machines("shm", [place("a", "1"), place("a", "1")])
    check_machines("nixl", [place("a", "1"), place("b", "2")])
    with pytest.raises(ConfigError, match="is memory of one machine, and the roles are on a, b") as caught:
        check_machines("shm", [place("a", "1"), place("b", "2")])
    assert "weights.transport=nixl" in caught.value.fix


def test_a_role_that_ray_ended_for_its_memory_ran_out_of_it() -> None:
    killed = "Task was killed due to the node running low on memory."
    assert ran_out(RunInterrupted("policy-0 died", cause=killed)) is not None
    assert ran_out(RunInterrupted("policy-0 died", cause="exit type NODE_OUT_OF_MEMORY")) is not None
    assert ran_out(RunInterrupted("policy-0 died", cause="a connection error")) is None
