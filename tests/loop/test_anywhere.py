"""A run whose parts come from files named relative to one folder goes on from another, where none of them is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.tracking.rollouts import read_rollouts
from posttrain.tracking.run_dir import saved_config

MINE = '''
import json, shutil
from pathlib import Path
from posttrain import Environment, Hook
from posttrain_algorithms.grpo import GRPO
from posttrain_datapackers.decoder_only import DecoderOnlyPacker

def make(out, base):
    """Copies a model that lies in a folder."""
    shutil.copytree(base, out, dirs_exist_ok=True)

def rows(path, keep):
    """The rows of a file that a function keeps, which is named too."""
    name = keep.rpartition(":")[2]
    return [row for row in map(json.loads, Path(path).read_text().splitlines()) if globals()[name](row)]

def short(row):
    return len(row["ask"]) < 3

class Packer(DecoderOnlyPacker):
    """Another name."""

class Mine(GRPO):
    """Another name."""

class Ask(Environment):
    """A message for the template."""
    def dataset(self, split):
        return []
    def format_prompt(self, task):
        return [{"role": "user", "content": task["ask"]}]
    def compute_reward(self, state):
        return state.completion.count("a") / 4

class Counts(Hook):
    """A line for each step."""
    def run_start(self, path):
        self._file = Path(path) / "counted.txt"
    def step_end(self, step):
        with open(self._file, "a") as file:
            file.write(f"{step}\\n")
'''
PARTS = [
    "model.factory=mine.py:make", "model.factory_kwargs={base: ./base}", "model.chat_template=template.jinja",
    "rl.data.factory=mine.py:rows", "rl.data.factory_kwargs={path: data/rows.jsonl, keep: 'mine.py:short'}",
    "rl.data.packer=mine.py:Packer", "rl.objective.name=mine.py:Mine", "environments=[{name: mine.py:Ask}]",
    "hooks=[{name: mine.py:Counts}]",
    "rl.steps=1", "rl.group_size=4", "rl.batch_per_replica=16", "rollout.max_tokens=4", "rollout.max_model_len=32",
    "validation.prompts=0", "grid.threads=1", "tracking.display=lines", "rl.discard_group_zero_advantage=false",
]  # fmt: skip


def test_a_run_goes_on_in_a_folder_without_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here / "data", elsewhere):
        folder.mkdir(parents=True)
    write_tiny_model(here / "base")
    asked = [*"abcdefgh", "too long"]
    (here / "data" / "rows.jsonl").write_text("".join(json.dumps({"id": ask, "ask": ask}) + "\n" for ask in asked))
    (here / "template.jinja").write_text("{% for m in messages %}{{ 'q' + m['content'] }}{% endfor %}")
    (here / "mine.py").write_text(MINE)
    monkeypatch.chdir(here)
    assert main(["train", *PARTS]) == 0
    assert str(here) not in capsys.readouterr().out  # paths are shown from here
    (run,) = [found for found in (here / "outputs").iterdir() if found.name != "models"]
    assert str(here) in json.dumps(saved_config(run))

    command = [sys.executable, "-m", "posttrain.cli", "train", "--resume", str(run), "rl.steps=2"]
    more = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=300)
    assert more.returncode == 0 and "Done: 2 of 2" in more.stdout, more.stdout + more.stderr
    assert (run / "counted.txt").read_text() == "1\n2\n" and not list(elsewhere.iterdir())
    for step in (1, 2):
        assert {row["prompt"].replace(" ", "") for row in read_rollouts(run, step)} <= {f"q{ask}" for ask in "abcdefgh"}
