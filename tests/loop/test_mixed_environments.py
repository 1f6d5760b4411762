"""Several environments in one run: each entry by its label, everywhere, with its own rows, rewards, metrics and state."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_runs import SMALL

from posttrain.config.load import load_config
from posttrain.data.dataset import Draw, PromptSampler, Source
from posttrain.data.environment import Environment
from posttrain.errors import DataError
from posttrain.loop.batches import cohort_metrics, make_batch
from posttrain.loop.checkpoint import find as find_checkpoints
from posttrain.loop.cohort import Cohort
from posttrain.loop.prepare import build_environments
from posttrain.loop.run import train
from posttrain.loop.validation import held_out_draws, refuse_held_out
from posttrain.objective import build_objective
from posttrain.tracking.metric_names import find
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.rollouts import read_rollouts
from posttrain.types import Group, Trajectory

TWO = (
    "environments=[{name: arithmetic, label: sums, weight: 3, options: {operations: ['+'], largest: 9, test_size: 10}},"
    " {name: arithmetic, label: differences, options: {operations: ['-'], largest: 9, test_size: 10}, reward_range: [0, 4]}]"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mixed")
    return train(load_config([*SMALL, TWO, "rl.steps=2", "rl.batch_per_replica=64"]), run_dir=root).run


def test_draws_trajectories_and_the_ledger_carry_the_label(run: Path) -> None:
    rows = [row for step in (1, 2) for row in read_rollouts(run, step)]
    assert {(row["env"], "+" in row["messages"][0]["content"]) for row in rows} == {("sums", True), ("differences", False)}
    drawn = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert {entry["env"] for entry in drawn if "env" in entry} == {"sums", "differences"}


def test_metrics_of_each_environment_add_up_to_those_of_all(run: Path) -> None:
    for step, row in enumerate(read_metrics(run), 1):
        count = Counter(t["env"] for t in read_rollouts(run, step))
        assert {env: row[f"rollout/{env}/count"] for env in ("sums", "differences")} == count
        whole = sum(row[f"reward/{env}/mean"] * n for env, n in count.items()) / sum(count.values())
        assert row["reward/mean"] == pytest.approx(whole)
        assert row["length/mean"] == pytest.approx(sum(row[f"length/{env}/mean"] * n for env, n in count.items()) / 64)
        assert row["rollout/differences/out_of_range_count"] == 0 and "rollout/sums/out_of_range_count" not in row
        assert [name for name in row if find(name) is None] == ["step"]


def test_validation_and_the_checkpoint_know_the_labels(run: Path) -> None:
    for row in read_validation(run):
        assert {"validation/sums/reward/mean", "validation/differences/reward/mean"} <= set(row)
        assert row["validation/sums/unscorable_count"] == 0
        assert [name for name in row if find(name) is None] == ["step"]
    newest = find_checkpoints(run / "checkpoints")[-1].path
    assert any("differences" in path.read_text(errors="replace") for path in newest.iterdir() if path.is_file())


def test_a_recorded_step_is_computed_again_with_the_ranges_of_the_run(run: Path) -> None:
    from posttrain.loop.prepare import build_packer, build_run_objective
    from posttrain.loop.replay import recorded_batch, replay_config
    from posttrain.tracking.rollouts import to_groups
    from posttrain.tracking.run_dir import saved_config

    config = replay_config(saved_config(run))
    packer = build_packer(config, str(next((run.parent / "models").iterdir())))
    rows = read_rollouts(run, 2)
    batch = recorded_batch(config, 2, to_groups(rows), build_run_objective(config), packer)
    assert batch.advantages == pytest.approx({row["sample_id"]: row["advantage"] for row in rows}, abs=1e-6)
    assert {row.reward for row in batch.rows if ":differences:" in row.id} <= {0.0, 0.25}  # a right answer is 1 of 0 to 4


def test_a_game_of_several_turns_and_a_single_turn_train_together(tmp_path: Path) -> None:
    """The model says letters at random: three turns without a guess end a game."""
    entries = (
        "environments=[{name: wordle, options: {prompt: 'guess {length}', invalid: 2}},"
        " {name: arithmetic, label: sums, options: {largest: 9, test_size: 10}}]"
    )
    more = ["rl.steps=1", "rl.batch_per_replica=32", "rollout.max_model_len=600", "validation.prompts=0", "checkpoint.every=0"]
    made = train(load_config([*SMALL, entries, *more]), run_dir=tmp_path).run
    games = [row for row in read_rollouts(made, 1) if row["env"] == "wordle"]
    sums = [row for row in read_rollouts(made, 1) if row["env"] == "sums"]
    assert games and sums and all(len(row["turns"]) == 1 for row in sums)
    assert {sum(m["role"] == "assistant" for m in row["messages"]) for row in games if row["messages"]} == {3}
    (metrics,) = read_metrics(made)
    assert metrics["rollout/wordle/turns/mean"] == 3 and "rollout/sums/turns/mean" not in metrics
    assert metrics["reward/wordle/invalid"] == 3 and [name for name in metrics if find(name) is None] == ["step"]


# --- what is known to go wrong elsewhere --------------------------------------------------------------------------------


class Named(Environment):
    """Its class, its `name` and its label in the config are all different."""

    name = "hendrycks_math"

    def dataset(self, split: str) -> list[dict[str, Any]]:
        numbers = range(20) if split == "train" else range(20, 30)
        return [{"id": str(i), "prompt": f"{split} {i}"} for i in numbers]

    def compute_reward(self, state: Any) -> float:
        return 1.0


class Leaky(Named):
    """Trains on what `Named` holds out."""

    def dataset(self, split: str) -> list[dict[str, Any]]:
        return super().dataset("test") if split == "train" else [{"id": "x", "prompt": "of its own"}]


def config_of(entries: list[dict[str, Any]]) -> Any:
    from posttrain.config.call import call_values

    return load_config(SMALL, values=call_values(settings={"environments": entries})).config


def test_b4_held_out_rows_are_found_by_label_whatever_an_environment_is_called() -> None:
    environments = build_environments(config_of([{"name": Named, "label": "hendrycks-math"}]))
    assert list(environments) == ["hendrycks-math"]
    own = Source("hendrycks-math", environments["hendrycks-math"].dataset("train"))
    draws = held_out_draws([own], environments, 10)
    PromptSampler([own], seed=0).watch(refuse_held_out(draws, environments))
    leaked = Source("hendrycks-math", [*own.rows, draws[4].task])
    with pytest.raises(DataError, match="row 20 trains and asks what validation asks, the held-out row 4"):
        PromptSampler([leaked], seed=0).watch(refuse_held_out(draws, environments))


def test_b4_what_one_environment_holds_out_no_other_trains_on() -> None:
    environments = build_environments(config_of([{"name": Named, "label": "a"}, {"name": Leaky, "label": "b"}]))
    sources = [Source(label, env.dataset("train")) for label, env in environments.items()]
    draws = held_out_draws(sources, environments, 20)
    with pytest.raises(DataError, match="row 0 trains and asks what validation asks, the held-out row 0 of a"):
        PromptSampler(sources, seed=0).watch(refuse_held_out(draws, environments))


class Game(Named):
    """Asks the same of every row; what a row hides is its key."""

    def format_prompt(self, task: Any) -> Any:
        return "Guess."

    def task_key(self, task: Any) -> Any:
        return task["prompt"]


def test_rows_of_a_game_are_told_apart_by_their_key_and_not_by_what_is_asked() -> None:
    environments = build_environments(config_of([{"name": Game, "label": "game"}]))
    own = Source("game", environments["game"].dataset("train"))
    draws = held_out_draws([own], environments, 10)
    PromptSampler([own], seed=0).watch(refuse_held_out(draws, environments))
    with pytest.raises(DataError, match="asks what validation asks"):
        PromptSampler([Source("game", [draws[0].task])], seed=0).watch(refuse_held_out(draws, environments))


def test_b10_each_entry_is_scored_with_its_own_options(tmp_path: Path) -> None:
    """Two entries of one environment that differ in the reward alone: every sample has the reward of its own entry."""
    (tmp_path / "rewards.py").write_text("def low(completion):\n    return 0.25\n\n\ndef high(completion):\n    return 75.0\n")
    rows = [{"prompt": f"{i}+{i}="} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [
        {"name": "function", "label": which, "options": {
            "reward": f"{tmp_path}/rewards.py:{which}", "data": f"{tmp_path}/rows.jsonl", "test_size": 4}}
        for which in ("low", "high")
    ]  # fmt: skip
    from posttrain.config.call import call_values

    values = call_values(settings={"environments": entries, "rl": {"steps": 1}})
    made = train(load_config(SMALL, values=values), run_dir=tmp_path / "runs").run
    rewards = {(row["env"], row["reward"]) for row in read_rollouts(made, 1)}
    assert rewards == {("low", 0.25), ("high", 75.0)}
    (row,) = read_validation(made)[:1]
    assert (row["validation/low/reward/mean"], row["validation/high/reward/mean"]) == (0.25, 75.0)


def test_two_entries_of_the_same_rows_are_shuffled_apart_and_each_without_replacement() -> None:
    rows = [{"id": str(i)} for i in range(30)]
    sampler = PromptSampler([Source("a", rows), Source("b", rows, 2.0)], seed=3)
    sampler.draw(90)
    taken = {env: [d.row_id for d in PromptSampler([Source(env, rows)], seed=3).draw(30)] for env in ("a", "b")}
    assert taken["a"] != taken["b"] and all(sorted(ids) == sorted(row["id"] for row in rows) for ids in taken.values())
    state = sampler.state_dict()
    again = PromptSampler([Source("a", rows), Source("b", rows, 2.0)], seed=3)
    again.load_state_dict(state)
    assert again.draw(20) == sampler.draw(20)


# --- the range of rewards -----------------------------------------------------------------------------------------------


class PlainPacker:
    """Prompt and completion end to end."""

    class special_tokens:
        @staticmethod
        def check(ids: Any) -> None: ...

        check_ending = check

    def get_policy_input(self, trajectory: Trajectory) -> dict[str, Any]:
        ids = trajectory.prompt_ids + trajectory.token_ids
        return {"input_ids": ids, "mask": [False] * len(trajectory.prompt_ids) + trajectory.mask}


def group(env: str, *rewards: float | None) -> Group:
    made = [
        Trajectory([1], [2, 3], [True] * 2, [-0.5] * 2, [0] * 2, "stop", r, group_id=env, sample_id=f"{env}/{i}", env=env)
        for i, r in enumerate(rewards)
    ]
    return Group(env, {}, made)


def test_rewards_train_within_their_range_and_are_recorded_as_they_are() -> None:
    groups = [group("points", 0, 50, 100, None), group("plain", 0, 0.5, 1, None), group("over", 0, 20)]
    cohort = Cohort(1, [Draw(i, 0, g.group_id, "r", {}) for i, g in enumerate(groups)], groups)
    ranges = {"points": (0.0, 100.0), "over": (0.0, 10.0)}
    batch = make_batch(cohort, build_objective("dr_grpo"), PlainPacker(), discard_tied=True, ranges=ranges)  # type: ignore[arg-type]
    named = batch.advantages
    assert [named[f"points/{i}"] for i in range(4)] == [named[f"plain/{i}"] for i in range(4)] == [-0.5, 0, 0.5, 0]
    assert {row.id: row.reward for row in batch.rows}["points/2"] == 1.0
    assert batch.metrics["reward/points/max"] == 100 and batch.metrics["reward/max"] == 100
    assert batch.metrics["rollout/over/out_of_range_count"] == 1 and batch.metrics["rollout/points/out_of_range_count"] == 0
    assert named["over/1"] == 1.0  # 20 of 10 is 2: counted, and not cut off


def test_a_cohort_without_labels_has_the_metrics_of_all_alone() -> None:
    (one,) = group("", 1.0).trajectories
    assert not any("//" in name for name in cohort_metrics([one]))
