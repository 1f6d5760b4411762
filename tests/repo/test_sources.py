"""What every file of the repository keeps to: sizes, docstrings, and nothing about the machine that it was written on."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(p for part in ("core", "plugins", "experiments") for p in (ROOT / part).rglob("*.py"))
MAX_FILE, MAX_FUNCTION = 400, 60


def tracked() -> list[Path]:
    """The files under version control; without git (a source archive) all that are not build products."""
    try:
        out = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True).stdout.decode()
        return [ROOT / name for name in out.split("\0") if name and (ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        parts = ("core", "plugins", "experiments", "docs", "tests", "requirements")
        return [p for part in parts for p in (ROOT / part).rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def test_there_are_sources() -> None:
    assert len(SOURCES) > 50


def test_files_stay_short() -> None:
    long = {str(p.relative_to(ROOT)): n for p in SOURCES if (n := len(p.read_text(encoding="utf-8").splitlines())) > MAX_FILE}
    assert not long, long


def test_functions_stay_short() -> None:
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert not long, "\n".join(long)


def test_every_module_states_its_contract() -> None:
    bare = [
        str(p.relative_to(ROOT))
        for p in SOURCES
        if p.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert not bare, bare


FORBIDDEN = {
    "a path of one machine": re.compile(
        r"(?<![\w./$}])/(?!tmp/(ray|logs|imaginaire-output)\b|home/(USER|other\.user|libucp)\b|opt/mpi\b)(work|tmp|root|home|opt)/\w"
    ),  # but for what Ray calls its own, and those that tests make up
    "a package registry's host": re.compile(r"\b(pypi|pythonhosted|npmjs|debian)\.(org|com|net)\b"),
    "an unfinished mark": re.compile(r"\b(TODO|FIXME|XXX)\b"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_the_repository_speaks_of_the_project_alone(what: str) -> None:
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".png", ".parquet", ".safetensors", ".gguf"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if FORBIDDEN[what].search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, f"{what}:\n" + "\n".join(found)


def forgotten(text: str) -> list[str]:
    """Lines outside fences that are one upper-case word: the place of something that was to be filled in."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^[A-Z][A-Z_]{2,}$", prose, flags=re.MULTILINE)


def test_no_page_has_a_placeholder_left() -> None:
    assert forgotten("a\n\nTABLE\n\n```text\nGAPOUT\n```\n") == ["TABLE"]
    pages = [path for path in tracked() if path.suffix == ".md"]
    assert not {str(p.relative_to(ROOT)): found for p in pages if (found := forgotten(p.read_text(encoding="utf-8")))}
