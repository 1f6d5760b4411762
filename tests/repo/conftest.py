"""What a reader of the docs has at hand: the files that the pages show, a small model, and a run that has ended."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Workshop = Callable[[Path], Path]


def pages() -> list[Path]:
    return sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def named(block: str) -> str | None:
    """The file that a block is, when its first line says so: `# my_package/envs.py`."""
    first = re.match(r"# ([\w./-]+\.(?:py|ya?ml))\n", block)
    return first[1] if first else None


ROWS = {
    "my.jsonl": [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 41)],
    "questions.jsonl": [{"id": str(n), "problem": f"{n}+4", "prompt": f"{n}+4", "answer": str(n + 4)} for n in range(4, 13)],
}
"""Data that pages name without showing it."""

LEAST = """\
model: {name_or_path: tiny}
rl: {steps: 1, objective: {name: grpo}}
environments: [{name: arithmetic, options: {operations: ['+'], largest: 19}}]
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the tiny model after a short warm-up: its answers differ, so there is something to learn."""
    from posttrain_experiments.tiny import build

    out = tmp_path_factory.mktemp("model") / "tiny"
    build(out, environment={"operations": ["+"], "largest": 19}, steps=30, slip_steps=10, say=lambda _: None)
    return out


@pytest.fixture(scope="session")
def ended_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a real run of one step, with its checkpoint."""
    from posttrain.config.load import load_config
    from posttrain.loop.run import train

    ready = [f"model.name_or_path={tiny_model}", "model.factory=null", "~model.factory_kwargs", "tracking.display=none"]
    values = ["experiment=arithmetic_grpo", *ready, "rl.steps=1", "rl.batch_per_replica=16", "validation.prompts=4"]
    return Path(train(load_config(values), run_dir=tmp_path_factory.mktemp("runs")).run)


@pytest.fixture
def small(tiny_model: Path) -> Callable[[Any], list[str]]:
    """Overrides that make any config one step of the tiny model."""

    def values(config: Any) -> list[str]:
        batch = min(config.rl.batch_per_replica, 4 * config.rl.group_size)
        return [
            "rl.steps=1",
            f"model.name_or_path={tiny_model}",
            "model.factory=null",
            "~model.factory_kwargs",
            "model.chat_template=null",
            f"rl.batch_per_replica={batch}",
            f"rl.mini_batch_per_replica={'null' if config.rl.mini_batch_per_replica is None else batch}",
            "rl.micro_batch_per_replica=null",
            "rl.param_dtype=float32",
            "rollout.dtype=float32",
            f"rollout.max_tokens={min(config.rollout.max_tokens, 8)}",
            f"rollout.max_model_len={min(config.rollout.max_model_len, 512)}",
            "validation.max_tokens=null",
            f"validation.prompts={min(config.validation.prompts, 4)}",
            "rollout.reward_workers=1",
            "grid.threads=1",
        ]

    return values


@pytest.fixture
def workshop(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    """Makes the current folder one where a page's commands can be typed. What it leaves in sys.modules is taken out again."""
    here = tmp_path / "here"
    before = dict(sys.modules)

    def prepare(page: Path) -> Path:
        here.mkdir()
        for folder in ("docs", "tests"):
            (here / folder).symlink_to(ROOT / folder)
        (here / "tiny").symlink_to(tiny_model)
        write(here / "my.yaml", LEAST)
        for name, rows in ROWS.items():
            write(here / name, "".join(json.dumps(row) + "\n" for row in rows))
        if (example := ROOT / "docs/examples/first_hour").exists():
            shutil.copytree(example, here, dirs_exist_ok=True)
        for shown in [page, *(p for p in pages() if p != page)]:
            for block in [b for language in ("python", "yaml") for b in blocks(shown, language)]:
                name = named(block)
                if name and not name.startswith(("docs/", "tests/")) and (shown == page or not (here / name).exists()):
                    write(here / name, block)
        monkeypatch.chdir(here)
        monkeypatch.syspath_prepend(str(here))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]))
        importlib.invalidate_caches()
        return here

    yield prepare
    for name, module in list(sys.modules.items()):
        place = [vars(module).get("__file__"), vars(module).get("__path__")]  # a folder without __init__ has no file
        if name not in before and str(here) in str(place):
            del sys.modules[name]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
