"""The page of models lists exactly what the tests run, and every code that a refusal can have."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from posttrain.testing.tiny_model import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/models.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"page_{path.replace('/', '_')}", ROOT / "tests" / f"{path}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def parameters(test: Any) -> dict[str, list[Any]]:
    """What a test is parametrised with."""
    return {mark.args[0]: list(mark.args[1]) for mark in test.pytestmark if mark.name == "parametrize"}


@pytest.fixture(scope="module")
def tested() -> dict[str, Any]:
    """By column, what the tests' own parametrisations say."""
    policy, engine = module("policy/test_families"), module("rollout/test_hf_families")
    loop, vllm = module("loop/test_families"), module("integration/test_families")
    decoding, training = parameters(engine.test_the_engine_says_what_the_policy_says), parameters(loop.test_a_family_trains)
    both = {(True, False, True), (False, True, False)}  # tied head, BOS, chat template: each both ways
    return {
        "policy": set(policy.CASES),
        "shared": {name for name, options in policy.LAYOUTS.items() if options.get("shared_prefix")},
        "hf": set(decoding["family"]) & set(training["family"]) if set(decoding["tied"]) == {True, False} else set(),
        "vllm": {*vllm.ON_VLLM, *vllm.ELSEWHERE.values()},
        "template": set(training["family"]) if {loop.VARIANTS[v] for v in training["variant"]} == both else set(),
    }


def test_the_table_is_what_the_tests_run(tested: dict[str, Any]) -> None:
    head, *found = rows("What the tests run")
    assert head[0] == "Family" and [row[0] for row in found] == list(FAMILIES)
    for family, like, tied, untied, hf, vllm, shared, template in found:
        assert like == FAMILIES[family].like
        on_vllm = [{True: "tied", False: "untied"}[head] for name, head in tested["vllm"] if name == family]
        assert {
            "tied": tied, "untied": untied, "hf": hf, "vllm": vllm, "shared": shared, "template": template,
        } == {
            "tied": yes((family, True) in tested["policy"]),
            "untied": yes((family, False) in tested["policy"]),
            "hf": yes(family in tested["hf"]),
            "vllm": ", ".join(sorted(on_vllm)),
            "shared": yes(bool(tested["shared"])),
            "template": yes(family in tested["template"]),
        }, family  # fmt: skip


def yes(is_so: bool) -> str:
    return "yes" if is_so else ""


def test_every_code_of_a_refusal_is_on_the_page() -> None:
    sources = [ROOT / "core/posttrain" / path for path in ("data/hub.py", "policy/load.py", "rollout/module.py")]
    words = r"(?:model|weights)-[a-z]+|architecture|no-eos"
    raised = {code for path in sources for code in re.findall(rf'"({words})"', path.read_text(encoding="utf-8"))}
    listed = {row[0] for row in rows("What is refused")[1:]}
    assert raised <= listed and listed - raised <= {"packer"}, raised ^ listed
