"""A dry run tells what a run would tell before its model loads, shows a prompt, and leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from posttrain.config.load import load_config
from posttrain.errors import ConfigError, DataError, EngineStartError, PosttrainError
from posttrain.loop import dry_run as module
from posttrain.loop.dry_run import dry_run
from posttrain.policy import load, policy
from posttrain.testing.tiny_model import write_tiny_model
from posttrain_envs.arithmetic import Arithmetic

ARITHMETIC = ["experiment=arithmetic_grpo", "model.factory=null", "rl.batch_per_replica=32"]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The report of these overrides on a tiny model, as one text; it reads no weights and leaves no files."""
    write_tiny_model(tmp_path / "model")
    monkeypatch.setattr(policy, "Policy", lambda *_: pytest.fail("the policy was loaded"))
    monkeypatch.setattr(load, "load_causal_lm", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "runs").mkdir()

    def run(*overrides: str, model: bool = True) -> str:
        base = [*ARITHMETIC, f"model.name_or_path={tmp_path}/model"] if model else []
        try:
            return "\n".join(dry_run(load_config([*base, *overrides]), root=tmp_path / "runs"))
        finally:
            assert os.listdir(tmp_path / "runs") == []

    return run


def test_the_report_says_what_will_run_and_ends_in_ok(report) -> None:
    lines = report("rl.mini_batch_per_replica=16").splitlines()
    text = "\n".join(lines)
    assert lines[-1] == "ok"
    assert "arithmetic: 320 rows train, 80 of the held-out ones are validated on" in text
    assert "32 completions a batch step: 4 prompts x 8" in text
    assert "2 optimizer steps of 16 (legal rl.mini_batch_per_replica: 1, 2, 4, 8, 16, 32)" in text
    assert "80 batch steps: 320 prompts, 160 optimizer steps" in text
    assert "engine     hf (float32): nothing that it would refuse to start with" in text
    assert "a checkpoint takes about" in text


def test_the_first_prompt_is_shown_as_the_model_gets_it(report) -> None:
    text = report()
    shown = text.splitlines()
    at = next(i for i, line in enumerate(shown) if "the first prompt, " in line)
    prompt = shown[at + 1].partition("| ")[2].split()  # one token per character, "a" where the tokenizer has none
    first = Arithmetic(Arithmetic.Options(operations=("+",), largest=19, test_size=80)).dataset("train")[0]["problem"]
    assert prompt == [c if c.isdigit() else "a" for c in f"{first}="] and f"the first prompt, {len(prompt)} tokens:" in shown[at]
    assert "336 prompts looked at have 4 to 6 tokens" in text  # 256 that train, 80 held out


def test_a_note_where_the_longest_completion_does_not_fit(report) -> None:
    assert "leaves room for 3 tokens of rollout.max_tokens=6: rollout.max_model_len=12 would hold both" in report(
        "rollout.max_model_len=9"
    )


@pytest.mark.parametrize(
    ("overrides", "error", "code", "message"),
    [
        (["rollout.max_model_len=5", "rollout.max_tokens=2"], DataError, 3, "leaves no room"),
        (["environments=[{name: countdown, options: {data: nowhere.jsonl}}]"], DataError, 3, "nowhere.jsonl"),
        (["model.name_or_path=/no/such/model"], EngineStartError, 4, "/no/such/model"),
        (["rl.data.packer=nowhere.packers:make"], PosttrainError, 2, "nowhere.packers"),
        (["rollout.engine=vllm", "rollout.options.enforce_eagr=true"], ConfigError, 2, "enforce_eager"),
    ],
)
def test_what_ends_a_run_ends_a_dry_run_the_same_way(report, overrides, error, code, message) -> None:
    with pytest.raises(error) as caught:
        report(*overrides)
    assert caught.value.exit_code == code and message in str(caught.value)


def test_a_folder_that_cannot_be_written_and_a_disk_too_small(report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot create a run directory under") as caught:
        module.check_writable(file / "runs")
    assert caught.value.code == "output_root"
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConfigError, match="1 kB free, and 3 checkpoints"):
        report()


def test_a_model_that_is_not_made_yet_is_not_made(report) -> None:
    text = report("experiment=arithmetic_grpo", model=False)
    assert "not made yet: the run will, with posttrain_experiments.tiny:build" in text
    assert "the first prompt, not tokenised:" in text and text.endswith("\nok")
    with pytest.raises(ConfigError, match="refused its arguments"):
        report("experiment=arithmetic_grpo", "model.factory_kwargs={nonsense: 1}", model=False)


def test_pairs_are_shown_side_by_side(report, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = report(
        "rollout.engine=none", "rl.objective.name=dpo", "rl.group_size=2", "rl.batch_per_replica=4",
        f"environments=[{{name: preference, options: {{data: {tmp_path}/pairs.jsonl, test_size: 2}}}}]",
    )  # fmt: skip
    assert "preference: 7 rows train, 2 of the held-out ones" in text and "none: completions come with the data" in text
    assert "chosen, 2 tokens:" in text and "rejected, 2 tokens:" in text
