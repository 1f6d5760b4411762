"""A machine that gives no new process: whoever asked is told why at once, and the pool goes on when there are processes again."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from posttrain.data.environment import Environment, episode
from posttrain.errors import RunInterrupted
from posttrain.rollout import worker_pool
from posttrain.rollout.scoring import Scorer
from posttrain.types import Reward

cloudpickle.register_pickle_by_value(sys.modules[__name__])

POPEN = subprocess.Popen
SOON_S = 20.0
"""Below the deadline of every job here, on a busy machine too."""


class Does(Environment):
    """Does what the completion says."""

    def dataset(self, split: Any) -> list[dict[str, Any]]:
        return [{"id": "0", "prompt": "?"}]

    def compute_reward(self, state: Any) -> Any:
        return eval(state.completion, {"os": os})

    def env_response(self, state: Any) -> Any:
        return eval(state.completion, {"os": os})


class Starts:
    """`subprocess.Popen` that fails from its `good`-th call on, with what it is given."""

    def __init__(self, good: int, failure: Exception) -> None:
        self.good, self.failure, self.pids = good, failure, list[int]()

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(self.pids) >= self.good:
            raise self.failure
        process = POPEN(*args, **options)
        self.pids.append(process.pid)
        return process


def hosted(work: Callable[[Scorer], Awaitable[Any]], *, workers: int = 1, log_path: Path | None = None) -> Any:
    async def main() -> Any:
        scorer = Scorer({"e": Does()}, workers=workers, timeout_s=120.0, log_path=log_path)
        await scorer.start()
        try:
            return await asyncio.wait_for(work(scorer), 120)
        finally:
            await asyncio.wait_for(scorer.close(), SOON_S)

    return asyncio.run(main())


async def outcomes(scorer: Scorer, *deeds: str) -> list[Any]:
    """What becomes of each: a reward, its cause when there is none, or the error that ends the run."""
    states = [episode(Does(), {"prompt": "?"}, deed) for deed in deeds]
    scoring = asyncio.gather(*(scorer.score("e", state) for state in states), return_exceptions=True)
    found = await asyncio.wait_for(scoring, SOON_S)
    return [(one.info["cause"] if one.total is None else one.total) if isinstance(one, Reward) else one for one in found]


@pytest.mark.parametrize("failure", [OSError(errno.EAGAIN, "no process left"), RuntimeError("no thread left")], ids=repr)
def test_a_worker_that_cannot_be_replaced_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    async def work(scorer: Scorer) -> None:
        with monkeypatch.context() as machine:
            machine.setattr(worker_pool.subprocess, "Popen", Starts(0, failure))
            first, *others = await outcomes(scorer, "os._exit(3)", *["1.0"] * 8)  # some of them travel together
            later = await outcomes(scorer, "3.0", "4.0")
        assert first == "died", "the one that it was on has a cause of its own"
        for told in (*others, *later):
            assert isinstance(told, RunInterrupted) and told.code == "reward-worker" and told.exit_code == 75
            assert "could not be started" in told.message and str(failure) in told.cause and "ulimit" in told.fix
        assert await outcomes(scorer, "5.0", "6.0") == [5.0, 6.0], "the pool goes on when the machine does"

    hosted(work)


def test_a_log_that_cannot_be_opened_is_told_too(tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"

    async def work(scorer: Scorer) -> None:
        log.unlink()
        log.mkdir()
        died, told = await outcomes(scorer, "os._exit(3)", "1.0")
        assert died == "died" and isinstance(told, RunInterrupted) and str(log) in told.cause
        log.rmdir()
        assert await outcomes(scorer, "1.0") == [1.0]

    hosted(work, log_path=log)


def test_a_worker_that_cannot_be_ended_leaves_no_call_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(worker: Any) -> str:
        raise RuntimeError("can't start new thread")

    async def work(scorer: Scorer) -> None:
        with monkeypatch.context() as machine:
            machine.setattr(worker_pool.Worker, "stop", stop)
            told, other = await outcomes(scorer, "os._exit(3)", "1.0")
        assert isinstance(told, RunInterrupted) and "can't start new thread" in told.cause
        assert [other, *await outcomes(scorer, "2.0")] == [1.0, 2.0]

    hosted(work)


def test_a_call_whose_worker_is_just_being_ended_is_cancelled_with_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever for an answer of a pool that is closed."""
    ending = asyncio.Event()

    async def stop(worker: Any) -> str:
        ending.set()
        return await asyncio.Event().wait() and ""

    async def main() -> None:
        scorer = Scorer({"e": Does()}, workers=1, timeout_s=120.0)
        await scorer.start()
        with monkeypatch.context() as machine:
            machine.setattr(worker_pool.Worker, "stop", stop)
            waiting = asyncio.ensure_future(scorer.score("e", episode(Does(), {"prompt": "?"}, "os._exit(3)")))
            await asyncio.wait_for(ending.wait(), SOON_S)
            await scorer.close()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, SOON_S)

    asyncio.run(main())


def test_an_answer_to_a_turn_without_a_worker_is_unscorable_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scorer: Scorer) -> None:
        with monkeypatch.context() as machine:
            machine.setattr(worker_pool.subprocess, "Popen", Starts(0, OSError(errno.EMFILE, "too many open files")))
            said = [
                await asyncio.wait_for(scorer.respond("e", episode(Does(), {"prompt": "?"}, deed)), SOON_S)
                for deed in ("os._exit(3)", "None")
            ]
        assert [one.info["cause"] for one in said if isinstance(one, Reward)] == ["env_died", "env_raised"]
        assert "too many open files" in str(said[1]) and await outcomes(scorer, "1.0") == [1.0]

    hosted(work)


def test_a_pool_that_starts_in_part_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(1, OSError(errno.EAGAIN, "no process left"))
    monkeypatch.setattr(worker_pool.subprocess, "Popen", starts)

    async def main() -> None:
        with pytest.raises(RunInterrupted, match="reward worker 1 could not be started"):
            await Scorer({"e": Does()}, workers=2).start()
        (pid,) = starts.pids
        with pytest.raises(ProcessLookupError):  # before the end of the loop, which would end it too
            os.kill(pid, 0)

    asyncio.run(main())


def test_a_worker_shares_a_core_fairly_and_hears_no_interrupt_of_the_terminal() -> None:
    """Linux shares a core by sessions (autogroups): a worker in one of its own waited for 3.9 s beside a busy engine."""

    async def work(scorer: Scorer) -> None:
        session, leads = await outcomes(scorer, "float(os.getsid(0))", "float(os.getpgid(0) == os.getpid())")
        assert session == os.getsid(0), "a session of its own"
        assert leads == 1.0, "an interrupt would reach it, and ending it would not end what it started"

    hosted(work)
