"""Who sits where: pure, for grids that no machine here has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from posttrain.placement.cluster import Seats, seats
from posttrain.placement.grid import Grid


def grid(policy: int, rollout: tuple[int, int], placement: str) -> Grid:
    return Grid("ray", (1, policy), rollout, 1, policy, placement)


def test_on_a_cpu_every_role_has_a_core() -> None:
    plan = seats(grid(2, (2, 1), "disaggregated"), gpu=False)
    assert [seat.name for seat in plan.seats] == ["policy-0", "policy-1", "rollout-0", "rollout-1"]
    assert plan.needs == {"CPU": 4.0}


def test_disaggregated_roles_have_devices_of_their_own() -> None:
    plan = seats(grid(4, (2, 2), "disaggregated"), gpu=True)
    assert plan.needs == {"CPU": 8.0, "GPU": 8.0} and not any(seat.shares for seat in plan.seats)
    assert plan.bundles[4:] == ({"CPU": 2.0, "GPU": 2.0},) * 2  # tensor parallelism stays on one node


def test_colocated_replicas_use_the_devices_of_policy_ranks_of_their_bundle() -> None:
    plan = seats(grid(4, (2, 2), "colocated"), gpu=True)
    assert plan.needs["GPU"] == 4.0
    assert [(seat.shares, seat.gpus) for seat in plan.of("rollout")] == [((0, 1), 0.0), ((2, 3), 0.0)]


def test_a_replica_without_enough_policy_ranks_has_the_rest_of_its_devices_to_itself() -> None:
    plan = seats(grid(3, (2, 2), "colocated"), gpu=True)
    assert [(seat.shares, seat.gpus) for seat in plan.of("rollout")] == [((0, 1), 0.0), ((2,), 1.0)]
    assert plan.needs["GPU"] == 4.0


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["colocated", "disaggregated"]), st.booleans())
def test_no_bundle_is_promised_twice(policy: int, replicas: int, width: int, placement: str, gpu: bool) -> None:
    plan: Seats = seats(grid(policy, (replicas, width), placement), gpu=gpu)
    for number, bundle in enumerate(plan.bundles):
        here = [seat for seat in plan.seats if seat.bundle == number]
        assert sum(seat.gpus for seat in here) <= bundle.get("GPU", 0.0)
        assert sum(seat.cpus for seat in here) <= bundle["CPU"]
        assert all(rank in [s.index for s in here if s.role == "policy"] for seat in here for rank in seat.shares)
    for seat in plan.of("rollout"):
        assert not gpu or seat.gpus + len(seat.shares) == width
