"""Calling hooks: order, threads, copies, results; and every way in which one fails under every policy."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.schema import HookConfig
from posttrain.errors import PluginError
from posttrain.hooks import Hook, RunHooks, build_hooks, hookimpl
from posttrain.plugins.objects import References


class Reporter:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.spans: list[tuple[str, str]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def span(self, role: str, name: str, **args: Any):
        self.spans.append((role, name))
        yield args


def made(*hooks: Hook, **config: Any) -> RunHooks:
    refs = References()
    return build_hooks([HookConfig(name=refs.of(hook, type(hook).__name__), **config) for hook in hooks])


def drive(hooks: RunHooks, *calls: Callable[[RunHooks], Coroutine[Any, Any, Any]], fails: bool = False) -> Reporter:
    """Run the hooks through `calls`, as the loop does."""
    reporter = Reporter()

    async def main() -> None:
        async with hooks.running(reporter, path=Path("run"), config={}, step=0, steps=3):
            for call in calls:
                await call(hooks)
            hooks.raise_failure()

    if fails:
        with pytest.raises(PluginError) as caught:
            asyncio.run(main())
        reporter.notes.append(str(caught.value))
    else:
        asyncio.run(main())
    return reporter


def step_end(step: int = 1):
    return lambda hooks: hooks.step_end(step, metrics={"loss": None}, groups=[], advantages={})


class Recorder(Hook):
    """Writes down what it is given."""

    def __init__(self, name: str = "", into: list[Any] | None = None) -> None:
        self.name, self.seen = name, [] if into is None else into

    def run_start(self, step, steps):
        self.seen.append((self.name, "run_start", step, steps))

    def step_end(self, step, metrics):
        self.seen.append((self.name, "step_end", step, threading.current_thread().name))
        metrics["loss"] = "changed"

    def run_end(self, outcome, error, step):
        self.seen.append((self.name, "run_end", outcome, type(error).__name__, step))


def test_hooks_are_called_in_the_order_of_the_config_each_in_one_thread_of_its_own() -> None:
    seen: list[Any] = []
    drive(made(Recorder("a", seen), Recorder("b", seen)), step_end(1), step_end(2))
    assert [entry[:2] for entry in seen] == [(n, e) for e in ("run_start", "step_end", "step_end", "run_end") for n in "ab"]
    threads = {(name, rest[1]) for name, event, *rest in seen if event == "step_end"}
    assert threads == {("a", "hook Recorder"), ("b", "hook Recorder#2")}
    assert seen[-1] == ("b", "run_end", "done", "NoneType", 2)


def test_hookimpl_gives_another_order() -> None:
    seen: list[str] = []

    class Late(Hook):
        @hookimpl(trylast=True)
        def step_end(self):
            seen.append("late")

    class Plain(Hook):
        def step_end(self):
            seen.append("plain")

    class Early(Hook):
        @hookimpl(tryfirst=True)
        def step_end(self):
            seen.append("early")

    drive(made(Late(), Plain(), Early()), step_end())
    assert seen == ["early", "plain", "late"]


def test_no_hook_changes_what_another_one_gets() -> None:
    metrics = {"loss": 0.5}
    hook = Recorder()
    drive(made(hook), lambda hooks: hooks.step_end(1, metrics=metrics, groups=[], advantages={}))
    assert metrics == {"loss": 0.5} and ("", "step_end", 1, "hook Recorder") in hook.seen


def test_the_event_loop_is_free_while_a_hook_works() -> None:
    release = threading.Event()

    class Waits(Hook):
        def step_end(self):
            assert release.wait(20)

    async def beside(hooks: RunHooks) -> None:
        task = asyncio.create_task(hooks.step_end(1, metrics={}, groups=[], advantages={}))
        await asyncio.sleep(0)
        release.set()  # reached only when the call above left the loop free
        await task

    hooks = made(Waits())
    drive(hooks, beside)
    assert hooks.active[0].errors == 0


class Broken(Hook):
    """Raises wherever it is told to."""

    def __init__(self, *events: str, error: type[BaseException] = ValueError) -> None:
        self.events, self.error, self.calls = events, error, []

    def _at(self, event: str) -> None:
        self.calls.append(event)
        if event in self.events:
            raise self.error("boom")

    def run_start(self):
        self._at("run_start")

    def step_end(self):
        self._at("step_end")

    def metrics(self):
        self._at("metrics")
        return {"extra": 1}

    def run_end(self):
        self._at("run_end")


def metrics_of(into: dict[str, float]):
    async def call(hooks: RunHooks) -> None:
        into.update(await hooks.metrics(1, []))

    return call


POLICIES = ("warn", "disable", "fail")
MATRIX = [
    *((event, policy, ValueError) for event in ("run_start", "metrics", "step_end", "run_end") for policy in POLICIES),
    *(("step_end", "warn", e) for e in (SystemExit, TimeoutError, asyncio.CancelledError, StopIteration, KeyboardInterrupt)),
]


@pytest.mark.parametrize(("event", "policy", "error"), MATRIX)
def test_every_failure_is_told_counted_logged_and_handled(
    event: str, policy: str, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    hook, other = Broken(event, error=error), Recorder("after")
    hooks = made(hook, other, on_error=policy)
    found: dict[str, float] = {}
    caplog.set_level(logging.ERROR, logger="posttrain.hooks")
    reporter = drive(hooks, metrics_of(found), step_end(1), step_end(2), metrics_of(found), fails=policy == "fail")
    (said,) = reporter.notes
    line = Broken._at.__code__.co_firstlineno + 3
    assert f"hook 'Broken' ({__file__}) failed in {event}: {error.__name__}: boom" in said
    assert f"{__file__}:{line}" in said
    repeats = {"step_end": 2, "metrics": 2}.get(event, 1)
    ends_at_start = policy == "fail" and event == "run_start"
    assert hooks.active[0].errors == (1 if policy == "disable" else repeats)
    if event in ("run_start", "step_end") and not ends_at_start:
        assert found["hook/Broken/errors"] == hooks.active[0].errors
    assert [record.exc_info[0] for record in caplog.records] == [error] * hooks.active[0].errors  # type: ignore[index]
    assert {"warn": "it goes on being called", "disable": "it is off", "fail": "where: hooks[0]"}[policy] in said
    after = hook.calls[hook.calls.index(event) + 1 :]
    assert (after == []) == (policy == "disable" or event == "run_end")
    assert other.seen[-1][1:3] == ("run_end", "failed" if policy == "fail" and event != "run_end" else "done")
    if policy != "fail":
        assert [e for _, e, *_ in other.seen] == ["run_start", "step_end", "step_end", "run_end"]


def test_the_error_that_ends_a_run_has_its_cause_code_and_fix() -> None:
    hooks = made(Broken("step_end"), on_error="fail")
    drive(hooks, step_end(), fails=True)
    error = hooks.active[0].error
    assert error is not None and isinstance(error.__cause__, ValueError)
    assert (error.code, error.exit_code, error.retryable) == ("hook-failed", 2, False)
    assert "--resume" in error.fix and "logs/hooks.log" in error.fix


def test_what_ended_a_run_goes_before_what_a_hook_raises_at_its_end() -> None:
    hooks = made(Broken("run_end"), on_error="fail")

    async def main() -> None:
        async with hooks.running(Reporter(), path=Path("run"), config={}, step=0, steps=1):
            raise MemoryError("the real reason")

    with pytest.raises(MemoryError):
        asyncio.run(main())
    assert hooks.failing


def test_an_interrupted_run_is_told_so() -> None:
    hook = Recorder()

    async def main() -> None:
        async with made(hook).running(Reporter(), path=Path("run"), config={}, step=0, steps=1):
            await asyncio.sleep(60)

    async def cancelled() -> None:
        task = asyncio.create_task(main())
        while not hook.seen:
            await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert hook.seen[-1][1:4] == ("run_end", "interrupted", "CancelledError")


@pytest.mark.parametrize("policy", ["warn", "fail"])
def test_a_hook_that_does_not_come_back_is_left_behind(policy: str) -> None:
    release = threading.Event()

    class Stuck(Hook):
        def step_end(self):
            release.wait(20)

    hooks, other = made(Stuck(), on_error=policy, timeout_s=0.2), Recorder("other")
    hooks = RunHooks([*hooks.active, *made(other).active])
    reporter = drive(hooks, step_end(1), fails=policy == "fail")
    release.set()
    assert "failed in step_end: did not come back in 0.2 s" in reporter.notes[0]
    assert not hooks.active[0].enabled and other.seen[1][:3] == ("other", "step_end", 1)


def test_what_a_hook_adds_to_the_metrics() -> None:
    import numpy as np
    import torch

    class Adds(Hook):
        def metrics(self, step, groups):
            return {"a": 1, "b.c": np.float32(0.5), "d": torch.tensor(2.0), "yes": True}

    class Silent(Hook):
        def metrics(self):
            return None

    found: dict[str, float] = {}
    drive(made(Adds(), Silent()), metrics_of(found))
    assert found.pop("time/hooks_s") >= 0
    assert found == {
        "hook/Adds/a": 1.0, "hook/Adds/b.c": 0.5, "hook/Adds/d": 2.0, "hook/Adds/yes": 1.0,
        "hook/Adds/errors": 0.0, "hook/Silent/errors": 0.0,
    }  # fmt: skip
    assert all(type(value) is float for value in found.values())


@pytest.mark.parametrize("bad", [3, {"a": "text"}, {"a/b": 1.0}, {"errors": 1.0}, {1: 2.0}, {"a": [1.0]}, {"a": None}])
def test_metrics_that_are_none_are_a_failure(bad: Any) -> None:
    class Bad(Hook):
        def metrics(self):
            return bad

    found: dict[str, float] = {}
    reporter = drive(made(Bad()), metrics_of(found))
    assert found["hook/Bad/errors"] == 1 and len(found) == 2 and "failed in metrics" in reporter.notes[0]


class Stateful(Hook):
    """Counts steps over resumes."""

    def __init__(self, state: Any = None) -> None:
        self.count, self.bad = 0, state

    def state_dict(self):
        return {"count": self.count} if self.bad is None else self.bad

    def load_state_dict(self, state):
        self.count = state["count"]

    def step_end(self):
        self.count += 1


def states(into: list[dict[str, Any]]):
    async def call(hooks: RunHooks) -> None:
        into.append(await hooks.state_dict())

    return call


def test_state_goes_into_the_checkpoint_and_back_by_name() -> None:
    saved: list[dict[str, Any]] = []
    drive(made(Stateful(), Stateful(), Recorder()), step_end(1), states(saved), step_end(2))
    assert saved == [{"Stateful": {"count": 1}, "Stateful#2": {"count": 1}}]
    again = made(Stateful(), Recorder())
    again.load_state_dict({**saved[0], "gone": {"x": 1}})
    drive(again, step_end(2), states(saved))
    assert saved[1] == {"Stateful": {"count": 2}}  # of a hook that is no longer there nothing is kept


def test_a_state_that_cannot_be_written_is_the_hooks_failure_and_keeps_the_last_good_one() -> None:
    saved: list[dict[str, Any]] = []
    hooks = made(Stateful({"x": object()}))
    hooks.load_state_dict({"Stateful": {"count": 7}})
    reporter = drive(hooks, states(saved))
    assert saved == [{"Stateful": {"count": 7}}] and "failed in state_dict: TypeError" in reporter.notes[0]


def test_without_hooks_nothing_is_called_and_nothing_is_added() -> None:
    hooks = RunHooks()
    found: dict[str, float] = {}
    saved: list[dict[str, Any]] = []
    reporter = drive(hooks, step_end(), metrics_of(found), states(saved))
    assert found == {} and saved == [{}] and reporter.spans == [] and not hooks.failing


def test_calls_are_events_of_the_run_but_for_the_frequent_one() -> None:
    class Both(Hook):
        def step_end(self): ...

        def trajectory_scored(self): ...

    reporter = drive(
        made(Both()), step_end(), lambda hooks: hooks.call("trajectory_scored", step=1, trajectory=None)
    )
    assert reporter.spans == [("hooks", "step_end")]


def test_calls_at_the_same_time_run_one_after_the_other_each_with_its_own_deadline() -> None:
    inside: list[int] = []

    class Counts(Hook):
        def trajectory_scored(self, trajectory):
            inside.append(+1)
            threading.Event().wait(0.02)
            inside.append(-1)

    async def many(hooks: RunHooks) -> None:
        await asyncio.gather(*(hooks.call("trajectory_scored", step=1, trajectory=i) for i in range(20)))

    hooks = made(Counts(), timeout_s=0.3)  # all together take longer
    drive(hooks, many)
    assert hooks.active[0].errors == 0 and inside == [+1, -1] * 20
