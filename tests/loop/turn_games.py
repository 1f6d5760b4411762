"""Environments of several turns for the tests: sums that are asked again until they are right."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from posttrain_envs.arithmetic import Arithmetic


class Again(Arithmetic):
    """Says `no;` and the sum again, up to three turns. A plain function: it runs in another process."""

    max_turns = 3

    def env_response(self, state: Any) -> Any:
        state.custom["tries"] = [*state.custom.get("tries", []), state.completion]
        if state.completion.strip() == state.task["answer"]:
            return None
        return [{"role": "user", "content": f"no;{state.task['problem']}="}]

    def compute_reward(self, state: Any) -> float:
        assert len(state.custom["tries"]) == state.turn, "what env_response remembered is there"
        return (state.completion.strip() == state.task["answer"]) / state.turn


class Late(Again):
    """The same on the event loop, each answer when it likes."""

    async def env_response(self, state: Any) -> Any:
        await asyncio.sleep(random.random() * 0.02)
        return super().env_response(state)


class Broken(Again):
    """Fails now and then, in one of three ways."""

    def env_response(self, state: Any) -> Any:
        if state.seed % 4 == 0:
            raise ValueError("no board")
        if state.seed % 4 == 1:
            return "not messages"
        return super().env_response(state)
