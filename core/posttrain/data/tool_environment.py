"""An environment whose model may call tools: typed Python functions, plain or async.

    def calculate(expression: str) -> str:
        '''Compute an arithmetic expression.'''
        …

    class Sums(ToolEnvironment):
        '''Long sums, with a calculator.'''

        tools = (calculate,)

        def dataset(self, split): …
        def format_prompt(self, task): return self.with_tools([{"role": "user", "content": task["question"]}])
        def compute_reward(self, state):
            return Reward(float(task["answer"] in state.completion), parts=tool_metrics(state))

A turn with calls is answered by one role-`tool` message per call, in their order; a turn without one is the final answer.
Whatever goes wrong with a call is told to the model and counted, and never ends the run: `KINDS`. Calls of one turn run at the
same time, but for tools that take the episode (`state: EpisodeState`): they run one by one, after the others. Plain functions run
in processes that are killed at `tool_timeout_s` (in a thread, which is left alone then, where nobody hosts the episode).
A tool may be a method, given as `self.name` from a property `tools`. What belongs to an episode is in `state.custom` alone.
An exception is told in one line; a `ToolError` in its own words. A SandboxError of an async tool is nobody's fault: it is raised,
and the episode is unscorable.
"""

from __future__ import annotations

import asyncio
import difflib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from posttrain.data.environment import ChatOrText, Environment, EpisodeState, Prompt, ToolChat, as_messages, is_messages
from posttrain.data.tool_calls import CallFormat, ToolCall, of_message, parse, with_described_tools
from posttrain.data.tool_types import BadArgument
from posttrain.data.tools import Tool, to_text, toolset
from posttrain.errors import ConfigError, SandboxError
from posttrain.types import Message

KINDS = ("malformed", "unknown_tool", "missing_argument", "wrong_argument", "exception", "timeout", "too_many")
"""What may be wrong with a call, as in the metric `tool/errors/<kind>`."""
NO_CALL = "No tool was called."
"""What a model hears where `is_final_answer` has more to come."""
WAIT_S = 600.0
"""For how long the calls of a turn may wait for others before theirs: for a process, a sandbox."""
COUNTS = "tools"
"""The key of `state.custom` under which calls are counted."""


class ToolError(Exception):
    """What a tool raises to tell the model what is wrong, all of the text; kind: under which of `KINDS` it is counted."""

    def __init__(self, text: str, kind: str = "exception") -> None:
        super().__init__(text)
        self.kind = kind if kind in KINDS else "exception"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one call: the text for the model, and its kind of error, "" for none. cut: the text was longer."""

    text: str
    error: str = ""
    cut: bool = False


class ToolEnvironment(Environment):
    """Base class of environments with tools. `Options` of a subclass inherit `ToolEnvironment.Options`."""

    offloads: ClassVar[bool] = True
    tools: Sequence[Callable[..., Any]] = ()
    """The functions that a model may call; a property where they are methods. Read when the object is built."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """How tools are told and run."""

        tool_format: Literal["auto", "json", "python"] = "auto"  # the template's own, else json; or always one of the two as text
        tool_timeout_s: float = 10.0  # of one call
        max_concurrent_tools: int = 64  # calls that run at the same time, of all episodes
        max_calls: int = 16  # of one turn; the others are not run
        max_tool_output: int = 4000  # characters of one result that the model sees
        thinking: bool = False  # the template opens <think> for the model: there is no call before </think>

        def __post_init__(self) -> None:
            if not self.tool_timeout_s > 0:
                raise ConfigError(f"tool_timeout_s={self.tool_timeout_s} must be above 0")
            if min(self.max_concurrent_tools, self.max_calls, self.max_tool_output) < 1:
                raise ConfigError("max_concurrent_tools, max_calls and max_tool_output must be at least 1")

    def __init__(self, options: Any = None) -> None:
        """Raises ConfigError for a function that cannot be a tool."""
        super().__init__(options)
        if not isinstance(self.options, ToolEnvironment.Options):
            raise ConfigError(
                f"{type(self).__name__}.Options lack those of tools", cause="they do not inherit ToolEnvironment.Options",
                fix="write `class Options(ToolEnvironment.Options):`, with @dataclass(frozen=True, kw_only=True)",
            )  # fmt: skip
        self._toolset  # noqa: B018  what cannot be a tool is refused now
        self.answer_timeout_s = WAIT_S + self.options.max_calls * self.options.tool_timeout_s  # a late tool is told the model

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_toolset", "_gates")}

    def with_tools(self, prompt: Prompt) -> Prompt:
        """A prompt that offers the tools. Token ids stay as they are: whoever writes ids tells the tools there."""
        if not self.schemas or not (isinstance(prompt, str) or is_messages(prompt)):
            return prompt
        messages, told = as_messages(prompt), self.options.tool_format
        if told == "auto":
            return ToolChat(messages, self.schemas)
        return ChatOrText(with_described_tools(messages, self.schemas, told))

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        """The row's `prompt`, with the tools. A subclass that asks in another way returns `self.with_tools(…)`."""
        return self.with_tools(super().format_prompt(task))

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The OpenAI-style schemas of the tools."""
        return [tool.schema for tool in self._toolset.values()]

    def parse_tool_calls(self, state: EpisodeState) -> list[ToolCall]:
        """The calls in the model's last turn."""
        read: CallFormat = self.options.tool_format
        first = 1 + _counts(state)["calls"]
        if state.messages and state.messages[-1].get("tool_calls"):
            return of_message(state.messages[-1], first)
        return parse(state.completion, read, tools=self.schemas, first=first, thinking=self.options.thinking)

    def is_final_answer(self, state: EpisodeState, calls: Sequence[ToolCall]) -> bool:
        """Whether the last turn ends the episode. Default: it calls nothing."""
        return not calls

    def tool_message(self, state: EpisodeState, call: ToolCall, outcome: Outcome) -> Message:
        """How the model hears of a call's outcome."""
        text = f"Error: {outcome.text}" if outcome.error else outcome.text
        return Message(role="tool", name=call.name or "tool", content=text, tool_call_id=call.id)

    async def env_response(self, state: EpisodeState) -> list[Message] | None:
        """Run the calls of the last turn; None, which ends the episode, for a final answer."""
        calls = self.parse_tool_calls(state)
        if self.is_final_answer(state, calls):
            return None
        if not calls:
            return [Message(role="user", content=NO_CALL)]
        most = self.options.max_calls
        outcomes = await self._run_all(state, calls[:most])
        outcomes += [Outcome(f"only the first {most} calls of a turn are run", "too_many")] * (len(calls) - most)
        counts = _counts(state)
        counts.update(["calls"] * len(calls))
        counts.update(outcome.error for outcome in outcomes if outcome.error)
        counts.update("cut" for outcome in outcomes if outcome.cut)
        state.custom[COUNTS] = dict(counts)
        return [self.tool_message(state, call, outcome) for call, outcome in zip(calls, outcomes, strict=True)]

    def deadline(self, name: str) -> float | None:
        """Seconds that a call of a tool may take; None for one that keeps its own time. Default: `tool_timeout_s`."""
        return self.options.tool_timeout_s  # type: ignore[no-any-return]

    def run_tool(self, state: EpisodeState, name: str, arguments: Mapping[str, Any]) -> Outcome:
        """Run a plain function, in whatever process or thread this is. Never raises."""
        tool = self._toolset[name]
        try:
            return self._told(tool.function(**tool.bind(arguments), **({"state": state} if tool.takes_state else {})))
        except (Exception, SystemExit) as exc:
            return self._failed(name, exc)

    @cached_property
    def _toolset(self) -> dict[str, Tool]:
        return toolset(self.tools)

    @cached_property
    def _gates(self) -> weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]:
        return weakref.WeakKeyDictionary()

    async def _run_all(self, state: EpisodeState, calls: Sequence[ToolCall]) -> list[Outcome]:
        """The outcomes, in the order of the calls."""
        # What a process changes in state.custom comes back whole, so nothing else may be on its way at that time.
        last = [n for n, call in enumerate(calls) if (tool := self._toolset.get(call.name)) is not None and tool.takes_state]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {n: group.create_task(self._run(state, call)) for n, call in enumerate(calls) if n not in last}
        except BaseExceptionGroup as several:
            failed = next((exc for exc in several.exceptions if isinstance(exc, SandboxError)), several)
            raise failed from None
        found = {n: task.result() for n, task in tasks.items()} | {n: await self._run(state, calls[n]) for n in last}
        return [found[n] for n in range(len(calls))]

    async def _run(self, state: EpisodeState, call: ToolCall) -> Outcome:
        """The outcome of one call. Raises nothing but SandboxError, and the cancellation of the episode."""
        if call.problem:
            return Outcome(f"this tool call cannot be read: {call.problem}", "malformed")
        tool = self._toolset.get(call.name)
        if tool is None:
            return Outcome(_unknown(call.name, self._toolset), "unknown_tool")
        loop, seconds = asyncio.get_running_loop(), self.deadline(call.name)
        async with self._gates.setdefault(loop, asyncio.Semaphore(self.options.max_concurrent_tools)):
            if tool.waits:
                return await self._run_async(state, tool, call.arguments, seconds)
            try:
                if state.offload is not None:
                    return await state.offload("run_tool", call.name, call.arguments, timeout=seconds)  # type: ignore[no-any-return]
                from posttrain.weights.deadline import in_thread  # not loaded where everything is hosted

                async with asyncio.timeout(seconds):
                    return await in_thread(self.run_tool, state, call.name, call.arguments)
            except TimeoutError:
                return self._late(call.name)
            except Exception:  # what is raised names processes: the model shall read the same in every run
                return Outcome(f"{call.name} ended its process", "exception")

    async def _run_async(self, state: EpisodeState, tool: Tool, arguments: Mapping[str, Any], seconds: float | None) -> Outcome:
        deadline = asyncio.timeout(seconds)
        try:
            given = tool.bind(arguments)
            async with deadline:
                return self._told(await tool.function(**given, **({"state": state} if tool.takes_state else {})))
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._failed(tool.name, exc)  # something inside was cancelled, not the episode
        except SandboxError:
            raise
        except (Exception, SystemExit) as exc:
            return self._late(tool.name) if deadline.expired() else self._failed(tool.name, exc)

    def _failed(self, name: str, exc: BaseException) -> Outcome:
        """What the model hears of an exception."""
        if isinstance(exc, BadArgument):
            return Outcome(f"{name}: {exc}", exc.kind)
        if isinstance(exc, ToolError):
            return replace(self._told(str(exc)), error=exc.kind)
        return Outcome(_one_line(exc), "exception")

    def _late(self, name: str) -> Outcome:
        return Outcome(f"{name} gave nothing within {self.deadline(name):g} s", "timeout")

    def _told(self, result: Any) -> Outcome:
        """A result as the model sees it."""
        text, most = to_text(result), self.options.max_tool_output
        if len(text) <= most:
            return Outcome(text)
        return Outcome(f"{text[:most]}\n[cut: {len(text):,} characters, the first {most:,} are shown]", cut=True)


def tool_metrics(state: EpisodeState) -> dict[str, float]:
    """How many calls an episode made and what was wrong with them, as parts of a reward: the same names for every episode."""
    counts = _counts(state)
    return {
        "tool/calls": float(counts["calls"]),
        "tool/errors": float(sum(counts[kind] for kind in KINDS)),
        **{f"tool/errors/{kind}": float(counts[kind]) for kind in KINDS},
        "tool/output_cut": float(counts["cut"]),
    }


def _counts(state: EpisodeState) -> Counter[str]:
    return Counter(state.custom.get(COUNTS, {}))


def _unknown(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=2) if len(name) <= 64 else []
    return f"there is no tool {name[:64]!r}; " + (
        f"did you mean {' or '.join(near)}?" if near else f"the tools are {', '.join(names) or 'none'}"
    )


def _one_line(exc: BaseException) -> str:
    """What was raised, without a traceback."""
    try:
        text = " ".join(str(exc).split())
    except Exception:
        text = ""
    return f"{type(exc).__name__}: {text[:300]}" if text else type(exc).__name__
