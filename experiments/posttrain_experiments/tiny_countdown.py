"""The tiny model for countdown: it knows how to combine two or three numbers, and mostly picks a wrong sign.

    python -m posttrain_experiments.tiny_countdown out/tiny

Its teacher tries all signs, in the order in which the numbers are given if it can. It is a `model.factory`.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain_envs.countdown import Countdown
from posttrain_experiments.tiny import Lesson, make


def build(
    out: Path,
    *,
    environment: Mapping[str, Any] | None = None,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    steps: int = 600,
    slip_steps: int = 150,
    batch: int = 64,
    lr: float = 3e-3,
    say: Callable[[str], None] = print,
) -> None:
    """Write the model to `out`. environment: options of `countdown` with the operations + and -; the rest as in `make`."""
    env = Countdown(Countdown.Options(**(environment or {})))
    rng = random.Random(seed)
    rows = env.dataset("train")
    taught = [teach(env, rows[i], rng) for i in range(len(rows))]
    make(
        out, [lesson for lesson in taught if lesson is not None], seed=seed, hidden_size=hidden_size, layers=layers,
        steps=steps, slip_steps=slip_steps, batch=batch, lr=lr, say=say,
    )  # fmt: skip


def teach(env: Countdown, row: Mapping[str, Any], rng: random.Random) -> Lesson | None:
    """The prompt, a right answer, and one with another sign; None where there is no such pair (brackets would be needed)."""
    for nums in dict.fromkeys([tuple(row["nums"]), *itertools.permutations(row["nums"])]):
        answers = list(expressions(nums, env.options.operations))
        right = [text for text, value in answers if value == row["target"]]
        wrong = [text for text, value in answers if value != row["target"]]
        if right and wrong:
            return str(env.format_prompt(row)), right[0], rng.choice(wrong)
    return None


def expressions(nums: Sequence[int], operations: Sequence[str]) -> list[tuple[str, int]]:
    """`nums` in this order with every choice of signs, and what each comes to."""
    signs = {"+": 1, "-": -1}
    found = []
    for chosen in itertools.product([op for op in operations if op in signs], repeat=len(nums) - 1):
        text = str(nums[0]) + "".join(f"{op}{n}" for op, n in zip(chosen, nums[1:], strict=True))
        found.append((text, nums[0] + sum(signs[op] * n for op, n in zip(chosen, nums[1:], strict=True))))
    return found


if __name__ == "__main__":
    build(Path(sys.argv[1]))
