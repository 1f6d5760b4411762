"""The recipes of the catalog: light to import, resolved without a network, and right about what they say of themselves."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.config.catalog import load_catalog
from posttrain.config.load import load_config
from posttrain.data.environment import episode
from posttrain.loop.run import train
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.tracking.metrics import read_metrics
from posttrain_envs.countdown import Countdown
from posttrain_experiments import countdown, tiny, tiny_countdown

RECIPES = ("arithmetic_grpo", "arithmetic_nft", "countdown_grpo", "gsm8k_grpo", "mixed_envs", "preference_dpo", "smollm2_grpo")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_stands_alone_and_resolves_without_a_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    (entry,) = load_catalog().experiments[name]
    assert entry.parents == () and entry.help
    loaded = load_config([f"experiment={name}"])
    assert loaded.config.name == name.replace("_", "-") and loaded.experiment == name


def test_the_catalog_needs_nothing_heavy_or_optional() -> None:
    code = (
        "import sys\nfrom posttrain.config.catalog import load_catalog\ncatalog = load_catalog()\n"
        "assert not catalog.broken and not catalog.skipped, catalog\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'datasets', 'math_verify') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_gsm8k_computes_and_samples_in_the_same_precision_and_keeps_fp32_masters() -> None:
    config = load_config(["experiment=gsm8k_grpo"]).config
    assert (config.rl.master_dtype, config.rl.param_dtype, config.rollout.dtype) == ("float32", "bfloat16", "bfloat16")
    assert (config.rl.optimizer.name, config.rl.optimizer.impl, config.rl.optimizer.lr) == ("adamw", "fused", 1e-6)


def test_gsm8k_runs_on_a_file_in_its_format(tmp_path: Path) -> None:
    """Shrunken: a tiny model, the embedded engine, one token an answer, so that a few of many answers are right by chance."""
    write_tiny_model(tmp_path / "model")
    rows = [{"question": f"What is {i} minus {i - 1}?", "answer": f"{i} - {i - 1} = 1\n#### 1"} for i in range(2, 32)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = train(
        load_config([
            "experiment=gsm8k_grpo", f"model.name_or_path={tmp_path}/model",
            f"environments.0.options.data={tmp_path}/gsm8k.jsonl",
            "environments.0.options.data_config=null", "environments.0.options.test_size=4",
            "environments.0.options.answer=last_number", "rollout.engine=hf", "rollout.max_tokens=1", "rollout.max_model_len=160",
            "rl.steps=2", "rl.group_size=128", "rl.batch_per_replica=128", "rl.lr_scheduler.warmup_steps=0",
            "rl.optimizer.lr=1e-2", "validation.prompts=2", "checkpoint.every=0", "tracking.display=none",
        ]),
        run_dir=tmp_path / "runs",
    )  # fmt: skip
    steps = read_metrics(result.run)
    assert result.steps_done == 2 and all(0 < row["reward/mean"] < 1 and row["grad_norm"] > 0 for row in steps)
    assert steps[1]["policy/logprob_gap"] < 0.1  # the engine has the new weights, up to what bf16 rounds


def test_countdown_s_teacher_is_right_or_careless_and_sees_no_held_out_problem() -> None:
    tree = countdown.EXPERIMENTS["countdown_grpo"]
    assert tree["model"]["factory_kwargs"]["environment"] == tree["environments"][0]["options"]
    env = Countdown(Countdown.Options(**tree["environments"][0]["options"]))
    rows, rng = env.dataset("train"), random.Random(0)
    held_out = {env.format_prompt(row) for row in (env.dataset("test")[i] for i in range(len(env.dataset("test"))))}
    lessons = [(row, tiny_countdown.teach(env, row, rng)) for row in (rows[i] for i in range(200))]
    taught = [(row, lesson) for row, lesson in lessons if lesson is not None]
    assert len(taught) > 180
    for row, (prompt, right, careless) in taught:
        assert prompt not in held_out
        assert env.compute_reward(episode(env, row, right)).total == 1.0
        wrong = env.compute_reward(episode(env, row, careless))
        assert wrong.total == 0.0 and wrong.info["value"] is not None  # an expression, with another value
    tokenizer = tiny.build_tokenizer()
    limit = tree["rollout"]
    assert max(len(tokenizer(right)["input_ids"]) for _, (_, right, _) in taught) < limit["max_tokens"]
    longest = max(len(tokenizer(prompt)["input_ids"]) for _, (prompt, _, _) in taught)
    assert longest + limit["max_tokens"] <= limit["max_model_len"]
