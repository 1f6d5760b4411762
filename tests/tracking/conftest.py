"""Small groups to track."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.types import Group, Trajectory, Turn


def make_group(name: str, rewards: list[float | None]) -> Group:
    rows = [
        Trajectory(
            prompt_ids=[1, 2],
            token_ids=[3, 4, 2],
            mask=[True, False, True],
            rollout_logprobs=[-0.5, 0.0, -0.25],
            weight_versions=[7, -1, 7],
            finish_reason="stop",
            reward=reward,
            reward_parts={"correct": reward or 0.0},
            group_id=name,
            sample_id=f"{name}/{i}",
            env="toy",
            turns=[Turn(0, 1), Turn(1, 2, "env"), Turn(2, 3)],
            messages=[{"role": "user", "content": "hi"}],
            info={} if reward is not None else {"cause": "exception"},
        )
        for i, reward in enumerate(rewards)
    ]
    return Group(name, {"id": name, "answer": 4}, rows)


@pytest.fixture
def group() -> Callable[[str, list[float | None]], Group]:
    return make_group
