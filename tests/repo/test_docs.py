"""The docs are the code's: generated parts are current, links and anchors resolve, every documented message has its place."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from posttrain import errors
from posttrain.errors import CATALOGUE
from posttrain.tracking.metric_names import definitions, find

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted(p for part in ("core", "plugins", "experiments") for p in (ROOT / part).rglob("*.py"))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "_generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#{1,3} (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-") for title in titles}


def resolves(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    return file.exists() and (not anchor or anchor in slugs(file))


def test_generated_parts_are_current(generate: ModuleType) -> None:
    texts = {page: page.read_text("utf-8") for page in generate.pages()}
    stale = [str(page.relative_to(ROOT)) for page, text in texts.items() if generate.regenerate(text) != text]
    assert not stale, f"run `python docs/_generate.py`: {stale}"


def test_every_documented_message_is_in_a_table(generate: ModuleType) -> None:
    blocks = [m for page in generate.pages() for m in generate.BLOCK.finditer(page.read_text("utf-8"))]
    shown = {code for block in blocks if block[2] == "errors" for code in block[3].split()}
    assert shown == set(CATALOGUE)


def test_a_message_that_is_gone_fails_the_docs(generate: ModuleType) -> None:
    with pytest.raises(KeyError):
        generate.regenerate("<!-- generated: errors E999 -->\n<!-- end -->")


def test_every_exit_code_is_in_the_table(generate: ModuleType) -> None:
    codes = {str(value) for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes == set(re.findall(r"^\| (\d+) \|", generate.exit_codes(), flags=re.MULTILINE))


@pytest.mark.parametrize("code", CATALOGUE)
def test_the_anchor_of_a_documented_message_exists(code: str) -> None:
    assert resolves(DOCS / "index.md", CATALOGUE[code].anchor), CATALOGUE[code].anchor


def strings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_anchors_and_pages_named_in_the_code_exist() -> None:
    broken = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for path in SOURCES
        for line, text in strings(path)
        for target in re.findall(r"(?<![\w/])(?:docs/)?((?:[\w-]+/)*[\w-]+\.md(?:#[\w-]+)?)", text)
        if not resolves(DOCS / "index.md", target) and not resolves(ROOT / "README.md", target)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")]), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    broken = [link for link in links if not re.match(r"\w+:", link) and not resolves(page, link)]
    assert not broken, broken


PREFIXES = ["reward", "rollout", "train", "length", "tokens", "policy", "time", "validation", "weights", "sync", "optimizer"]
NAME = re.compile(rf"(?:{'|'.join(PREFIXES)})/[\w/{{}}-]+")
EMITTERS = [p for p in SOURCES if p.parent.name != "tracking"]


def metric_names(path: Path) -> Iterator[tuple[int, str]]:
    """Metric names as written in a file, the variable parts of f-strings as `{}`, and those of the policy's phases."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".phase") and isinstance(node.args[0], ast.Constant):
            text = f"time/{node.args[0].value}_s"
        if NAME.fullmatch(text) and not text.endswith("/"):
            yield node.lineno, text


def documented(name: str) -> bool:
    pattern = re.compile(re.escape(name).replace(r"\{\}", "[^/]+"))
    return find(name) is not None or any(pattern.fullmatch(m.name) for m in definitions())


def test_every_metric_in_the_code_is_documented() -> None:
    names = [(path, line, name) for path in EMITTERS for line, name in metric_names(path)]
    assert len(names) > 40
    found = [f"{path.relative_to(ROOT)}:{line}: {name}" for path, line, name in names if not documented(name)]
    assert not found, "\n".join(found)


def test_the_site_builds_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 15
    fetching = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="((?:https?:)?//[^"]+)"')
    assert not {address for page in pages for address in fetching.findall(page.read_text("utf-8"))}
