"""Every family through the whole loop on the embedded engine: two steps, with and without BOS, chat template, tied head."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from posttrain.config.load import load_config
from posttrain.loop import checkpoint
from posttrain.loop.run import RunResult, train
from posttrain.policy.load import load_causal_lm
from posttrain.testing.tiny_model import FAMILIES, write_tiny_model
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts

LETTERS = '''
from posttrain.data.environment import Environment

class Letters(Environment):
    """The share of vowels."""

    def dataset(self, split):
        return [{"id": f"{split}{i}", "text": split[1] + "abcdefghijkl"[: 2 + i]} for i in range(8)]

    def format_prompt(self, task):
        return CHAT

    async def compute_reward(self, state):
        return sum(letter in "aeiou0123" for letter in state.completion) / (1 + len(state.completion))
'''
CHAT = {True: '[{"role": "user", "content": task["text"]}]', False: 'task["text"]'}

VARIANTS = {"tied, template": (True, False, True), "untied, BOS, no template": (False, True, False)}
"""Tied head, BOS, chat template."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunResult]:
    """Makes the model, and trains on it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(family: str, variant: tuple[bool, bool, bool], *overrides: str, resume: Path | None = None) -> RunResult:
        tied, bos, template = variant
        if resume is not None:
            return train(load_config(overrides, config_file=resume.parent.parent / "config.yaml"), resume=resume)
        module = f"letters_{template}"
        (tmp_path / f"{module}.py").write_text(LETTERS.replace("CHAT", CHAT[template]))
        folder = tmp_path / "model"
        if not folder.exists():
            write_tiny_model(folder, family=family, tied=tied, bos=bos, template=template)
        settings = [
            f"model.name_or_path={folder}", f"environments=[{{name: '{module}:Letters'}}]", "rl.objective.name=grpo",
            "rl.steps=2", "rl.group_size=8", "rl.batch_per_replica=32", "rl.optimizer.lr=1e-2", "rollout.max_tokens=24",
            "rollout.max_model_len=64", "validation.prompts=2", "checkpoint.every=1", "checkpoint.keep_last=null",
            "grid.threads=1", "tracking.display=none",
        ]  # fmt: skip
        return train(load_config([*settings, *overrides]), run_dir=tmp_path / "outputs")

    return run


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains(start, tmp_path, family, variant):
    tied, bos, _ = VARIANTS[variant]
    result = start(family, VARIANTS[variant])
    assert result.steps_done == 2
    for row in read_metrics(result.run):
        assert row["policy/ratio_min"] == pytest.approx(1, abs=1e-4) and row["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert row["grad_norm"] > 0
    rows = [row for step in (1, 2) for row in read_rollouts(result.run, step)]
    for row in rows:
        assert (list(row["prompt_ids"]).count(1) == 1 and row["prompt_ids"][0] == 1) if bos else 1 not in row["prompt_ids"]
        assert all(row["mask"]), "the stop token is trained too"
        assert not {2, 3} & set(row["token_ids"][:-1])
    assert {row["token_ids"][-1] for row in rows if row["finish_reason"] == "stop"} == {2, 3}, "each of the two ids ends"
    base = dict(load_causal_lm(str(tmp_path / "model"), "float32").named_parameters())
    trained = load_file(newest(result.run) / "model.safetensors")
    assert base.keys() == trained.keys() and ("lm_head.weight" in trained) is not tied
    assert all((base[name] != trained[name]).any() for name in base)


def newest(run: Path) -> Path:
    return checkpoint.find(run / "checkpoints")[-1].policy


@pytest.mark.parametrize(("family", "tied"), [("gemma2", True), ("qwen3", False)])
def test_a_resumed_run_ends_in_the_same_bits(start, family, tied):
    variant = (tied, False, True)
    run = start(family, variant, "rl.steps=3").run
    wanted = {path.name: path.read_bytes() for path in newest(run).iterdir() if path.suffix == ".safetensors"}
    for later in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"step_{later}")
    assert start(family, variant, resume=run / "checkpoints" / "step_1").steps_done == 2
    assert {path.name: path.read_bytes() for path in newest(run).iterdir() if path.suffix == ".safetensors"} == wanted
