"""Small verifiers environments, as people write them: one turn, several turns, tools."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(kind: str = "single", evals: bool = True, broken: str = "") -> vf.Environment:
    rows = [{"question": f"What is {i}+{i}?", "answer": str(2 * i), "info": {"number": i}} for i in range(60)]
    data: dict[str, Any] = {"dataset": Dataset.from_list(rows[:40])}
    if evals:
        data["eval_dataset"] = Dataset.from_list(rows[40:])
    data["system_prompt"] = "Answer shortly."
    return KINDS[kind](broken, data)


def exact(completion: list[Any], answer: str) -> float:
    return float(completion[-1].content.strip() == answer)


async def length(completion: list[Any]) -> float:
    await asyncio.sleep(0)
    return float(sum(len(message.content) for message in completion))


def raises(completion: list[Any]) -> float:
    raise KeyError("judge")


def compares(completions: list[Any]) -> list[float]:
    return [0.0] * len(completions)


def rubric(broken: str) -> vf.Rubric:
    more = {"reward": [raises], "group": [compares]}.get(broken, [])
    return vf.Rubric(funcs=[exact, length, *more], weights=[1.0, 0.0, *[0.5] * len(more)])


class Guess(vf.MultiTurnEnv):
    """Higher and lower until the number is said; what was said is kept in the state."""

    def __init__(self, broken: str, **kwargs: Any) -> None:
        super().__init__(max_turns=4, **kwargs)
        self.broken, self.cleaned = broken, 0

    async def setup_state(self, state: vf.State) -> vf.State:
        state["said"] = []
        if self.broken == "setup":
            state["prompt"] = [*state["prompt"], *state["prompt"]]
        return await super().setup_state(state)

    async def get_prompt_messages(self, state: vf.State) -> Any:
        messages = await super().get_prompt_messages(state)
        return messages[-2:] if self.broken == "rewrites" else messages

    @vf.stop
    async def found(self, state: vf.State) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1].content.strip() == state["answer"]

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        if self.broken == "infra":
            raise vf.SandboxError("the sandbox is gone")
        if self.broken == "asks":
            await self.get_model_response(state, messages)
        text = messages[-1].content.strip()
        state["said"].append(text)
        if not (text.isascii() and text.isdigit() and len(text) < 9):
            state["final_env_response"] = [{"role": "user", "content": "That is no number."}]
            return state["final_env_response"]
        way = "higher" if int(text) < int(state["answer"]) else "lower"
        return [{"role": "user", "content": f"{way}, after {len(state['said'])} tries"}]

    @vf.cleanup
    async def count(self, state: vf.State) -> None:
        self.cleaned += 1


async def tries(state: vf.State) -> float:
    return float(len(state["trajectory"]))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def multi(broken: str, data: dict[str, Any]) -> vf.Environment:
    made = rubric(broken)
    made.add_metric(tries)
    return Guess(broken, rubric=made, **data)


KINDS = {
    "single": lambda broken, data: vf.SingleTurnEnv(rubric=rubric(broken), **data),
    "multi": multi,
    "tools": lambda broken, data: vf.ToolEnv(tools=[add], max_turns=4, rubric=rubric(broken), **data),
}
