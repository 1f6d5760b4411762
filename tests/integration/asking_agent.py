"""An agent of the tests, which asks the openai client for a sum twice, and a run that trains it beside the calculator."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from openai import AsyncOpenAI

from posttrain import AgentEnvironment, EpisodeState, Reward

STEPS = 6
WITH_VLLM = [
    "experiment=calculator_agent",
    "environments=[{name: calculator, options: {calls: short, terms: [2], digits: 2, size: 3000, test_size: 100, max_turns: 2}}, "
    f"{{name: '{__file__}:Asks', label: agent}}]",
    "rollout.base_port=18100",
    "rollout.keep_history_verbatim=true",
    "model.factory_kwargs.steps=250",
    "model.factory_kwargs.slip_steps=20",
    f"rl.steps={STEPS}",
    "rl.batch_per_replica=64",
    "rl.discard_group_zero_advantage=false",
    "rollout.engine=vllm",
    "rollout.max_num_seqs=32",
    "rollout.max_async_rollout=1",
    "rollout.stop=['>']",
    "validation.prompts=8",
    "tracking.display=none",
]
"""On one engine; what the model cannot do yet does not matter."""


class Asks(AgentEnvironment):
    def dataset(self, split: Any) -> Any:
        numbers = range(200) if split == "train" else range(200, 220)
        return [{"id": str(n), "question": f"{n}+{n}="} for n in numbers]

    async def run_agent(self, state: EpisodeState, base_url: str, api_key: str, model: str) -> None:
        messages: list[Any] = [{"role": "user", "content": state.task["question"]}]
        state.custom["port"] = urlsplit(base_url).port
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120.0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=6)
                said = answer.choices[0].message.content
                state.custom.setdefault("said", []).append(said)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "0="}]

    def compute_reward(self, state: EpisodeState) -> Reward:
        said = [message["content"] for message in state.messages if message["role"] == "assistant"]
        return Reward(
            float(sum(map(len, said)) % 2), {"as_said": float(said == state.custom["said"]), "port": float(state.custom["port"])}
        )
