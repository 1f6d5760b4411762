"""rollouts/step_000012.parquet: every trajectory of a batch step, to the token, with reward, parts and advantage.

    write_rollouts(run_dir.rollouts, 12, groups, advantages={"0:math:7/0": 0.5}, decode=tokenizer.decode)
    for row in read_rollouts("outputs/my-run", 12):
        print(row["completion"], row["reward"], row["advantage"])
    trajectory = to_trajectory(row)          # ids, mask, log-probs and versions as they were
    groups = to_groups(rows)                 # the groups of the batch step, in batch order

One row per trajectory, in batch order; `COLUMNS` names the columns. Held-out samples are in `validation_000012.parquet`.
A file is written aside and renamed: a reader never sees half of one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import ConfigError, DataError
from posttrain.tracking.files import aside, superseded_name
from posttrain.tracking.jsonl import plain
from posttrain.types import Group, Trajectory, Turn

if TYPE_CHECKING:
    import pyarrow

Decode = Callable[[Sequence[int]], str]

ROW = "row"
"""Key of `info` that numbers the earlier rows of a split episode, from 0; the last row of an episode has none."""

COLUMNS: dict[str, str] = {
    "step": "batch step",
    "group_id": "the prompt's draw",
    "sample_id": "the trajectory",
    "env": "environment",
    "reward": "total, null when unscorable",
    "reward_parts": "named parts of the reward",
    "advantage": "what the row trained with; 0 when it did not train",
    "finish_reason": "stop, length, aborted or error",
    "prompt": "text of the prompt, special tokens included",
    "completion": "text of everything after the prompt",
    "prompt_ids": "token ids of the prompt",
    "token_ids": "token ids of everything after it",
    "mask": "whether the token was sampled by the model and trains",
    "rollout_logprobs": "log-prob of the distribution sampled from, nats",
    "weight_versions": "version of the weights that sampled the token, -1 for the environment's",
    "turns": "spans of token_ids by who wrote them",
    "messages": "chat messages, JSON",
    "task": "the dataset row, JSON",
    "info": "free, JSON; `cause` says why a reward is unscorable",
}


def schema() -> pyarrow.Schema:
    """The columns of a rollout file."""
    import pyarrow as pa

    turn = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("role", pa.string())])
    types = {
        "step": pa.int32(), "reward": pa.float64(), "advantage": pa.float64(), "reward_parts": pa.map_(pa.string(), pa.float64()),
        "prompt_ids": pa.list_(pa.int32()), "token_ids": pa.list_(pa.int32()), "mask": pa.list_(pa.bool_()),
        "rollout_logprobs": pa.list_(pa.float32()), "weight_versions": pa.list_(pa.int32()), "turns": pa.list_(turn),
    }
    return pa.schema([pa.field(n, types.get(n, pa.string()), metadata={"help": h}) for n, h in COLUMNS.items()])


def write_rollouts(
    folder: Path,
    step: int,
    groups: Sequence[Group],
    *,
    advantages: Mapping[str, float] | None = None,
    decode: Decode | None = None,
    kind: str = "step",
) -> Path:
    """Write one file and return its path. `decode` turns ids into the text columns; without it they are empty."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [_row(step, g, row, advantages or {}, decode) for g in groups for t in g.trajectories for row in t.rows]
    path = folder / f"{kind}_{step:06d}.parquet"
    with aside(path, durable=False) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=schema()), temporary, compression="zstd")
    return path


def _row(step: int, group: Group, t: Trajectory, advantages: Mapping[str, float], decode: Decode | None) -> dict[str, Any]:
    return {
        "step": step,
        "group_id": t.group_id or group.group_id,
        "sample_id": t.sample_id,
        "env": t.env,
        "reward": t.reward if t.scorable else None,
        "reward_parts": {k: float(v) for k, v in t.reward_parts.items()},
        "advantage": float(advantages.get(t.sample_id, 0.0)),
        "finish_reason": t.finish_reason,
        "prompt": decode(t.prompt_ids) if decode else "",
        "completion": decode(t.token_ids) if decode else "",
        "prompt_ids": t.prompt_ids,
        "token_ids": t.token_ids,
        "mask": t.mask,
        "rollout_logprobs": t.rollout_logprobs,
        "weight_versions": t.weight_versions,
        "turns": [{"start": turn.start, "end": turn.end, "role": turn.role} for turn in t.turns],
        "messages": json.dumps(plain(t.messages), ensure_ascii=False),
        "task": json.dumps(plain(group.task), ensure_ascii=False),
        "info": json.dumps(plain(t.info), ensure_ascii=False),
    }


def rollout_steps(run: str | Path, kind: str = "step") -> list[int]:
    """The steps of a run that have a rollout file, ascending."""
    return [step for step, _ in _files(Path(run) / "rollouts", kind)]


def read_rollouts(run: str | Path, step: int | None = None, kind: str = "step") -> list[dict[str, Any]]:
    """The rows of one step (default: the last), with JSON columns parsed.

    Raises ConfigError naming the steps there are, DataError for a file that is damaged or lacks a column.
    """
    files = dict(_files(Path(run) / "rollouts", kind))
    wanted = max(files, default=None) if step is None else step
    if wanted is None or wanted not in files:
        have = f"there are steps {', '.join(map(str, files))}" if files else "the run has written none yet"
        raise ConfigError(
            f"no rollouts of step {wanted} in {run}" if wanted is not None else f"no rollouts in {run}",
            cause=have,
            fix="name one of those steps; tracking.rollouts_every sets how often they are written (0: never)",
            code="no_rollouts",
        )
    return _read(files[wanted])


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist(maps_as_pydicts="strict")
        for row in rows:
            if absent := COLUMNS.keys() - row.keys():
                raise ValueError(f"it has no column {', '.join(sorted(absent))}")
            for name in ("messages", "task", "info"):
                row[name] = json.loads(row[name])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as exc:
        raise DataError(
            f"the rollout file {path} cannot be read",
            cause=" ".join(f"{type(exc).__name__}: {exc}".split()),
            fix="bring back the file that the run wrote, or name another step",
            code="rollouts_damaged",
        ) from exc
    return rows


def to_trajectory(row: Mapping[str, Any]) -> Trajectory:
    """The Trajectory that a row was written from."""
    fields = ("prompt_ids", "token_ids", "mask", "rollout_logprobs", "weight_versions", "finish_reason", "reward", "reward_parts",
              "group_id", "sample_id", "env", "messages", "info")
    return Trajectory(**{name: row[name] for name in fields}, turns=[Turn(**turn) for turn in row["turns"]])


def to_groups(rows: Sequence[Mapping[str, Any]]) -> list[Group]:
    """The groups that rows were written from, in batch order; a group's rows stand together.

    Raises DataError for a row whose lists of tokens disagree in length.
    """
    groups: list[Group] = []
    earlier: list[Trajectory] = []
    for row in rows:
        if not groups or groups[-1].group_id != row["group_id"]:
            groups.append(Group(row["group_id"], row["task"], []))
        try:
            earlier.append(to_trajectory(row))
        except (TypeError, ValueError) as exc:
            raise DataError(
                f"the recorded trajectory {row['sample_id']!r} of step {row['step']} is damaged",
                cause=str(exc),
                fix="bring back the file that the run wrote, or name another step",
                code="rollouts_damaged",
            ) from exc
        if ROW not in earlier[-1].info:
            *before, last = earlier
            last.earlier, earlier = before, []
            groups[-1].trajectories.append(last)
    return groups


def supersede_after(run: str | Path, step: int) -> int:
    """Rename the files of steps past `step` to `*.superseded`; return how many. A resume calls this."""
    folder = Path(run) / "rollouts"
    past = [path for kind in ("step", "validation") for n, path in _files(folder, kind) if n > step]
    for path in past:
        path.rename(superseded_name(path))
    return len(past)


def _files(folder: Path, kind: str) -> Iterator[tuple[int, Path]]:
    found = ((re.fullmatch(rf"{kind}_(\d+)\.parquet", p.name), p) for p in folder.glob(f"{kind}_*.parquet"))
    return iter(sorted((int(match[1]), path) for match, path in found if match))
