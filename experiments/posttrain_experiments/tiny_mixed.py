"""The tiny model for sums and countdown at once: it knows how both go, and is careless at both. It is a `model.factory`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posttrain_envs.arithmetic import Arithmetic
from posttrain_envs.countdown import Countdown
from posttrain_experiments.tiny import Lesson, make
from posttrain_experiments.tiny_countdown import teach


def build(
    out: Path,
    *,
    sums: Mapping[str, Any],
    countdown: Mapping[str, Any],
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    steps: int = 800,
    slip_steps: int = 150,
    batch: int = 96,
    lr: float = 3e-3,
    say: Callable[[str], None] = print,
) -> None:
    """Write the model to `out`. sums, countdown: options of `arithmetic` and `countdown`; the rest as in `tiny.make`."""
    make(
        out, lessons(sums, countdown, seed), seed=seed, hidden_size=hidden_size, layers=layers, steps=steps,
        slip_steps=slip_steps, batch=batch, lr=lr, say=say,
    )  # fmt: skip


def lessons(sums: Mapping[str, Any], countdown: Mapping[str, Any], seed: int) -> list[Lesson]:
    """Those of both train splits, about as many of each: of the smaller one several times."""
    adding = [
        (f"{row['problem']}=", row["answer"], str(int(row["answer"]) + 1))
        for row in Arithmetic(Arithmetic.Options(**sums)).dataset("train")
    ]
    env, rng = Countdown(Countdown.Options(**countdown)), random.Random(seed)
    rows = env.dataset("train")
    reaching = [lesson for i in range(len(rows)) if (lesson := teach(env, rows[i], rng)) is not None]
    return adding * max(1, len(reaching) // len(adding)) + reaching * max(1, len(adding) // len(reaching))
