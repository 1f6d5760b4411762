"""The Python of the pages runs as printed, block after block, in a folder with the files that the pages show.

A block whose first line is `# path/to/file.py` is that file, and is imported. Trainings are one step of a tiny model; a run that
a block reads is a run of one step. Where neither is the case, the output that stands behind a block is what it prints.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.load import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
Workshop = Callable[[Path], Path]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def one_step(small: Callable[[Any], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`posttrain.train` trains one step of the tiny model, whatever config it is called with."""
    from posttrain.loop import run

    original = run.train

    def train(loaded: Any, *, resume: Any = None, **options: Any) -> Any:
        if resume is None:
            (tmp_path / "config.yaml").write_text(loaded.yaml(), encoding="utf-8")
            loaded = load_config(small(loaded.config), config_file=tmp_path / "config.yaml")
        return original(loaded, resume=resume, **options)

    monkeypatch.setattr(run, "train", train)


def shown_output(page: Path) -> list[str | None]:
    """For each Python block, what the `text` block right behind it shows."""
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n.*?^```\n(?:\n```text\n(.*?)^```)?", text, flags=re.DOTALL | re.MULTILINE)
    return [output or None for output in found]


def run_page(page: Path, ended_run: Path) -> str:
    """Everything that the blocks of a page print. What a page shows as output of a block is what it prints."""
    names: dict[str, Any] = {"__name__": "page"}
    printed = []
    for number, (block, shown) in enumerate(zip(blocks(page), shown_output(page), strict=True), 1):
        if file := re.match(r"# ([\w/-]+)\.py\n", block):
            importlib.import_module(file[1].replace("/", "."))
            continue
        text = re.sub(r"([\"'])(?:outputs/[\w-]+|RUN)\1", repr(str(ended_run)), block)
        text = re.sub(r"\bstep=\d+", "step=1", text)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, f"{page.name}, block {number}", "exec"), names)
        printed.append(out.getvalue())
        if shown is not None and text == block and "train(" not in block:
            assert out.getvalue().strip() == shown.strip(), f"{page.name}, block {number}"
    return "".join(printed)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_python_of_the_page_runs(page: Path, workshop: Workshop, ended_run: Path, one_step: None) -> None:
    workshop(page)
    run_page(page, ended_run)


def test_custom_datapacker_is_found_by_its_path(workshop: Workshop) -> None:
    from posttrain.data.packer import load_packer

    workshop(ROOT / "docs/howto/custom-datapacker.md")
    assert type(load_packer("my_package.packers:Terse")).__name__ == "Terse"


def test_contributing_shows_an_algorithm_that_works(workshop: Workshop) -> None:
    from posttrain.objective.objective import build_objective

    workshop(ROOT / "CONTRIBUTING.md")
    objective = build_objective("my_package.scaled:Scaled", group_size=2, scale=3.0)
    assert objective.advantages([1.0, 0.0], ["a", "a"]).tolist() == [1.5, -1.5]


def test_make_names_what_the_readme_and_ci_say() -> None:
    def dry(target: str) -> str:
        return subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "posttrain train experiment=arithmetic_grpo" in dry("demo")
    test = dry("test")
    assert "ruff check" in test and "mypy" in test and "pytest tests/integration" in test
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"make (\w+)", readme):
        dry(target)

