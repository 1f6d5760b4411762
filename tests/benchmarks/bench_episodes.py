"""1,000 episodes with tools at the same time in one process: how long the event loop makes others wait, and episodes per second.

    python tests/benchmarks/bench_episodes.py

The driver, the packer, the tool environment and the pool of scorers are the real ones; the engine answers after 1 to 4 s
what a model might: a call, and then the answer. `async`: the tool runs on the event loop; `plain`: in the processes that score,
which also run all rewards. The lag of the loop is how much later than asked a sleep of 1 ms returns, sampled all the time.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.data.dataset import Draw
from posttrain.data.packer import init_data_packer
from posttrain.data.seeds import derive_seed
from posttrain.loop.collector import few_collections
from posttrain.loop.rollouts import Rollouts
from posttrain.rollout.scoring import Scorer
from posttrain.types import Completion, Request, Sampling
from posttrain_envs.calculator import Calculator, calculate
from posttrain_experiments import tiny

EPISODES, GROUP = 1_000, 8


def compute(expression: str) -> str:
    """Compute an expression.

    Args:
        expression: whole numbers with + - * /
    """
    return asyncio.run(calculate(expression))


class Plain(Calculator):
    """The same, with a tool that is a plain function."""

    @property
    def tools(self) -> Any:  # type: ignore[override]
        return (compute,)

    def parse_tool_calls(self, state: Any) -> Any:
        calls = super().parse_tool_calls(state)
        return [type(call)(call.id, "compute", call.arguments, call.raw, call.problem) for call in calls]


class Engine:
    """Calls the tool in the first turn, and says what it returned in the second."""

    def __init__(self, packer: Any) -> None:
        self.flying, self.most, self.stop = 0, 0, packer.special_tokens.stop[0]
        self.ids = {character: packer.encode(character)[0] for character in "0123456789+-*=<>"}  # one token per character
        self.characters = {number: character for character, number in self.ids.items()}

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        asked = [(request, index) for request in requests for index in range(request.n)]
        self.flying += len(asked)
        self.most = max(self.most, self.flying)
        for work in asyncio.as_completed([self._one(request, index) for request, index in asked]):
            done = await work
            self.flying -= 1
            yield done

    async def _one(self, request: Request, index: int) -> Completion:
        await asyncio.sleep(1 + 3 * random.Random(derive_seed(request.seed, "s", index)).random())
        text = "".join(self.characters.get(number, "") for number in request.prompt_ids)
        said = text.rpartition(">")[2].strip("= ") if ">" in text else f"<{text.strip('=')}>"
        ids = [*(self.ids[character] for character in said), self.stop]
        return Completion(request.id, index, ids, [-0.1] * len(ids), [0] * len(ids), "stop")

    async def abort(self, request_id: str) -> None: ...


async def lags(found: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(0.001)
        found.append(time.perf_counter() - began - 0.001)


async def measure(folder: Path, env: Calculator, rounds: int = 4) -> dict[str, float]:
    packer = init_data_packer(str(folder))
    engine, scorer = Engine(packer), Scorer({"calculator": env})
    rollouts = Rollouts(engine, packer, {"calculator": env}, scorer, 512, 0, in_step=False)  # type: ignore[arg-type]
    rows = env.dataset("train")
    draws = [Draw(i, 0, "calculator", rows[i]["id"], rows[i]) for i in range(rounds * EPISODES // GROUP)]
    free = asyncio.Semaphore(EPISODES // GROUP)
    found: list[float] = []

    async def fly(draw: Draw) -> float:
        (group,) = await rollouts.run([draw], n=GROUP, sampling=Sampling(64))
        free.release()
        return float(np.mean([t.reward for t in group.trajectories]))

    await scorer.start()
    await rollouts.run(draws[:1], n=1, sampling=Sampling(64))  # imports what is imported late
    watching = asyncio.create_task(lags(found))
    try:
        with few_collections():
            began = time.perf_counter()
            flights = []
            for draw in draws:  # as the rollouts loop does, whose prompts a thread has formatted
                await free.acquire()
                await asyncio.to_thread(rollouts.prepare, draw)
                flights.append(asyncio.create_task(fly(draw)))
            rewards = await asyncio.gather(*flights)
            seconds = time.perf_counter() - began
    finally:
        watching.cancel()
        await scorer.close()
    lag = np.array(found) * 1e3
    return {
        "reward": float(np.mean(rewards)), "most at once": engine.most, "episodes/s": rounds * EPISODES / seconds,
        "lag p50 ms": float(np.quantile(lag, 0.5)), "lag p99 ms": float(np.quantile(lag, 0.99)), "lag max ms": float(lag.max()),
    }  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "model"
        tokenizer = tiny.build_tokenizer()
        tiny.build_model(len(tokenizer), 32, 1).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for name, kind in (("async", Calculator), ("plain", Plain)):
            env = kind(kind.Options(calls="short", style="text", terms=(2,), digits=3))
            result = asyncio.run(measure(folder, env))
            print(f"{name}: " + "  ".join(f"{key} {value:.4g}" for key, value in result.items()))


if __name__ == "__main__":
    main()
