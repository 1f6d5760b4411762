"""The tiny model for `calculator_agent`: it knows how to call the calculator and how to read its answer, and mostly guesses.

    python -m posttrain_experiments.tiny_calculator out/tiny

Its lessons are both turns of an episode with `calls: short`: the question, answered by a call or by a guess; and the question
with the call and its result, answered by copying the result or by a slip. It is a `model.factory`, to be used with a chat
template that writes every message as it is and ends the model's turns (`calculator.TEMPLATE`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain_envs.calculator import Calculator
from posttrain_experiments.tiny import EOS, Lesson, make


def build(
    out: Path,
    *,
    environment: Mapping[str, Any] | None = None,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    steps: int = 400,
    slip_steps: int = 100,
    batch: int = 64,
    lr: float = 3e-3,
    say: Callable[[str], None] = print,
) -> None:
    """Write the model to `out`. environment: options of `calculator` with `calls: short`; the rest as in `make`."""
    env = Calculator(Calculator.Options(**(environment or {"calls": "short"})))
    rng = random.Random(seed)
    lessons = [lesson for row in env.dataset("train") for lesson in teach(row, rng)]
    make(
        out, lessons, seed=seed, hidden_size=hidden_size, layers=layers, steps=steps, slip_steps=slip_steps, batch=batch, lr=lr,
        say=say,
    )  # fmt: skip


def teach(row: Mapping[str, Any], rng: random.Random) -> Iterator[Lesson]:
    """Both turns, each with what is right and what is careless."""
    question, answer = row["question"], int(row["answer"])
    guess = str(answer + rng.choice((-1, 1)) * rng.randint(1, 9 * 10 ** max(0, len(str(abs(answer))) - 2)))
    yield f"{question}=", f"<{question}>", guess
    yield f"{question}=<{question}>{EOS}{answer}=", str(answer), str(answer + rng.choice((-1, 1)))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
