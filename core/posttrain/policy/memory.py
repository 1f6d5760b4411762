"""Where every out-of-memory error of a policy goes through: one typed error, whoever ran out and whatever it called that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from posttrain.errors import OutOfMemory

CPU_ALLOCATOR = ("can't allocate memory", "not enough memory", "cannot allocate memory")
"""What torch's allocators for host memory say in a plain RuntimeError."""


@contextmanager
def memory_guard(doing: str) -> Iterator[None]:
    """Turn an out-of-memory error of the block into OutOfMemory, which names what was being done."""
    try:
        yield
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        raise out_of_memory(doing, exc) from exc


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether host or device memory ran out."""
    if isinstance(exc, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(words in str(exc).lower() for words in CPU_ALLOCATOR)


def out_of_memory(doing: str, exc: BaseException) -> OutOfMemory:
    """The error of a policy that ran out of memory while `doing` something."""
    if isinstance(exc, OutOfMemory):
        return exc
    said = " ".join(str(exc).split())
    return OutOfMemory(
        f"the policy ran out of memory while {doing}",
        cause=said[:300] or type(exc).__name__,
        fix="lower rl.micro_batch_tokens, or set a smaller rl.micro_batch_per_replica; then see the page",
        anchor="troubleshooting.md#the-policy-runs-out-of-memory",
    )
