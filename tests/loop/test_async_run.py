"""The asynchronous loop with the real parts: overlap, versions of tokens, exact resume. Tiny model, hf engine; seconds each."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from small_runs import start as begin

from posttrain.errors import RunAborted
from posttrain.loop import checkpoint
from posttrain.loop.controller import Controller
from posttrain.rollout.hf import HFEngine
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts

ASYNC = ("rl.steps=6", "checkpoint.every=1", "model.factory_kwargs.steps=100")  # taught enough to have a gradient each step
STEADY = ("step", "reward/mean", "loss", "grad_norm", "lr", "length/mean", "policy/ratio_min", "tokens/trained")


class Crash(BaseException):
    pass


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("outputs")


def start(root, *overrides, resume=None):
    return begin(root, *overrides, resume=resume) if resume else begin(root, *ASYNC, *overrides)


def crash(root, step, *overrides):
    """A run that dies when it begins to train `step`, with a checkpoint of the step before in whatever state it is, but for the
    first: without it there is nothing to resume."""
    original, before = Controller._train, set(root.iterdir())

    async def dying(self, admitted):
        if admitted.batch.step == step:
            if step == 2:
                await self.checkpoints.written()
            raise Crash
        return await original(self, admitted)

    Controller._train = dying
    try:
        with pytest.raises(Crash):
            start(root, *overrides)
    finally:
        Controller._train = original
    (run,) = [p for p in set(root.iterdir()) - before if (p / "config.yaml").exists()]
    return run


def rows(run):
    return [tuple(row.get(key) for key in STEADY) for row in read_metrics(run)]


def weights(run, step):
    found = {c.step: c for c in checkpoint.find(Path(run) / "checkpoints")}[step]
    return {p.name: p.read_bytes() for p in sorted(found.policy.rglob("*")) if p.is_file()}


def ends(run):
    """How every draw ended: it may end once."""
    lines = [json.loads(line) for line in (Path(run) / "ledger.jsonl").read_text().splitlines()]
    assert max(Counter(line["draw"] for line in lines).values()) == 1
    return sorted((line["draw"], line["epoch"], line["row"], line["state"], line["step"], line.get("cause")) for line in lines)


def versions(run, step):
    return {v for row in read_rollouts(run, step) for v in row["weight_versions"] if v >= 0}


@pytest.fixture(scope="module", params=[1, 2, 3])
def ahead(request):
    return request.param


@pytest.fixture(scope="module")
def settings(ahead):
    return f"rollout.max_async_rollout={ahead}", "rl.lr_scheduler.name=linear"


@pytest.fixture(scope="module")
def whole(root, settings):
    return start(root, *settings).run


def test_a_cohort_is_sampled_by_the_version_that_the_run_ahead_leaves(whole, ahead):
    assert [versions(whole, step) for step in range(1, 7)] == [{max(0, step - 1 - ahead)} for step in range(1, 7)]
    assert [end[0] for end in ends(whole)] == list(range(24))


def test_the_learning_rate_falls_step_by_step(whole):
    assert [row["lr"] for row in read_metrics(whole)] == pytest.approx([2e-4 * left / 6 for left in (6, 5, 4, 3, 2, 1)])


def test_the_same_run_again_is_bitwise_the_same(root, whole, settings):
    again = start(root, *settings).run
    assert rows(again) == rows(whole) and weights(again, 6) == weights(whole, 6)


@pytest.mark.parametrize("step", [2, 5])
def test_a_killed_run_resumes_to_the_same_bits(root, whole, settings, step):
    run = crash(root, step, *settings)
    found = checkpoint.find(run / "checkpoints")[-1]
    start(root, resume=run)
    assert rows(run) == rows(whole)
    assert weights(run, 6) == weights(whole, 6)
    assert ends(run) == ends(whole)
    assert [versions(run, step) for step in range(1, 7)] == [versions(whole, step) for step in range(1, 7)]
    clock, seconds = [row["time/wall_s"] for row in read_metrics(run)], found.loop_state()["state"]["seconds"]
    assert all(earlier < later for earlier, later in pairwise(clock))
    assert clock[found.step - 1] == seconds
    assert clock[found.step] == pytest.approx(seconds + read_metrics(run)[found.step]["time/step_s"])


def test_every_checkpoint_leads_to_the_same_end(root, whole, settings):
    copies = start(root, *settings).run
    for step in (1, 3, 5):
        start(root, resume=copies / "checkpoints" / f"step_{step}")
        assert rows(copies) == rows(whole) and weights(copies, 6) == weights(whole, 6) and ends(copies) == ends(whole)


ARRIVAL = ("loop.commit_order=arrival", "rollout.max_num_seqs=8")


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_arrival_trains_every_draw_once_and_never_on_tokens_that_are_too_old(root, ahead):
    run = start(root, *ARRIVAL, f"rollout.max_async_rollout={ahead}").run
    assert len(rows(run)) == 6
    trained = [end for end in ends(run) if end[3] == "trained"]
    assert len(trained) == 24 and Counter(end[4] for end in trained) == dict.fromkeys(range(1, 7), 4)
    for step in range(1, 7):
        assert all(step - 1 - (8 if ahead else 0) <= version <= step - 1 for version in versions(run, step))


@pytest.mark.parametrize("order", ["logical", "arrival"])
def test_a_token_that_an_engine_stamps_with_another_version_ends_a_run_that_is_to_be_on_policy(root, order, monkeypatch):
    """Proven per token: the first batch is trained, of the second one token lies."""
    original = HFEngine.generate

    async def lying(self, requests):
        async for done in original(self, requests):
            if done.request_id.startswith("validation") or done.versions[0] != 1:
                yield done
            else:
                yield replace(done, versions=[*done.versions[:-1], 0])

    monkeypatch.setattr(HFEngine, "generate", lying)
    with pytest.raises(RunAborted, match="was sampled by version 0, not by version 1") as caught:
        start(root, f"loop.commit_order={order}", "rollout.max_async_rollout=0", "rl.steps=3")
    assert caught.value.code == "off-policy"


def test_arrival_resumes_with_every_draw_ending_once(root):
    run = crash(root, 4, *ARRIVAL, "rollout.max_async_rollout=2")
    start(root, resume=run)
    trained = [end for end in ends(run) if end[3] == "trained"]
    assert len(trained) == 24 and len(rows(run)) == 6
    assert [end[0] for end in trained] == list(range(24))


CAP = 1.2
CORRECTIONS = {
    "tis": ("rl.objective.use_tis=true", f"rl.objective.tis_cap={CAP}"),
    "icepop": (
        "rl.objective.use_tis=true", f"rl.objective.tis_cap={CAP}", "rl.objective.tis_mode=icepop", "rl.objective.tis_floor=0.2",
    ),
    "sequence mask": ("rl.objective.seq_is_masking=true",),
    "the clip": (),
}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_for_age_see_the_versions_and_log_probs_of_real_tokens(root, name):
    """Two versions behind at a learning rate that moves them: engine and trainer differ, and the run says why."""
    order = "arrival" if name == "tis" else "logical"
    result = start(
        root, f"loop.commit_order={order}", "rollout.max_async_rollout=2", "validation.prompts=0",
        *CORRECTIONS[name],
    )  # fmt: skip
    late = [row for row in read_metrics(result.run) if row["step"] > 2 and row["loss"] is not None]
    assert late and all(row["staleness/max"] >= 1 for row in late)
    assert all(row["policy/logprob_gap"] > 1e-3 and row["policy/ratio_min"] < 1 for row in late)
    assert all(abs(row["loss"]) < 100 for row in late) and any(row["grad_norm"] > 0 for row in late)
    if name in ("tis", "icepop"):  # nobody but the cap and the floor takes the mean weight below the mean ratio
        beyond = [row for row in late if row["policy/ratio_max"] > CAP + 0.1]
        assert beyond and all(row["policy/tis_weight"] < row["policy/ratio_mean"] - 1e-4 for row in beyond)
    if name == "sequence mask":
        assert any(0 < row["policy/seq_masked_share"] < 1 for row in late)
    if max(row["policy/logprob_gap"] for row in late[:-1]) > 0.1:
        assert "most likely: version" in (result.run / "events.jsonl").read_text()


def test_a_large_gap_between_engine_and_trainer_is_explained_once(root):
    run = start(root, "rollout.max_async_rollout=2", "rl.optimizer.lr=3e-3", "validation.prompts=0").run
    notes = [json.loads(line)["args"]["text"] for line in (run / "events.jsonl").read_text().splitlines() if '"note"' in line]
    told = [note for note in notes if note.startswith("most likely:")]
    assert len(told) == 1 and told[0].startswith("most likely: version")
    assert sum(row.get("policy/logprob_gap", 0) > 0.1 for row in read_metrics(run)) > 1
