"""Questions that are answered with programs: the tool `python(code)` runs what the model writes, in a sandbox.

    environments=[{name: python_tool}]                                      # puzzles made from a seed (`posttrain_envs.puzzles`)
    environments=[{name: python_tool, options: {data: questions.jsonl}}]    # rows of your own: question, answer

Every call is a program of its own: nothing is left of the one before. The model sees what it prints, and the value of its last
expression; of one that fails, the end of what it wrote to stderr, too. `tool_timeout_s` bounds the program alone, not the wait
for a sandbox. A program that fails is the model's; a sandbox that fails is nobody's: the episode is unscorable.

The answer is the last `\\boxed{…}` or `<answer>…</answer>` of the last turn; the reward is 1 for the right one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.data.environment import EpisodeState, Prompt, RowDataset, Rows, Split, user_prompt
from posttrain.data.source import DataOptions, open_rows
from posttrain.data.tool_environment import ToolEnvironment, ToolError, tool_metrics
from posttrain.errors import ConfigError, DataError
from posttrain.sandbox.options import Sandboxes, SandboxOptions
from posttrain.sandbox.provider import MIB, Limits, Ran
from posttrain.types import Reward
from posttrain_envs.idle import refuse_idle
from posttrain_envs.math_answer import find
from posttrain_envs.puzzles import KINDS, answer, asked, draw
from posttrain_envs.short_answer import equal
from posttrain_envs.tags import visible

PROMPT = "{question}\n\nUse Python where it helps, then put the final answer in \\boxed{}."
_TRIES = 2000  # draws in a row that give no new puzzle, after which there are no more
_ERROR_LINES = 8  # of stderr that the model sees
_SHOW = """\
import ast
with open("program.py", encoding="utf-8") as file:
    tree = ast.parse(file.read(), "program.py")
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
scope = {"__name__": "__main__"}
exec(compile(tree, "program.py", "exec"), scope)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "program.py", "eval"), scope)
    if value is not None:
        print(repr(value))
"""
_OURS = re.compile(r'  File "[^"\n]*show\.py", .*\n(?:    .*\n)*')
_ENDED = {
    "timeout": "it was ended after {seconds:g} s", "output": "it was ended because it wrote too much",
    "memory": "it was ended because it used too much memory", "disk": "it was ended because it wrote too large files",
    "processes": "it was ended because it started too many processes",
}  # fmt: skip


class PythonTool(ToolEnvironment):
    """Questions that a short program answers, with Python in a sandbox as the tool."""

    api: ClassVar[int] = 1
    provides = ("binary_rewards",)

    @dataclass(frozen=True, kw_only=True)
    class Options(ToolEnvironment.Options, SandboxOptions, DataOptions):
        """Where the questions come from (`data`, or else a seed), how they are asked, and where programs run."""

        kinds: tuple[str, ...] = tuple(KINDS)  # of made puzzles
        size: int = 2000  # made puzzles of the train split; test_size (default 128) are made beside them
        seed: int = 0  # which puzzles are made
        memory_mb: int = 512  # of a program
        system: str | None = None  # system message
        prompt: str = PROMPT  # user message; {question} is filled in
        max_turns: int = 6  # turns of the model

        def __post_init__(self) -> None:
            for part in (ToolEnvironment.Options, SandboxOptions, DataOptions):
                part.__post_init__(self)
            refuse_idle(self, made=("kinds", "size", "seed"), what="puzzles")
            unknown = [kind for kind in self.kinds if kind not in KINDS]
            if unknown or not self.kinds:
                raise ConfigError(f"kinds={self.kinds!r}: choose from {', '.join(KINDS)}")
            if "{question}" not in self.prompt:
                raise ConfigError(f"prompt={self.prompt!r} does not hold the question", fix="write {question} where it belongs")
            if self.size < 1 or self.memory_mb < 16 or self.max_turns < 1:
                raise ConfigError("size and max_turns must be at least 1, memory_mb at least 16")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.max_turns = self.options.max_turns
        self._sandboxes = Sandboxes(self.options)

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:  # type: ignore[override]
        return (self.python,)

    async def start(self) -> None:
        await self._sandboxes.start()

    async def close(self) -> None:
        await self._sandboxes.close()

    def deadline(self, name: str) -> float | None:
        return None

    async def python(self, code: str) -> str:
        """Run a Python program, and see what it prints and the value of its last expression.

        Every call starts afresh: nothing of an earlier program is there. No network.

        Args:
            code: the whole program
        """
        o = self.options
        limits = Limits(memory=o.memory_mb * MIB)
        files: dict[str, str | bytes] = {"program.py": code.encode("utf-8", "replace"), "show.py": _SHOW}
        ran = await self._sandboxes.use(
            lambda sandbox: sandbox.run([sandbox.python, "show.py"], files=files, limits=limits, timeout=o.tool_timeout_s)
        )
        if not ran.ok:
            raise ToolError(_failed(ran, o.tool_timeout_s), "timeout" if ran.outcome == "timeout" else "exception")
        return ran.stdout.rstrip("\n") or "(it printed nothing)"

    def dataset(self, split: Split) -> RowDataset:
        """Rows `{"id", "question", "answer"}`."""
        if self.options.data is not None:
            return open_rows(self.options, split, required=("question", "answer"), same=("question",))
        return _make(self.options, split)

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        text = self.options.prompt.replace("{question}", str(task["question"]))
        return self.with_tools(user_prompt(text, system=self.options.system))

    def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `correct`; `answered`; the metrics of the tools. A program that failed is a `tool/errors/exception`."""
        closed = not self.options.thinking or "</think>" in state.completion
        given, gold = find(visible(state.completion), "auto") if closed else None, str(state.task["answer"])
        correct = float(given is not None and equal(given, gold))
        parts = {"correct": correct, "answered": float(given is not None), **tool_metrics(state)}
        return Reward(correct, parts, {"extracted": given, "answer": gold})


def _failed(ran: Ran, seconds: float) -> str:
    """What a model sees of a program that did not end well."""
    errors = _OURS.sub("", ran.stderr).splitlines()[-_ERROR_LINES:]
    why = _ENDED.get(ran.outcome, f"exit code {ran.exit_code}").format(seconds=seconds)
    return "\n".join([why, *filter(None, [ran.stdout.rstrip("\n")]), *errors])


def _make(options: Any, split: Split) -> Rows:
    """Different puzzles, the test split first; answers are computed when a row is read. Raises DataError for too few."""
    share = 128 if options.test_size is None else options.test_size
    test = round(share * options.size) if isinstance(share, float) else share
    rng, found, misses = random.Random(options.seed), dict[Any, None](), 0
    while len(found) < test + options.size and misses < _TRIES:
        puzzle = draw(rng, options.kinds)
        misses = misses + 1 if puzzle in found else 0
        found[puzzle] = None
    puzzles = list(found)
    chosen = puzzles[:test] if split == "test" else puzzles[test:]
    if len(puzzles) < test or not chosen:
        raise DataError(f"python_tool has only {len(puzzles)} different puzzles of {', '.join(options.kinds)}",
                        cause=f"{test} are to be the test split", fix="lower test_size", code="python-tool-too-few")  # fmt: skip

    def row(index: int) -> dict[str, Any]:
        kind, numbers = puzzle = chosen[index]
        return {"id": "-".join(map(str, (kind, *numbers))), "question": asked(puzzle), "answer": str(answer(puzzle))}

    return Rows(len(chosen), row)
