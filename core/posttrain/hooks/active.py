"""One hook in a run: its calls, and what happens when one of them fails.

    on_error=warn      it is said, counted and logged; the hook goes on being called
    on_error=disable   the same, and it is not called again in this run
    on_error=fail      the same, and the run ends after this batch step, with a checkpoint of it

A call that has not come back by its deadline has failed, and its hook is not called again: its thread is still busy.
"""

from __future__ import annotations

import inspect
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.errors import PluginError
from posttrain.hooks.thread import HookThread

if TYPE_CHECKING:
    from posttrain.config.schema import HookConfig
    from posttrain.hooks.hook import Hook

FAILURES = "howto/trackers.md#when-a-hook-fails"

log = logging.getLogger("posttrain.hooks")


class Reporter(Protocol):
    """To whom failures and times are told: a `tracking.tracker.Tracker`."""

    def note(self, text: str) -> None: ...

    def span(self, role: str, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]: ...


class ActiveHook:
    """A hook with its policy. label: its name in metrics and messages. owner: the distribution and version, or the file.

    enabled   whether it is still called       errors    calls that failed
    seconds   that its calls took              error     what ends the run, when `on_error` is `fail`
    """

    def __init__(self, hook: Hook, config: HookConfig, *, label: str, owner: str, where: str) -> None:
        self.hook, self.config, self.label, self.owner, self.where = hook, config, label, owner, where
        self.enabled, self.errors, self.seconds = True, 0, 0.0
        self.error: PluginError | None = None
        self._thread = HookThread(f"hook {label}")
        self._said: set[str] = set()

    async def call(
        self, event: str, function: Callable[..., Any], arguments: Mapping[str, Any], reporter: Reporter
    ) -> tuple[bool, Any]:
        """Whether the call came back, and with what. Nothing that the hook raises gets out of it."""
        began = time.perf_counter()
        copies = {name: dict(value) if type(value) is dict else value for name, value in arguments.items()}
        try:
            value, failure = await self._thread.run(function, copies, self.config.timeout_s)
        except TimeoutError:
            value, failure = None, _Overdue(f"did not come back in {self.config.timeout_s:g} s (hooks[i].timeout_s)")
            self.enabled = False
        finally:
            self.seconds += time.perf_counter() - began
        if failure is not None:
            self.failed(event, failure, reporter)
        return failure is None, value

    def failed(self, event: str, failure: BaseException, reporter: Reporter) -> None:
        """Count, log and say a failure; `error` is set when the policy is `fail`."""
        self.errors += 1
        log.error("%s failed in %s", self._name(), event, exc_info=failure)
        kind = "" if isinstance(failure, _Overdue) else f"{type(failure).__name__}: "
        message, at = f"{self._name()} failed in {event}: {kind}{failure}", self._location(failure)
        if self.config.on_error == "disable":
            self.enabled = False
        if self.config.on_error == "fail":
            self.error = self.error or self._error(message, at, failure)
        elif event not in self._said or not self.enabled:
            self._said.add(event)
            follows = "it goes on being called, and later failures here are only counted"
            reporter.note(f"{message} ({at}); {follows if self.enabled else 'it is off for the rest of this run'}")

    def _error(self, message: str, at: str, failure: BaseException) -> PluginError:
        fix = "correct it, or set on_error of this hook to warn; then go on with --resume; the traceback is in logs/hooks.log"
        error = PluginError(message, cause=at, where=self.where, fix=fix, code="hook-failed", anchor=FAILURES)
        error.__cause__ = failure
        return error

    def stop(self) -> None:
        self._thread.stop()

    def _name(self) -> str:
        return f"hook {self.label!r} ({self.owner})"

    def _location(self, failure: BaseException) -> str:
        """`file.py:12`: the deepest line of the hook's own file, else the deepest of all."""
        frames = traceback.extract_tb(failure.__traceback__)
        try:
            own = inspect.getsourcefile(type(self.hook))
        except TypeError:  # a class of an interactive session
            own = None
        mine = [frame for frame in frames if frame.filename == own] or frames
        return f"{mine[-1].filename}:{mine[-1].lineno}" if mine else "see logs/hooks.log"


class _Overdue(Exception):
    """A call that did not come back by its deadline."""
