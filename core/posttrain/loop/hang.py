"""The hang doctor: what is known of a run whose deadline has passed, in seconds, and then the end of the run with exit code 75.

    ended = await attended(controller.run(), controller.waits, parts)

Raises WaitExpired when a named wait passes its deadline, when the loops wait for each other, and when nothing has moved for
longer than all deadlines of the config together (`stall_limit`): the waits of the loops for each other have none of their own.
A thread does the same where the event loop itself hangs (`blocked`). The error carries the graph; `logs/hang-TIME.txt` also the
stacks of every thread and task of this process, of every role, of the engine's processes and of the reward workers. What does not
answer within 5 s is said to be silent, which is an answer too.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.errors import WaitExpired
from posttrain.loop.blocked import loop_watched
from posttrain.loop.wait_graph import cycle, endless, within
from posttrain.loop.waits import Waits, guarded, run_together
from posttrain.placement import stacks
from posttrain.tracking.text import near
from posttrain.weights import deadline

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.loop.cluster import Hosting
    from posttrain.loop.parts import Parts

T = TypeVar("T")

SILENT_S = 5.0
"""How long a role may take to say where it is."""

PERIOD_S, DEADLOCK_S = 1.0, 10.0
"""How often the graph is looked at, and how long a deadlock must have lasted: what is just handed over looks like one."""


LEFT, END_S = "posttrain-left", 3.0
"""Name of the threads that nobody waits for, and how long they may hold up the end of the interpreter."""


async def attended(work: Coroutine[Any, Any, T], waits: Waits, parts: Parts) -> T:
    """The result of `work`, with the roles, its waits and its progress under watch. A WaitExpired has its report when raised."""
    loop, limit = asyncio.get_running_loop(), stall_limit(parts.config, parts.scorer.longest_s if parts.scorer else 0.0)
    waits.examine = functools.partial(examine, parts)

    def tell(exc: WaitExpired) -> None:
        write(exc, asyncio.run(examine(parts, loop)), parts)

    try:
        with loop_watched(waits, limit, tell):
            return await guarded(work, run_together(parts.watch(), watchdog(waits, limit)))
    except WaitExpired as exc:
        _leave_threads_behind()
        if not hasattr(exc, "report"):
            found = getattr(exc, "examined", "") or await examine(parts)
            write(exc, "\n\n".join(filter(None, [getattr(exc, "stacks", ""), found])), parts)
        raise


def stall_limit(config: RunConfig, scoring_s: float = 0.0) -> float:
    """Seconds in which something must move: all that one step of the loop may take under the deadlines of the config.

    scoring_s: of the longest reward, where an environment asks for more than the config.
    """
    hooks = sum(hook.timeout_s for hook in config.hooks)
    w = config.weights
    weights = w.stage_timeout_s + w.apply_timeout_s + w.abort_timeout_s + w.rebuild_timeout_s
    scoring = max(config.rollout.reward_timeout_s, scoring_s)
    return config.rollout.generate_timeout_s + scoring + config.loop.train_timeout_s + weights + hooks


async def watchdog(waits: Waits, limit: float) -> None:
    """Returns never. Raises WaitExpired when no wait has begun or ended for `limit` s, or when some wait for each other."""
    loop = asyncio.get_running_loop()
    waits.changed = max(waits.changed, loop.time())
    while True:
        await asyncio.sleep(PERIOD_S)
        now, stuck = loop.time(), endless(list(waits.open))
        names = cycle(stuck)
        if names and now - max(wait.since for wait in within(stuck, names)) >= DEADLOCK_S:
            raise await waits.expired(
                f"deadlock: {' → '.join(names)}, each waits for the next",
                fix="this is a bug in posttrain or in a plug-in that drives the loop: report it with the file",
            )
        if now - waits.changed >= limit:
            raise await waits.expired(
                f"nothing has moved for {now - waits.changed:.0f} s",
                fix="raise loop.train_timeout_s if the work is only slow; see the logs in logs/",
            )


def write(exc: WaitExpired, found: str, parts: Parts) -> None:
    """Write the report to the run's logs, and name the file in the error; that it could not be written is told too."""
    path = parts.run_dir.logs / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        path.write_text(f"{exc}\n\n{found}\n", encoding="utf-8")
    except OSError as problem:
        exc.fix += f" (the report could not be written: {problem})"
        return
    exc.report = path  # type: ignore[attr-defined]
    exc.fix = f"read {near(path)}; {exc.fix}"


async def examine(parts: Parts, loop: asyncio.AbstractEventLoop | None = None) -> str:
    """Where everything is, as text: this process at once, the others side by side. loop: whose tasks, else the running one's."""
    here = f"== this process (pid {os.getpid()})\n\n" + "\n\n".join(map(str, [*stacks.tasks(loop), *stacks.threads()]))
    asked = [_told("the engine", parts.engine), _told("reward workers", parts.scorer)]
    if parts.hosting is not None:
        asked.append(_roles(parts.hosting))
    return "\n\n".join([here, *filter(None, await asyncio.gather(*asked))])


async def _told(name: str, part: Any) -> str:
    """What the processes of a part say of themselves; empty when it has none."""
    if not hasattr(part, "stacks"):
        return ""
    try:
        found: Mapping[str, str] = await deadline.within(part.stacks(), SILENT_S)
    except Exception as exc:
        found = {name: f"silent: {type(exc).__name__}: {exc}"}
    return "\n\n".join(f"== {process}\n\n{text}" for process, text in found.items())


async def _roles(hosting: Hosting) -> str:
    lines = []
    for name, beat in (await hosting.fleet.stacks(SILENT_S)).items():
        place = hosting.fleet.roles[name].place
        where = f" (pid {place.pid} on {place.node})" if place else ""
        lines.append(f"== {name}{where}\n\n{beat if isinstance(beat, str) else beat.full()}")
    return "\n\n".join(lines)


class _Unwaited(ThreadPoolExecutor):
    """Threads that the event loop does not wait for when it ends."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def _leave_threads_behind() -> None:
    """A thread that hangs must not hold up the end: neither that of the event loop nor, for long, that of the interpreter."""
    asyncio.get_running_loop().set_default_executor(_Unwaited(thread_name_prefix=LEFT))
    hung = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    threading.Thread(target=_end, args=(hung,), name="posttrain-end", daemon=True).start()


def _end(hung: Sequence[threading.Thread]) -> None:
    """When the interpreter ends, it waits for all threads, for ever perhaps. Its exit code would be this one."""
    idle = ThreadPoolExecutor(1, thread_name_prefix="posttrain-idle")
    idle.submit(threading.current_thread).result().join()  # the idle threads of executors are the first that the end ends
    time.sleep(END_S)
    if any(thread.is_alive() and (thread in hung or thread.name.startswith(LEFT)) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(WaitExpired.exit_code)
