"""From what `compute_reward` gave to a `Reward`: checked, and unscorable with a cause when it cannot be used, never 0.

Causes: `raised` (an exception), `timeout`, `died` (its process ended), `none` (it returned None), `not_finite` (NaN or
infinite), `wrong_type`, `unscorable` (the environment said so itself); `env_raised`, `env_timeout`, `env_died`: it was already
an answer to a turn that failed; `agent_raised`, `agent_timeout`, `agent_died`, `agent_silent` (it asked nothing): the agent of an
AgentEnvironment did; `judge_overloaded`, `judge_unreachable`, `judge_timeout`, `judge_refused`, `judge_unreadable`: there was no
judgement.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

from posttrain.types import Reward

FAILED = (
    "raised", "timeout", "died", "not_finite", "wrong_type", "env_raised", "env_timeout", "env_died",
    "agent_raised", "agent_timeout", "agent_died", "agent_silent",
    "judge_overloaded", "judge_unreachable", "judge_timeout", "judge_refused", "judge_unreadable",
)  # fmt: skip
"""Causes that nobody meant; the others are an environment's own word that there is no reward."""


def as_reward(value: Any) -> Reward:
    """A finite number or a `Reward` as a `Reward`; anything else is unscorable with its cause."""
    total: Any
    if isinstance(value, Reward):
        if value.total is None:
            return unscorable(str(value.info.get("cause", "unscorable")), str(value.info.get("error", "")), value)
        total, base = value.total, value
    else:
        total, base = value, Reward(None)
    if total is None:
        return unscorable("none", "the reward is None", base)
    if not isinstance(total, numbers.Real):
        if getattr(total, "shape", None) != ():
            return unscorable("wrong_type", f"the reward is {_short(total)}, not one number or a Reward", base)
        total = total.item()
    number = float(total)
    if not math.isfinite(number):
        return unscorable("not_finite", f"the reward is {number}", base)
    try:
        parts = {str(name): float(part) for name, part in base.parts.items()}
    except (AttributeError, TypeError, ValueError) as exc:
        return unscorable("wrong_type", f"Reward.parts must map names to numbers: {exc}", Reward(None))
    return Reward(number, parts, dict(base.info))


def raised(exc: BaseException) -> Reward:
    """The reward of an episode whose `compute_reward` raised."""
    return unscorable("raised", f"{type(exc).__name__}: {exc}")


def unscorable(cause: str, problem: str = "", base: Reward | None = None) -> Reward:
    """A reward that enters no baseline and trains nothing; `info` names the cause."""
    info = {**(dict(base.info) if base else {}), "cause": cause}
    if problem:
        info["error"] = problem
    return Reward(None, {}, info)


def _short(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
