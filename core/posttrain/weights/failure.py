"""A failure of one peer of a weight update: who, in which phase, at which bucket, and what was raised first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, Literal, TypeVar

from posttrain.errors import WeightSyncError
from posttrain.weights.deadline import within

T = TypeVar("T")

Phase = Literal["publish", "stage", "apply", "canary"]


class PeerFailure(WeightSyncError):
    """peer: lane or policy rank     bucket: its index in the plan, where there is one     at: wall clock of the failure, seconds

    `stopped`: the peer did not fail itself, it was told to stop because another one had.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: str = "",
        phase: Phase = "stage",
        bucket: int | None = None,
        stopped: bool = False,
        **details: Any,
    ) -> None:
        super().__init__(message, **details)
        self.peer, self.phase, self.bucket, self.stopped, self.at = peer, phase, bucket, stopped, time.time()


def as_failure(exc: BaseException, *, peer: str, phase: Phase, message: str, bucket: int | None = None) -> PeerFailure:
    """`exc` as a failure of `peer`, `bucket` being the one that it was at; what the exception says itself is kept."""
    if isinstance(exc, PeerFailure):
        failure = exc
    elif isinstance(exc, WeightSyncError):
        kept: dict[str, Any] = {"cause": exc.cause, "fix": exc.fix, "where": exc.where, "code": exc.code}
        text = exc.message if peer in exc.message else f"{peer}: {exc.message}"
        failure = PeerFailure(text, peer=peer, phase=phase, retryable=exc.retryable, **kept)
        failure.__cause__ = exc
    else:
        failure = PeerFailure(message, peer=peer, phase=phase, cause=first_exception(exc), fix=out_of_memory_fix(exc))
        failure.__cause__ = exc
    if failure.bucket is None and bucket is not None and not failure.stopped:
        failure.bucket = bucket
        failure.where = failure.where or f"at bucket {bucket}"
    return failure


def first_exception(exc: BaseException) -> str:
    """The exception in one line, as causes quote it."""
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__


def out_of_memory_fix(exc: BaseException) -> str:
    """What to change when memory ran out during an update; empty for every other failure."""
    text = str(exc)
    ran_out = isinstance(exc, MemoryError) or type(exc).__name__ == "OutOfMemoryError" or "can't allocate memory" in text
    return "lower weights.max_concurrent_lanes (lanes that pull at once) or weights.bucket_bytes" if ran_out else ""


async def bounded(work: Awaitable[T], *, peer: str, phase: Phase, what: str, timeout: float) -> T:
    """`work` of a peer within `timeout` seconds. Whatever goes wrong is raised as PeerFailure, `what` in its message.

    A task of the peer that was cancelled is that peer's failure, not a cancellation of ours.
    """
    task = asyncio.ensure_future(work)
    try:
        return await within(task, timeout)
    except asyncio.CancelledError:
        mine = asyncio.current_task()
        if not task.cancelled() or (mine is not None and mine.cancelling()):
            raise
        raise PeerFailure(what, peer=peer, phase=phase, cause="its task was cancelled") from None
    except TimeoutError as exc:
        if task.done() and not task.cancelled():
            raise as_failure(exc, peer=peer, phase=phase, message=what) from exc
        raise PeerFailure(
            f"{what}: no answer within {timeout:.3g} s", peer=peer, phase=phase, code="deadline",
            fix="raise weights.stage_timeout_s or weights.apply_timeout_s, or look at its machine",
        ) from exc  # fmt: skip
    except Exception as exc:
        raise as_failure(exc, peer=peer, phase=phase, message=what) from exc


def first(failures: Sequence[PeerFailure]) -> PeerFailure:
    """The origin: the earliest of those that were not told to stop."""
    return min(failures, key=lambda failure: (failure.stopped, failure.at))


def failures_of(tasks: Iterable[asyncio.Future[Any]]) -> list[PeerFailure]:
    """What tasks that are done raised."""
    found = (task.exception() for task in tasks if not task.cancelled())
    return [exc for exc in found if isinstance(exc, PeerFailure)]


def of_publisher(failure: PeerFailure) -> bool:
    """Whether the lane that saw it is not to blame: who published died (code `peer`), or a policy rank failed."""
    return failure.code == "peer" or failure.peer.startswith("policy")
