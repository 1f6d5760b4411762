"""Rewards as a run computes them: in processes with deadlines, on the loop, and unscorable instead of 0."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from posttrain.data.environment import Environment, episode
from posttrain.errors import PluginError, RunAborted
from posttrain.rollout.rewards import as_reward
from posttrain.rollout.scoring import Scorer, score
from posttrain.types import Reward, Trajectory

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Eval(Environment):
    """The reward is what the completion evaluates to, so a test can make it do anything."""

    def dataset(self, split: Any) -> list[dict[str, Any]]:
        return [{"id": "0", "prompt": "?"}]

    def compute_reward(self, state: Any) -> Any:
        scope = {"os": os, "time": time, "signal": signal, "np": np, "Reward": Reward, "state": state, "sys": sys}
        return eval(state.completion, scope)


class AsyncEval(Eval):
    async def compute_reward(self, state: Any) -> Any:
        value = super().compute_reward(state)
        return await value if asyncio.iscoroutine(value) else value


ROW: Mapping[str, Any] = {"prompt": "?"}


def run(
    env: Environment, completions: list[str], *, workers: int | None = 1, timeout_s: float = 20.0
) -> tuple[list[Reward], list[int]]:
    """The rewards of the completions, scored at the same time, and the pids of the workers at the start."""

    async def main() -> tuple[list[Reward], list[int]]:
        scorer = Scorer({"e": env}, workers=workers, timeout_s=timeout_s)
        await scorer.start()
        pids = [w.process.pid for w in scorer._pool._workers.values()] if scorer._pool else []
        try:
            states = [episode(env, ROW, c) for c in completions]
            for i, state in enumerate(states):
                state.trajectory = Trajectory([1], [2], [True], [0.0], [0], "stop", sample_id=f"sample-{i}")
            return await asyncio.gather(*(scorer.score("e", s) for s in states)), pids
        finally:
            await scorer.close()

    return asyncio.run(main())


def causes(rewards: list[Reward]) -> list[Any]:
    return [r.total if r.total is not None else r.info["cause"] for r in rewards]


@pytest.mark.parametrize("env", [Eval(), AsyncEval()], ids=["process", "loop"])
def test_case_samp_1_a_reward_that_cannot_be_had_is_unscorable(env: Environment, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "posttrain.rewards"):
        rewards, _ = run(env, ["1", "0", "1/0", "1", "float('nan')", "None", "float('inf')", "'text'", "[1, 2]", "Reward(None)"])
    expected = [1.0, 0.0, "raised", 1.0, "not_finite", "none", "not_finite", "wrong_type", "wrong_type", "unscorable"]
    assert causes(rewards) == expected
    assert "ZeroDivisionError" in rewards[2].info["error"]
    assert "sample-2" in caplog.text and "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("env", [Eval(), AsyncEval()], ids=["process", "loop"])
def test_case_samp_1_strict_ends_the_run_at_a_reward_that_failed(env: Environment) -> None:
    """With the sample and what was raised. None and Reward(None) did not fail: the environment says so itself."""

    async def main(completion: str) -> Reward:
        scorer = Scorer({"e": env}, strict=True)
        await scorer.start()
        try:
            state = episode(env, ROW, completion)
            state.trajectory = Trajectory([1], [2], [True], [0.0], [0], "stop", sample_id="sample-7")
            return await scorer.score("e", state)
        finally:
            await scorer.close()

    assert [asyncio.run(main(text)).total for text in ("1", "None", "Reward(None)")] == [1.0, None, None]
    for text, word in (("1/0", "ZeroDivisionError"), ("float('nan')", "not_finite"), ("'text'", "wrong_type")):
        with pytest.raises(RunAborted, match="the reward of sample 'sample-7'") as caught:
            asyncio.run(main(text))
        assert word in caught.value.cause and caught.value.exit_code == 5


def test_case_samp_1_advantages_of_the_valid_members() -> None:
    from posttrain.objective import build_objective

    rewards, _ = run(Eval(), ["1", "0", "1/0", "1"])
    totals = [r.total for r in rewards]
    centred = build_objective("dr_grpo", max_tokens=8).advantages(totals, ["g"] * 4, [True] * 4)
    assert np.allclose(centred, [1 / 3, -2 / 3, 0, 1 / 3])
    scaled = build_objective("grpo", group_size=4).advantages(totals, ["g"] * 4, [True] * 4)
    assert np.allclose(scaled, [0.57735, -1.15470, 0, 0.57735], atol=1e-5)


def test_rewards_keep_parts_and_numbers_of_any_kind() -> None:
    assert as_reward(np.float32(0.5)).total == 0.5 and as_reward(True).total == 1.0 and as_reward(np.array(2)).total == 2.0
    kept = as_reward(Reward(1, {"format": np.float64(0.5)}, {"answer": "42"}))
    assert kept == Reward(1.0, {"format": 0.5}, {"answer": "42"}) and type(kept.parts["format"]) is float
    assert as_reward(Reward(1.0, {"x": "y"})).info["cause"] == "wrong_type"
    lost = as_reward(Reward(math.nan, {}, {"seen": 1}))
    assert lost.info == {"seen": 1, "cause": "not_finite", "error": "the reward is nan"}
    assert as_reward(Reward(None, {}, {"cause": "sandbox"})).info["cause"] == "sandbox"


@pytest.mark.parametrize(
    ("deed", "cause", "word"),
    [
        ("os._exit(3)", "died", "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "died", "exit code -9"),
        ("time.sleep(600)", "timeout", "within 2 s"),
    ],
)
def test_case_ops_1_a_dead_or_silent_worker_fails_its_requests_and_is_replaced(deed: str, cause: str, word: str) -> None:
    began = time.monotonic()
    rewards, pids = run(Eval(), [deed, deed, "1"], timeout_s=2.0)
    assert causes(rewards) == [cause, cause, 1.0]
    assert word in rewards[0].info["error"] and "reward worker 0" in rewards[0].info["error"]
    assert time.monotonic() - began < 30
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_a_reward_started_dies_with_its_worker(tmp_path: Path) -> None:
    child = "str(__import__('subprocess').Popen(['sleep', '600']).pid)"
    deed = f"open({str(tmp_path / 'pid')!r}, 'w').write({child}) and time.sleep(600)"
    rewards, _ = run(Eval(), [deed], timeout_s=3.0)
    assert causes(rewards) == ["timeout"]
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the reward's own child is still running"
        time.sleep(0.05)


def test_two_workers_share_the_work_and_print_nothing_here(capfd: pytest.CaptureFixture[str]) -> None:
    rewards, pids = run(Eval(), ["Reward(float(os.getpid()))"] * 40, workers=2)
    assert {r.total for r in rewards} <= set(map(float, pids)) and len(pids) == 2
    run(Eval(), ["sys.stdout.write('chatter') and 1"])
    assert "chatter" not in capfd.readouterr().out


def test_a_reward_may_read_the_tokens_and_the_whole_episode() -> None:
    deeds = ["sum(state.trajectory.token_ids)", "state.trajectory.sample_id == 'sample-1'", "len(state.messages)",
             "setattr(state, 'trajectory', None) or state.trajectory is None"]
    assert causes(run(Eval(), deeds)[0]) == [2.0, 1.0, 2.0, 1.0]


def test_by_default_there_is_a_worker_per_core() -> None:
    _, pids = run(Eval(), ["1"], workers=None)
    assert len(pids) == min(len(os.sched_getaffinity(0)), 8)


def test_an_async_reward_has_a_deadline_and_may_itself_time_out() -> None:
    import builtins

    builtins.__dict__["_nap"] = asyncio.sleep
    rewards, pids = run(AsyncEval(), ["_nap(60)", "1", "(_ for _ in ()).throw(TimeoutError('inner'))"], timeout_s=0.3)
    assert causes(rewards) == ["timeout", 1.0, "raised"] and pids == []


def test_an_environment_that_does_not_reach_the_worker_is_told_at_the_start() -> None:
    class Gone(Eval):
        def __reduce__(self) -> Any:
            return (__import__, ("no_such_module_anywhere",))

    async def main() -> None:
        await Scorer({"e": Gone()}, workers=1).start()

    with pytest.raises(PluginError, match="could not be built") as caught:
        asyncio.run(main())
    assert "no_such_module_anywhere" in caught.value.cause


def test_the_reward_s_own_randomness_is_named_by_the_episode_s_seed() -> None:
    completions = ["__import__('random').random()"] * 3
    first, second = run(Eval(), completions)[0], run(Eval(), completions)[0]
    assert {r.total for r in first} == {r.total for r in second} and len({r.total for r in first}) == 1


def test_score_runs_the_same_path_also_inside_an_event_loop() -> None:
    assert score(Eval(), ROW, "0.25") == Reward(0.25)
    assert score(Eval(), ROW, "1/0").info["cause"] == "raised"

    async def inside() -> Reward:
        return score(Eval(), ROW, "0.5")

    assert asyncio.run(inside()).total == 0.5


def test_a_worker_dies_with_its_owner(tmp_path: Path) -> None:
    """The owner is killed while its worker computes; the worker must not outlive it."""
    script = tmp_path / "owner.py"
    script.write_text(
        "import asyncio, os, signal, sys\n"
        "from posttrain.data.environment import Environment, episode\n"
        "from posttrain.rollout.scoring import Scorer\n"
        "class Slow(Environment):\n"
        "    def dataset(self, split): return [{'prompt': '?'}]\n"
        "    def compute_reward(self, state):\n"
        "        while True: pass\n"
        "async def main():\n"
        "    scorer = Scorer({'e': Slow()})\n"
        "    await scorer.start()\n"
        "    print(scorer._pool._workers[0].process.pid, flush=True)\n"
        "    await scorer.score('e', episode(Slow(), {'prompt': '?'}, ''))\n"
        "asyncio.run(main())\n"
    )
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    worker = int(owner.stdout.readline())
    time.sleep(0.2)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{worker}").exists() and Path(f"/proc/{worker}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the worker outlived its owner"
        time.sleep(0.05)


def test_a_worker_loads_no_torch() -> None:
    rewards, _ = run(Eval(), ["float('torch' in sys.modules)"])
    assert causes(rewards) == [0.0]


@pytest.mark.parametrize("kind", [Eval, AsyncEval], ids=["process", "loop"])
def test_an_environment_may_ask_for_more_time_than_the_config_gives(kind: type[Environment]) -> None:
    slow = kind()
    slow.reward_timeout_s = 30.0
    deed = "(time.sleep(0.5), 1.0)[1]" if kind is Eval else "__import__('asyncio').sleep(0.5, 1.0)"
    assert causes(run(slow, [deed], timeout_s=0.2)[0]) == [1.0]
    assert causes(run(kind(), [deed], timeout_s=0.2)[0]) == ["timeout"]
    assert Scorer({"slow": slow, "other": Eval()}, timeout_s=5).longest_s == 30.0


class Shared(Environment):
    """Keeps what it is asked to do, and a client that is no part of the pickle."""

    offloads = True

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.calls: list[str] = []

    def dataset(self, split: Any) -> Any:
        return []

    async def start(self) -> None:
        self.calls.append("start")

    async def close(self) -> None:
        self.calls.append("close")

    def double(self, state: Any, number: Any) -> Any:
        state.custom["seen"] = [*state.custom.get("seen", []), number]
        return time.sleep(60) if number == "late" else os._exit(3) if number == "dies" else number * 2

    async def compute_reward(self, state: Any) -> float:
        return float(await state.offload("double", 4, timeout=20.0))


def test_offload_calls_a_method_in_a_process_and_brings_back_what_it_remembers() -> None:
    env = Shared()

    async def main() -> None:
        scorer = Scorer({"e": env}, workers=1)
        await scorer.start()
        try:
            state = episode(env, ROW, "x")
            state.offload = functools.partial(scorer.call, "e", state)
            assert await state.offload("double", 3, timeout=20.0) == 6
            with pytest.raises(TimeoutError):
                await state.offload("double", "late", timeout=0.3)
            with pytest.raises(RuntimeError, match="exit code 3"):
                await state.offload("double", "dies", timeout=20.0)
            with pytest.raises(RuntimeError, match="AttributeError"):
                await state.offload("triple", 3, timeout=20.0)
            assert (await scorer.score("e", state)).total == 8.0
            assert state.custom["seen"] == [3, 4], "what failed left nothing"
        finally:
            await scorer.close()

    asyncio.run(main())
    assert env.calls == ["start", "close"]


def test_what_cannot_be_sent_is_said_and_holds_up_nobody() -> None:
    """The pool goes on: an episode with a lock in it, an answer that cannot be read here, and one behind them."""
    import threading

    async def main() -> None:
        scorer = Scorer({"e": Eval()}, workers=1)
        await scorer.start()
        try:
            states = [episode(Eval(), ROW, text) for text in ("1.0", "1.0", "2.0")]
            states[0].custom["lock"] = threading.Lock()
            rewards = await asyncio.wait_for(asyncio.gather(*(scorer.score("e", s) for s in states)), 30)
            assert causes(rewards) == ["raised", 1.0, 2.0] and "cannot be sent" in rewards[0].info["error"]
        finally:
            await scorer.close()

    asyncio.run(main())


def test_a_call_that_nobody_waits_for_any_more_is_not_made_or_ended() -> None:
    async def main() -> None:
        scorer = Scorer({"e": Eval()}, workers=1, timeout_s=60.0)
        await scorer.start()
        try:
            late = [asyncio.ensure_future(scorer.score("e", episode(Eval(), ROW, "time.sleep(50)"))) for _ in range(4)]
            await asyncio.sleep(0.5)
            for one in late:
                one.cancel()
            assert (await asyncio.wait_for(scorer.score("e", episode(Eval(), ROW, "1.0")), 20)).total == 1.0
        finally:
            await scorer.close()

    asyncio.run(main())


def test_one_environment_that_cannot_close_leaves_none_open() -> None:
    class Stuck(Shared):
        async def close(self) -> None:
            raise ValueError("no")

    first, last = Shared(), Shared()

    async def main() -> None:
        scorer = Scorer({"a": first, "b": Stuck(), "c": last}, workers=1)
        await scorer.start()
        with pytest.raises(ValueError, match="no"):
            await scorer.close()

    asyncio.run(main())
    assert first.calls == last.calls == ["start", "close"]
