"""Dynamic sampling, the overlong penalty and the filters in whole runs that are one batch step ahead of themselves.

Whether a group is informative is a matter of its row: `Z` all 0, `O` all 1, `i` every other sample is right. A batch has four
groups, and three have to be informative. In the order of the rows that is, with one extra round: eight draws for the first batch
(one informative group in the base draw, four in the extra round, so one is surplus), four for the second, and so on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.load import load_config
from posttrain.errors import RunAborted
from posttrain.loop import checkpoint
from posttrain.loop.controller import Controller
from posttrain.loop.replay import replay
from posttrain.loop.run import train
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.testing.tiny_run import TinyRun
from posttrain.tracking.agreement import EQUAL
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts

ORDERS = pytest.mark.parametrize("order", ["logical", "arrival"])
BASE = [
    "rollout.max_async_rollout=1", "validation.prompts=0", "rl.data.shuffle=false", "rl.objective.name=grpo", "rl.steps=6",
    "rl.min_informative_groups=3", "rl.dynamic_sampling_max_extra_rollouts=1", "checkpoint.every=1", "checkpoint.keep_last=null",
    "tracking.rollouts_every=1", "weights.canary_every=0",
]  # fmt: skip
STEADY = ("step", "reward/mean", "loss", "grad_norm", "train/dynamic_sampling_rounds", "train/effective_batch")

ROWS = '''
from posttrain.testing.letters import Letters

KINDS = "ZOiZiiiiiiiZ"

class Known(Letters):
    def kind(self, number):
        return KINDS[number % 12]

    def compute_reward(self, state):
        kind, sample = self.kind(state.task["number"]), int(state.trajectory.sample_id.rpartition("/")[2])
        return {"Z": 0.0, "O": 1.0, "i": float(sample % 2)}[kind]

class Dry(Known):
    """Nothing to learn from in three rounds of the fifth batch."""

    def kind(self, number):
        return "Z" if 24 <= number < 36 else super().kind(number)
'''


class Crash(BaseException):
    pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling")
    write_tiny_model(folder / "model")
    (folder / "rows.py").write_text(ROWS)
    return folder


@pytest.fixture(scope="module")
def start(site: Path) -> Any:
    run = TinyRun(site / "model", site)

    def started(env: str, *overrides: str, resume: Path | None = None) -> Path:
        if resume is not None:
            folder = resume if (resume / "config.yaml").exists() else resume.parents[1]
            return train(load_config(overrides, config_file=folder / "config.yaml"), resume=resume).run
        return run([*BASE, *overrides], env=f"{site}/rows.py:{env}").run

    return started


@pytest.fixture(scope="module")
def whole(start: Any) -> Path:
    return start("Known")  # type: ignore[no-any-return]


def ends(run: Path) -> list[tuple[Any, ...]]:
    """How every draw ended: those that were taken end once."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    found = sorted((line["draw"], line["step"], line["state"], line.get("cause", "")) for line in lines)
    assert [one[0] for one in found] == list(range(len(found)))
    return found


def column(run: Path, name: str) -> list[Any]:
    return [row.get(name) for row in read_metrics(run)]


def rows(run: Path) -> list[Any]:
    return [[row.get(name) for name in STEADY] for row in read_metrics(run)]


def weights(run: Path, step: int) -> bytes:
    found = {one.step: one for one in checkpoint.find(run / "checkpoints")}[step]
    return (found.policy / "model.safetensors").read_bytes()


def trained_kinds(run: Path, step: int, kinds: str = "ZOiZiiiiiiiZ") -> Counter[str]:
    """The kinds of the groups that trained in a batch step."""
    return Counter(kinds[draw % 12] for draw, at, state, _ in ends(run) if at == step and state == "trained")


def test_quotas_are_met_by_extra_rounds_and_every_draw_ends_as_planned(whole: Path) -> None:
    assert column(whole, "train/dynamic_sampling_rounds") == [2, 1] * 3
    assert column(whole, "train/dynamic_sampling_extra_prompts") == [4, 0] * 3
    assert column(whole, "train/dynamic_sampling_shortfall") == [0] * 6 and column(whole, "train/effective_batch") == [16] * 6
    assert column(whole, "train/informative_group_count") == [5, 3] * 3
    assert column(whole, "train/grpo_all_zero_group_count") == [2, 1] * 3
    assert column(whole, "train/grpo_all_one_group_count") == [1, 0] * 3
    planned = []
    for step in range(1, 7):
        first = 12 * ((step - 1) // 2) + 8 * ((step - 1) % 2)
        fates = ["uninformative", "uninformative", "", "uninformative", "", "", "", "surplus"] if step % 2 else [""] * 4
        planned += [(first + i, step, "dropped" if fate else "trained", fate) for i, fate in enumerate(fates)]
    assert ends(whole) == planned
    for step in range(1, 7):  # a cohort is of one version, its extra round too
        assert {v for row in read_rollouts(whole, step) for v in row["weight_versions"]} == {max(0, step - 2)}
        assert len(read_rollouts(whole, step)) == (32 if step % 2 else 16)


def test_under_arrival_quotas_are_met_too(start: Any) -> None:
    run = start("Known", "loop.commit_order=arrival")
    assert column(run, "train/dynamic_sampling_shortfall") == [0] * 6 and column(run, "train/effective_batch") == [16] * 6
    assert set(column(run, "train/dynamic_sampling_rounds")) <= {1, 2}
    for step in range(1, 7):
        assert trained_kinds(run, step)["i"] >= 3 and trained_kinds(run, step).total() == 4
    causes = Counter(cause for *_, cause in ends(run))
    assert set(causes) <= {"", "uninformative", "surplus", "unused"} and causes[""] == 24
    extra = sum(column(run, "train/dynamic_sampling_extra_prompts"))
    assert causes["uninformative"] + causes["surplus"] == extra


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_killed_run_resumes_to_the_same_bits(start: Any, whole: Path, site: Path, step: int, monkeypatch: Any) -> None:
    original, before = Controller._train, set((site / "runs").iterdir())

    async def dying(self: Controller, admitted: Any) -> Any:
        if admitted.batch.step == step:
            raise Crash
        return await original(self, admitted)

    monkeypatch.setattr(Controller, "_train", dying)
    with pytest.raises(Crash):
        start("Known")
    monkeypatch.undo()
    (run,) = [one for one in set((site / "runs").iterdir()) - before if (one / "config.yaml").exists()]
    assert checkpoint.find(run / "checkpoints")
    start("Known", resume=run)
    assert rows(run) == rows(whole) and weights(run, 6) == weights(whole, 6) and ends(run) == ends(whole)


def test_every_checkpoint_leads_to_the_same_end(start: Any, whole: Path) -> None:
    """Also those that hold a cohort of two rounds."""
    run = start("Known")
    for step in (5, 2, 1):
        start("Known", resume=run / "checkpoints" / f"step_{step}")
        assert rows(run) == rows(whole) and weights(run, 6) == weights(whole, 6) and ends(run) == ends(whole)


@ORDERS
def test_a_spent_budget_ends_the_run_and_a_larger_one_goes_on_with_the_same_draws(start: Any, order: str) -> None:
    with pytest.raises(RunAborted) as caught:
        start("Dry", f"loop.commit_order={order}")
    error = caught.value
    assert error.exit_code == 5 and error.code == "E7"
    run = error.run_dir  # type: ignore[attr-defined]
    step = 5 if order == "logical" else int(str(error).partition("batch_step=")[2].partition(":")[0])
    message = f"dynamic sampling batch_step={step}: replay cells [0] hold fewer informative trajectories than their quotas [12]"
    assert str(error).splitlines()[0] == message
    if order == "logical":
        assert error.cause == (
            "cell 0 has 0 of 3 informative groups of 4 trajectories after 2 round(s), 8 prompts: too few groups have "
            "rewards that disagree (8 were all 0, 0 all 1); the step did not train"
        )
    assert max(column(run, "step")) < step and checkpoint.find(run / "checkpoints")
    with pytest.raises(RunAborted, match="dynamic sampling batch_step="):
        start("Dry", resume=run)
    start("Dry", "rl.dynamic_sampling_max_extra_rollouts=6", resume=run)
    assert len(rows(run)) == 6 and sum(end[2] == "trained" for end in ends(run)) == 24
    if order == "logical":
        generous = start("Dry", "rl.dynamic_sampling_max_extra_rollouts=6")
        assert rows(run) == rows(generous) and ends(run) == ends(generous) and weights(run, 6) == weights(generous, 6)
        assert column(run, "train/dynamic_sampling_rounds") == [2, 1, 2, 1, 5, 1]


@pytest.mark.parametrize(("then", "now", "rounds"), [(2, 0, [3, 1]), (1, 6, [2, 3])])
def test_a_cohort_in_a_checkpoint_was_gathered_under_the_budget_of_then(start: Any, then: int, now: int, rounds: Any) -> None:
    """Cohort 5 is in the checkpoint of step 4; a resume with a smaller or a larger budget takes it as it is."""
    run = start(
        "Dry", f"rl.dynamic_sampling_max_extra_rollouts={then}", "rl.dynamic_sampling_on_budget_exhausted=proceed"
    )  # fmt: skip
    before = rows(run)
    budget = f"rl.dynamic_sampling_max_extra_rollouts={now}", "rl.dynamic_sampling_on_budget_exhausted=raise"
    start("Dry", *budget[: 2 if now else 1], resume=run / "checkpoints" / "step_4")
    assert rows(run)[:5] == before[:5] and column(run, "train/dynamic_sampling_rounds")[4:] == rounds
    assert len(ends(run)) == 24 + 4 * sum(rounds)


def test_the_command_ends_with_5(site: Path) -> None:
    settings = ["rl.group_size=4", "rl.batch_per_replica=16", "rollout.max_tokens=8", "rollout.max_model_len=99"]
    given = [f"model.name_or_path={site}/model", f"environments=[{{name: '{site}/rows.py:Known'}}]", "grid.threads=1"]
    budget = "rl.dynamic_sampling_max_extra_rollouts=0"
    options = [*BASE, *settings, *given, budget, "tracking.display=none", "--run", str(site / "cli")]
    command = [sys.executable, "-m", "posttrain.cli", "train", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = done.stderr
    assert done.returncode == 5, told
    assert "dynamic sampling batch_step=1: replay cells [0] hold fewer informative trajectories than their quotas [12]" in told
    assert "Traceback" not in told and "#a-batch-lacks-informative-groups" in told


@ORDERS
def test_proceed_fills_the_batch_and_logs_what_it_lacks(start: Any, order: str) -> None:
    run = start("Dry", f"loop.commit_order={order}", "rl.dynamic_sampling_on_budget_exhausted=proceed")
    short = column(run, "train/dynamic_sampling_shortfall")
    assert len(short) == 6 and sum(short) > 0 and column(run, "train/effective_batch") == [16] * 6
    assert sum(end[2] == "trained" for end in ends(run)) == 24
    if order == "logical":
        assert short == [0, 0, 0, 0, 3, 2] and column(run, "train/dynamic_sampling_rounds") == [2, 1, 2, 1, 2, 2]
        assert [end[0] for end in ends(run) if end[1:3] == (5, "trained")] == [24, 25, 26, 27]
        assert [end[3] for end in ends(run) if end[1:3] == (5, "dropped")] == ["uninformative"] * 4


SCREENED = [
    "rl.overlong_penalty_factor=0.5", "rl.overlong_buffer_tokens=6", "rl.filter_overlong=true", "rl.filter_repetition=true",
    "rl.filter_gibberish=true", "rl.gibberish_token_threshold=20", "rl.gibberish_logprob_offset=0.01",
]  # fmt: skip


@ORDERS
def test_the_penalty_and_the_filters_in_a_run_and_its_replay(start: Any, order: str) -> None:
    run = start("Known", *SCREENED, f"loop.commit_order={order}", "rl.dynamic_sampling_on_budget_exhausted=proceed")
    for step in range(1, 7):
        samples, metrics = read_rollouts(run, step), read_metrics(run)[step - 1]
        found = [row["info"]["screening"] for row in samples]
        for row, noted in zip(samples, found, strict=True):
            taken = 0.5 * min(max(len(row["token_ids"]) - 2, 0) / 6, 1.0)
            assert noted["raw_reward"] in (0.0, 1.0) and row["reward"] == noted["raw_reward"] - taken
            assert row["reward_parts"]["overlong_penalty"] == -taken
            assert ("overlong" in noted["filters"]) == (row["finish_reason"] == "length")
            assert not noted["filters"] or row["advantage"] == 0
        for name in ("overlong", "gibberish", "repetition"):
            assert metrics[f"filter/{name}_frac"] == sum(name in noted["filters"] for noted in found) / len(found)
        assert metrics["reward/overlong_penalty"] < 0 and 0 < metrics["filter/overlong_frac"] < 1
    assert any(column(run, "filter/gibberish_frac"))
    for step in (1, 2, 5):
        again = replay(run, step, say=lambda text: None)
        assert {line.verdict for line in again.lines} == {EQUAL}, again.lines
        named = {line.name for line in again.lines}
        assert {"loss", "grad_norm", "filter/overlong_frac", "reward/overlong_penalty", "train/informative_group_count"} <= named
        assert {"train/dynamic_sampling_rounds"} <= set(again.left_out)
