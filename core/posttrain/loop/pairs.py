"""From draws to groups without an engine: the two completions of a pair come with the data, labelled instead of scored.

A group is the chosen trajectory (reward 1) and the rejected one (reward 0). No version of the weights sampled their tokens
(version -1), so they have no rollout log-probs. A pair with nothing to learn from becomes two unscorable trajectories, whose
cause is counted (`identical`, `empty`, `too_long`) and which never train; a row that is no pair at all ends the run.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posttrain.data.dataset import Draw, read_row, row_id
from posttrain.data.environment import as_messages
from posttrain.data.packer import require_packer
from posttrain.errors import DataError
from posttrain.loop.batches import make_batch
from posttrain.loop.cohort import Cohort
from posttrain.types import ENV_VERSION, Group, Trajectory, Turn

if TYPE_CHECKING:
    from posttrain.data.dataset import Source
    from posttrain.data.packer import DataPacker
    from posttrain.data.preference import Pair, PreferenceEnvironment
    from posttrain.loop.parts import PolicyEnd
    from posttrain.objective.objective import Objective

CHECKED_ROWS = 10_000


@dataclass(slots=True)
class Pairs:
    """What `Rollouts` is to a run with an engine. `environments` by the name that draws carry; `max_model_len` in tokens."""

    packer: DataPacker
    environments: Mapping[str, PreferenceEnvironment]
    max_model_len: int

    def __post_init__(self) -> None:
        require_packer(self.packer, type(self).__name__)

    async def run(self, draws: Sequence[Draw], **_: Any) -> list[Group]:
        """Two trajectories of each draw, in draw order, the chosen one first. Takes what `Rollouts.run` takes."""
        return await asyncio.to_thread(lambda: [self.group(draw) for draw in draws])

    def prepare(self, draw: Draw) -> None:
        """Nothing is made ahead: a row that is no pair ends the run when it is used."""

    async def abort(self, draw: Draw) -> None:
        """Nothing is generated."""

    def group(self, draw: Draw) -> Group:
        """The group of one draw. Raises DataError for a row that is no pair, PackerError for a packer not made for pairs."""
        env = self.environments[draw.env]
        pair = read_pair(env, draw)
        ids = self.packer.get_preference_input(pair, max_len=self.max_model_len, truncate=env.truncate)
        cause = pair.useless or ("" if ids.fits else "too_long")
        sides = (
            (ids.chosen_ids, ids.chosen_cut, pair.chosen, 1.0),
            (ids.rejected_ids, ids.rejected_cut, pair.rejected, 0.0),
        )
        rows = [
            Trajectory(
                prompt_ids=list(ids.prompt_ids),
                token_ids=list(tokens),
                mask=[True] * len(tokens),
                rollout_logprobs=[0.0] * len(tokens),
                weight_versions=[ENV_VERSION] * len(tokens),
                finish_reason="length" if cut else "stop",
                reward=None if cause else label,
                group_id=draw.group_id,
                sample_id=f"{draw.group_id}/{index}",
                env=draw.env,
                turns=[Turn(0, len(tokens))],
                messages=[*as_messages(pair.prompt), {"role": "assistant", "content": text}],
                info={"cause": cause} if cause else {},
            )
            for index, (tokens, cut, text, label) in enumerate(sides)
        ]
        return Group(draw.group_id, draw.task, rows)


def read_pair(env: PreferenceEnvironment, draw: Draw, where: str = "") -> Pair:
    """The pair of a draw. Raises DataError naming the row, and its file and line where known, when it is none."""
    try:
        return env.pair(draw.task)
    except Exception as exc:
        raise DataError(
            f"row {draw.row_id!r} of environment {draw.env!r} is not a preference pair",
            cause=str(exc) if isinstance(exc, ValueError) else f"pair raised {type(exc).__name__}: {exc}",
            fix='give it "prompt", "chosen" and "rejected" (options.columns renames), in one of the forms of the page',
            where=where,
            anchor="guides/dpo.md#the-data-it-needs",
            code="not-a-pair",
        ) from exc


def check_pairs(
    sources: Sequence[Source], held_out: Sequence[Draw], environments: Mapping[str, PreferenceEnvironment]
) -> list[str]:
    """Read the first 10,000 rows of each source, and the held-out ones, before anything starts.

    Lines to say about held-out prompts that train and pairs that teach nothing. Raises DataError for a row that is no pair, and
    when no row of a source teaches.
    """
    notes = []
    asked = {repr(read_pair(environments[draw.env], draw).prompt) for draw in held_out}
    for source in sources:
        size = min(len(source.rows), CHECKED_ROWS)
        pairs = list(_pairs(source, size, environments[source.env]))
        if shared := asked & {repr(pair.prompt) for pair in pairs}:
            notes.append(f"{len(shared)} of {len(asked)} held-out prompts also train in {source.env}")
        useless = [pair.useless for pair in pairs if pair.useless]
        if not useless:
            continue
        of = f"{len(useless)} of the {'first ' if size < len(source.rows) else ''}{size} pairs of {source.env}"
        text = f"{of} teach nothing: " + ", ".join(f"{useless.count(cause)} {cause}" for cause in sorted(set(useless)))
        if len(useless) == size:
            raise DataError(text, cause="chosen and rejected are the same, or empty", fix="check the columns", code="no-pairs")
        notes.append(f"{text}; they are left out")
    return notes


def _pairs(source: Source, size: int, env: PreferenceEnvironment) -> Iterable[Pair]:
    place = getattr(source.rows, "where", None)
    for position in range(size):
        row = read_row(source, position)
        draw = Draw(position, 0, source.env, row_id(row, position), row)
        yield read_pair(env, draw, place(position) if place else "")


async def validate(
    pairs: Pairs, draws: Sequence[Draw], objective: Objective, policy: PolicyEnd
) -> tuple[dict[str, float], list[Group]]:
    """Loss and measures of held-out pairs under `validation/…`, and their groups. No weight moves."""
    groups = await pairs.run(draws)
    batch = make_batch(Cohort(0, list(draws), groups), objective, pairs.packer, discard_tied=True)
    found = await asyncio.to_thread(policy.evaluate, batch.rows) if batch.rows else {}
    rows = [t for group in groups for t in group.trajectories]
    metrics = {f"validation/{name}": value for name, value in found.items()}
    metrics |= {
        "validation/prompts": float(len(draws)),
        "validation/unscorable_count": float(sum(not t.scorable for t in rows)),
        "validation/length/mean": statistics.fmean(len(t.token_ids) for t in rows),
        "validation/truncated_share": sum(t.truncated for t in rows) / len(rows),
    }
    return metrics, groups
