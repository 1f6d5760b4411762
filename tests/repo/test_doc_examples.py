"""The Python of the how-to pages runs as printed."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Install = Callable[[str, str], None]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts text into a module of a user's own package `my_package`, importable here and in child processes."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))

    def write(name: str, text: str) -> None:
        (tmp_path / "my_package" / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()

    yield write
    for name in [n for n in sys.modules if n.split(".")[0] == "my_package"]:
        del sys.modules[name]


def test_custom_reward_scores_a_text(install: Install) -> None:
    environment, use = blocks("docs/howto/custom-reward.md")
    install("envs", environment)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(use, {})
    assert "Reward(total=1.0, parts={'correct': 1.0, 'format': 1.0}" in out.getvalue()


def test_custom_data_is_a_dataset(install: Install, tmp_path: Path) -> None:
    (page,) = blocks("docs/howto/custom-data.md")
    install("data", page)
    rows = [{"id": str(i), "prompt": "p", "answer": i} for i in range(5)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    questions = importlib.import_module("my_package.data").questions
    assert questions(str(tmp_path / "questions.jsonl"), limit=3) == rows[:3]


def test_custom_datapacker_is_found_by_its_path(install: Install) -> None:
    from posttrain.data.packer import load_packer

    page, *_ = blocks("docs/howto/custom-datapacker.md")
    install("packers", page)
    assert type(load_packer("my_package.packers:Terse")).__name__ == "Terse"


def test_contributing_shows_an_algorithm_that_works(install: Install) -> None:
    from posttrain.objective.objective import build_objective

    (page,) = blocks("CONTRIBUTING.md")
    install("scaled", page)
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


def commands() -> list[str]:
    """The `posttrain train` lines of all pages that start a new run."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    shell = [b for p in pages for b in re.findall(r"^```bash\n(.*?)^```", p.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)]
    lines = "".join(shell).replace("\\\n", " ").splitlines()
    plain = {re.sub(r" +", " ", line.partition("  #")[0].strip()) for line in lines if line.startswith("posttrain train")}
    return sorted(line for line in plain if "--resume" not in line)


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_the_docs_are_accepted(
    command: str, install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from posttrain.cli.main import main

    install("envs", blocks("docs/howto/custom-reward.md")[0])
    install("packers", blocks("docs/howto/custom-datapacker.md")[0])
    install("data", blocks("docs/howto/custom-data.md")[0])
    rl = {"steps": 1, "objective": {"name": "grpo"}}
    least = {"rl": rl, "model": {"name_or_path": "m"}, "environments": [{"name": "arithmetic"}]}
    (tmp_path / "my.yaml").write_text(json.dumps(least))
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command)[1:], "--cfg", "job"]) == 0, capsys.readouterr().err
