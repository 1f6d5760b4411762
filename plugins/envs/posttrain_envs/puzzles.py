"""Questions that a short program answers and a head does not, made from a seed, with exact answers.

    puzzle = draw(random.Random(0), ("primes",))     # ("primes", (2871, 9163)), say
    asked(puzzle)                                    # "How many primes are there from 2871 to 9163, both included?"
    answer(puzzle)                                   # 722
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Puzzle: TypeAlias = tuple[str, tuple[int, ...]]
"""The name of its kind, and its numbers."""


@dataclass(frozen=True, slots=True)
class Kind:
    """text: of the question, around its numbers; draw: those; answer: of them."""

    text: str
    draw: Callable[[random.Random], tuple[int, ...]]
    answer: Callable[..., int]


def draw(rng: random.Random, kinds: Sequence[str]) -> Puzzle:
    kind = rng.choice(kinds)
    return kind, KINDS[kind].draw(rng)


def asked(puzzle: Puzzle) -> str:
    return KINDS[puzzle[0]].text.format(*puzzle[1])


def answer(puzzle: Puzzle) -> int:
    return KINDS[puzzle[0]].answer(*puzzle[1])


def _primes(first: int, last: int) -> int:
    sieve = bytearray([1]) * (last + 1)
    sieve[:2] = b"\0\0"
    for n in range(2, int(last**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, last + 1, n)))
    return sum(sieve[first:])


def _divisors(n: int) -> int:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sum({*small, *(n // d for d in small)})


def _steps(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
    return steps


def _between(rng: random.Random, *bounds: tuple[int, int]) -> tuple[int, ...]:
    return tuple(rng.randint(*bound) for bound in bounds)


KINDS: dict[str, Kind] = {
    "digit_sum": Kind("What is the sum of the decimal digits of {} to the power of {}?",
                      lambda rng: _between(rng, (2, 99), (20, 200)), lambda a, b: sum(map(int, str(a**b)))),
    "remainder": Kind("What is the remainder when {} to the power of {} is divided by {}?",
                      lambda rng: _between(rng, (2, 999), (20, 999), (100, 9999)), pow),
    "primes": Kind("How many primes are there from {} to {}, both included?",
                   lambda rng: _between(rng, (1, 5000), (5001, 20_000)), _primes),
    "divisors": Kind("What is the sum of all divisors of {}, 1 and the number itself included?",
                     lambda rng: _between(rng, (10_000, 999_999)), _divisors),
    "collatz": Kind("Begin with {}. Halve the number when it is even, else take three times the number plus 1. "
                    "After how many such steps is it 1 for the first time?", lambda rng: _between(rng, (1000, 999_999)), _steps),
    "digit_count": Kind("The whole numbers from 1 to {} are written down. How often is the digit {} written?",
                        lambda rng: _between(rng, (500, 20_000), (0, 9)),
                        lambda n, d: sum(str(one).count(str(d)) for one in range(1, n + 1))),
}  # fmt: skip
