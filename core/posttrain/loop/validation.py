"""Held-out validation: the mean reward on prompts that training never draws, by the same path as training.

It runs before step 1, every `validation.every` batch steps, and after the last. Unscorable samples are counted and left out
of the mean, never taken as 0.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.data.dataset import Draw, Source, place_of, row_id
from posttrain.errors import DataError
from posttrain.loop.rollouts import ask
from posttrain.types import Sampling

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.environment import Environment, RowDataset
    from posttrain.loop.rollouts import Rollouts
    from posttrain.types import Group

SPLIT = "test"


def held_out_rows(source: Source, environments: Mapping[str, Any]) -> RowDataset:
    """The test split of an environment, or the one that came with the rows of `rl.data.factory`."""
    return environments[source.env].dataset(SPLIT) if source.test is None else source.test  # type: ignore[no-any-return]


def held_out_draws(sources: Sequence[Source], environments: Mapping[str, Any], prompts: int) -> list[Draw]:
    """The first `prompts` rows of the test splits, shared evenly over the environments; fewer when there are fewer."""
    draws: list[Draw] = []
    for number, source in enumerate(sources):
        share = prompts // len(sources) + (number < prompts % len(sources))
        rows = held_out_rows(source, environments) if share else []
        for position in range(min(share, len(rows))):
            row = rows[position]
            draws.append(Draw(len(draws), 0, source.env, row_id(row, position), row, place_of(rows, position)))
    return draws


def refuse_held_out(
    draws: Sequence[Draw], environments: Mapping[str, Any], *, bad_rows: bool = False
) -> Callable[[Source, int, Any], None]:
    """What `PromptSampler.watch` takes: raises DataError for a row of a source that asks the same as a held-out draw.

    The draw may be of another environment of the run: what one of them holds out, no other trains on. Also for a row that its
    environment cannot ask about, unless there may be `bad_rows`: those are counted as they are drawn.
    """
    asked = {task_key(environments[draw.env], draw): draw for draw in draws}

    def refuse(source: Source, position: int, row: Any) -> None:
        draw = Draw(position, 0, source.env, row_id(row, position), row, place_of(source.rows, position))
        try:
            key = task_key(environments[draw.env], draw)
        except DataError:
            if bad_rows:
                return
            raise
        held = asked.get(key)
        if held is not None:
            raise DataError(
                f"{draw.where} trains and asks what validation asks, the held-out {held.where}"
                + (f" of {held.env}" if held.env != draw.env else ""),
                cause="a score on prompts that train says nothing of others",
                fix="leave one of the two out (options.filter, another options.test_data), or set validation.prompts=0",
                where="rl.data.factory" if source.test is not None else "",
                code="not-held-out",
            )

    return refuse


def task_key(env: Environment, draw: Draw) -> str:
    """What the row of a draw has in common with no row but the same task. Raises DataError for one that cannot be asked about."""
    from posttrain.data.environment import Environment

    prompt = ask(env, draw)
    return repr(prompt if type(env).task_key is Environment.task_key else env.task_key(draw.task))


def sampling(config: RunConfig) -> Sampling:
    v = config.validation
    r = config.rollout
    return Sampling(v.max_tokens or r.max_tokens, v.temperature, v.top_p, v.top_k, v.min_p, stop=r.stop)


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
        of_env = [t for t in rows if t.env == env]
        scores = [float(t.reward) for t in of_env if t.scorable and t.reward is not None]
        metrics[f"validation/{env}/unscorable_count"] = float(len(of_env) - len(scores))
        metrics[f"validation/{env}/length/mean"] = statistics.fmean(len(t.token_ids) for t in of_env)
        if scores:
            metrics[f"validation/{env}/reward/mean"] = statistics.fmean(scores)
    return metrics, groups
