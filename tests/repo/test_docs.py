"""The docs are the code's: generated parts are current, links and anchors resolve, every documented message has its place."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from posttrain import errors
from posttrain.cli.main import COMMANDS
from posttrain.config.flat_keys import renamed
from posttrain.config.load import load_config
from posttrain.errors import CATALOGUE, ConfigError
from posttrain.tracking.metric_names import definitions, find

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted(p for part in ("core", "plugins", "experiments") for p in (ROOT / part).rglob("*.py"))


@pytest.fixture(scope="module")
def generate() -> Iterator[ModuleType]:
    """`docs/_generate.py`, which imports its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("_generate")


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#{1,4} (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower().strip()).replace(" ", "-") for title in titles}


def resolves(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    return file.exists() and (not anchor or anchor in slugs(file))


def test_generated_parts_are_current(generate: ModuleType) -> None:
    states = {path: generate.current(path) for path in generate.files()}
    stale = [str(path.relative_to(ROOT)) for path, (text, wanted) in states.items() if text != wanted]
    assert not stale, f"run `python docs/_generate.py`: {stale}"


def test_every_documented_message_is_in_a_table(generate: ModuleType) -> None:
    blocks = [m for page in generate.pages() for m in generate.BLOCK.finditer(page.read_text("utf-8"))]
    shown = {code for block in blocks if block[2] == "errors" for code in block[3].split()}
    assert shown == set(CATALOGUE)


def test_a_message_that_is_gone_fails_the_docs(generate: ModuleType) -> None:
    with pytest.raises(KeyError):
        generate.regenerate("<!-- generated: errors E999 -->\n<!-- end -->")


def test_the_error_page_has_every_message_with_its_exit_code_and_a_link(generate: ModuleType) -> None:
    page = (DOCS / "reference/errors.md").read_text("utf-8")
    sections = dict(re.findall(r"^### (E\d+|misfit)\n(.*?)(?=^#|\Z)", page, flags=re.DOTALL | re.MULTILINE))
    assert set(sections) == set(CATALOGUE)
    for code, entry in CATALOGUE.items():
        retryable = "worth resuming" if entry.retryable or entry.cls.retryable else "not retryable"
        assert f"**Exit code** {entry.cls.exit_code}, {retryable}" in sections[code], code
        assert f"](../{entry.anchor})" in sections[code], code


def test_every_command_has_its_help_on_the_page(generate: ModuleType) -> None:
    page = (DOCS / "reference/cli.md").read_text("utf-8")
    shown = {name for block in generate.BLOCK.finditer(page) if block[2] == "cli" for name in block[3].split()}
    assert shown == set(COMMANDS)
    assert all(f"\n## `posttrain {name}`\n" in page for name in COMMANDS)


def documented_keys() -> set[str]:
    """The first column of every table of the configuration page that gives full paths."""
    page = (DOCS / "reference/config.md").read_text("utf-8").split("## Options of the objective")[0]
    return set(re.findall(r"^\| `([\w.\[\]]+)` \|", page, flags=re.MULTILINE))


SEED_KEYS = json.loads((ROOT / "tests/data/seed_keys.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("key", SEED_KEYS["keys"])
def test_every_key_that_the_seeds_name_is_in_the_reference(key: str) -> None:
    assert key in documented_keys() or (key == "experiment" and "`experiment=NAME`" in (DOCS / "reference/config.md").read_text())


@pytest.mark.parametrize("key", [*SEED_KEYS["flat"], *SEED_KEYS["engine"], *(flag.strip("-") for flag in SEED_KEYS["flags"])])
def test_every_flat_name_of_the_seeds_is_answered(key: str) -> None:
    from posttrain.cli.train import parser

    assert renamed(key) or f"--{key} " in parser().format_help()


@pytest.mark.parametrize("variable", SEED_KEYS["environment"])
def test_every_environment_variable_of_the_seeds_is_in_the_reference(variable: str) -> None:
    assert f"`{variable}`" in (DOCS / "reference/config.md").read_text("utf-8").split("## Environment variables")[1]


def test_every_environment_variable_of_the_code_is_in_the_reference() -> None:
    text = (DOCS / "reference/config.md").read_text("utf-8")
    named = {name for path in SOURCES for _, value in strings(path) for name in re.findall(r"\bPOSTTRAIN_[A-Z_]+\b", value)}
    internal = {name for name in named if name.startswith("POSTTRAIN_ENGINE_")}
    assert {"POSTTRAIN_OUTPUT_ROOT", "POSTTRAIN_PLUGINS"} <= named
    assert not [name for name in named - internal if f"`{name}`" not in text]


def test_the_bounds_that_rules_hold_to_are_true(generate: ModuleType) -> None:
    """A value that the reference rules out is refused under its key."""
    good = ["experiment=arithmetic_grpo"]
    for key, (_, refused) in generate._config_tables.RULED.items():
        if refused:
            entry = {"environments[i].weight": "arithmetic, weight", "hooks[i].timeout_s": "tensorboard, timeout_s"}.get(key)
            override = f"{key.partition('[')[0]}=[{{name: {entry}: {refused}}}]" if entry else f"{key}={refused}"
            with pytest.raises(ConfigError) as caught:
                load_config([*good, override])
            assert key.replace("[i]", "[0]").rpartition(".")[0] in str(caught.value), key


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
        if not target.endswith("README.md")
        if not resolves(DOCS / "index.md", target) and not resolves(ROOT / "README.md", target)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("page", sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")]), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))
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
