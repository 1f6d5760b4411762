"""Environments whose model turns are asked for by somebody else's program: an agent that takes a `base_url`.

The run opens a session for every episode, an OpenAI-compatible endpoint of its own on loopback, and calls `run_agent` with its
address. Whatever the agent asks there is answered by the model that trains, and recorded to the token. When `run_agent` returns,
the episode is over and `compute_reward` says what it was worth. The smallest one:

    class Assistant(AgentEnvironment):
        '''Answer a question with the tools of a program that somebody else wrote.'''

        def dataset(self, split):
            return [{"id": "0", "question": "How many files are in /tmp?"}]

        async def run_agent(self, state, base_url, api_key, model):
            client = AsyncOpenAI(base_url=base_url, api_key=api_key)
            state.custom["answer"] = await my_agent(client, model, state.task["question"])

        def compute_reward(self, state):
            return float(state.custom["answer"] == "12")
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from posttrain.data.environment import Environment, EpisodeState, Prompt


class AgentEnvironment(Environment):
    """Base class of environments that drive an agent of their own. `max_turns` bounds the answers that an episode gets."""

    api: ClassVar[int] = 1
    max_turns: int = 50
    agent_timeout_s: float = 600.0
    """Deadline of one `run_agent`, seconds. An object may set its own."""

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        """What `state.prompt` is; the agent asks what it likes. Default: the row's `prompt`, or `question`, or its id."""
        return task.get("prompt") or task.get("question") or str(task.get("id", "task"))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.offloads = cls.offloads or not inspect.iscoroutinefunction(cls.run_agent)

    @abstractmethod
    async def run_agent(self, state: EpisodeState, base_url: str, api_key: str, model: str) -> None:
        """Let the agent do its work, asking `model` at `base_url` with `api_key`, as any client of the OpenAI API does.

        A coroutine runs on the event loop; it must wait, not compute. A plain function (`def run_agent`) runs in a process that
        is killed at the deadline: for synchronous clients, and for agents that compute. What it wants to keep goes into
        `state.custom`. What it raises, and one that overruns `agent_timeout_s`, make the episode unscorable, as does an agent
        that asked nothing.
        """
