"""Programs, judged by their tests in a sandbox.

    environments=[{name: code, options: {data: problems.jsonl}}]          # rows: prompt, tests (posttrain_envs.code_tests)

The program is the last Python block after the model's thinking. Each test runs it in a fresh work folder, under limits; what it
gives is compared here (`posttrain_envs.code_compare`): the sandbox knows the inputs, never the expected outputs. The reward is 1
when it passes every test, or with `fraction` the share that it passes. A test that fails for any reason of the program (wrong,
an exception, too slow, too much output, nothing at all) has failed and stays in the count. When the sandbox fails, in three of
them, the reward is unscorable.

A reward may take `total_timeout_s` and ten minutes of waiting for a sandbox (`reward_timeout_s`): a late one is unscorable, and
no program may get there by sleeping.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from posttrain.data.environment import Environment, EpisodeState, Prompt, RowDataset, Split, is_messages, user_prompt
from posttrain.data.reward_range import Range
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import ConfigError, DataError, SandboxError
from posttrain.sandbox.options import Sandboxes, SandboxOptions
from posttrain.sandbox.provider import MIB, Limits, Ran, Sandbox
from posttrain.types import Message, Reward
from posttrain_envs.code_block import program
from posttrain_envs.code_compare import same_text, same_value
from posttrain_envs.code_tests import CallTest, StdinTest, Test, read_tests, some

T = TypeVar("T")

PROMPT = "{prompt}\n\nWrite the whole program in Python and put it into one block, between ```python and ```."
_CHECKED = 1000
_LARGE = 1 << 16
_CALL = Path(__file__).with_name("code_call.py")
_COMPILE_S = 30.0
_COMPILE = "compile(open('program.py', encoding='utf-8').read(), 'program.py', 'exec')"


LEASE_S = 600.0
"""For how long a reward may wait for its sandbox."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one test.

    how   passed: by which comparison (`posttrain_envs.code_compare`, or `equal` for a function). Failed: wrong, error, the limit
          that it broke (`posttrain.sandbox.provider.Outcome`), compile, or late: the time for all tests was over
    """

    passed: bool
    how: str
    seconds: float = 0.0


class Code(Environment):
    """Programs in Python, judged by tests in a sandbox: what they print, or what a function gives."""

    api: ClassVar[int] = 1
    provides = ("binary_rewards",)
    metrics: Mapping[str, Range] = {"pass_rate": Range(0, 1), "compile": Range(0, 1)}

    @dataclass(frozen=True, kw_only=True)
    class Options(SandboxOptions, DataOptions):
        """Where the problems come from, how they are asked, what tests count, and where and how programs run."""

        system: str | None = None  # system message
        prompt: str | None = PROMPT  # user message; {prompt} is filled in; null: the row's prompt alone
        style: Literal["auto", "chat", "text"] = "auto"  # auto: chat messages where the model has a chat template, else text
        max_tests: int | None = 15  # at most so many tests of a row count, drawn once for each row; null: all
        tests_seed: int = 0  # which are drawn
        fraction: bool = False  # the reward is the share of tests that pass, instead of 1 for all of them
        test_timeout_s: float = 10.0  # of one test
        total_timeout_s: float = 180.0  # of all tests; those that have no time left have failed
        memory_mb: int = 1024  # of a program, with all that it starts

        def __post_init__(self) -> None:
            DataOptions.__post_init__(self)
            SandboxOptions.__post_init__(self)
            if self.prompt is not None and "{prompt}" not in self.prompt:
                raise ConfigError(f"prompt={self.prompt!r} does not hold the problem", fix="write {prompt} where it belongs")
            for name in ("max_tests", "test_timeout_s", "total_timeout_s", "memory_mb"):
                value = getattr(self, name)
                if value is not None and value <= 0:
                    raise ConfigError(f"{name}={value} must be above 0")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.sandboxes = Sandboxes(self.options)
        self.reward_timeout_s = self.options.total_timeout_s + LEASE_S
        if self.options.fraction:
            self.lacks = ("binary_rewards",)

    async def start(self) -> None:
        await self.sandboxes.start()

    async def close(self) -> None:
        await self.sandboxes.close()

    def dataset(self, split: Split) -> RowDataset:
        """Rows with `prompt` and `tests`. Raises DataError, also for tests of the first rows that cannot be read."""
        rows = open_rows(self.options, split, required=("prompt", "tests"), same=("prompt",))
        for index in range(min(len(rows), _CHECKED if rows.window is None else 1)):
            try:
                read_tests(rows[index]["tests"])
            except DataError as exc:
                exc.where = exc.where or rows.where(index)
                raise
        return rows

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        asked, o = task["prompt"], self.options
        if is_messages(asked):
            own = [Message(**message) for message in asked]  # type: ignore[typeddict-item]
            return own if not o.system or own[0].get("role") == "system" else [Message(role="system", content=o.system), *own]
        text = str(asked) if o.prompt is None else o.prompt.replace("{prompt}", str(asked))
        return user_prompt(text, system=o.system, style=o.style)

    async def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `passed` tests, `pass_rate`, and `compile`, which is 0 without a program, or with one that is no Python."""
        task, o = state.task, self.options
        tests = await _aside(lambda: some(read_tests(task["tests"]), o.max_tests, f"{o.tests_seed}/{task.get('id')}"))
        source = await _aside(lambda: program(state.completion))
        if source is None:
            return self._judged([Result(False, "compile")] * len(tests), compiled=False)
        text = source
        try:
            return await self.sandboxes.use(lambda sandbox: self._judge(sandbox, text, tests))
        except SandboxError as exc:
            return Reward(None, {}, {"cause": "sandbox", "error": str(exc)})

    async def _judge(self, sandbox: Sandbox, source: str, tests: Sequence[Test]) -> Reward:
        """Every test, one after the other. The time is the programs' own: what a sandbox needs to start is not charged."""
        o = self.options
        left, results = o.total_timeout_s, list[Result]()
        for test in tests:
            if left <= 0 or (results and results[-1].how == "disk"):  # to clean up after it again may take longer than it ran
                results.append(Result(False, "disk" if left > 0 else "late"))
                continue
            if results:
                await sandbox.clear()
            timeout = min(o.test_timeout_s, left)
            if isinstance(test, StdinTest):
                results.append(await self._printed(sandbox, source, test, timeout))
            else:
                results.append(await self._called(sandbox, source, test, timeout))
            left -= results[-1].seconds
            if len(results) == 1 and results[0].how == "error" and not await self._compiles(sandbox, source):
                return self._judged([Result(False, "compile")] * len(tests), compiled=False)
        return self._judged(results, compiled=True)

    async def _compiles(self, sandbox: Sandbox, source: str) -> bool:
        """Whether it is Python. Asked where the first test ended in an error."""
        await sandbox.clear()
        ran = await self._run(sandbox, [sandbox.python, "-c", _COMPILE], {"program.py": source}, "", _COMPILE_S)
        return ran.ok

    async def _printed(self, sandbox: Sandbox, source: str, test: StdinTest, timeout: float) -> Result:
        ran = await self._run(sandbox, [sandbox.python, "program.py"], {"program.py": source}, test.stdin, timeout)
        if not ran.ok:
            return Result(False, "error" if ran.outcome == "exited" else ran.outcome, ran.seconds)
        stage = await _aside(lambda: same_text(test.stdout, ran.stdout), len(ran.stdout) + len(test.stdout))
        return Result(stage is not None, stage or "wrong", ran.seconds)

    async def _called(self, sandbox: Sandbox, source: str, test: CallTest, timeout: float) -> Result:
        """The function's value comes in a file of its own, so that anything may be printed."""
        files = {"program.py": source, "call.py": _CALL.read_text(encoding="utf-8")}
        call = json.dumps({"name": test.name, "args": test.args, "kwargs": test.kwargs})
        command = [sandbox.python, "call.py", "program.py", "result.json"]
        ran = await self._run(sandbox, command, files, call, timeout)
        if ran.outcome != "exited":
            return Result(False, ran.outcome, ran.seconds)
        try:
            text = await sandbox.read("result.json", at_most=4 * MIB)
            found = await _aside(lambda: json.loads(text), len(text))
            value = found["value"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):  # no result, or none that means anything
            return Result(False, "error", ran.seconds)
        same = await _aside(lambda: same_value(test.expected, value), len(text))
        return Result(same, "equal" if same else "wrong", ran.seconds)

    async def _run(self, sandbox: Sandbox, command: Sequence[str], files: Mapping[str, str], stdin: str, timeout: float) -> Ran:
        limits = Limits(memory=self.options.memory_mb * MIB)
        return await sandbox.run(command, stdin=stdin, files=files, limits=limits, timeout=timeout)

    def _judged(self, results: Sequence[Result], *, compiled: bool) -> Reward:
        passed = sum(result.passed for result in results)
        rate = passed / len(results)
        total = rate if self.options.fraction else float(passed == len(results))
        parts = {"passed": float(passed), "pass_rate": rate, "compile": float(compiled)}
        seconds = sum(result.seconds for result in results)
        return Reward(total, parts, {"tests": [asdict(result) for result in results], "seconds": seconds})


async def _aside(work: Callable[[], T], size: int = _LARGE) -> T:
    """`work()`, in a thread when there is much of it."""
    return await asyncio.to_thread(work) if size >= _LARGE else work()
