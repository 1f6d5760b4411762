"""How many completions per second are scored, through the path of a run: the Scorer, its processes, their deadlines.

    python tests/benchmarks/bench_rewards.py

A completion is 200 words of thinking and an answer; its trajectory has as many tokens as TOKENS. Half of the answers are right.
Per core: completions per second of computing, of this process, the reward workers and the processes of math-verify together;
other programs change it little. Busy: the same computing time over the cores that the workers could have used (at most all).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.data.environment import Environment, EpisodeState, episode
from posttrain.rollout.scoring import Scorer
from posttrain.types import Trajectory
from posttrain_envs.countdown import Countdown
from posttrain_envs.math_env import Math

TOKENS = 400
TICK = os.sysconf("SC_CLK_TCK")
GROUP = 8
THINKING = "<think>\n" + "let us see whether that is right, or not yet. " * 20 + "\n</think>\n"


def countdown(n: int) -> tuple[Environment, list[EpisodeState]]:
    """Problems with answers; a wrong answer is an expression too."""
    env = Countdown(Countdown.Options(operations=("+",), size=n // GROUP, test_size=1))
    states = []
    for i, row in enumerate(_repeated(env.dataset("train"), n)):
        answer = " + ".join(map(str, row["nums"])) + (" - 1" if i % 2 else "")
        states.append(_state(env, row, f"{THINKING}<answer>{answer}</answer>"))
    return env, states


def math_fast(n: int) -> tuple[Environment, list[EpisodeState]]:
    """Numbers, written in the ways that models write them."""
    env = Math(Math.Options(data=[{"question": f"What is {i} + 1000?", "answer": str(i + 1000)} for i in range(n // GROUP)],
                            test_size=0))
    ways = ("{}", "{}.0", "${}$", "\\text{{{} apples}}", "x = {}", "{:,}", "\\frac{{{}}}{{1}}", "{} dollars")
    states = []
    for i, row in enumerate(_repeated(env.dataset("train"), n)):
        states.append(_state(env, row, f"{THINKING}So \\boxed{{{ways[i % GROUP].format(int(row['gold']) + i % 2)}}}."))
    return env, states


def math_verify(n: int) -> tuple[Environment, list[EpisodeState]]:
    """Different polynomials and roots, factored or not: only algebra can tell."""
    rng = random.Random(0)
    rows = [{"question": "Expand.", "a": rng.randint(1, 999), "b": rng.randint(1, 999)} for _ in range(n // GROUP)]
    for row in rows:
        row["answer"] = f"x^2 + {row['a'] + row['b']}x + {row['a'] * row['b']}"
    env = Math(Math.Options(data=rows, test_size=0))
    states = []
    for i, row in enumerate(_repeated(env.dataset("train"), n)):
        states.append(_state(env, row, f"{THINKING}\\boxed{{(x + {row['a'] + i % GROUP // 2})(x + {row['b']})}}"))
    return env, states


def _repeated(rows: Sequence[Any], n: int) -> list[Any]:
    return [rows[i // GROUP] for i in range(n)]


def _state(env: Environment, row: Any, completion: str) -> EpisodeState:
    state = episode(env, row, completion)
    state.trajectory = Trajectory(list(range(100)), list(range(TOKENS)), [True] * TOKENS, [-0.1 * i for i in range(TOKENS)],
                                  [1] * TOKENS, "stop")
    return state


def _cpu(pid: int) -> float:
    """Seconds that a process and its children have computed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK + sum(_cpu(int(child)) for child in children)


async def measure(name: str, env: Environment, states: list[EpisodeState], workers: int, *, batch: int = 256) -> None:
    """Score the states, a batch at a time; print the rates. The first ones warm up and are not counted."""
    scorer = Scorer({"env": env}, workers=workers)
    await scorer.start()
    try:
        await asyncio.gather(*(scorer.score("env", state) for state in states[: 16 * workers]))
        began, computed = time.perf_counter(), _cpu(os.getpid())
        for first in range(0, len(states), batch):
            rewards = await asyncio.gather(*(scorer.score("env", state) for state in states[first : first + batch]))
            assert 0.2 < sum(reward.total or 0 for reward in rewards) / len(rewards) < 0.8
        wall, computed = time.perf_counter() - began, _cpu(os.getpid()) - computed
    finally:
        await scorer.close()
    busy = computed / wall / min(workers + 1, len(os.sched_getaffinity(0)))
    rates = f"{len(states) / wall:8.0f}/s  {len(states) / computed:8.0f}/s per core"
    print(f"{name:32s} {workers} worker(s)  {rates}  busy {busy:4.0%}", flush=True)


if __name__ == "__main__":
    print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, {TOKENS} tokens per trajectory")
    for workers in (1, 2):
        asyncio.run(measure("countdown", *countdown(8192), workers))
        asyncio.run(measure("math, numbers and text", *math_fast(8192), workers))
    for workers in (1, 2):
        asyncio.run(measure("math, math-verify", *math_verify(512), workers))
