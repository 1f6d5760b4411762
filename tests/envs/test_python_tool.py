"""The environment with Python as its tool: its puzzles, what a model sees of its programs, and what happens to bad ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import plugins
from posttrain.data.environment import ToolChat, episode
from posttrain.data.tool_environment import tool_metrics
from posttrain.errors import ConfigError, DataError, SandboxError
from posttrain.sandbox.provider import Limits, Ran
from posttrain.testing import EnvContract
from posttrain_envs import puzzles
from posttrain_envs.python_tool import PythonTool

SMALL = {"size": 40, "test_size": 10}


class Script:
    """Sandboxes that answer as they are told, and remember what they ran."""

    python = "python3"

    def __init__(self, *answers: Ran | Exception) -> None:
        self.answers, self.ran = list(answers), list[tuple[Any, ...]]()

    async def use(self, work: Any) -> Any:
        return await work(self)

    async def run(self, command: list[str], *, files: Mapping[str, bytes], limits: Limits, timeout: float) -> Ran:
        self.ran.append((command, files, limits, timeout))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def made(script: Script | None = None, **options: Any) -> PythonTool:
    env = PythonTool(PythonTool.Options(**{**SMALL, **options}))
    if script is not None:
        env._sandboxes = script  # type: ignore[assignment]
    return env


def ask(env: PythonTool, *codes: Any) -> tuple[list[str], dict[str, float]]:
    """What the tool answers to programs, and what of the metrics is not 0."""
    text = "".join(f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>" for code in codes)
    state = episode(env, {"id": "1", "question": "?", "answer": "1"}, text)
    messages = asyncio.run(env.env_response(state)) or []
    return [message["content"] for message in messages], {name: n for name, n in tool_metrics(state).items() if n}


class TestPythonTool(EnvContract):
    plugin = "python_tool"
    options = SMALL

    def gold(self, row: Mapping[str, Any]) -> str:
        return f"\\boxed{{{row['answer']}}}"


# --- puzzles --------------------------------------------------------------------------------------------------------------------

BY_HAND = {
    ("digit_sum", (2, 10)): 7,  # 1024
    ("remainder", (3, 5, 100)): 43,  # 243
    ("primes", (1, 20)): 8,  # 2 3 5 7 11 13 17 19
    ("primes", (19, 23)): 2,
    ("primes", (24, 28)): 0,
    ("divisors", (12,)): 28,  # 1 2 3 4 6 12
    ("divisors", (9,)): 13,  # 1 3 9
    ("collatz", (6,)): 8,  # 3 10 5 16 8 4 2 1
    ("digit_count", (20, 1)): 12,  # 1 10 11 11 12 … 19
    ("digit_count", (20, 0)): 2,
}


@pytest.mark.parametrize(("puzzle", "answer"), BY_HAND.items())
def test_answers_by_hand(puzzle: puzzles.Puzzle, answer: int) -> None:
    assert puzzles.answer(puzzle) == answer
    assert all(str(n) in puzzles.asked(puzzle) for n in puzzle[1])


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 10**6))
def test_every_kind_has_answers(seed: int) -> None:
    puzzle = puzzles.draw(random.Random(seed), tuple(puzzles.KINDS))
    assert puzzles.answer(puzzle) >= 0 and puzzles.asked(puzzle).endswith("?")


def test_puzzles_are_different_and_do_not_depend_on_the_size() -> None:
    small, large = made(), made(size=80)
    assert list(small.dataset("test")) == list(large.dataset("test"))
    ids = [row["id"] for split in ("test", "train") for row in large.dataset(split)]  # type: ignore[arg-type]
    assert len(ids) == len(set(ids)) == 90


def test_rows_of_ones_own() -> None:
    env = PythonTool(PythonTool.Options(data=[{"question": f"{n}?", "answer": n} for n in range(9)], test_size=2))
    row = env.dataset("train")[0]
    prompt = env.format_prompt(row)
    assert isinstance(prompt, ToolChat) and prompt.tools[0]["function"]["parameters"]["required"] == ["code"]
    reward = env.compute_reward(episode(env, row, f"<answer>{row['answer']}.0</answer>"))
    assert reward.total == 1.0 and reward.parts["answered"] == 1.0 and reward.parts["tool/calls"] == 0.0


# --- what the model sees --------------------------------------------------------------------------------------------------------


def test_what_is_shown_of_a_program() -> None:
    ok = {"exit_code": 0, "stderr": "", "outcome": "exited", "seconds": 0.1}
    ours = '  File "/sandbox/show.py", line 6, in <module>\n    exec(compile(tree))\n    ^^^^^^^^^\n'
    trace = f'Traceback (most recent call last):\n{ours}  File "program.py", line 1\nZeroDivisionError: x\n'
    script = Script(
        Ran(stdout="42\n", **ok), Ran(stdout="", **ok),  # type: ignore[arg-type]
        Ran(1, "half\n", trace, "exited", 0.1), Ran(137, "", "", "timeout", 2.0), Ran(137, "", "", "memory", 0.1),
    )  # fmt: skip
    env = made(script, tool_timeout_s=2.0, memory_mb=100)
    told, counted = ask(env, "print(42)", "x = 1", "1/0", "while True: pass", "'\ud800'")
    assert told == [
        "42", "(it printed nothing)",
        'Error: exit code 1\nhalf\nTraceback (most recent call last):\n  File "program.py", line 1\nZeroDivisionError: x',
        "Error: it was ended after 2 s", "Error: it was ended because it used too much memory",
    ]  # fmt: skip
    assert counted == {"tool/calls": 5.0, "tool/errors": 3.0, "tool/errors/exception": 2.0, "tool/errors/timeout": 1.0}
    command, files, limits, timeout = script.ran[0]
    assert command == ["python3", "show.py"] and files["program.py"] == b"print(42)"
    assert limits.memory == 100 << 20 and timeout == 2.0


def test_a_sandbox_that_fails_ends_the_episode() -> None:
    with pytest.raises(SandboxError):
        ask(made(Script(SandboxError("gone"))), "print(1)")


def test_an_argument_that_is_no_text_runs_nothing() -> None:
    script = Script()
    assert ask(made(script), 7)[0] == ["Error: python: code must be text, it is 7"] and not script.ran


@pytest.fixture
def real() -> PythonTool:
    """On the sandboxes of this machine."""
    from posttrain.sandbox.cage import BUBBLEWRAP

    if BUBBLEWRAP.problem():
        pytest.skip(f"bubblewrap does not work here: {BUBBLEWRAP.problem()}")
    return made(tool_timeout_s=20.0)


def test_real_programs(real: PythonTool) -> None:
    async def whole() -> list[str]:
        await real.start()
        try:
            state = episode(real, {"id": "1", "question": "?", "answer": "1"}, "")
            codes = ["print('é')\nx = 6\nx * 7", "def f(:", "print(open('/etc/passwd').read())", "None", "1/0"]
            state.completion = "".join(
                f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>" for code in codes
            )
            return [message["content"] for message in await real.env_response(state) or []]
        finally:
            await real.close()

    shown, syntax, escape, nothing, failed = asyncio.run(whole())
    assert shown == "é\n42" and nothing == "(it printed nothing)"
    assert syntax.startswith("Error: exit code 1") and "SyntaxError" in syntax and "program.py" in syntax
    assert "Error" in escape and "root:" not in escape
    assert failed.startswith('Error: exit code 1\nTraceback (most recent call last):\n  File "program.py", line 1, in <module>')
    assert failed.endswith("ZeroDivisionError: division by zero") and "show.py" not in failed and "exec" not in failed


@pytest.mark.parametrize("options", [
    {"kinds": []}, {"kinds": ["riddles"]}, {"size": 0}, {"memory_mb": 1}, {"max_turns": 0}, {"prompt": "?"},
    {"tool_timeout_s": 0.0}, {"sandboxes": 0}, {"columns": {"a": "b"}},
    {"data": [{"question": "?", "answer": "1"}], "kinds": ["primes"]},
])  # fmt: skip
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plugins.load("envs", "python_tool", **options)


def test_too_few_puzzles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain_envs.python_tool.draw", lambda rng, kinds: ("primes", (1, rng.randint(1, 5))))
    with pytest.raises(DataError, match="only 5 different"):
        made().dataset("test")
