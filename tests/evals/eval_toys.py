"""An engine that answers what a row says, and what stands around it: evals without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.config.schema import EnvironmentConfig, EvalConfig, ModelConfig, RLConfig, RunConfig
from posttrain.data.dataset import Draw
from posttrain.data.environment import Environment, EpisodeState
from posttrain.data.packer import DataPacker
from posttrain.errors import RunInterrupted
from posttrain.evals.build import Eval, draws_of
from posttrain.evals.result import Result
from posttrain.loop.rollouts import Rollouts
from posttrain.types import Completion, Request, Reward

SETTINGS = {
    "environment": "toy", "split": "test", "prompts": 4, "samples": 4, "k": [2], "temperature": 1.0, "seed": 0,
}  # fmt: skip


def result(rewards: Sequence[Sequence[float | None]], *, step: int = 0, label: str = "toy", **settings: Any) -> Result:
    """A result with these rewards; a reward of 1 or more is correct, None has the cause raised."""
    rows = [
        {
            "id": str(i), "where": f"row {i}", "n": len(own), "rewards": list(own),
            "correct": sum(r is not None and r >= 1 for r in own),
            "causes": {"raised": own.count(None)} if None in own else {}, "tokens": 5 * len(own), "truncated": 0,
        }
        for i, own in enumerate(rewards)
    ]  # fmt: skip
    return Result(label, step, SETTINGS | {"prompts": len(rows)} | settings, rows)


class Toy(Environment):
    """Rows say what is asked; the reward is the length of the answer, and what the row says goes wrong does."""

    def __init__(self, rows: Sequence[dict[str, Any]] = (), held: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__()
        self.rows = {"train": list(rows), "test": list(held)}

    def dataset(self, split: Any) -> Any:
        return self.rows[split]

    def format_prompt(self, task: Any) -> str:
        if task.get("bad"):
            raise ValueError("no question")
        return str(task["ask"])

    async def compute_reward(self, state: EpisodeState) -> Reward:
        if state.task.get("raises"):
            raise RuntimeError("no sandbox")
        return Reward(float(state.task.get("reward", 1)), {"style": 0.25})


class Bytes(DataPacker):
    """A packer of bytes."""

    get_policy_input = policy_compute_max_len = policy_collate_fn = None  # type: ignore[assignment]

    def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
        return {"prompt_ids": list(prompt.encode())}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()


class Engine:
    """Says `ok` as version `version`, and keeps what it was asked; `fails` at its n-th call."""

    def __init__(self, version: int = 3, fails: int | None = None) -> None:
        self.version, self.fails = version, fails
        self.requests: list[Request] = []
        self.calls = self.running = self.most = 0

    async def start(self) -> None: ...

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        self.requests += requests
        try:
            if self.calls == self.fails:
                raise RunInterrupted("the engine died", code="engine-dead")
            for request in requests:
                for index in range(request.n):
                    yield Completion(request.id, index, [111, 107], [-0.1, -0.2], [self.version] * 2, "stop")
        finally:
            self.running -= 1

    async def abort(self, request_id: str) -> None: ...

    async def close(self) -> None: ...


def made(engine: Engine, rows: Sequence[dict[str, Any]], **entry: Any) -> tuple[Eval, Rollouts, RunConfig]:
    """An eval of the rows, and what runs it."""
    from posttrain.rollout.scoring import Scorer

    env = Toy(held=rows)
    chosen = EvalConfig(name="toy", options={}, **entry)
    config = RunConfig(
        model=ModelConfig(name_or_path="m"), rl=RLConfig(steps=9), environments=(EnvironmentConfig(name="toy"),), evals=(chosen,)
    )
    config = replace(config, rollout=replace(config.rollout, max_num_seqs=4, max_model_len=64, max_tokens=8))
    one = Eval(chosen, env, draws_of(chosen, env.dataset("test"), "evals[0]"))
    scorer = Scorer({one.key: env}, timeout_s=5)
    return one, Rollouts(engine, Bytes(), {one.key: env}, scorer, 64, 0), config


def draw(index: int, row: dict[str, Any], env: str = "toy") -> Draw:
    return Draw(index, 0, env, str(row.get("id", index)), row)


def folder(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
