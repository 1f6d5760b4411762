"""Evals of real runs, tiny model and hf engine: exactly one version, nothing of training changed, and what fails is told."""

import json
from pathlib import Path
from typing import Any

import pytest
from eval_toys import folder

from posttrain.data.environment import Environment
from posttrain.errors import DataError
from posttrain.evals.result import Results
from posttrain.hooks import Hook
from posttrain.testing.letters import Letters
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts, rollout_steps

LETTERS = "posttrain.testing.letters:Letters"
EVALS = [
    {"name": LETTERS, "label": "letters", "prompts": 10, "samples": 4, "k": [1, 2], "every": 2},
    {"name": LETTERS, "label": "held", "split": "holdout", "prompts": 6},
]


class Broken(Letters):
    """A reward that always raises."""

    def compute_reward(self, state: Any) -> Any:
        raise RuntimeError("no sandbox")


class Dead(Environment):
    """Nothing can be scored: the whole eval fails."""

    def dataset(self, split: Any) -> Any:
        return [{"id": "a"}]

    def format_prompt(self, task: Any) -> Any:
        return "letter"

    async def compute_reward(self, state: Any) -> Any:
        return 1.0


class Watch(Hook):
    """Keeps what it is told of evals."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, str, dict[str, float]]] = []

    def eval_end(self, step: int, label: str, metrics: Any) -> None:
        self.told.append((step, label, dict(metrics)))


@pytest.fixture(scope="module")
def model(posttrain_tiny_model: Path) -> Path:
    return posttrain_tiny_model


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four steps with evals before, at step 2 and after."""
    from posttrain.testing.tiny_run import TinyRun

    run = TinyRun(model, tmp_path_factory.mktemp("evals"))
    return run(["rl.steps=4", "checkpoint.every=2", "checkpoint.keep_last=null"], evals=EVALS, rl={"optimizer": {"lr": 1e-3}})


def test_before_while_and_after_with_files_a_summary_and_a_table(whole: Any) -> None:
    evals = whole.run / "evals"
    assert [name for name in folder(evals) if name.endswith((".jsonl", ".json", ".txt"))] == [
        "held/0.jsonl", "held/4.jsonl", "letters/0.jsonl", "letters/2.jsonl", "letters/4.jsonl", "summary.json", "table.txt"
    ]  # fmt: skip
    assert [(one["label"], one["step"]) for one in whole.evals()] == [
        ("letters", 0), ("letters", 2), ("letters", 4), ("held", 0), ("held", 4)
    ]  # fmt: skip
    lines = [json.loads(line) for line in (evals / "letters" / "2.jsonl").read_text().splitlines()]
    assert len(lines) == 10 and all(line["n"] == 4 and len(line["rewards"]) == 4 for line in lines)
    assert all(line["correct"] == sum(r == 1 for r in line["rewards"]) for line in lines)
    table = (evals / "table.txt").read_text()
    assert "4 - 0" in table and "pass@2" in table and "none of the 16 eval rows is among the 16 draws" in table
    assert "eval letters of step 2: accuracy" in (whole.run / "events.jsonl").read_text()


def test_every_token_is_of_the_version_of_its_step(whole: Any) -> None:
    import pyarrow.parquet as pq

    for step in (0, 2, 4):
        rows = pq.read_table(whole.run / "evals" / "letters" / f"completions_{step:06d}.parquet").to_pylist()
        assert len(rows) == 40 and {v for row in rows for v in row["weight_versions"]} == {step}


def test_eval_samples_are_no_draws_and_held_out_rows_never_train(whole: Any) -> None:
    ledger = [json.loads(line) for line in (whole.run / "ledger.jsonl").read_text().splitlines()]
    assert {line["env"] for line in ledger} == {LETTERS} and len(ledger) == 16
    held = {json.loads(line)["id"] for line in (whole.run / "evals" / "held" / "0.jsonl").read_text().splitlines()}
    assert held == {str(n) for n in range(6)} and not held & {line["row"] for line in ledger}
    checked = whole.evals()[0]["checked"]
    assert (checked["ledger_draws"], checked["eval_rows"], checked["trained"], checked["unknown"]) == (16, 16, [], "")
    for step in rollout_steps(whole.run):
        assert all(not row["env"].startswith("eval:") for row in read_rollouts(whole.run, step))


def test_training_is_to_the_bit_what_it_is_without_evals(whole: Any, model: Path, tmp_path: Path) -> None:
    from posttrain.testing.tiny_run import TinyRun

    only_held = [EVALS[1] | {"before": False, "after": True}]  # the same training rows
    other = TinyRun(model, tmp_path)(["rl.steps=4"], evals=only_held, rl={"optimizer": {"lr": 1e-3}})
    names = ("step", "loss", "reward/mean", "grad_norm", "length/mean")
    found = [[[row[name] for name in names] for row in read_metrics(run)] for run in (other.run, whole.run)]
    assert found[0] == found[1]


def test_a_run_that_goes_on_does_what_is_missing_and_no_more(whole: Any, model: Path, tmp_path: Path) -> None:
    import shutil

    from posttrain.testing.tiny_run import TinyRun

    copy = tmp_path / "copy"
    shutil.copytree(whole.run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_4")
    before = (copy / "evals" / "letters" / "2.jsonl").stat().st_mtime_ns
    again = TinyRun(model, tmp_path)([], resume=copy)
    assert again.steps_done == 2
    assert [(one["label"], one["step"]) for one in again.evals()] == [(one["label"], one["step"]) for one in whole.evals()]
    assert (copy / "evals" / "letters" / "2.jsonl").stat().st_mtime_ns == before
    assert (copy / "evals" / "letters" / "4.jsonl.superseded").exists()
    old, new = (Results(run / "evals").read()[2] for run in (whole.run, copy))
    assert old.rows == new.rows  # the same weights, the same noise


def test_what_fails_is_told_and_training_goes_on(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.evals import during

    ran = during.run_eval

    async def fails_once(one: Any, rollouts: Any, config: Any, version: int, **more: Any) -> Any:
        if one.label == "dead" and version == 0:
            raise RuntimeError("no machine")
        return await ran(one, rollouts, config, version, **more)

    monkeypatch.setattr(during, "run_eval", fails_once)
    watch = Watch()
    entries = [{"name": Broken, "label": "broken", "prompts": 3, "samples": 2}, {"name": Dead, "label": "dead"}]
    result = tiny_run(["rl.steps=2"], evals=entries, hooks=[watch])
    assert result.steps_done == 2
    broken = next(one for one in result.evals() if one["label"] == "broken")
    assert broken["unscorable"] == {"raised": 6} and broken["accuracy"]["mean"] == 0 and broken["completions"] == 6
    assert [(one["label"], one["step"]) for one in result.evals() if one["label"] == "dead"] == [("dead", 2)]
    assert "eval dead of step 0 failed, training goes on: RuntimeError: no machine" in (result.run / "events.jsonl").read_text()
    assert "6 raised of 6" in (result.run / "evals" / "table.txt").read_text()
    told = {(step, label): metrics for step, label, metrics in watch.told}
    assert told[0, "dead"] == {"eval/dead/failed": 1.0}
    assert told[0, "broken"]["eval/broken/unscorable_count"] == 6 and told[2, "dead"]["eval/dead/accuracy"] == 1


def test_under_arrival_versions_are_exact_too_and_training_does_not_wait(tiny_run: Any) -> None:
    result = tiny_run(
        ["rl.steps=4", "loop.commit_order=arrival", "rollout.max_async_rollout=1"], evals=[EVALS[0] | {"every": 1}]
    )
    assert [one["step"] for one in result.evals()] == [0, 1, 2, 3, 4]


def test_rows_that_train_and_are_asked_end_the_run_before_it_begins(tiny_run: Any) -> None:
    entry = {"name": LETTERS, "label": "same", "split": "train", "prompts": 3}
    with pytest.raises(DataError, match="trains, and the eval same asks it") as caught:
        tiny_run([], evals=[entry])
    assert "split=holdout" in caught.value.fix and not caught.value.retryable
