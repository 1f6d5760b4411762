"""The whole loop with the real parts: tiny model, hf engine, reward processes, weight plane, checkpoints. Seconds each."""

import json
import signal
from pathlib import Path

import pytest
import torch
from small_runs import SMALL, start

from posttrain.config.load import load_config
from posttrain.errors import ConfigError, RunAborted, RunInterrupted
from posttrain.loop import checkpoint
from posttrain.loop.run import train
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.rollouts import read_rollouts


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """One root for all runs, so that the model is made once."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def whole(root):
    """An undisturbed run of four steps."""
    return start(root)


STEADY = ("reward/mean", "loss", "grad_norm", "length/mean", "policy/ratio_min", "tokens/trained")


def steady(run, past=0):
    return [{k: row.get(k) for k in ("step", *STEADY)} for row in read_metrics(run) if row["step"] > past]


def weights(run, step):
    found = [c for c in checkpoint.find(Path(run) / "checkpoints") if c.step == step]
    return {p.name: p.read_bytes() for p in sorted(found[0].policy.rglob("*")) if p.suffix == ".safetensors"}


def test_a_run_leaves_everything_that_the_design_names(whole):
    run = whole.run
    assert whole.steps_done == 4
    for name in ("config.yaml", "overrides.txt", "provenance.json", "metrics.jsonl", "events.jsonl", "ledger.jsonl"):
        assert (run / name).stat().st_size > 0, name
    assert [c.step for c in checkpoint.find(run / "checkpoints")] == [2, 4]
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]
    assert next(row["step"] for row in read_validation(run)) == 0 and read_validation(run)[-1]["step"] == 4


def test_every_token_was_sampled_by_the_version_that_its_batch_updates(whole):
    for step in (1, 2, 3, 4):
        rows = read_rollouts(whole.run, step)
        assert len(rows) == 16
        assert {version for row in rows for version in row["weight_versions"]} == {step - 1}


def test_engine_and_trainer_agree_on_policy(whole):
    for row in read_metrics(whole.run):
        assert row["policy/ratio_min"] == pytest.approx(1, abs=1e-4)
        assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-4)


def test_every_draw_ends_once(whole):
    lines = [json.loads(line) for line in (whole.run / "ledger.jsonl").read_text().splitlines()]
    assert sorted(line["draw"] for line in lines) == list(range(16))
    assert {line["state"] for line in lines} == {"trained"}


def test_the_same_run_again_is_bitwise_the_same(root, whole):
    again = start(root)
    assert steady(again.run) == steady(whole.run)
    assert weights(again.run, 4) == weights(whole.run, 4)


def test_a_killed_run_resumes_to_the_same_bits(root, whole):
    """Stop after step 3 (the last checkpoint is of step 2) as a crash would, then resume."""
    run = crash_after(root, 3)
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3]
    resumed = start(root, resume=run)
    assert resumed.run == run and resumed.steps_done == 2
    assert steady(run) == steady(whole.run)
    assert weights(run, 4) == weights(whole.run, 4)
    assert list(run.glob("metrics.jsonl.superseded*"))
    draws = [json.loads(line)["draw"] for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert sorted(draws) == list(range(16))


def crash_after(root, step):
    from posttrain.loop.controller import Controller

    class Crash(BaseException):
        pass

    original = Controller._train

    async def dying(self, admitted):
        if admitted.batch.step == step + 1:
            await self.checkpoints.written()
            raise Crash
        return await original(self, admitted)

    before = set(root.iterdir())
    Controller._train = dying
    try:
        with pytest.raises(Crash):
            start(root)
    finally:
        Controller._train = original
    (run,) = [p for p in set(root.iterdir()) - before if (p / "config.yaml").exists()]
    return run


def test_nothing_left_to_do_is_said_and_is_no_error(root, whole):
    again = start(root, resume=whole.run)
    assert again.steps_done == 0
    assert "Nothing left to do" in again.summary.lines()[0]


def test_fewer_steps_than_are_done_are_nothing_to_do_either(root, whole):
    again = start(root, "rl.steps=1", resume=whole.run)
    said = again.summary.lines()[0]
    assert again.steps_done == 0 and "the run has" in said and "steps, more than rl.steps=1, 0 done now" in said


def test_a_run_goes_on_for_longer_when_asked(root, whole):
    run = start(root, "rl.steps=2").run
    longer = start(root, "rl.steps=4", resume=run)
    assert longer.steps_done == 2
    assert steady(run) == steady(whole.run)


def test_other_changes_on_resume_are_refused(root, whole):
    with pytest.raises(ConfigError, match="cannot change") as caught:
        start(root, "rl.group_size=8", "seed=3", resume=whole.run)
    assert "rl.group_size: 4 → 8" in str(caught.value) and "seed: 0 → 3" in str(caught.value)


def test_micro_batches_change_nothing_beyond_rounding(root, whole):
    split = start(root, "rl.micro_batch_per_replica=4")
    for mine, theirs in zip(steady(split.run), steady(whole.run), strict=True):
        assert mine["reward/mean"] == theirs["reward/mean"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("objective", ["rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo", "sapo", "dpo", "nft"])
def test_the_algorithm_is_swapped_by_name(root, objective):
    done = start(
        root, f"rl.objective.name={objective}", "rl.steps=2", "rl.discard_group_zero_advantage=true", "validation.prompts=0"
    )
    assert done.steps_done == 2
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in read_metrics(done.run) if row["loss"] is not None)


def test_several_optimizer_steps_per_batch(root):
    done = start(root, "rl.mini_batch_per_replica=8", "rl.steps=2")
    assert [row["optimizer_steps"] for row in read_metrics(done.run)] == [2, 2]


def test_a_task_with_nothing_to_learn_stops_with_a_diagnosis(root):
    with pytest.raises(RunAborted, match="2 batches in a row had nothing to learn from") as caught:
        start(
            root,
            "rl.max_uninformative_batches=2",
            "rl.discard_group_zero_advantage=true",
            "rollout.max_tokens=1",
            "environments=[{name: arithmetic, options: {digits: 4, operations: ['*']}}]",
        )
    assert "all 0" in str(caught.value) and caught.value.exit_code == 5


def test_a_full_disk_is_said_and_the_last_checkpoint_is_intact(root, monkeypatch):
    import errno

    from posttrain.policy.policy import Policy

    original = Policy.snapshot

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(root.iterdir())
    monkeypatch.setattr(Policy, "snapshot", lambda self: full if self.version >= 4 else original(self))
    with pytest.raises(RunInterrupted, match="checkpoint of step 4") as caught:
        start(root)
    assert caught.value.exit_code == 75 and "disk is full" in str(caught.value)
    monkeypatch.setattr(Policy, "snapshot", original)
    (run,) = [p for p in set(root.iterdir()) - before if (p / "config.yaml").exists()]
    assert [c.step for c in checkpoint.find(run / "checkpoints")] == [2]
    assert start(root, resume=run).steps_done == 2


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_end_with_their_codes_and_the_run_can_go_on(tmp_path, number, code):
    """The real command, interrupted as a person would."""
    import subprocess
    import sys
    import time

    command = [
        sys.executable,
        "-m",
        "posttrain.cli",
        "train",
        *SMALL,
        "rl.steps=400",
        "checkpoint.every=1",
        "--run",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.glob("*/checkpoints/step_*/loop.json")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code, out
    assert "Traceback" not in out
    (run,) = [p for p in tmp_path.iterdir() if (p / "config.yaml").exists()]
    last = checkpoint.find(run / "checkpoints")[-1]
    assert train(load_config([f"rl.steps={last.step + 1}"], config_file=run / "config.yaml"), resume=run).steps_done == 1


def test_the_first_step_is_not_charged_with_bringing_up_the_engine(whole):
    """The update to version 0, with its canary, belongs to no batch step."""
    first = read_metrics(whole.run)[0]
    assert "weights/canary_max" not in first and first["time/sync_s"] > 0
