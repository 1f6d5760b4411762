"""Held-out validation: the mean reward on prompts that training never draws, by the same path as training.

It runs before step 1, every `validation.every` batch steps, and after the last. Unscorable samples are counted and left out
of the mean, never taken as 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.data.dataset import Draw, Source, read_row, row_id
from posttrain.errors import DataError
from posttrain.loop.rollouts import ask
from posttrain.types import Sampling

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.loop.rollouts import Rollouts
    from posttrain.types import Group

SPLIT = "test"
COMPARED_ROWS = 10_000


def held_out_draws(environments: Mapping[str, Any], prompts: int) -> list[Draw]:
    """The first `prompts` rows of the test splits, shared evenly over the environments; fewer when there are fewer."""
    draws: list[Draw] = []
    names = list(environments)
    for number, name in enumerate(names):
        share = prompts // len(names) + (number < prompts % len(names))
        rows = environments[name].dataset(SPLIT)
        for position in range(min(share, len(rows))):
            row = rows[position]
            draws.append(Draw(len(draws), 0, name, row_id(row, position), row))
    return draws


def check_held_out(draws: Sequence[Draw], environments: Mapping[str, Any], sources: Sequence[Source]) -> None:
    """Raise DataError when one of the first 10,000 rows of a source asks the same as a held-out draw of its environment."""
    asked = {(draw.env, repr(ask(environments[draw.env], draw))) for draw in draws}
    for source in sources if asked else ():
        size = min(len(source.rows), COMPARED_ROWS)
        rows = (Draw(i, 0, source.env, row_id(row, i), row) for i in range(size) for row in [read_row(source, i)])
        shared = [draw.row_id for draw in rows if (draw.env, repr(ask(environments[draw.env], draw))) in asked]
        if shared:
            raise DataError(
                f"{len(shared)} of the rows that train ask what validation asks, first {shared[0]!r}",
                cause=f"validation asks the test split of {source.env}, and a score on prompts that train says nothing of others",
                fix="leave these rows out, or set validation.prompts=0",
                where="rl.data.factory",
                code="not-held-out",
            )


def sampling(config: RunConfig) -> Sampling:
    v = config.validation
    return Sampling(v.max_tokens or config.rollout.max_tokens, v.temperature, v.top_p, v.top_k, v.min_p)


async def validate(rollouts: Rollouts, draws: Sequence[Draw], config: RunConfig) -> tuple[dict[str, float], list[Group]]:
    """Metrics under `validation/…` and the groups they came from."""
    groups = await rollouts.run(draws, n=config.validation.samples, sampling=sampling(config), purpose="validation")
    rows = [t for g in groups for t in g.trajectories]
    rewards = [float(t.reward) for t in rows if t.scorable and t.reward is not None]
    metrics = {
        "validation/prompts": float(len(draws)),
        "validation/unscorable_count": float(len(rows) - len(rewards)),
        "validation/length/mean": statistics.fmean(len(t.token_ids) for t in rows),
        "validation/truncated_share": sum(t.truncated for t in rows) / len(rows),
    }
    if rewards:
        metrics["validation/reward/mean"] = statistics.fmean(rewards)
    for env in sorted({t.env for t in rows}):
        scores = [float(t.reward) for t in rows if t.env == env and t.scorable and t.reward is not None]
        if scores:
            metrics[f"validation/{env}/reward/mean"] = statistics.fmean(scores)
    return metrics, groups
