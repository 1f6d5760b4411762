"""What a config names by a file is found again from every directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from posttrain.config import load_config, resolved_yaml

PARTS = {
    "mine.py": """
from posttrain.data.environment import Environment
from posttrain_datapackers.decoder_only import DecoderOnlyPacker
from posttrain.hooks.hook import Hook
from posttrain_algorithms.grpo import GRPO

class Packer(DecoderOnlyPacker): pass
class Mine(GRPO): pass

class Env(Environment):
    def dataset(self, split): return []
    def compute_reward(self, state): return 0.0

class Said(Hook):
    def run_start(self): pass
""",
    "rows.jsonl": "",
    "template.jinja": "{{ messages }}",
}
GIVEN = [
    "environments=[{name: mine.py:Env}]", "rl.data.factory=mine.py:rows", "model.name_or_path=model",
    "rl.data.factory_kwargs={data: rows.jsonl, glob: '*.jsonl', by: 'mine.py:by', split: train, sep: '.', ask: 'Is it? Say.'}",
    "model.factory=mine.py:make", "model.factory_kwargs={file: ./rows.jsonl, size: 3, base: org/model}",
    "model.chat_template=template.jinja", "rl.steps=1",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "here"
    for name in ("model", "train"):
        (here / name).mkdir(parents=True)
    for name, content in PARTS.items():
        (here / name).write_text(content)
    monkeypatch.chdir(here)
    return here


def test_a_saved_config_means_the_same_elsewhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_config(GIVEN)
    saved = tmp_path / "config.yaml"
    saved.write_text(resolved_yaml(first.config))
    monkeypatch.chdir(tmp_path)
    again = load_config(config_file=saved)
    assert again.tree == first.tree == yaml.safe_load(saved.read_text())
    model, data = again.config.model, again.config.rl.data
    assert again.config.environments[0].name == f"{folder}/mine.py:Env"
    assert (model.name_or_path, model.factory) == (f"{folder}/model", f"{folder}/mine.py:make")
    assert (model.chat_template, data.factory) == (f"{folder}/template.jinja", f"{folder}/mine.py:rows")
    assert model.factory_kwargs == {"file": f"{folder}/rows.jsonl", "size": 3, "base": "org/model"}
    assert data.factory_kwargs == {
        "data": f"{folder}/rows.jsonl", "glob": f"{folder}/*.jsonl", "by": f"{folder}/mine.py:by",
        "split": "train", "sep": ".", "ask": "Is it? Say.",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("rl.data.packer=mine.py:Packer", lambda config: config.rl.data.packer),
        ("rl.objective.name=mine.py:Mine", lambda config: config.rl.objective.name),
        ("hooks=[{name: mine.py:Said}]", lambda config: config.hooks[0].name),
    ],
)
def test_plug_ins_of_a_file(folder: Path, override: str, read) -> None:
    config = load_config(["experiment=toy_grpo", override]).config
    assert read(config).startswith(f"{folder}/mine.py:")


def test_names_text_and_what_is_not_here_stay(folder: Path) -> None:
    config = load_config(["experiment=toy_grpo", "model.name_or_path=org/model", "model.chat_template='{{ model }}'"]).config
    assert (config.model.name_or_path, config.model.chat_template) == ("org/model", "{{ model }}")
    assert (config.environments[0].name, config.rl.objective.name, config.rollout.engine) == ("toy", "grpo", "hf")
