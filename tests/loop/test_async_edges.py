"""Edges of the asynchronous loop that a review found: each was a bug once. Tiny model, hf engine; seconds each."""

import asyncio
import json
from pathlib import Path

import pytest
from small_runs import start as begin

from posttrain.errors import PackerError, RunAborted
from posttrain.loop import checkpoint
from posttrain.loop.controller import Controller
from posttrain.loop.rollouts import Rollouts
from posttrain.rollout.hf import HFEngine
from posttrain.tracking.metrics import read_metrics

EDGES = ("rl.steps=6", "checkpoint.every=1", "validation.prompts=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("outputs")


def start(root, *overrides, resume=None):
    return (begin(root, *overrides, resume=resume) if resume else begin(root, *EDGES, *overrides)).run


def failed(root, kind, *overrides, match):
    before = set(root.iterdir())
    with pytest.raises(kind, match=match):
        start(root, *overrides)
    (run,) = [path for path in set(root.iterdir()) - before if (path / "config.yaml").exists()]
    return run


def ended(run):
    return sorted(json.loads(line)["draw"] for line in (run / "ledger.jsonl").read_text().splitlines())


@pytest.mark.parametrize("order", ["logical", "arrival"])
def test_what_a_packer_raises_while_prompts_are_formatted_ahead_ends_the_run_at_its_turn(root, monkeypatch, order):
    original = Rollouts.prepare

    def bad(self, draw):
        if draw.index == 6:
            raise PackerError("no ids", cause="a packer of one's own")
        original(self, draw)

    monkeypatch.setattr(Rollouts, "prepare", bad)
    failed(root, PackerError, f"loop.commit_order={order}", "rl.data.max_bad_rows=5", match="no ids")


@pytest.mark.parametrize("order", ["logical", "arrival"])
def test_an_update_that_fails_half_way_is_healed_also_under_prompts_in_flight(root, monkeypatch, order):
    original, failures = HFEngine.apply, []

    async def half(self, staged):
        if staged.version == 2 and not failures:
            failures.append(staged.version)
            raise OSError("half-way")
        await original(self, staged)

    monkeypatch.setattr(HFEngine, "apply", half)
    run = start(
        root, f"loop.commit_order={order}", "rollout.max_async_rollout=2", "rollout.max_num_seqs=8", "rollout.max_tokens=64",
        "rollout.max_model_len=128", "weights.on_failure=rebuild_and_retry",
    )  # fmt: skip
    assert failures == [2] and len(read_metrics(run)) == 6 and ended(run) == list(range(24))


def test_generation_that_lags_behind_a_checkpoint_far_ahead_of_it_loses_no_cohort(root, monkeypatch):
    """A checkpoint of step k waits for cohort k + 3 while training goes on."""
    original = Rollouts.run

    async def slow(self, draws, **kwargs):
        found = await original(self, draws, **kwargs)
        await asyncio.sleep(0.2)
        return found

    monkeypatch.setattr(Rollouts, "run", slow)
    run = start(root, "rollout.max_async_rollout=3", "checkpoint.every=4", "rl.steps=10")
    assert [found.step for found in checkpoint.find(run / "checkpoints")] == [4, 8, 10] and ended(run) == list(range(40))


def test_fewer_steps_and_then_more_lose_no_draw(root):
    run = start(root, "rollout.max_async_rollout=2")
    start(root, "rl.steps=4", resume=run / "checkpoints" / "step_3")
    start(root, "rl.steps=7", resume=run)
    assert ended(run) == list(range(28)) and len(read_metrics(run)) == 7


def test_a_failure_leaves_the_checkpoint_that_was_copied_before_it(root, monkeypatch):
    original = Controller._train

    async def dying(self, admitted):
        if admitted.batch.step == 3:
            raise RunAborted("boom")
        return await original(self, admitted)

    monkeypatch.setattr(Controller, "_train", dying)
    run = failed(root, RunAborted, "checkpoint.every=2", match="boom")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_2"]


def test_what_a_killed_writer_left_is_gone_after_a_resume(root):
    run = start(root)
    torn = run / "checkpoints" / "tmp_step_4"
    torn.mkdir()
    (torn / "half").write_text("x")
    start(root, resume=run / "checkpoints" / "step_3")
    assert not torn.exists() and len(read_metrics(run)) == 6


COUNTING = '''
from posttrain import Environment


class Counting(Environment):
    """Asks by how many answers it has seen, those of a validation too."""

    def __init__(self, options=None):
        super().__init__(options)
        self.seen = 0

    def dataset(self, split):
        numbers = range(10, 15) if split == "train" else range(15, 20)
        return [{"id": f"{a}+{b}", "answer": str(a + b)} for a in numbers for b in range(10)]

    def format_prompt(self, task):
        return f"{self.seen % 7}+1={self.seen % 7 + 1}?{task['id']}="

    def compute_reward(self, state):
        return float(len(state.completion) % 2)

    async def finish_reward(self, state, reward):
        self.seen += 1
        return reward

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
'''


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_validation_that_moves_an_environment_is_done_again_after_a_resume(root, ahead):
    (root / "counting.py").write_text(COUNTING)
    run = start(
        root, f"environments=[{{name: '{root}/counting.py:Counting'}}]", "validation.prompts=3", "validation.every=2",
        f"rollout.max_async_rollout={ahead}",
    )  # fmt: skip

    def seen():
        found = {one.step: one for one in checkpoint.find(Path(run) / "checkpoints")}
        return [saved.state for step in range(3, 7) for saved in found[step].plugin_states()]

    whole, rows = seen(), (run / "validation.jsonl").read_text().count("\n")
    start(root, resume=run / "checkpoints" / "step_2")
    assert seen() == whole and (run / "validation.jsonl").read_text().count("\n") == rows


def test_a_cohort_of_a_checkpoint_keeps_the_cells_that_it_was_dealt_to(root, monkeypatch):
    """A resume on another number of rollout replicas deals only what is drawn from then on by its own cells."""
    sampling = ("rl.min_informative_groups=2", "rl.dynamic_sampling_max_extra_rollouts=1",
                "rl.dynamic_sampling_on_budget_exhausted=proceed", "rollout.max_async_rollout=2")  # fmt: skip
    with monkeypatch.context() as two_replicas:
        for module in ("controller", "checkpointer", "gathering"):
            two_replicas.setattr(f"posttrain.loop.{module}.cell_groups", lambda config: (2, 2))
        run = start(root, *sampling)
    saved = run / "checkpoints" / "step_2"
    assert json.loads((saved / "loop.json").read_text())["cells"] == [2, 2]
    start(root, resume=saved)
    assert len(read_metrics(run)) == 6 and len(set(ended(run))) == len(ended(run))
    assert json.loads((run / "checkpoints" / "step_6" / "loop.json").read_text())["cells"] == [4]
