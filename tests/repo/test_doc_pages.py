"""Facts of hand-written pages that would otherwise rot: numbers, names, quoted messages."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.DOTALL | re.MULTILINE)


def printed(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, {})
    return out.getvalue()


def test_batching_prints_what_it_says() -> None:
    (code,), (shown,) = fenced("howto/batching.md", "python"), fenced("howto/batching.md", "text")
    assert printed(code) == shown


WORDS = """
run experiment role replica rank data-cell policy-cell cohort body engine publication bucket epoch lane prompt group
trajectory turn trained-token batch-step optimizer-step informative-group dp_world dp_replicate dp_shard validation
canary actorgroup devicegroup worker replay-cell bucket-plan objective datapacker environment transport catalog version
ledger unscorable ahead-pass
"""


def test_the_glossary_has_every_word_of_the_library() -> None:
    marked = re.findall(r"\*{1,2}(`?[\w -]+`?)\*{1,2}", text("glossary.md"))
    assert set(WORDS.split()) - {word.strip("`").lower().replace(" ", "-") for word in marked} == set()


def test_every_word_of_the_glossary_is_defined_once() -> None:
    heads = [w.lower() for line in text("glossary.md").splitlines() for w in re.findall(r"^\*\*([^*]+)\*\*", line)]
    assert len(heads) == len(set(heads))


def deviations(name: str) -> list[str]:
    """The list in the header of an algorithm, one line for each bullet."""
    source = (ROOT / "plugins" / "algorithms" / "posttrain_algorithms" / f"{name}.py").read_text(encoding="utf-8")
    listed = (ast.get_docstring(ast.parse(source)) or "").partition("Deviations from the paper:\n")[2].partition("\n\n")[0]
    return re.sub(r"\n +", " ", listed).splitlines()


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo", "sapo"])
def test_a_guide_lists_the_deviations_of_the_algorithm(name: str) -> None:
    expected = deviations(name)
    assert expected and text(f"guides/{name}.md").rstrip().splitlines()[-len(expected) :] == expected
