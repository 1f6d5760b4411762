"""One eval of the weights that the engines have: the template path, the engines and the scorer of training.

    rollouts = beside(parts.rollouts, parts.engine, evals)
    result, groups = await run_eval(evals[0], rollouts, config, version=20)

Its prompts go behind those that train, in engines that know priorities. A row that cannot be asked, and a completion that failed
or has no reward, is wrong and told; anything else that fails is raised, by whoever runs the eval to be told. Every sampled token
must be of `version`: a result that is of other weights is none.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.errors import DataError, PackerError, RunAborted
from posttrain.evals.build import Eval, eval_sampling, settings_of
from posttrain.evals.result import Result, failed_row, row_of
from posttrain.types import ENV_VERSION
from posttrain.weights.deadline import in_thread

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw
    from posttrain.loop.rollouts import Rollouts
    from posttrain.rollout.engine import Generates
    from posttrain.types import Completion, Group, Request

T = TypeVar("T")

PURPOSE = "eval"
BEHIND = 1_000_000
"""Added to the priority of a request; engines serve lower ones first."""
AT_ONCE = 2
"""Pieces of an eval in the engines at a time, so that they have something to do when one is nearly over."""

Piece = Callable[[Awaitable[T], str], Awaitable[T]]
"""Awaits the completions of a piece of an eval, under a deadline; the text says what they are."""


class Behind:
    """Engines whose requests wait for those of others."""

    priority = BEHIND

    def __init__(self, engine: Generates) -> None:
        self._engine = engine

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        later = [dataclasses.replace(request, priority=request.priority + BEHIND) for request in requests]
        inner = self._engine.generate(later)
        try:
            async for done in inner:
                yield done
        finally:
            if (close := getattr(inner, "aclose", None)) is not None:
                await close()

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def close(self) -> None:
        await self._engine.close()


def beside(rollouts: Rollouts, evals: Sequence[Eval]) -> Rollouts:
    """Rollouts as those that train, of the evals' environments, behind them. Their scorer must know these environments."""
    return dataclasses.replace(
        rollouts, engine=Behind(rollouts.engine), environments={one.key: one.env for one in evals}
    )


async def run_eval(
    one: Eval, rollouts: Rollouts, config: RunConfig, version: int, *, of: str = "", piece: Piece[Any] | None = None
) -> tuple[Result, list[Group]]:
    """Ask every prompt of an eval. version: that the engines have, and keep until this returns.

    Raises RunAborted when a token is of another version, and what the engines or the scorer raise.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    size = max(2 * config.rollout.max_num_seqs // one.entry.samples, 1)
    pieces = [one.draws[i : i + size] for i in range(0, len(one.draws), size)]
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(draws: Sequence[Draw]) -> list[Group | dict[str, Any]]:
        async with gate:
            work = _asked(draws, rollouts, config, one)
            name = f"eval {one.label}, prompts {draws[0].index + 1} to {draws[-1].index + 1}, of version {version}"
            return await (work if piece is None else piece(work, name))

    tasks = [asyncio.create_task(ask(draws), name=f"eval {one.label}") for draws in pieces]
    try:
        found = [item for part in await asyncio.gather(*tasks) for item in part]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    rows, groups = await in_thread(_counted, one, found, version)
    return Result(one.label, version, settings_of(config, one), rows, clock() - began, of), groups


def _counted(
    one: Eval, found: Sequence[Group | dict[str, Any]], version: int
) -> tuple[list[dict[str, Any]], list[Group]]:
    """The line of each prompt, and what was generated. Raises RunAborted for tokens of another version."""
    groups = [item for item in found if not isinstance(item, dict)]
    refuse_other_versions(groups, version, one.label)
    part, at = one.entry.correct_part, one.entry.correct_at
    rows = [
        item if isinstance(item, dict) else row_of(item, draw.row_id, draw.where, part=part, at=at)
        for draw, item in zip(one.draws, found, strict=True)
    ]
    return rows, groups


async def _asked(draws: Sequence[Draw], rollouts: Rollouts, config: RunConfig, one: Eval) -> list[Group | dict[str, Any]]:
    """The groups of some prompts; for a row that cannot be asked its line."""
    n = one.entry.samples
    try:
        groups: list[Group | dict[str, Any]] = []
        groups += await rollouts.run(draws, n=n, sampling=eval_sampling(config, one.entry), purpose=PURPOSE)
        return groups
    except (DataError, PackerError) as exc:  # prompts are made before the first is generated
        if len(draws) == 1:
            return [failed_row(draws[0].row_id, draws[0].where, n, "unaskable", str(exc))]
    return [item for draw in draws for item in await _asked([draw], rollouts, config, one)]


def refuse_other_versions(groups: Sequence[Group], version: int, label: str) -> None:
    """Raise RunAborted unless every token that was sampled is of `version`."""
    found = {
        v
        for group in groups for t in group.trajectories for row in t.rows
        for v, sampled in zip(row.weight_versions, row.mask, strict=True) if sampled
    } - {ENV_VERSION}  # fmt: skip
    if other := sorted(found - {version}):
        raise RunAborted(
            f"the eval {label} of version {version} has tokens of version {', '.join(map(str, other))}",
            cause="the weights of an engine changed while it was asked",
            fix="this is a bug in posttrain or in an engine plug-in: report it",
            code="eval-version",
        )
