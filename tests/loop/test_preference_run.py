"""The whole loop on preference pairs: no engine, a margin that rises, a resume to the bit that keeps the first reference.

The model is hardly warmed up and cannot add, so the pairs here are easier than the recipe's: a number is better than a word.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from posttrain.config.load import load_config
from posttrain.errors import DataError
from posttrain.loop import checkpoint
from posttrain.loop.run import train
from posttrain.tracking.metric_names import find
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.rollouts import read_rollouts
from posttrain.tracking.show import show

SMALL = [
    "experiment=preference_dpo",
    "model.factory_kwargs.steps=30",
    "model.factory_kwargs.slip_steps=10",
    "rl.batch_per_replica=32",
    "rl.steps=6",
    "rl.optimizer.lr=5e-4",
    "validation.prompts=16",
    "validation.every=3",
    "checkpoint.every=3",
    "checkpoint.keep_last=null",
    "tracking.display=none",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One root for all runs, so that the model is made once; the pairs are beside them."""
    out = tmp_path_factory.mktemp("outputs")
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "none"} for a in range(10) for b in range(10)]
    (out / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return out


def start(root: Path, *overrides: str, resume: Path | None = None) -> Any:
    if resume is None:
        data = f"environments=[{{name: preference, options: {{data: {root}/pairs.jsonl, test_size: 16}}}}]"
        return train(load_config([*SMALL, data, *overrides]), run_dir=root)
    return train(load_config(list(overrides), config_file=resume / "config.yaml"), resume=resume)


@pytest.fixture(scope="module")
def whole(root: Path) -> Any:
    return start(root)


def steady(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    (found,) = [c for c in checkpoint.find(run / "checkpoints") if c.step == step]
    return load_file(found.policy / "model.safetensors")


def test_the_margin_rises_in_training_and_on_held_out_pairs(whole: Any) -> None:
    rows, held_out = read_metrics(whole.run), read_validation(whole.run)
    margins = [row["dpo/margin"] for row in rows]
    assert margins[0] == 0 and rows[0]["dpo/accuracy"] == 0.5 and rows[0]["loss"] == pytest.approx(0.693147, abs=1e-4)
    assert margins[-1] > 0.5 and rows[-1]["loss"] < rows[0]["loss"]
    assert [row["step"] for row in held_out] == [0, 3, 6]
    assert held_out[0]["validation/dpo/margin"] == 0 and held_out[0]["validation/dpo/accuracy"] == 0.5
    assert held_out[-1]["validation/dpo/margin"] > held_out[1]["validation/dpo/margin"] > 0.1
    assert held_out[-1]["validation/dpo/accuracy"] > 0.8


def test_no_metric_speaks_of_an_engine_and_all_are_defined(whole: Any) -> None:
    for row in [*read_metrics(whole.run), *read_validation(whole.run)]:
        names = set(row) - {"step"}
        assert not [name for name in names if find(name) is None]
        assert not [name for name in names if name.startswith(("reward/", "weights/", "policy/ratio", "policy/kl", "time/sync"))]
        assert row.get("tokens/generated", 0) == 0


def test_rollout_files_ledger_and_show_hold_the_pairs(whole: Any) -> None:
    rows = read_rollouts(whole.run, 1)
    assert len(rows) == 32 and {row["reward"] for row in rows} == {0.0, 1.0}
    first, second = rows[:2]
    assert first["task"]["chosen"] == first["messages"][-1]["content"]
    assert second["task"]["rejected"] == second["messages"][-1]["content"]
    lines = [json.loads(line) for line in (whole.run / "ledger.jsonl").read_text().splitlines()]
    assert {line["state"] for line in lines} == {"trained"} and len(lines) == 6 * 16
    console = Console(file=io.StringIO(), width=120)
    show(whole.run, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "mean margin" in text and "accuracy" in text and "held-out 0 →" in text
    assert "▸ chosen · " in text and "▸ rejected · " in text and "reward" not in text


def test_the_summary_speaks_of_margin_and_accuracy(whole: Any) -> None:
    text = "\n".join(whole.summary.lines())
    assert "held-out margin   0 before →" in text and "held-out accuracy 0.5 before →" in text and "training margin" in text
    assert "reward" not in text and "tokens/s" not in text and "sync" not in text


def test_the_same_run_again_is_bitwise_the_same(root: Path, whole: Any) -> None:
    again = start(root)
    assert steady(again.run) == steady(whole.run)
    one, other = weights(whole.run, 6), weights(again.run, 6)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_run_still_compares_with_the_first_weights(root: Path, whole: Any) -> None:
    """To the bit: with the checkpoint as reference the margin of step 4 would begin at 0 again."""
    run = start(root, "rl.steps=3").run
    resumed = start(root, "rl.steps=6", resume=run)
    assert resumed.steps_done == 3
    assert steady(run) == steady(whole.run)
    assert steady(run)[3]["dpo/margin"] > 0.1
    one, other = weights(whole.run, 6), weights(run, 6)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_validation_moves_no_weight(root: Path, whole: Any) -> None:
    silent = start(root, "validation.prompts=0")
    assert steady(silent.run) == steady(whole.run) and read_validation(silent.run) == []


def test_a_bad_row_ends_the_run_before_a_model_is_made(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"chosen": "a", "rejected": "a"}\n{"chosen": "blue", "rejected": "green"}\n')
    data = f"environments=[{{name: preference, options: {{data: {file}, test_size: 0}}}}]"
    with pytest.raises(DataError, match="is not a preference pair") as caught:
        start(tmp_path / "outputs", data)
    assert "bad.jsonl:2" in str(caught.value) and caught.value.exit_code == 3
    assert not list((tmp_path / "outputs").glob("models/*"))


def test_chat_pairs_train_through_the_template(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    ask = {"role": "user", "content": "1+1="}
    row = {"chosen": [ask, {"role": "assistant", "content": "2"}], "rejected": [ask, {"role": "assistant", "content": "3"}]}
    file.write_text("\n".join(json.dumps(row) for _ in range(4)))
    data = f"environments=[{{name: preference, options: {{data: {file}, test_size: 0}}}}]"
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role + ':' + m.content + '<eos>' }}{% endfor %}"
                        "{% if add_generation_prompt %}assistant:{% endif %}")  # fmt: skip
    short = ["rl.steps=3", "rl.batch_per_replica=4", "validation.prompts=0", f"model.chat_template={template}"]
    run = start(root, data, *short).run
    rows = read_rollouts(run, 1)
    assert (rows[0]["prompt"], rows[0]["completion"], rows[1]["completion"]) == ("user:1+1=assistant:", "2", "3")
    assert [row["token_ids"].count(1) for row in rows[:2]] == [1, 1] and rows[0]["token_ids"][-1] == 1
    assert read_metrics(run)[-1]["dpo/margin"] > 0


def test_online_preferences_say_the_same_measures(root: Path) -> None:
    made = train(load_config([
        "experiment=arithmetic_grpo", "rl.objective.name=dpo", *SMALL[1:3], "rl.batch_per_replica=32", "rl.group_size=8",
        "rl.steps=2", "validation.prompts=4", "tracking.display=none", "rollout.temperature=1.0", "name=online",
    ]), run_dir=root)  # fmt: skip
    row = read_metrics(made.run)[0]
    assert "dpo/margin" in row or row["loss"] is None
    assert "reward/mean" in row and "validation/reward/mean" in read_validation(made.run)[0]
