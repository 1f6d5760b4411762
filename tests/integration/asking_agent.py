"""An agent of the tests: asks the openai client for a sum twice."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from posttrain import AgentEnvironment, EpisodeState, Reward


class Asks(AgentEnvironment):
    def dataset(self, split: Any) -> Any:
        numbers = range(200) if split == "train" else range(200, 220)
        return [{"id": str(n), "question": f"{n}+{n}="} for n in numbers]

    async def run_agent(self, state: EpisodeState, base_url: str, api_key: str, model: str) -> None:
        messages: list[Any] = [{"role": "user", "content": state.task["question"]}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120.0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=model, messages=messages, max_tokens=6)
                said = answer.choices[0].message.content
                state.custom.setdefault("said", []).append(said)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "0="}]

    def compute_reward(self, state: EpisodeState) -> Reward:
        said = [message["content"] for message in state.messages if message["role"] == "assistant"]
        return Reward(float(sum(map(len, said)) % 2), {"as_said": float(said == state.custom["said"])})
