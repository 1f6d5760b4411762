"""A recorded step computed again: to the bit on this machine, in float64 within rounding, and what differs is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from posttrain.cli.main import main
from posttrain.config.load import load_config
from posttrain.errors import ConfigError, DataError
from posttrain.loop.model_folder import model_folder
from posttrain.loop.prepare import build_packer, build_run_objective
from posttrain.loop.replay import Replay, policy_ranks, recorded_batch, replay, replay_config, tolerance
from posttrain.loop.run import train
from posttrain.tracking.agreement import BF16, DIFFERS, EQUAL, FP32, ROUNDING
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts, to_groups
from posttrain.tracking.run_dir import saved_config

SMALL = [
    "experiment=arithmetic_grpo",
    "model.factory_kwargs.steps=30",
    "model.factory_kwargs.slip_steps=10",
    "rl.batch_per_replica=64",
    "rl.group_size=8",
    "rl.steps=3",
    "rl.discard_group_zero_advantage=false",
    "validation.prompts=0",
    "checkpoint.every=1",
    "checkpoint.keep_every=1",
    "grid.threads=1",
    "tracking.display=none",
]
PAIRS = [
    *(value for value in SMALL if not value.startswith(("experiment", "rl.group_size"))),
    "experiment=preference_dpo",
    "rl.steps=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One root for all runs, so that each model is made once."""
    out = tmp_path_factory.mktemp("outputs")
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "none"} for a in range(10) for b in range(10)]
    (out / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return out


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    return Path(train(load_config(SMALL), run_dir=root).run)


@pytest.fixture
def copy(run: Path, root: Path) -> Path:
    """Beside the run, where the model is."""
    out = root / "a-copy"
    shutil.rmtree(out, ignore_errors=True)
    return Path(shutil.copytree(run, out))


def verdicts(found: Replay) -> set[str]:
    return {line.verdict for line in found.lines}


def rewritten(run: Path, step: int, change: Callable[[dict[str, Any]], None], row: int = 0) -> None:
    """Change one row of a rollout file."""
    path = run / "rollouts" / f"step_{step:06d}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows[row])
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


@pytest.mark.parametrize("step", [1, 3])
def test_every_metric_and_weight_of_a_step_is_computed_again_to_the_bit(run: Path, step: int) -> None:
    before = torch.get_num_threads()
    found = replay(run, step)
    assert verdicts(found) == {EQUAL} and found.same and not found.notes and not found.left_out
    names = {line.name for line in found.lines}
    recorded = read_metrics(run)[step - 1]
    assert names >= {name for name in recorded if not name.startswith(("time/", "weights/", "step"))}
    assert any(name.startswith("weights after the step") for name in names)
    assert torch.get_num_threads() == before


OTHERS = {
    "two optimizer steps": [*SMALL, "rl.mini_batch_per_replica=32", "rl.objective.kl_coef=0.01"],
    "tied groups are left out": [*SMALL, "rl.discard_group_zero_advantage=true"],
    "pairs": PAIRS,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_objectives_are_computed_again_to_the_bit(root: Path, name: str) -> None:
    data = [f"environments=[{{name: preference, options: {{data: {root}/pairs.jsonl, test_size: 16}}}}]"] * (name == "pairs")
    made = Path(train(load_config([*OTHERS[name], *data]), run_dir=root).run)
    rows = read_metrics(made)
    assert any(row["loss"] for row in rows)
    for row in rows:
        found = replay(made, row["step"])
        assert verdicts(found) == {EQUAL} and not found.left_out


def test_a_step_that_trained_nothing_is_computed_again(run: Path, root: Path) -> None:
    nothing = [*SMALL, "rl.steps=1", "rollout.max_tokens=1", "rl.discard_group_zero_advantage=true"]  # no sum has one digit
    made = Path(train(load_config([*nothing, "seed=3"]), run_dir=root).run)
    assert read_metrics(made)[0]["loss"] is None
    found = replay(made, 1)
    assert verdicts(found) == {EQUAL} and {"loss": None, "optimizer_steps": 0}.items() <= {
        line.name: line.recomputed for line in found.lines
    }.items()


def test_float64_is_within_rounding_and_not_equal(run: Path) -> None:
    found = replay(run, 2, dtype="float64")
    assert found.same and found.dtype == "float64" and verdicts(found) == {EQUAL, ROUNDING}
    by_name = {line.name: line for line in found.lines}
    assert by_name["reward/mean"].verdict == EQUAL
    assert by_name["grad_norm"].verdict == ROUNDING and by_name["grad_norm"].difference != 0


def test_a_reward_that_was_altered_differs(copy: Path) -> None:
    def alter(row: dict[str, Any]) -> None:
        row["reward"] = 1.0 - row["reward"]

    rewritten(copy, 2, alter)
    found = replay(copy, 2)
    differing = {line.name for line in found.lines if line.verdict == DIFFERS}
    assert not found.same and {"reward/mean", "grad_norm"} <= differing
    assert any(name.startswith("advantages") for name in differing) and any(n.startswith("weights after") for n in differing)


def test_a_token_that_was_altered_differs_where_the_model_computes(copy: Path) -> None:
    def alter(row: dict[str, Any]) -> None:
        row["token_ids"][0] += 1

    rewritten(copy, 2, alter)
    differing = {line.name for line in replay(copy, 2).lines if line.verdict == DIFFERS}
    assert "policy/logprob_gap" in differing and "reward/mean" not in differing


def test_the_environment_and_the_engine_are_not_needed(copy: Path) -> None:
    config = (copy / "config.yaml").read_text()
    config = config.replace("name: arithmetic\n", "name: an-environment-of-nowhere\n").replace("engine: hf", "engine: nowhere")
    assert "an-environment-of-nowhere" in config and "engine: nowhere" in config
    (copy / "config.yaml").write_text(config)
    assert verdicts(replay(copy, 2)) == {EQUAL}


def test_what_the_run_was_made_on_is_compared(copy: Path) -> None:
    path = copy / "provenance.json"
    first = json.loads(path.read_text())[0]
    first["machine"]["processor"], first["libraries"]["torch"] = "abacus", "0.1"
    path.write_text(json.dumps([first, first | {"changed": {"rl.steps": {"was": 2, "is": 3}}}]))
    notes = replay(copy, 1).notes
    assert any(note.startswith("processor: abacus in the run") for note in notes)
    assert any(note.startswith("torch: 0.1 in the run") and note.endswith("expect rounding") for note in notes)
    assert "rl.steps was changed by a resume from 2 to 3; the replay uses 3" in notes


def test_several_ranks_and_half_precision_are_compared_within_rounding(run: Path) -> None:
    tree = saved_config(run)
    tree["grid"] |= {"backend": "ray", "dp_shard": 2, "dp_replicate": 2}
    assert policy_ranks(replay_config(tree)) == 4 and tolerance(replay_config(tree)) == FP32
    tree["rl"]["param_dtype"] = "bfloat16"
    assert tolerance(replay_config(tree)) == BF16


def test_a_run_of_several_ranks_is_said_to_be(copy: Path) -> None:
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("dp_shard: 1", "dp_shard: 2").replace("backend: local", "backend: ray"))
    found = replay(copy, 1)
    assert found.same and "the run's policy had 2 ranks, the replay is one process: expect rounding" in found.notes


def test_what_dynamic_sampling_did_not_take_is_counted_and_does_not_train(run: Path, root: Path) -> None:
    config = replay_config(saved_config(run))
    objective, packer = build_run_objective(config), build_packer(config, model_folder(config.model, root))
    rows = read_rollouts(run, 1)
    more = [row | {"group_id": f"more{row['group_id']}", "sample_id": f"more{row['sample_id']}"} for row in rows]
    alone, both = (recorded_batch(config, 1, to_groups(part), objective, packer) for part in (rows, rows + more))
    assert both.rows == alone.rows and len(both.groups) == 2 * len(alone.groups)
    assert both.metrics["tokens/generated"] == 2 * alone.metrics["tokens/generated"]
    assert both.metrics["train/effective_batch"] == alone.metrics["train/effective_batch"] == len(alone.rows)


def test_filtered_samples_and_shaped_rewards_come_from_the_record(run: Path, root: Path) -> None:
    tree = saved_config(run)
    tree["rl"] |= {"filter_overlong": True, "overlong_penalty_factor": 1.0, "overlong_buffer_tokens": 2}
    config = replay_config(tree)
    objective, packer = build_run_objective(config), build_packer(config, model_folder(config.model, root))
    rows = read_rollouts(run, 1)
    for row in rows:
        row["info"] = row["info"] | {"screening": {"filters": [], "raw_reward": row["reward"]}}
    rows[0]["info"] = {"screening": {"filters": ["overlong"], "raw_reward": 1.0}}
    batch = recorded_batch(config, 1, to_groups(rows), objective, packer)
    assert batch.metrics["filter/overlong_frac"] == 1 / len(rows) and rows[0]["sample_id"] not in {row.id for row in batch.rows}
    assert [row.reward for row in batch.rows] == [row["reward"] for row in rows[1:]]


def test_a_step_without_a_checkpoint_before_it_names_those_that_can_be_replayed(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step_1")
    with pytest.raises(ConfigError, match="batch step 2 of .* cannot be replayed: there is no checkpoint of step 1") as caught:
        replay(copy, 2)
    assert "--step 1 or --step 3 can be; " in caught.value.fix
    assert "checkpoint.every=1 checkpoint.keep_every=1" in caught.value.fix and caught.value.code == "no_checkpoint"


def test_a_step_that_is_not_there(copy: Path) -> None:
    with pytest.raises(ConfigError, match="has no batch step 9") as caught:
        replay(copy, 9)
    assert caught.value.cause == "it has steps 1 to 3" and caught.value.code == "no_step"
    (copy / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="has no batch step 1") as caught:
        replay(copy, 1)
    assert caught.value.cause == "it has done none"


def test_rollouts_that_were_not_recorded_or_are_damaged(copy: Path) -> None:
    path = copy / "rollouts" / "step_000002.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"the rollout file .*step_000002\.parquet cannot be read") as caught:
        replay(copy, 2)
    assert caught.value.code == "rollouts_damaged"
    path.unlink()
    with pytest.raises(ConfigError, match="no rollouts of step 2") as unrecorded:
        replay(copy, 2)
    assert "tracking.rollouts_every" in unrecorded.value.fix
    rewritten(copy, 1, lambda row: row["token_ids"].pop())
    with pytest.raises(DataError, match="the recorded trajectory '.*' of step 1 is damaged"):
        replay(copy, 1)


def test_a_config_that_cannot_be_read(copy: Path) -> None:
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace("group_size: 8", "group_size: eight"))
    with pytest.raises(ConfigError, match="the config of the run: 1 problem"):
        replay(copy, 1)


def test_the_command(run: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--step", "2"]) == 0
    text = capsys.readouterr().out
    assert "grad_norm" in text and text.rstrip().splitlines()[-1].startswith("the same: all ")
    assert main(["replay", str(run), "--step", "2", "--dtype", "float64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] and found["dtype"] == "float64" and {m["verdict"] for m in found["metrics"]} == {EQUAL, ROUNDING}
    assert main(["replay", str(run), "--step", "2", "--dtype", "float64"]) == 0
    assert "the others within rounding" in capsys.readouterr().out
    rewritten(copy, 2, lambda row: row.update(reward=7.0))
    assert main(["replay", str(copy), "--step", "2"]) == 1
    assert "DIFFERS in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN"], "a replay needs a run and a step"),
        (["--step", "1"], "a replay needs a run and a step"),
        (["RUN", "--bisect", "A", "B"], "--bisect takes two runs and nothing else"),
        (["--bisect", "A", "B", "--step", "1"], "--bisect takes two runs and nothing else"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *arguments]) == 2
    assert message in capsys.readouterr().err
