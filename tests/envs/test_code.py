"""The code environment: what is the program, what is the same answer, and that no program talks itself out of its tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import plugins
from posttrain.data.environment import Environment, episode
from posttrain.errors import ConfigError, DataError, SandboxError
from posttrain.sandbox import LocalProvider, Provider, Sandbox, SandboxPool
from posttrain.testing import EnvContract
from posttrain_envs.code import Code
from posttrain_envs.code_block import program
from posttrain_envs.code_compare import same_text, same_value
from posttrain_envs.code_tests import CallTest, StdinTest, read_tests, some

ADD = [{"stdin": f"{a} {b}\n", "stdout": f"{a + b}\n"} for a, b in ((1, 2), (30, 4), (-5, 5))]
ADD_FUNCTION = [{"name": "add", "args": [a, b], "expected": a + b} for a, b in ((1, 2), (30, 4), (-5, 5))]
RIGHT = "a, b = map(int, input().split())\nprint(a + b)"
RIGHT_FUNCTION = "def add(a, b):\n    return a + b"
LOCAL = {"sandbox_options": {"allow_unisolated": True}}
"""The tests are about the environment; where bubblewrap is not installed they go without."""


def fenced(source: str, language: str = "python") -> str:
    return f"Here it is:\n\n```{language}\n{source}\n```\n"


def made(**options: Any) -> Code:
    return Code(Code.Options(**{"data": [{"prompt": "?", "tests": ADD}], **LOCAL, **options}))


def reward(source: str, tests: Any = ADD, *, raw: bool = False, **options: Any) -> Any:
    """The reward of a program, with the pool of a run."""
    env = made(**options)

    async def whole() -> Any:
        await env.start()
        try:
            return await env.compute_reward(episode(env, task(tests), source if raw else fenced(source)))
        finally:
            await env.close()

    return asyncio.run(whole())


def task(tests: Any) -> dict[str, Any]:
    return {"id": "0", "prompt": "Add.", "tests": tests}


class TestCodeContract(EnvContract):
    rows = 2
    deadline_s = 120.0

    @pytest.fixture
    def env(self, tmp_path: Path) -> Environment:
        rows = [
            {"prompt": f"Add {i} to a number.", "tests": [{"name": "f", "args": [i], "expected": 2 * i}]} for i in range(1, 5)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return made(data=str(tmp_path / "rows.jsonl"), test_size=2, sandboxes=2)

    def gold(self, row: Mapping[str, Any]) -> str:
        return fenced(f"def f(x):\n    return x + {row['tests'][0]['args'][0]}")

    def mutations(self, gold: str) -> Mapping[str, str]:
        return {"nothing": "", "another": gold.replace("return x", "return 1 + x"), "no end": gold[:-6]}


# --- the program ----------------------------------------------------------------------------------------------------------------

BLOCKS = (
    (fenced("print(1)"), "print(1)\n"),
    (fenced("print(1)") + fenced("print(2)"), "print(2)\n"),
    (fenced("print(1)") + "It prints\n```\n1\n```\n", "print(1)\n"),
    ("```\nprint(1)\n```", "print(1)\n"),
    ("```py\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
    ("~~~python\nprint(1)\n~~~", "print(1)\n"),
    ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
    (f"<think>{fenced('print(1)')}</think>{fenced('print(2)')}", "print(2)\n"),
    (f"<think>{fenced('print(1)')}</think>I do not know.", None),
    (f"<think>{fenced('print(1)')}", None),
    ("```python\nprint(1)", None),
    (fenced("print(1)") + "```python\nprint(2)", "print(1)\n"),
    (fenced("int main() {}", "cpp"), None),
    ("print(1)", None),
    ("", None),
    ("```python\n```", ""),
)


@pytest.mark.parametrize(("completion", "expected"), BLOCKS)
def test_the_program_is_the_last_python_block_after_the_thinking(completion: str, expected: str | None) -> None:
    assert program(completion) == expected


# --- comparison -----------------------------------------------------------------------------------------------------------------

TEXTS = (
    ("3\n", "3\n", "exact"), ("", "", "exact"), ("3\n", "3", "lines"), ("1\n2\n", " 1 \n2\n\n\n", "lines"),
    ("1 2", "1\n2", "tokens"), ("a  b", "a b", "tokens"), ("1.5", "1.500", "numeric"),
    ("0.3333", "0.33333", "numeric"), ("1", "1.0", "numeric"),
    ("1e3", "1000", "numeric"), ("7", "+7", "numeric"), ("7", "007", "numeric"), ("0", "-0", "numeric"),
    ("x 1.0", "x 1", "numeric"),
    ("1000000", "1000000.0004", "numeric"), ("3", "4", None), ("3", "3.01", None), ("1000000", "1000001", None),
    ("123456789012345678901", "123456789012345678902", None), ("1e12", "1000000000000.5", "numeric"),
    ("1e12", "1000000100000", None),
    ("yes", "Yes", None), ("1 2", "1", None), ("1", "1 2", None), ("", "1", None), ("1", "", None), ("nan", "nan", "exact"),
    ("inf", "1", None), ("1_000", "1000", None), ("1", "１", None), ("1", "0x1", None), ("9" * 5000, "9" * 5000 + " ", "lines"),
    ("9" * 5000, "9" * 4999 + "8", None), ("1." + "0" * 500, "1", None),
)  # fmt: skip


@pytest.mark.parametrize(("expected", "given", "stage"), TEXTS)
def test_texts_are_compared_in_four_stages(expected: str, given: str, stage: str | None) -> None:
    assert same_text(expected, given) == stage


VALUES = (
    (3, 3, True), (3, 3.0, True), (3, 4, False), (0.5, 0.5004, True), (0.5, 0.6, False), (True, 1, False), (True, True, True),
    (None, None, True), (None, 0, False), ("3", 3, False), ("a", "a", True), ("a", "b", False), ([1, 2], [1, 2], True),
    ([1, 2], [2, 1], False), ([1], [1, 2], False), ([[0.1]], [[0.1000001]], True), ({"a": [1]}, {"a": [1.0]}, True),
    ({"a": 1}, {"b": 1}, False), ({"a": 1}, [1], False), (10**400, 10**400, True), (10**400, 1.0, False),
    (float("inf"), float("inf"), True), (float("inf"), 1.0, False), (1e15, 1e15 + 1, True), (10**15, 10**15 + 1, False),
)  # fmt: skip


@pytest.mark.parametrize(("expected", "given", "same"), VALUES)
def test_values_are_compared_by_their_parts(expected: Any, given: Any, same: bool) -> None:
    assert same_value(expected, given) is same


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(ANYTHING, st.text(alphabet="0123456789.-+e \nab", max_size=40), st.text(alphabet="0123456789.-+e \nab", max_size=40))
def test_comparison_is_reflexive_and_never_fails(value: Any, one: str, two: str) -> None:
    assert same_value(value, json.loads(json.dumps(value)))
    assert same_text(one, one) == "exact"
    assert (same_text(one, two) is None) == (same_text(two, one) is None) or "e" in one + two


def test_what_is_nested_for_ever_is_different() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert same_value(deep, deep) is False


# --- tests of a row ---------------------------------------------------------------------------------------------------------


def test_tests_are_read_in_every_form() -> None:
    assert read_tests(json.dumps(ADD[:1])) == [StdinTest("1 2\n", "3\n")]
    assert read_tests([{"input": "1", "output": "2"}]) == [StdinTest("1", "2")]
    assert read_tests(ADD_FUNCTION[:1]) == [CallTest("add", [1, 2], 3)]
    assert read_tests({"inputs": ["1", ["2", "3"]], "outputs": ["a", ["b", "c"]]}) == [
        StdinTest("1", "a"),
        StdinTest("2\n3", "b\nc"),
    ]
    table = {"fn_name": "f", "inputs": [[1], "2\n[3]"], "outputs": [2, '{"a": 1}']}
    assert read_tests(table) == [CallTest("f", [1], 2), CallTest("f", [2, [3]], {"a": 1})]


@pytest.mark.parametrize(
    "tests",
    ["", "[]", "nonsense", "7", [], [{}], [{"stdin": "1"}], [{"name": "f", "args": 1, "expected": 1}],
     {"inputs": ["1"], "outputs": []}, {"fn_name": "f", "inputs": ["__import__('os').getpid()"], "outputs": ["1"]}, None],
)  # fmt: skip
def test_other_tests_are_refused_with_the_form(tests: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_tests(tests)
    assert "stdin" in caught.value.fix
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "?", "tests": ADD}) + "\n" + json.dumps({"prompt": "!", "tests": tests})
    )
    with pytest.raises(DataError, match=r"tests|rows.jsonl") as caught:
        made(data=str(tmp_path / "rows.jsonl"), test_size=0).dataset("train")


def test_some_tests_are_drawn_once_for_a_row() -> None:
    tests = read_tests([{"stdin": str(i), "stdout": ""} for i in range(100)])
    drawn = some(tests, 15, "0/a")
    assert len(drawn) == 15 and drawn == some(tests, 15, "0/a") != some(tests, 15, "0/b")
    assert sorted(drawn, key=tests.index) == drawn and some(tests, None, "") == tests == some(tests, 100, "")


# --- rewards ----------------------------------------------------------------------------------------------------------------

PROGRAMS = (
    (RIGHT, ADD, 3), ("print(3)", ADD, 1), ("print(3", ADD, 0), ("import sys; sys.exit(1)", ADD, 0),
    (RIGHT + "\nraise ValueError", ADD, 0),
    ("while True: pass", ADD, 0), ("", ADD, 0),
    (RIGHT_FUNCTION, ADD_FUNCTION, 3), ("class Solution:\n    def add(self, a, b): return a + b", ADD_FUNCTION, 3),
    ("def add(a, b): return 3", ADD_FUNCTION, 1), ("def sub(a, b): return 3", ADD_FUNCTION, 0),
    ("def add(a, b): raise SystemExit(0)", ADD_FUNCTION, 0), ("def add(a, b): return object()", ADD_FUNCTION, 0),
    ("import os\ndef add(a, b): os._exit(0)", ADD_FUNCTION, 0), ("raise ValueError", ADD_FUNCTION, 0),
)  # fmt: skip


@pytest.mark.parametrize(("source", "tests", "passed"), PROGRAMS)
def test_every_test_counts(source: str, tests: Any, passed: int) -> None:
    found = reward(source, tests, test_timeout_s=5.0 if "while" not in source else 0.5)
    assert found.parts["passed"] == passed and found.parts["pass_rate"] == passed / 3
    assert found.total == (passed == 3) and len(found.info["tests"]) == 3
    assert found.parts["compile"] == (source != "print(3")


def test_the_share_of_tests_may_be_the_reward() -> None:
    assert reward("print(3)", fraction=True).total == pytest.approx(1 / 3)
    assert made(fraction=True).lacks == ("binary_rewards",)


def test_no_program_is_wrong_and_needs_no_sandbox() -> None:
    env = made(sandbox="no_such_module:Provider")
    found = asyncio.run(env.compute_reward(episode(env, task(ADD), "I do not know.")))
    assert found.total == 0.0 and found.parts == {"passed": 0, "pass_rate": 0, "compile": 0}


def test_values_of_python_are_those_of_json() -> None:
    source = "def f(x): return {'pairs': [(1, 2)], 'set': {3, 1}, 5: x}"
    tests = [{"name": "f", "args": [None], "kwargs": {}, "expected": {"pairs": [[1, 2]], "set": [1, 3], "5": None}}]
    assert reward(source, tests).total == 1.0
    assert reward("def f(*, x): return x", [{"name": "f", "kwargs": {"x": 2}, "expected": 2}]).total == 1.0


def test_files_of_one_test_are_not_there_in_the_next() -> None:
    source = "import os\nprint(sorted(os.listdir()))\nopen('left', 'w')"
    assert reward(source, [{"stdin": "", "stdout": "['program.py']"}] * 3).total == 1.0


def test_the_time_of_all_tests_is_bounded_and_what_is_not_run_has_failed() -> None:
    tests = [{"stdin": "", "stdout": "ok"}] * 4
    found = reward("import time; time.sleep(100); print('ok')", tests, test_timeout_s=0.4, total_timeout_s=0.9)
    assert [test["how"] for test in found.info["tests"]][-1] == "late" and found.total == 0 and len(found.info["tests"]) == 4


# --- the faults of telescope's i3_code, which ours does not have ------------------------------------------------------------


def test_b13_junk_on_standard_output_is_only_junk() -> None:
    """There, what was no JSON on stdout was taken for a fault of the sandbox, and the test left the denominator."""
    junk = "print('{\"value\": 3} junk', flush=True)\n"
    noisy = junk + "def add(a, b):\n    print('junk')\n    return a + b"
    assert reward(noisy, ADD_FUNCTION).total == 1.0
    cheat = "def add(a, b):\n    if a == 1: return 3\n    print('}{ not json')\n    import os; os._exit(1)"
    found = reward(cheat, ADD_FUNCTION)
    assert found.total == 0.0 and found.parts["pass_rate"] == pytest.approx(1 / 3), "1 of 3, not 1 of 1"


def test_b13_a_program_that_breaks_its_results_has_failed() -> None:
    for trick in ("open('result.json', 'w').write('{{{')", "import os; os.mkfifo('result.json')",
                  "import os; os.mkdir('result.json')",
                  "import os; os.symlink('/dev/zero', 'result.json')", "open('result.json', 'w').write('[' * 100000)",
                  "import os; os.kill(os.getppid(), 9)"):  # fmt: skip
        found = reward(f"{trick}\nimport os\nos._exit(0)\ndef add(a, b): return a + b", ADD_FUNCTION[:2])
        assert (found.total, found.parts["passed"], len(found.info["tests"])) == (0.0, 0.0, 2), trick


def test_a_program_cannot_know_what_is_expected() -> None:
    """The expected values never enter the sandbox, so that a result written by hand must be right all the same."""
    secret = 987654321
    source = f"""
import glob, os, sys
def add(a, b):
    texts = [open(p, errors='replace').read() for p in glob.glob('**', recursive=True) if os.path.isfile(p)]
    texts += [str(vars(sys.modules['__main__'])), str(sys.argv), str(dict(os.environ))]
    return any(str({secret} + 1 - 1) in text.replace('{secret} + 1 - 1', '') for text in texts)
"""
    tests = [{"name": "add", "args": [1, 2], "expected": secret}]
    found = reward(source, tests)
    assert found.total == 0.0 and found.info["tests"][0]["how"] == "wrong"


def test_b13_test_inputs_are_data() -> None:
    """There, they were evaluated in the process of the orchestrator."""
    text = "__import__('os').system('echo evaluated')"
    assert reward("print(input())", [{"stdin": text, "stdout": text}]).total == 1.0
    assert reward("def f(x): return x", [{"name": "f", "args": [text], "expected": text}]).total == 1.0


class Broken(Provider):
    """Sandboxes that fail: as many as it is told, then the local ones."""

    def __init__(self, fail: int = 10**9, how: str = "run") -> None:
        self.fail, self.how, self.local, self.open = fail, how, LocalProvider(allow_unisolated=True), 0

    async def create(self) -> Sandbox:
        if self.how == "create" and self.fail > 0:
            self.fail -= 1
            raise SandboxError("quota exceeded")
        made = await self.local.create()
        run, close = made.run, made.close

        async def failing(command: Any, **options: Any) -> Any:
            if self.how == "run" and self.fail > 0:
                self.fail -= 1
                raise SandboxError("connection lost")
            return await run(command, **options)

        async def closing() -> None:
            self.open -= 1
            await close()

        self.open += 1
        made.run, made.close = failing, closing  # type: ignore[method-assign]
        return made

    async def close(self) -> None:
        await self.local.close()


@pytest.mark.parametrize("how", ["run", "create"])
def test_b12_a_fault_of_the_sandbox_is_unscorable(how: str) -> None:
    """There, it was a reward of 0, and trained on."""
    env = made()
    env.sandboxes._new = lambda most: SandboxPool(Broken(how=how), size=0, most=1)  # type: ignore[method-assign]
    found = asyncio.run(env.compute_reward(episode(env, task(ADD), fenced(RIGHT))))
    assert found.total is None and found.info["cause"] == "sandbox"
    assert ("connection lost" if how == "run" else "quota exceeded") in found.info["error"]


def test_b12_a_fault_that_passes_is_tried_again_from_the_beginning() -> None:
    env, provider = made(), Broken(fail=2)
    env.sandboxes._new = lambda most: SandboxPool(provider, size=0, most=1)  # type: ignore[method-assign]
    found = asyncio.run(env.compute_reward(episode(env, task(ADD), fenced(RIGHT))))
    assert found.total == 1.0 and len(found.info["tests"]) == 3
    assert provider.open == 0, "the broken ones were closed"


def test_a9_a_cancelled_reward_gives_its_sandbox_back() -> None:
    """There, a cancelled reward kept its sandbox for ever, and each later one waited for ten minutes."""

    async def whole() -> None:
        env = made(sandboxes=1)
        await env.start()
        state = episode(env, task(ADD), fenced("import time; time.sleep(1000)"))
        for wait in (0.0, 0.05, 0.3, 0.6):
            late = asyncio.create_task(env.compute_reward(state))
            await asyncio.sleep(wait)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
        found = await asyncio.wait_for(env.compute_reward(episode(env, task(ADD), fenced(RIGHT))), 120)
        assert found.total == 1.0
        await env.close()

    asyncio.run(whole())


# --- options ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [({"prompt": "Go."}, "does not hold"), ({"max_tests": 0}, "max_tests"), ({"test_timeout_s": 0}, "test_timeout_s"),
     ({"sandboxes": 0}, "sandboxes")],
)  # fmt: skip
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_a_provider_that_is_none_is_refused_at_the_start() -> None:
    for options, message in (
        ({"sandbox": "builtins:dict", "sandbox_options": {}}, "not a posttrain.sandbox.Provider"),
        ({"sandbox_options": {"nonsense": 1}}, "nonsense"), ({"sandbox": "nosuch:Provider"}, "no module"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            asyncio.run(made(**options).start())


def test_prompts_ask_for_a_block_and_keep_messages() -> None:
    assert "```python" in made().format_prompt(task(ADD)).text  # type: ignore[union-attr]
    own = [{"role": "user", "content": "Add."}]
    assert made().format_prompt({"prompt": own, "tests": ADD}) == own
    assert made(system="Be brief.").format_prompt({"prompt": own, "tests": ADD})[0]["content"] == "Be brief."  # type: ignore[index, call-overload, typeddict-item]


def test_it_is_a_plugin() -> None:
    env = plugins.load("envs", "code", data=[{"prompt": "?", "tests": ADD}])
    assert isinstance(env, Code) and "pass_rate" in env.metrics
