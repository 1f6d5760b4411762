"""A cluster of three nodes on one machine: joining it, placing roles over it, and what a cluster that does not fit says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import EngineStartError
from posttrain.placement.cluster import Seat, Seats, connect
from posttrain.placement.host import RoleSpec, boot_id
from posttrain.placement.remote import Fleet
from posttrain.weights.owner import ProcessId

TOYS = str(Path(__file__).parent.parent / "placement")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def test_roles_are_spread_over_the_nodes_that_have_room(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    plan = Seats(({"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}), ())
    with connect(logs=tmp_path) as cluster:
        assert not cluster.own and cluster.nodes == 3
        cluster.reserve(plan, timeout=30)
        fleet = Fleet(cluster, 30.0)
        for i in range(3):
            spec = RoleSpec(
                f"toy-{i}", "toy_roles:Toy", {"answer": i}, str(tmp_path), ProcessId.current(), boot_id(), paths=(TOYS,)
            )
            fleet.add(spec, Seat("toy", i, i, 1.0, 0.0))
        fleet.begin(list(fleet.roles), 60)
        assert [asyncio.run(role.call("add", 0, timeout=10)) for role in fleet.roles.values()] == [0, 1, 2]
        import ray

        placed = {ray.util.placement_group_table(cluster.group)["bundles_to_node_id"][i] for i in range(3)}
        assert len(placed) == 3
        fleet.close()
    assert capfd.readouterr().err == ""


def test_a_grid_that_no_cluster_holds_is_refused_with_what_there_is(
    nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    wide = Seats(tuple({"CPU": 1.0} for _ in range(5)), ())
    tall = Seats(({"CPU": 2.0},), ())
    with connect(logs=tmp_path) as cluster:
        with pytest.raises(EngineStartError, match=r"the cluster has 3 CPU free, this grid needs 5 CPU in 5 bundle"):
            cluster.reserve(wide, timeout=5)
        with pytest.raises(EngineStartError, match=r"needs 2 CPU in 1 bundle") as caught:
            cluster.reserve(tall, timeout=2)
        assert "a bundle must fit on one node" in caught.value.cause


def test_no_cluster_at_the_address_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with (
        pytest.raises(EngineStartError, match="no Ray cluster can be joined at RAY_ADDRESS=127.0.0.1:1"),
        connect(logs=tmp_path),
    ):
        raise AssertionError("not reached")
