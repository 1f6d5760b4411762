"""What fails in flight: rewards, rows and completions. Each is counted under its cause, bounded, and stops none of the others.

The whole loop with a tiny model of random weights, one batch step ahead, in both commit orders.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.seeds import derive_seed
from posttrain.errors import DataError, RunAborted
from posttrain.loop import checkpoint
from posttrain.testing.sandbox import write_distribution
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.testing.tiny_run import LETTERS, TinyRun
from posttrain.tracking.metrics import read_metrics
from posttrain.tracking.rollouts import read_rollouts

ORDERS = pytest.mark.parametrize("order", ["logical", "arrival"])
BASE = [
    "rollout.max_async_rollout=1", "validation.prompts=0", "rl.data.shuffle=false", "rollout.reward_workers=2",
    "rl.objective.name=grpo", "checkpoint.keep_last=null", "weights.canary_every=0",
]  # fmt: skip

SICK = '''
import asyncio, os, time
from posttrain.testing.letters import Letters
from posttrain.types import Reward

KINDS = ("timeout", "died", "wrong_type", "not_finite", "infinite", "raised", "none", "parts")

class Sick(Letters):
    """A third of the rewards fails, in eight ways."""

    def compute_reward(self, state):
        place = state.seed % 24
        if place >= len(KINDS):
            return super().compute_reward(state)
        return getattr(self, KINDS[place])(state)

    def timeout(self, state):
        time.sleep(1000)

    def died(self, state):
        os._exit(3)

    def wrong_type(self, state):
        return [1.0, 0.0]  # a count that is not one

    def not_finite(self, state):
        return float("nan")

    def infinite(self, state):
        return Reward(float("-inf"), {"a": 1.0})

    def raised(self, state):
        raise ValueError("no such answer")

    def none(self, state):
        return None

    def parts(self, state):
        return Reward(1.0, {"format": "good"})

class SickOnTheLoop(Sick):
    """The same in a coroutine: it cannot die alone, and hangs without blocking."""

    async def compute_reward(self, state):
        place = state.seed % 24
        if place == 0:
            await asyncio.sleep(1000)
        if place == 1 or place >= len(KINDS):
            return Letters.compute_reward(self, state)
        return getattr(self, KINDS[place])(state)

class Rows(Letters):
    """Rows of which some cannot be asked about: one raises, one is too long."""

    RAISES, LONG = (), ()

    def format_prompt(self, task):
        if task["number"] in self.RAISES:
            raise KeyError("question")
        return super().format_prompt(task) + "x" * (500 if task["number"] in self.LONG else 0)

class OneRaises(Rows):
    RAISES = (9,)

class First(Rows):
    RAISES = (0,)

class OneLong(Rows):
    LONG = (9,)

class Three(Rows):
    RAISES, LONG = (5, 14), (10,)
'''
CAUSES = ["timeout", "died", "wrong_type", "not_finite", "not_finite", "raised", "none", "wrong_type"]

ENGINE = '''
import asyncio
from dataclasses import dataclass, replace
from posttrain.rollout.hf import HFEngine

class Withholds(HFEngine):
    """Keeps the completions of some draws until they are aborted; `draws=all` those of all, `only=0` of their first samples."""

    name = "withholds"

    @dataclass(frozen=True)
    class Options:
        draws: str = "5"
        only: int | None = None

    def __init__(self, spec, options=None):
        super().__init__(spec, options)
        self._told = {}

    async def generate(self, requests):
        names = {r.id for r in requests if self.options.draws in ("all", r.id.split(":")[0])}
        told = asyncio.Event()
        self._told |= dict.fromkeys(names, told)
        kept = []
        async for done in super().generate(requests):
            if done.request_id in names and self.options.only in (None, done.index):
                kept.append(done)
            else:
                yield done
        if kept:
            await told.wait()
        for done in kept:
            yield replace(done, finish_reason="aborted")

    async def abort(self, request_id):
        if request_id in self._told:
            self._told[request_id].set()
        await super().abort(request_id)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    write_tiny_model(folder / "model")
    (folder / "sick.py").write_text(SICK)
    (folder / "engine.py").write_text(ENGINE)  # not beside the distribution: its folder comes onto the path of this process
    write_distribution(
        folder / "site", "withholds", points={"posttrain.engines": {"withholds": "withholds:Withholds"}},
        files={"withholds.py": ENGINE},
    )  # fmt: skip
    return folder


@pytest.fixture
def start(site: Path) -> Any:
    run = TinyRun(site / "model", site)

    def started(env: str, *overrides: str, resume: Path | None = None) -> Path:
        if resume is not None:
            return run(list(overrides), resume=resume).run
        return run([*BASE, *overrides], env=env if ":" in env else f"{site}/sick.py:{env}").run

    return started


def lines(run: Path) -> list[dict[str, Any]]:
    """The ledger: every draw that was taken ends once."""
    found = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert [one["draw"] for one in sorted(found, key=lambda one: one["draw"])] == list(range(len(found)))
    return found


def total(run: Path, name: str) -> float:
    return sum(row.get(name, 0) for row in read_metrics(run))


def notes(run: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run / "logs").glob("*.log")))


def fate(row: dict[str, Any]) -> int:
    """What `Sick` does with a recorded trajectory."""
    index, row_id = row["group_id"].split(":")[0], row["group_id"].rpartition(":")[2]
    return derive_seed(0, "reward", int(index), row_id, int(row["sample_id"].rpartition("/")[2])) % 24


# --- rewards ------------------------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("env", ["Sick", "SickOnTheLoop"])
def test_rewards_that_fail_are_counted_by_cause_and_stop_nobody(start: Any, env: str, order: str) -> None:
    run = start(env, f"loop.commit_order={order}", "rollout.reward_timeout_s=1.5", "rl.steps=4", "tracking.rollouts_every=1")
    rows = [row for step in range(1, 5) for row in read_rollouts(run, step)]
    assert len(rows) == 64 and all(one["state"] == "trained" for one in lines(run))
    alone = env == "SickOnTheLoop"
    expected = Counter(CAUSES[kind] for kind in map(fate, rows) if kind < 8 and not (alone and kind == 1))
    assert expected.total() >= 12 and expected.keys() == {*CAUSES} - ({"died"} if alone else set())
    for row in rows:
        kind = fate(row)
        failed = kind < 8 and not (alone and kind == 1)
        assert (row["reward"] is None) == failed and row["info"].get("cause") == (CAUSES[kind] if failed else None)
    assert {cause: total(run, f"rollout/unscorable/{cause}") for cause in expected} == dict(expected)
    assert total(run, "rollout/unscorable_count") == expected.total()
    assert total(run, "train/effective_batch") == 64 - expected.total()


@ORDERS
def test_rewards_that_take_longer_together_than_generation_may_are_waited_for(start: Any, order: str, site: Path) -> None:
    """The deadline of generation is the engine's: each reward has its own."""
    (site / "slow.py").write_text(
        "import time\nfrom posttrain.testing.letters import Letters\n\nclass Slow(Letters):\n"
        "    def compute_reward(self, state):\n"
        "        time.sleep(0.15)\n        return super().compute_reward(state)\n"
    )
    slow = "rollout.generate_timeout_s=2", "rollout.reward_timeout_s=30", "rollout.reward_workers=1"
    run = start(f"{site}/slow.py:Slow", f"loop.commit_order={order}", "rl.steps=2", *slow)
    assert [row["train/effective_batch"] for row in read_metrics(run)] == [16, 16]
    assert read_metrics(run)[0]["time/rollout_s"] > 2 and total(run, "rollout/aborted_count") == 0


# --- rows ---------------------------------------------------------------------------------------------------------------


@ORDERS
def test_a_prompt_that_is_too_long_ends_the_run_when_its_turn_comes(start: Any, order: str) -> None:
    """Row 9 is the second prompt of the third batch."""
    run = start("OneLong", f"loop.commit_order={order}", "rl.steps=2")
    assert len(read_metrics(run)) == 2 and "data/bad_rows" not in read_metrics(run)[-1]
    with pytest.raises(DataError, match="prompt '9' of environment '.*:OneLong' has 507 tokens") as caught:
        start("OneLong", f"loop.commit_order={order}", "rl.steps=4")
    assert caught.value.cause == "rollout.max_model_len=128 leaves no room for a completion" and caught.value.exit_code == 3
    assert "rl.data.max_bad_rows passes over a few" in caught.value.fix


def test_a_row_that_cannot_be_asked_about_is_told_before_the_model_loads(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.policy.policy import Policy

    monkeypatch.delattr(Policy, "__init__")
    with pytest.raises(DataError, match=r"environment '.*:OneRaises' cannot ask about row '9' \(row 9\)") as caught:
        start("OneRaises")
    assert caught.value.cause == "format_prompt raised KeyError: 'question'" and caught.value.exit_code == 3
    assert "rl.data.max_bad_rows passes over a few" in caught.value.fix


@ORDERS
def test_poisoned_rows_are_passed_over_up_to_the_limit(start: Any, order: str) -> None:
    settings = f"loop.commit_order={order}", "rl.data.max_bad_rows=2"
    run = start("Three", "rl.steps=3", *settings)
    ended = {one["row"]: one for one in lines(run)}
    assert {row for row, one in ended.items() if one["state"] == "dropped"} == {"5", "10"}
    assert ended["5"]["cause"] == ended["10"]["cause"] == "bad_row"
    assert len(ended) == 14 and read_metrics(run)[-1]["data/bad_rows"] == 2
    if order == "logical":
        assert [row.get("data/bad_rows") for row in read_metrics(run)] == [None, 1, 2]
    said = notes(run)
    assert "passed over: environment '" in said and "cannot ask about row '5'" in said and "has 508 tokens" in said
    with pytest.raises(DataError, match="cannot ask about row '14'"):
        start("Three", "rl.steps=4", *settings)


def test_the_first_row_may_be_the_poisoned_one(start: Any) -> None:
    run = start("First", "rl.data.max_bad_rows=1", "rl.steps=1")
    assert [one["draw"] for one in lines(run) if one["state"] == "dropped"] == [0] and total(run, "data/bad_rows") == 1


@ORDERS
def test_the_count_of_poisoned_rows_goes_on_over_a_resume(start: Any, site: Path, order: str) -> None:
    whole = start("Three", "rl.steps=5", "rl.data.max_bad_rows=3", f"loop.commit_order={order}")
    settings = f"loop.commit_order={order}", "rl.steps=5", "rl.data.max_bad_rows=2", "checkpoint.every=1"
    with pytest.raises(DataError, match="cannot ask about row '14'") as caught:
        start("Three", *settings)
    run = caught.value.run_dir  # type: ignore[attr-defined]
    found = checkpoint.find(run / "checkpoints")
    assert found and found[-1].loop_state()["sampler"]["bad_rows"]
    with pytest.raises(DataError, match="cannot ask about row '14'"):
        start("Three", resume=run)
    start("Three", "rl.data.max_bad_rows=3", resume=run)
    assert len(read_metrics(run)) == 5 and read_metrics(run)[-1]["data/bad_rows"] == 3
    dropped = sorted(one["draw"] for one in lines(run) if one.get("cause") == "bad_row")
    assert dropped == [5, 10, 14] and len(lines(run)) == 23
    if order == "logical":
        mine, theirs = ([(row["loss"], row.get("data/bad_rows")) for row in read_metrics(one)] for one in (run, whole))
        assert mine == theirs


# --- completions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead", "batch"), [(1, 16), (0, 4)])
def test_a_group_that_never_completes_is_tried_three_times_and_dropped(start: Any, site: Path, ahead: int, batch: int) -> None:
    """The second time it is alone in the engine, and with a batch of one prompt it always is: that the engine has nothing else
    to give does not mean that it hangs."""
    run = start(
        LETTERS, "loop.commit_order=arrival", "rl.steps=4", f"rl.batch_per_replica={batch}", f"rollout.max_async_rollout={ahead}",
        "rollout.generate_timeout_s=2",
        f"rollout.engine={site}/engine.py:Withholds", f"rollout.options.draws='{5 if ahead else 1}'",
    )  # fmt: skip
    ended, stuck = lines(run), 5 if ahead else 1
    (dropped,) = [one for one in ended if one["state"] == "dropped"]
    assert (dropped["draw"], dropped["cause"]) == (stuck, "timeout") and len(ended) == 4 * batch // 4 + 1
    assert len(read_metrics(run)) == 4 and total(run, "rollout/dropped_count") == 1
    assert total(run, "rollout/aborted_count") == total(run, "rollout/aborted/timeout") >= 3
    assert f"draw {stuck} was dropped after 3 tries: timeout" in notes(run)


def test_an_engine_that_gives_nothing_back_but_on_demand_ends_the_run(site: Path) -> None:
    """One prompt at a time: each is taken back when it is aborted, and of none there ever is a completion."""
    command = [
        sys.executable, "-m", "posttrain.cli", "train", f"model.name_or_path={site}/model", "rl.steps=2", "rl.group_size=4",
        "rl.batch_per_replica=4", "environments=[{name: 'posttrain.testing.letters:Letters'}]", "rollout.max_tokens=8",
        "rollout.max_model_len=128", "loop.commit_order=arrival", "validation.prompts=0", "grid.threads=1",
        "rollout.generate_timeout_s=1", "rollout.engine=withholds", "rollout.options.draws=all", "--run", str(site / "runs"),
    ]  # fmt: skip
    path = os.pathsep.join([str(site / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 75 and done.stderr.startswith("error: waited 1 s for completions of draw 1\n"), done.stderr
    assert "draw 0 was dropped after 3 tries: timeout" in done.stdout


def test_a_run_whose_prompts_are_all_dropped_ends(start: Any, site: Path) -> None:
    """The engine does not hang, it always has something to give: but never a whole group."""
    with pytest.raises(RunAborted, match="^4 prompts in a row were dropped after 3 tries each") as caught:
        start(
            LETTERS, "loop.commit_order=arrival", "rl.steps=4", "rl.batch_per_replica=8", "rl.max_uninformative_batches=2",
            "rollout.generate_timeout_s=1", f"rollout.engine={site}/engine.py:Withholds", "rollout.options={draws: all, only: 0}",
        )  # fmt: skip
    assert caught.value.cause == "timeout: 4" and caught.value.exit_code == 5


def test_stale_prompts_are_counted_too(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `keep` finds too old is generated again, under its cause."""
    from posttrain.loop.stream import Stream

    original, aged = Stream.keep, []

    def keep(self: Stream, step: int, round: Any) -> Any:
        if step == 3 and not aged:
            aged.append(round.draws[0].index)
            self._limit = -1
        kept = original(self, step, round)
        self._limit = 8
        return kept

    monkeypatch.setattr(Stream, "keep", keep)
    run = start(LETTERS, "loop.commit_order=arrival", "rl.steps=4")
    assert all(one["state"] == "trained" for one in lines(run)) and len(lines(run)) == 16
    assert [row["rollout/aborted_count"] for row in read_metrics(run)] == [0, 0, 1, 0]
    assert total(run, "rollout/aborted/stale") == 1 and total(run, "rollout/dropped_count") == 0
