"""The driver's end of a role in a Ray actor: calls with deadlines, deaths that are named, heartbeats.

    fleet = Fleet(cluster, logs, heartbeat_timeout_s=60)
    policy = fleet.add(RoleSpec("policy-0", "posttrain.policy.rank:PolicyRank", {...}), seat)
    fleet.begin(["policy-0"], timeout=300)
    await policy.call("publish", 3, timeout=60)
    await fleet.watch()        # returns never; raises when a role is dead or stuck

Every call has a deadline. A role that died is named with its pid, its node and the last lines of its log.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import RunInterrupted, WaitExpired, WeightSyncError
from posttrain.placement.host import STACKS_S, Beat, Host, Outcome, Place, RoleSpec, boot_id
from posttrain.placement.role_log import RoleLog

if TYPE_CHECKING:
    from posttrain.placement.cluster import Cluster, Seat

PERIOD_S = 2.0
"""Seconds between heartbeats."""

_RANKS_OF_BLAME = {"role-died": 0, "policy-rank-lost": 2}
"""By code: a death explains everything else, the loss of a peer explains nothing."""

DEATH_GRACE_S = 3.0
"""How long a collective call that failed on one role waits for the others: the death of one reaches its peers first."""


@dataclass(eq=False)
class Remote:
    """One role. place: known once it has begun.   spare: the run can go on without it, so its death ends nothing by itself.
    log: what its process of now has printed."""

    spec: RoleSpec
    seat: Seat
    actor: Any
    spare: bool = False
    place: Place | None = None
    ended: bool = False
    log: RoleLog = field(init=False)
    _seen: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.log = RoleLog.from_now(Path(self.spec.logs) / f"{self.name}.log")

    @property
    def name(self) -> str:
        return self.spec.name

    async def call(self, method: str, *args: Any, timeout: float) -> Any:
        """The method's result, or what it raised. Raises RunInterrupted when the role is dead, WaitExpired after `timeout` s."""
        future = self.actor.call.remote(method, *args)
        return self._value(await self._bounded(asyncio.wrap_future(future.future()), method, timeout))

    def call_blocking(self, method: str, *args: Any) -> concurrent.futures.Future[Any]:
        """The same from ordinary code: a future of the outcome; see `together`."""
        return self.actor.call.remote(method, *args).future()  # type: ignore[no-any-return]

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """What an asynchronous generator of the role yields."""
        references = self.actor.stream.options(num_returns="streaming").remote(method, *args)
        try:
            async for reference in references:
                yield self._value(await reference)
        except _ray_errors() as exc:
            raise self.died(exc) from exc

    async def beat(self, timeout: float, *, stacks: bool = False) -> Beat:
        """A heartbeat. Raises RunInterrupted when the role is dead, TimeoutError when it does not answer."""
        try:
            beat: Beat = await asyncio.wait_for(asyncio.wrap_future(self.actor.beat.remote(stacks).future()), timeout)
        except _ray_errors() as exc:
            raise self.died(exc) from exc
        self._seen = time.monotonic()
        return beat

    def kill(self) -> None:
        """End the role's process now; idempotent."""
        import ray

        self.ended = True
        if ray.is_initialized():  # every function of Ray starts a cluster where there is none, also for a thread that comes late
            with contextlib.suppress(Exception):
                ray.kill(self.actor, no_restart=True)

    def died(self, exc: BaseException) -> RunInterrupted:
        """The error that says that this role is gone; what UCX announced in its log before is the cause."""
        announced = self.log.announced(death=str(exc))
        causes = [announced.message, announced.cause] if announced else self.log.last_lines()
        return RunInterrupted(
            f"{self.name} died",
            where=self._where,
            cause="; ".join([_first_line(exc), *causes]),
            fix=announced.fix if announced else f"read {self.log.path}, then go on with --resume",
            code="role-died",
        )

    def stuck(self, seconds: float) -> RunInterrupted:
        """The error that says that this role does not answer; a crash that UCX's handler holds is announced in its log."""
        announced = self.log.announced()
        resume = f"read {self.log.path}, then go on with --resume"
        return RunInterrupted(
            f"{self.name} has not answered for {seconds:.0f} s",
            where=self._where,
            cause=f"{announced.message}; {announced.cause}" if announced else
            "its process is stopped, frozen in a fault, or its machine is unreachable",
            fix=f"{announced.fix}; {resume}" if announced else f"{resume}; grid.heartbeat_timeout_s sets the limit",
            code="role-stuck",
        )  # fmt: skip

    @property
    def _where(self) -> str:
        return self.name + (f", pid {self.place.pid} on {self.place.node}" if self.place else "")

    async def _bounded(self, future: asyncio.Future[Any], method: str, timeout: float) -> Any:
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError as exc:
            raise await self.late(method, timeout) from exc
        except _ray_errors() as exc:
            raise self.died(exc) from exc

    async def late(self, method: str, timeout: float) -> WaitExpired:
        """The error that says that a call missed its deadline, with the stacks of the role."""
        beat: Beat | None = None
        with contextlib.suppress(Exception):
            beat = await self.beat(STACKS_S + 2.0, stacks=True)
        return _expired([self], method, timeout, {self.name: beat})

    def _value(self, outcome: Outcome) -> Any:
        if outcome.failure is not None:
            raise outcome.failure
        return outcome.value


@dataclass(eq=False)
class Fleet:
    """All roles of a run. heartbeat_timeout_s: how long a role may be silent."""

    cluster: Cluster
    heartbeat_timeout_s: float
    roles: dict[str, Remote] = field(default_factory=dict)

    def add(self, spec: RoleSpec, seat: Seat, *, spare: bool = False) -> Remote:
        """Place a role in its seat. Nothing of it runs before `begin`."""
        self.roles[spec.name] = Remote(spec, seat, self._actor(spec, seat), spare)
        return self.roles[spec.name]

    def replace(self, name: str, timeout: float) -> None:
        """A new process for a role that is gone, in the same seat; begun, and known under the same `Remote`."""
        role = self.roles[name]
        role.kill()
        role.actor, role.place, role.log = self._actor(role.spec, role.seat), None, RoleLog.from_now(role.log.path)
        self.begin([name], timeout)
        role.ended, role._seen = False, time.monotonic()

    def _actor(self, spec: RoleSpec, seat: Seat) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = ray.remote(Host).options(
            num_cpus=seat.cpus,
            num_gpus=seat.gpus,
            max_concurrency=1000,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.cluster.group, placement_group_bundle_index=seat.bundle),
        )
        return actor.remote(spec)

    def begin(self, names: Sequence[str], timeout: float) -> None:
        """Build these roles where they were placed, side by side. Raises what building the first that failed raised."""
        roles = [self.roles[name] for name in names]
        places = _collect({role.actor.begin.remote().future(): role for role in roles}, "begin", timeout)
        for role, place in zip(roles, places, strict=True):
            role.place, role.log = place, RoleLog(role.log.path, place.log_start)

    async def watch(self) -> None:
        """Ask every role for a heartbeat, for ever. Raises as soon as one is dead, or silent for too long (it is then killed)."""
        await first_failure([self._watch(role) for role in self.roles.values()])

    async def _watch(self, role: Remote) -> None:
        period = min(self.heartbeat_timeout_s / 6, PERIOD_S)
        while True:
            await asyncio.sleep(period)
            if role.ended or role.place is None:  # killed by us; it may be replaced
                continue
            try:
                await role.beat(self.heartbeat_timeout_s)
            except (TimeoutError, RunInterrupted) as exc:
                if role.ended:
                    continue
                role.kill()
                if not role.spare:
                    raise (role.stuck(time.monotonic() - role._seen) if isinstance(exc, TimeoutError) else exc) from None

    async def stacks(self, timeout: float) -> dict[str, Beat | str]:
        """Where every role is, asked at once; in words for one that is gone or silent."""
        roles = {name: role for name, role in self.roles.items() if role.place is not None}
        found = await asyncio.gather(*(role.beat(timeout, stacks=True) for role in roles.values()), return_exceptions=True)
        return {name: one if isinstance(one, Beat) else _silent(one, timeout) for name, one in zip(roles, found, strict=True)}

    def close(self) -> None:
        """End every role."""
        for role in self.roles.values():
            role.kill()

    def wait_gone(self, seconds: float) -> None:
        """Wait until the roles on this machine have ended."""
        here = [role.place.process for role in self.roles.values() if role.place and role.place.boot == boot_id()]
        deadline = time.monotonic() + seconds
        while any(process.alive() for process in here) and time.monotonic() < deadline:
            time.sleep(0.02)


def free_port(role: Remote, timeout: float) -> tuple[str, int]:
    """Address of the role's node, and a port of it that nobody listens on."""
    assert role.place is not None, "begin comes first"
    return role.place.address, _collect({role.actor.free_port.remote().future(): role}, "free_port", timeout)[0]


def each(roles: Sequence[Remote], method: str, args: Sequence[tuple[Any, ...]], *, timeout: float) -> list[Any]:
    """As `together`, with arguments of its own for each role."""
    calls = zip(roles, args, strict=True)
    return _collect({role.call_blocking(method, *own): role for role, own in calls}, method, timeout)


def together(roles: Sequence[Remote], method: str, *args: Any, timeout: float, kill: bool = True) -> list[Any]:
    """Call a collective method of all roles from ordinary code; their results in order.

    The first failure is raised at once, and all the roles are killed with it: the others wait in a collective for the one that
    failed. kill: False for a method that tells every role of a failure by itself, and runs beside others that go on.
    Raises WaitExpired naming the roles that are late.
    """
    import ray

    # one copy in the object store, whatever the number of roles
    shared = [ray.put(value) for value in args]
    return _collect({role.call_blocking(method, *shared): role for role in roles}, method, timeout, kill)


def _collect(futures: dict[concurrent.futures.Future[Any], Remote], method: str, timeout: float, kill: bool = True) -> list[Any]:
    deadline = time.monotonic() + timeout
    pending = set(futures)
    while pending:
        done, pending = concurrent.futures.wait(
            pending, max(deadline - time.monotonic(), 0), return_when=concurrent.futures.FIRST_COMPLETED
        )
        failure = _origin(futures, done, pending) if done else _late(futures, pending, method, timeout)
        if failure is not None:
            if kill:
                for role in futures.values():
                    role.kill()
            raise failure
    return [role._value(future.result()) for future, role in futures.items()]


async def first_failure(work: Sequence[Any]) -> None:
    """Run side by side; the first exception cancels the rest and is raised itself."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _origin(
    futures: dict[concurrent.futures.Future[Any], Remote],
    done: set[concurrent.futures.Future[Any]],
    pending: set[concurrent.futures.Future[Any]],
) -> BaseException | None:
    """Why a collective call failed, None while it has not. A death comes before what the survivors say about their connection."""
    failures = [f for f in (_failure(futures[future], future) for future in done) if f is not None]
    if not failures:
        return None
    if pending:
        later, _ = concurrent.futures.wait(pending, DEATH_GRACE_S)
        failures += [f for f in (_failure(futures[future], future) for future in later) if f is not None]
    return min(failures, key=lambda f: _RANKS_OF_BLAME.get(getattr(f, "code", ""), 1))


def _late(
    futures: dict[concurrent.futures.Future[Any], Remote],
    pending: set[concurrent.futures.Future[Any]],
    method: str,
    timeout: float,
) -> BaseException:
    roles = [role for future, role in futures.items() if future in pending]
    return _expired(roles, method, timeout, _stacks_of(roles))


def _expired(roles: Sequence[Remote], method: str, timeout: float, beats: Mapping[str, Beat | None]) -> WaitExpired:
    """The error of roles that are late; `stacks`: all that they say of themselves, for a report."""
    names = ", ".join(role.name for role in roles)
    silent = {role.name: role.log.announced() for role in roles if beats.get(role.name) is None}
    announced = [sign for sign in silent.values() if sign]
    short = [f"{name} {beat.short(name)}" if beat else _mute(name, silent[name]) for name, beat in beats.items()]
    logs = f"see {' and '.join(f'{name}.log' for name in beats) or 'the logs'} in {roles[0].spec.logs}"
    failure = WaitExpired(
        f"{names} did not finish {method} within {timeout:g} s",
        where=f"owner: {names}",
        cause="; ".join(short),
        fix="; ".join([announced[0].fix, logs] if announced else [logs]),
    )
    failure.stacks = "\n\n".join(f"== {n}\n\n{beat.full()}" for n, beat in beats.items() if beat)  # type: ignore[attr-defined]
    return failure


def _mute(name: str, announced: WeightSyncError | None) -> str:
    said = f": {announced.message}; {announced.cause}" if announced else ""
    return f"{name} does not answer heartbeats either{said}"


def _stacks_of(roles: Sequence[Remote]) -> dict[str, Beat | None]:
    """Where these roles are; None for one that does not answer."""
    import ray

    if not ray.is_initialized():
        return {}
    beats = {role.actor.beat.remote(True): role.name for role in roles}
    ready, _ = ray.wait(list(beats), num_returns=len(beats), timeout=STACKS_S + 2.0)
    found: dict[str, Beat | None] = dict.fromkeys(beats.values())
    for reference in ready:
        with contextlib.suppress(Exception):
            found[beats[reference]] = ray.get(reference)
    return found


def _failure(role: Remote, future: concurrent.futures.Future[Any]) -> BaseException | None:
    exc = future.exception()
    if exc is not None:
        return role.died(exc) if isinstance(exc, _ray_errors()) else exc
    return future.result().failure  # type: ignore[no-any-return]


def _ray_errors() -> tuple[type[BaseException], ...]:
    from ray.exceptions import RayError

    return (RayError,)


def _silent(exc: BaseException, timeout: float) -> str:
    if isinstance(exc, TimeoutError):
        return f"silent: no answer within {timeout:g} s; its process is stopped, or its event loop is blocked"
    return f"silent: {str(exc).splitlines()[0] if str(exc) else type(exc).__name__}"


def _first_line(exc: BaseException) -> str:
    """What Ray says of the end of a process, without its advice."""
    text = " ".join(str(exc).split())
    detail = text.partition("Worker exit detail: ")[2] or text
    return detail.partition(" Some common causes")[0][:300].rstrip(". ") or type(exc).__name__
