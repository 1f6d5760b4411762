"""The Ray cluster of a run: joined where one is named, else started for this run alone; and the seats that a grid needs in it.

    with connect(logs=run_dir.logs, cpus=4) as cluster:
        plan = seats(resolve_grid(config.grid), gpu=cluster.gpus > 0)
        cluster.reserve(plan, timeout=60)
        fleet.add(spec, plan.of("policy")[1])

Joined by `RAY_ADDRESS`, as any Ray program. Nothing is placed before the cluster is known to hold every bundle.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import EngineStartError
from posttrain.placement.grid import Grid
from posttrain.placement.ports import ray_version
from posttrain.weights.owner import ProcessId

SUPPORTED = ((2, 56), (3, 0))
"""Ray versions that this is written against: from the first, below the second."""

ADDRESS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one role sits: `bundle` of the placement group, with `cpus` and `gpus` of it.

    shares: policy ranks of the same bundle whose devices it uses too
    """

    role: str
    index: int
    bundle: int
    cpus: float
    gpus: float
    shares: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True)
class Seats:
    """Bundles of resources, each on one node, and who sits in which."""

    bundles: tuple[dict[str, float], ...]
    seats: tuple[Seat, ...]

    def of(self, role: str) -> list[Seat]:
        return [seat for seat in self.seats if seat.role == role]

    @property
    def needs(self) -> dict[str, float]:
        """What all bundles need together."""
        total: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount
        return total


def seats(grid: Grid, *, gpu: bool) -> Seats:
    """One seat for each policy rank and each rollout replica. On a CPU a seat is one core.

    Disaggregated: every seat has a bundle of its own; a rollout replica's has one device for each of its ranks. Colocated:
    rollout replica i uses the devices of the policy ranks from `i * rollout_ranks` on, and where there are none its own.
    """
    policy_ranks, (replicas, width) = grid.policy[1], grid.rollout
    if not gpu:
        names = [("policy", i) for i in range(policy_ranks)] + [("rollout", i) for i in range(replicas)]
        return Seats(tuple({"CPU": 1.0} for _ in names), tuple(Seat(r, i, b, 1.0, 0.0) for b, (r, i) in enumerate(names)))
    if grid.gpu_placement == "colocated":
        return _colocated(policy_ranks, replicas, width)
    bundles = [{"CPU": 1.0, "GPU": 1.0} for _ in range(policy_ranks)]
    bundles += [{"CPU": float(width), "GPU": float(width)} for _ in range(replicas)]
    places = [Seat("policy", i, i, 1.0, 1.0) for i in range(policy_ranks)]
    places += [Seat("rollout", i, policy_ranks + i, float(width), float(width)) for i in range(replicas)]
    return Seats(tuple(bundles), tuple(places))


def cpus_of(grid: Grid) -> int:
    """CPUs that all roles of a grid take from Ray, on devices or without: on one node, fewer cores must not end the run."""
    return int(max(seats(grid, gpu=gpu).needs["CPU"] for gpu in (False, True)))


def _colocated(policy_ranks: int, replicas: int, width: int) -> Seats:
    """Bundles of `width` devices, so that a replica's devices are on one node with the policy ranks it shares them with.

    The policy's ranks own the devices and a replica is told which: Ray itself divides a device, but gives nobody parts of two.
    """
    count = max(-(-policy_ranks // width), replicas)
    bundles = tuple({"CPU": 2.0 * width, "GPU": float(width)} for _ in range(count))
    places = [Seat("policy", i, i // width, 1.0, 1.0) for i in range(policy_ranks)]
    for i in range(replicas):
        shared = tuple(range(min(i * width, policy_ranks), min((i + 1) * width, policy_ranks)))
        places.append(Seat("rollout", i, i, float(width), float(width - len(shared)), shared))
    return Seats(bundles, tuple(places))


@dataclass(eq=False)
class Cluster:
    """A cluster that this process is connected to.

    own: started for this run   processes: of the cluster, where it is   group: the reserved bundles
    """

    address: str
    own: bool
    session_logs: Path
    nodes: int = 1
    gpus: float = 0.0
    processes: tuple[ProcessId, ...] = ()
    group: Any = None

    def reserve(self, plan: Seats, *, timeout: float) -> None:
        """Hold the bundles of `plan` for this run. Raises EngineStartError saying what is there and what is needed."""
        import ray

        total = {name: amount for name, amount in ray.cluster_resources().items() if name in plan.needs}
        if any(total.get(name, 0.0) < amount for name, amount in plan.needs.items()):
            raise _too_small(plan, total)
        self.group = ray.util.placement_group([dict(bundle) for bundle in plan.bundles], strategy="PACK")
        if not self.group.wait(timeout_seconds=timeout):
            ray.util.remove_placement_group(self.group)
            free = {name: amount for name, amount in ray.available_resources().items() if name in plan.needs}
            raise _too_small(plan, free, timeout)


@contextmanager
def connect(*, logs: Path, cpus: int = 0) -> Iterator[Cluster]:
    """Join the cluster at `RAY_ADDRESS`, or start one with room for `cpus` processes; left, or ended, whatever happens.

    Raises EngineStartError: Ray absent or of another version, no cluster at the address.
    """
    check_installed()
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    try:
        with _our_handlers(), _stderr_to(logs / "ray.log"):
            context = _join(address) if address else _start(cpus)
        with _messages_to(logs / "ray.log"):
            gpus = ray.cluster_resources().get("GPU", 0.0)
            nodes = sum(node["Alive"] for node in ray.nodes())
            session = Path(context["session_dir"]) / "logs"
            _link_logs(session, logs)
            yield Cluster(context["gcs_address"], not address, session, nodes, gpus, () if address else _children())
    finally:
        ray.shutdown()


def check_installed() -> None:
    """Raise EngineStartError unless a supported Ray is installed; reads its metadata only."""
    from importlib.metadata import PackageNotFoundError, version

    wanted = "ray>={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
    try:
        found = version("ray")
    except PackageNotFoundError:
        raise EngineStartError(
            "grid.backend=ray needs Ray, which is not installed", fix=f'pip install "{wanted}"', code="ray-absent"
        ) from None
    release = tuple(int(part) for part in found.split(".")[:2])
    if not SUPPORTED[0] <= release < SUPPORTED[1]:
        raise EngineStartError(
            f"Ray {found} is installed, this needs {wanted}", fix=f'pip install "{wanted}"', code="ray-version"
        )


def _join(address: str) -> dict[str, Any]:
    import ray

    host, _, port = address.rpartition(":")
    plain = host and port.isdigit() and "/" not in host
    if plain and ray_version(host, int(port), timeout=ADDRESS_TIMEOUT_S) is None:  # Ray itself would wait for minutes
        raise _no_cluster(address, "nothing that speaks Ray answers there")
    try:
        return dict(ray.init(address=address, **_QUIET).address_info)
    except Exception as exc:
        raise _no_cluster(address, f"{type(exc).__name__}: {str(exc).strip().splitlines()[0]}") from exc


def _no_cluster(address: str, cause: str) -> EngineStartError:
    return EngineStartError(
        f"no Ray cluster can be joined at RAY_ADDRESS={address}",
        cause=cause,
        fix="start it (posttrain launch ray), correct the address, or unset RAY_ADDRESS to start one for this run",
        code="ray-address",
    )


def _start(cpus: int) -> dict[str, Any]:
    import ray

    cores = len(os.sched_getaffinity(0))
    try:
        return dict(ray.init(address="local", num_cpus=max(cpus, cores), **_QUIET).address_info)
    except Exception as exc:
        raise EngineStartError(
            "Ray could not start a cluster on this machine",
            cause=f"{type(exc).__name__}: {str(exc).strip().splitlines()[0]}",
            fix="see Ray's logs under /tmp/ray/session_latest/logs; `posttrain doctor` checks ports and shared memory",
            code="ray-start",
        ) from exc


_QUIET: dict[str, Any] = {
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
    "configure_logging": False,
}


def _too_small(plan: Seats, present: dict[str, float], waited: float | None = None) -> EngineStartError:
    def shown(resources: dict[str, float]) -> str:
        return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items())) or "nothing"

    since = f" after {waited:.0f} s" if waited is not None else ""
    return EngineStartError(
        f"the cluster has {shown(present)} free{since}, this grid needs {shown(plan.needs)} in {len(plan.bundles)} bundle(s)",
        cause="a bundle must fit on one node: " + "; ".join(sorted({shown(bundle) for bundle in plan.bundles})),
        fix="a smaller grid.shapes, grid.gpu_placement=colocated, or more nodes; another job may hold them (`ray status`)",
        code="cluster-too-small",
    )


def _children() -> tuple[ProcessId, ...]:
    """What Ray has started below this process."""
    import psutil  # type: ignore[import-untyped]

    found = [ProcessId.of(child.pid) for child in psutil.Process().children(recursive=True) if _is_ray(child)]
    return tuple(found)


def _is_ray(process: Any) -> bool:
    with contextlib.suppress(Exception):  # it has just ended
        return "ray" in process.name() or any("/ray/" in part or part.startswith("ray::") for part in process.cmdline())
    return False


@contextmanager
def _our_handlers() -> Iterator[None]:
    """Ray's SIGTERM handler ends the process without closing anything: the handlers from before stay."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.signal(number, handler)


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """What native code says while it starts goes to a log, not to the screen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before, log = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(log)


@contextmanager
def _messages_to(path: Path) -> Iterator[None]:
    """Messages of the raylets, which Ray prints on the driver's screen: a death of ours is told by whoever waits for it."""
    import ray._private.worker as worker

    def write(data: dict[str, Any], *_: Any, **__: Any) -> None:
        with path.open("a", encoding="utf-8") as log:
            log.writelines(f"({data.get('pid')}) {line}\n" for line in data.get("lines", ()))

    printed = worker.print_to_stdstream
    worker.print_to_stdstream = write
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


def _link_logs(session: Path, logs: Path) -> None:
    """`logs/ray` is Ray's own log folder on this node: the `.err` of each worker is there."""
    link = logs / "ray"
    with contextlib.suppress(OSError):
        link.unlink(missing_ok=True)
        link.symlink_to(session, target_is_directory=True)
