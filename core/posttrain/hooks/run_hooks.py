"""The hooks of one run: built from its config, called at the points of `specs.HookSpecs`, in the order of the config.

    hooks = build_hooks(config.hooks)
    async with hooks.running(tracker, path=..., config=..., step=0, steps=100):
        await hooks.call("step_end", step=1, metrics=..., groups=..., advantages=...)
        hooks.raise_failure()

A run without hooks pays for a function call at each point, and no more.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pluggy

from posttrain.hooks.active import ActiveHook, Reporter
from posttrain.hooks.check import check_hook, label_and_owner
from posttrain.hooks.hook import Hook
from posttrain.hooks.specs import EVENTS, PROJECT, HookSpecs
from posttrain.plugins.state import plain

if TYPE_CHECKING:
    from posttrain.config.schema import HookConfig

_FREQUENT = ("trajectory_scored",)
"""Hooks whose calls would fill the events of a run."""


class _Manager(pluggy.PluginManager):
    """Every public method of a hook implements the spec of its name; `hookimpl` is needed only to give an order."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        marked = super().parse_hookimpl_opts(plugin, name)  # type: ignore[arg-type]
        plain = name in EVENTS and inspect.ismethod(getattr(plugin, name, None))
        return {} if marked is None and plain else marked


class RunHooks:
    """The active hooks of one run."""

    def __init__(self, active: Sequence[ActiveHook] = ()) -> None:
        self.active = list(active)
        self._by_hook = {id(a.hook): a for a in active}
        self._manager = _Manager(PROJECT)
        if self.active:
            self._manager.add_hookspecs(HookSpecs)
        for entry in reversed(self.active):  # pluggy calls the last registered first
            self._manager.register(entry.hook, name=entry.label)
        self._saved: dict[str, Any] = {}
        self._step, self._told = 0, 0.0
        self._reporter: Reporter

    async def call(self, event: str, **arguments: Any) -> list[tuple[ActiveHook, Any]]:
        """Call the hooks of an event, one after the other; what each returned. A failure is handled by the hook's policy."""
        if not self.active:
            return []
        results = []
        for implementation in reversed(getattr(self._manager.hook, event).get_hookimpls()):
            entry = self._by_hook[id(implementation.plugin)]
            given = {name: arguments[name] for name in implementation.argnames}
            came_back, value = await self._one(entry, event, implementation.function, given)
            if came_back:
                results.append((entry, value))
        return results

    async def metrics(self, step: int, groups: Sequence[Any]) -> dict[str, float]:
        """What hooks add to a batch step, with the time that they took since the last one and their failures so far."""
        if not self.active:
            return {}
        found: dict[str, float] = {}
        for entry, value in await self.call("metrics", step=step, groups=groups):
            try:
                found |= {f"hook/{entry.label}/{name}": number for name, number in _numbers(value).items()}
            except (TypeError, ValueError) as exc:
                entry.failed("metrics", exc, self._reporter)
        found |= {f"hook/{entry.label}/errors": float(entry.errors) for entry in self.active}
        total = sum(entry.seconds for entry in self.active)
        found["time/hooks_s"], self._told = total - self._told, total
        return found

    async def step_end(self, step: int, **arguments: Any) -> None:
        """As `call("step_end")`; from here on `step` is the last one done."""
        self._step = step
        await self.call("step_end", step=step, **arguments)

    @asynccontextmanager
    async def running(
        self, reporter: Reporter, *, path: Any, config: Mapping[str, Any], step: int, steps: int
    ) -> AsyncIterator[None]:
        """run_start, and run_end in whatever way the block ends. Raises the PluginError of a hook that is to fail the run.

        An exception of the block goes before that of a hook.
        """
        self._reporter, self._step = reporter, step
        try:
            for entry in self.active:
                if entry.label in self._saved:
                    await self._one(entry, "load_state_dict", entry.hook.load_state_dict, {"state": self._saved[entry.label]})
            await self.call("run_start", path=path, config=dict(config), step=step, steps=steps)
            self.raise_failure()
            yield
        except BaseException as exc:
            interrupted = isinstance(exc, (asyncio.CancelledError, KeyboardInterrupt))
            await self.call("run_end", outcome="interrupted" if interrupted else "failed", error=exc, step=self._step)
            raise
        else:
            await self.call("run_end", outcome="done", error=None, step=self._step)
            self.raise_failure()
        finally:
            for entry in self.active:
                entry.stop()

    @property
    def failing(self) -> bool:
        """Whether a hook is to end the run."""
        return any(entry.error for entry in self.active)

    def raise_failure(self) -> None:
        """Raise what a hook with `on_error=fail` left, if any."""
        for entry in self.active:
            if entry.error is not None:
                raise entry.error

    async def state_dict(self) -> dict[str, Any]:
        """The state of each hook that has one, by label. A hook that fails to give it keeps the one it had."""
        for entry in self.active:
            if type(entry.hook).state_dict is Hook.state_dict:
                continue
            came_back, state = await self._one(entry, "state_dict", entry.hook.state_dict, {})
            if came_back:
                try:
                    self._saved[entry.label] = plain(state)
                except (TypeError, RecursionError) as exc:
                    entry.failed("state_dict", exc, self._reporter)
        return dict(self._saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the saved states until the run starts, when each hook takes its own."""
        labels = [entry.label for entry in self.active]
        self._saved = {label: saved for label, saved in state.items() if label in labels}

    async def _one(self, entry: ActiveHook, event: str, function: Any, given: Mapping[str, Any]) -> tuple[bool, Any]:
        """Whether a call came back, and with what; timed as an event of the run."""
        if not entry.enabled:
            return False, None
        if event in _FREQUENT:
            return await entry.call(event, function, given, self._reporter)
        with self._reporter.span("hooks", event, hook=entry.label):
            return await entry.call(event, function, given, self._reporter)


def _numbers(given: Any) -> dict[str, float]:
    """What a `metrics` hook returned, checked. Raises TypeError or ValueError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"returned a {type(given).__name__}, not a mapping of names to numbers")
    found = {}
    for name, value in given.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name) or name == "errors":
            raise ValueError(f"{name!r} cannot name a metric: letters, digits and . + - _, and not errors")
        if not (isinstance(value, numbers.Real) or (hasattr(value, "item") and getattr(value, "shape", None) == ())):
            raise TypeError(f"{name!r} is a {type(value).__name__}, not a number")
        found[name] = float(value)
    return found


def build_hooks(configs: Sequence[HookConfig]) -> RunHooks:
    """The hooks of a run, checked against the specs and not started. Raises PluginError, ConfigError before anything is."""
    from posttrain.plugins.build import build

    active: list[ActiveHook] = []
    for position, config in enumerate(configs):
        where = f"hooks[{position}]"
        hook = build("hooks", config.name, config.options, where=where)
        label, owner = label_and_owner(config.name, hook)
        number, plain = 2, label
        while label in [entry.label for entry in active]:
            label, number = f"{plain}#{number}", number + 1
        check_hook(hook, f"hook {label!r} ({owner})", where)
        active.append(ActiveHook(hook, config, label=label, owner=owner, where=where))
    return RunHooks(active)
