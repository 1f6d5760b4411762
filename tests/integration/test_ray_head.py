"""A real Ray cluster under a port of its own: recognised by who asks, joined by its address, gone with its owner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain.errors import ConfigError, EngineStartError
from posttrain.placement.ports import holder, ray_version
from posttrain.placement.ray_head import ray_head, wait_for_nodes

pytestmark = pytest.mark.integration


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def of_session(session: int) -> list[int]:
    """Living processes of a session: a head begins one of its own."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def gone(session: int, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while of_session(session) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not of_session(session)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """A head and its address; after the module, nothing of it is left."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            patch.delenv(name, raising=False)
        port = free_port()
        with ray_head(port, tmp_path_factory.mktemp("ray") / "ray.log") as address:
            found = holder(port)
            assert found is not None and found.pid is not None
            session = os.getsid(found.pid)
            yield port, address
        assert gone(session, 10), "processes of Ray are left"
        assert holder(port) is None and "RAY_ADDRESS" not in os.environ and "RAY_AUTH_TOKEN" not in os.environ


def test_it_is_recognised_as_ray_without_its_token(cluster: tuple[int, str]) -> None:
    port, address = cluster
    assert ray_version("127.0.0.1", port) == "Ray" and os.environ["RAY_ADDRESS"] == address == f"127.0.0.1:{port}"
    found = holder(port)
    assert found is not None and "gcs_server" in found.command


def test_a_second_job_under_the_same_port_is_told_whose_cluster_it_is(cluster: tuple[int, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a cluster of Ray") as caught, ray_head(cluster[0], tmp_path / "ray.log"):
        pass
    assert caught.value.code == "port_taken" and "gcs_server" in str(caught.value)


def test_nodes_are_waited_for(cluster: tuple[int, str]) -> None:
    wait_for_nodes(cluster[1], 1, 60)
    with pytest.raises(EngineStartError, match="does not have its 2 nodes") as caught:
        wait_for_nodes(cluster[1], 2, 8)
    assert caught.value.cause.startswith("1 of 2 have joined after 8 s")


def test_a_second_job_with_a_port_of_its_own_runs_beside_it_and_ends_with_its_owner(
    cluster: tuple[int, str], tmp_path: Path
) -> None:
    """Two clusters on one machine; the second one's owner is killed without a chance to end anything."""
    port = free_port()
    code = (
        "import sys, time; from pathlib import Path; from posttrain.placement.ray_head import ray_head\n"
        f"with ray_head({port}, Path({str(tmp_path / 'ray.log')!r})): print('up', flush=True); time.sleep(600)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "up\n"
        found = holder(port)
        assert found is not None and found.pid is not None
        session = os.getsid(found.pid)
        wait_for_nodes(cluster[1], 1, 60)
        owner.send_signal(signal.SIGKILL)
    assert gone(session, 60), "the cluster outlives its owner"
    assert ray_version("127.0.0.1", cluster[0]), "the other job's cluster is gone, too"
