"""Roles in Ray actors: calls, streams, deaths, stalls, deadlines. One cluster, whose roles are reused where they survive."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from posttrain.errors import EngineStartError, PackerError, PluginError, RunAborted, RunInterrupted, WaitExpired, WeightSyncError
from posttrain.loop.policy_group import RemoteRank
from posttrain.placement.cluster import Cluster, Seat, Seats, connect
from posttrain.placement.host import PluginRef, RoleSpec, boot_id
from posttrain.placement.remote import Fleet, together
from posttrain.weights.failure import PeerFailure
from posttrain.weights.owner import ProcessId
from posttrain.weights.publisher import GroupPublisher

HERE = Path(__file__).parent.parent / "placement"
PLAN = Seats(tuple({"CPU": 1.0} for _ in range(8)), ())


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def cluster(logs: Path) -> Iterator[Cluster]:
    with connect(logs=logs, cpus=8) as cluster:
        cluster.reserve(PLAN, timeout=60)
        yield cluster


class Roles:
    """A fleet whose roles are made by name, each in a bundle of its own."""

    def __init__(self, cluster: Cluster, logs: Path) -> None:
        self.fleet, self.logs = Fleet(cluster, heartbeat_timeout_s=3.0), logs

    def make(
        self,
        count: int = 1,
        *,
        factory: str = "toy_roles:Toy",
        kwargs: dict[str, Any] | None = None,
        each: Any = None,
        **options: Any,
    ) -> list[Any]:
        made = []
        for i in range(count):
            name = f"toy-{i}"
            spec = RoleSpec(
                name,
                factory,
                (each or {}).get(name, kwargs or {}),
                str(self.logs),
                ProcessId.current(),
                boot_id(),
                paths=(str(HERE),),
                **options,
            )
            made.append(self.fleet.add(spec, Seat("toy", i, i, 0.1, 0.0)))
        self.fleet.begin(list(self.fleet.roles), 60)
        return made


@pytest.fixture
def roles(cluster: Cluster, tmp_path: Path) -> Iterator[Roles]:
    made = Roles(cluster, tmp_path)
    yield made
    made.fleet.close()


@pytest.fixture(scope="module")
def toy(cluster: Cluster, logs: Path) -> Iterator[Any]:
    """One role that no test kills."""
    made = Roles(cluster, logs)
    yield made.make(kwargs={"answer": 40})[0]
    made.fleet.close()


def test_a_method_is_called_where_the_role_lives(toy: Any) -> None:
    assert asyncio.run(toy.call("add", 2, timeout=10)) == 42
    pid = asyncio.run(toy.call("pid", timeout=10))
    assert pid == toy.place.pid != os.getpid()


def test_a_stream_yields_in_order_and_ends_with_what_it_raised(toy: Any) -> None:
    async def take(*args: int) -> list[int]:
        taken = []
        try:
            async for number in toy.stream("count", *args):
                taken.append(number)
        except RunAborted as exc:
            assert "cannot say 2" in exc.message
            taken.append(-1)
        return taken

    assert asyncio.run(take(5)) == [0, 1, 2, 3, 4]
    assert asyncio.run(take(5, 2)) == [0, 1, -1]


def test_an_error_of_ours_arrives_as_it_is_and_says_where(toy: Any) -> None:
    with pytest.raises(WeightSyncError, match="bucket 3 arrived damaged") as caught:
        asyncio.run(toy.call("fail_known", timeout=10))
    assert caught.value.fix == "look at the network" and "toy-0" in caught.value.where


def test_any_other_error_names_role_method_line_and_log(toy: Any, logs: Path) -> None:
    with pytest.raises(RunAborted, match=r"toy-0 failed in fail: ValueError: seven is not even \(fail, toy_roles.py:\d+\)"):
        asyncio.run(toy.call("fail", timeout=10))
    assert "seven is not even" in (logs / "toy-0.log").read_text()


def test_an_error_that_cannot_be_pickled_arrives_without_what_holds_it_back(toy: Any) -> None:
    with pytest.raises(WeightSyncError, match="held by a lock"):
        asyncio.run(toy.call("fail_unpicklable", timeout=10))


def test_a_heartbeat_is_answered_while_the_role_computes(toy: Any) -> None:
    async def both() -> tuple[float, tuple[Any, ...]]:
        nap = asyncio.ensure_future(toy.call("nap", 4.0, timeout=20))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        beat = await toy.beat(5)
        took = time.monotonic() - began
        await nap
        return took, beat.busy

    took, busy = asyncio.run(both())
    assert took < 3 and busy[0][0] == "nap"


def test_a_late_call_is_named_with_the_stacks_of_the_role(toy: Any) -> None:
    with pytest.raises(WaitExpired, match="toy-0 did not finish nap within 0.5 s") as caught:
        asyncio.run(toy.call("nap", 1.5, timeout=0.5))
    assert "nap (toy_roles.py" in caught.value.cause


def test_a_role_that_cannot_be_built_says_why(roles: Roles) -> None:
    with pytest.raises(WeightSyncError, match="cannot be built: no clay"):
        roles.make(kwargs={"fail": "no clay"})


def test_a_killed_role_is_named_with_its_pid_and_its_last_words(roles: Roles) -> None:
    (toy,) = roles.make()
    with pytest.raises(RunInterrupted, match="toy-0 died") as caught:
        asyncio.run(toy.call("die", timeout=10))
    assert str(toy.place.pid) in caught.value.where and "about to die" in caught.value.cause and caught.value.retryable


def test_shared_memory_of_a_killed_role_s_processes_goes_with_them(roles: Roles) -> None:
    """Ray ends the process group of a worker that died with SIGKILL, and what would have cleaned up with it."""
    (toy,) = roles.make()
    name = asyncio.run(toy.call("share", timeout=60))
    assert (Path("/dev/shm") / name).exists()
    os.kill(toy.place.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while (Path("/dev/shm") / name).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not (Path("/dev/shm") / name).exists()


def test_what_ucx_announced_before_a_crash_is_the_cause(roles: Roles) -> None:
    (toy,) = roles.make()
    with pytest.raises(RunInterrupted, match="toy-0 died") as caught:
        asyncio.run(toy.call("die_of_ucx", timeout=10))
    assert "UCX does not see this machine's GPUs" in caught.value.cause and "start NIXL first" in caught.value.fix


class Loud:
    """Speaks when it is unpickled: in a worker of Ray's, before the role's log is open."""

    def __reduce__(self) -> Any:
        return os.write, (2, b"E ucx_utils.cpp:582] VRAM memory is detected as host by UCX\n")


def test_what_a_worker_printed_before_its_role_began_is_in_its_log(roles: Roles) -> None:
    (toy,) = roles.make(kwargs={"answer": Loud()})
    assert "VRAM memory is detected" in toy.log.text() and ":job_id:" not in toy.log.text()
    with pytest.raises(RunInterrupted, match="toy-0 died") as caught:
        asyncio.run(toy.call("die", timeout=10))
    assert "UCX does not see this machine's GPUs" in caught.value.cause


def test_the_watch_notices_a_death_while_nobody_calls(roles: Roles) -> None:
    first, second = roles.make(2)

    async def watch() -> None:
        watching = asyncio.ensure_future(roles.fleet.watch())
        await asyncio.sleep(0.2)
        os.kill(second.place.pid, signal.SIGKILL)
        await asyncio.wait_for(watching, 10)

    with pytest.raises(RunInterrupted, match="toy-1 died"):
        asyncio.run(watch())
    assert asyncio.run(first.call("add", 1, timeout=5)) == 1


def test_the_watch_notices_a_stopped_process_and_ends_it(roles: Roles) -> None:
    (toy,) = roles.make()
    os.kill(toy.place.pid, signal.SIGSTOP)
    with pytest.raises(RunInterrupted, match=r"toy-0 has not answered for \d+ s"):
        asyncio.run(asyncio.wait_for(roles.fleet.watch(), 20))
    deadline = time.monotonic() + 10
    while psutil.pid_exists(toy.place.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(toy.place.pid)


def test_every_role_says_where_it_is_at_once_and_one_that_cannot_is_silent(roles: Roles) -> None:
    napping, stopped, dead = roles.make(3)

    async def ask() -> dict[str, Any]:
        nap = asyncio.ensure_future(napping.call("nap", 3.0, timeout=10))
        await asyncio.sleep(0.2)
        os.kill(stopped.place.pid, signal.SIGSTOP)
        os.kill(dead.place.pid, signal.SIGKILL)
        found = await roles.fleet.stacks(1.5)
        await nap
        return found

    found = asyncio.run(ask())
    os.kill(stopped.place.pid, signal.SIGCONT)
    assert re.search(r"thread toy-0_0: nap \(toy_roles.py:\d+\) < run", found["toy-0"].short("toy-0"))
    assert any("_answer (host.py" in task.line() for task in found["toy-0"].tasks), "\n".join(map(str, found["toy-0"].tasks))
    assert found["toy-1"] == "silent: no answer within 1.5 s; its process is stopped, or its event loop is blocked"
    assert found["toy-2"] == "silent: toy-2 died"


def test_a_role_says_where_its_processes_are(roles: Roles) -> None:
    (toy,) = roles.make(kwargs={"processes": {"VLLM::EngineCore (pid 7)": "in a forward"}})
    assert asyncio.run(toy.beat(10, stacks=True)).processes == {"VLLM::EngineCore (pid 7)": "in a forward"}


def test_a_collective_call_names_the_dead_and_not_those_who_lost_the_connection(roles: Roles) -> None:
    made = roles.make(2, each={"toy-1": {"answer": 1}})
    with pytest.raises(RunInterrupted, match="toy-1 died"):
        together(made, "meet", 1, timeout=20)


def test_a_collective_call_that_is_late_names_who_is_late(roles: Roles) -> None:
    made = roles.make(2)
    with pytest.raises(WaitExpired, match="toy-0, toy-1 did not finish nap within 1 s"):
        together(made, "nap", 30.0, timeout=1)


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "toy-1 died"), (signal.SIGSTOP, "toy-1 did not finish publish")])
def test_a_rank_that_is_lost_while_it_publishes_is_named_with_its_bucket(roles: Roles, number: int, cause: str) -> None:
    """It died, or its process was stopped; the other rank takes back what it has published."""
    toys = roles.make(2, factory="publishing_role:Rank", each={"toy-0": {"at": 5}, "toy-1": {"at": 3}})
    ranks = [RemoteRank(toy, 4.0) for toy in toys]

    async def publish() -> None:
        part = await ranks[1].publish(1)
        assert part.version == 1 and all((await ranks[1].digests(1)).values())
        publishing = asyncio.ensure_future(GroupPublisher(ranks).publish(2))
        async with asyncio.timeout(20):
            while ranks[1].at != 3:
                await asyncio.sleep(0.05)
        os.kill(toys[1].place.pid, number)
        await publishing

    with pytest.raises(PeerFailure, match="toy-1 did not publish") as caught:
        asyncio.run(publish())
    os.kill(toys[1].place.pid, signal.SIGCONT) if number == signal.SIGSTOP else None
    assert caught.value.bucket == 3 and cause in caught.value.cause
    part = asyncio.run(ranks[0].publish(2))
    assert part.version == 2, "it was not taken back"


def test_results_of_a_collective_call_are_in_the_order_of_the_roles(roles: Roles) -> None:
    made = roles.make(2)
    assert together(made, "add", 5, timeout=10) == [5, 5]


def test_a_plugin_that_a_worker_does_not_have_fails_before_the_role_is_built(roles: Roles) -> None:
    with pytest.raises(PackerError, match="Unable to import DataPacker factory 'nowhere.packers:make'") as caught:
        roles.make(plugins=(PluginRef("datapackers", "nowhere.packers:make"),))
    assert caught.value.code == "E9" and "node " in caught.value.where and "every node" in caught.value.fix


def test_a_plugin_of_another_version_is_named_with_both(roles: Roles) -> None:
    with pytest.raises(PluginError, match=r"is posttrain [\d.]+ on node .*, and 99.0 on the driver"):
        roles.make(plugins=(PluginRef("envs", "arithmetic", "posttrain", "99.0"),))


def test_a_cluster_that_is_too_small_says_what_is_missing(cluster: Cluster) -> None:
    with pytest.raises(EngineStartError, match=r"the cluster has 8 CPU free, this grid needs 1000 CPU in 1 bundle"):
        cluster.reserve(Seats(({"CPU": 1000.0},), ()), timeout=1)
    with pytest.raises(EngineStartError, match=r"has .* free after 1 s, this grid needs 8 CPU") as caught:
        cluster.reserve(PLAN, timeout=1)  # the module's own group holds them
    assert "another job may hold them" in caught.value.fix


def test_what_ray_says_is_in_its_log_and_not_on_the_screen(cluster: Cluster, logs: Path) -> None:
    assert (logs / "ray.log").exists()
    assert (logs / "ray").is_symlink() and list((logs / "ray").glob("worker-*.err"))
