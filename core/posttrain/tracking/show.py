"""`posttrain show RUN [--step N]`: sample rollouts of a step with their rewards, parts and advantages. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from posttrain.data.reward_range import Range
from posttrain.tracking.metric_names import score_of
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.ranges import read_ranges
from posttrain.tracking.rollouts import read_rollouts, rollout_steps
from posttrain.tracking.run_dir import find_run
from posttrain.tracking.text import number, printable
from posttrain.types import ENV_VERSION

Row = Mapping[str, Any]


def show(run: str | Path, step: int | None = None, *, groups: int = 3, samples: int = 4, console: Console | None = None) -> None:
    """Print up to `groups` prompts of a step (default: the last) with up to `samples` answers each.

    Groups with the widest spread of rewards come first, and in a group the best and the worst answers.
    Raises ConfigError when there is no such run or step.
    """
    folder = find_run(run)
    out = console or Console()
    rows = read_rollouts(folder, step)
    shown = rows[0]["step"] if rows else step
    out.print(Text(_headline(folder, shown, rows), style="bold"))
    ranges = read_ranges(folder)
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row["group_id"], []).append(row)
    for members in sorted(by_group.values(), key=_spread, reverse=True)[:groups]:
        out.print(_group_panel(members, samples, ranges))
    left = len(by_group) - groups
    if left > 0:
        out.print(Text(f"{left} more group(s) in {folder / 'rollouts'}", style="dim"))


def _headline(folder: Path, step: int | None, rows: Sequence[Row]) -> str:
    metrics = {row["step"]: row for row in read_metrics(folder)}.get(step, {})
    validations = read_validation(folder)
    score = score_of(metrics, *validations)
    held_out = [row[score.held_out] for row in validations if row.get(score.held_out) is not None]
    mean = f"mean {score.name} {score.text(metrics)}"
    parts = [f"step {step} of {max(rollout_steps(folder))}", f"{len(rows)} answers", mean]
    if held_out:
        parts.append(f"held-out {number(held_out[0])} → {number(held_out[-1])}")
    return " · ".join(parts)


def _spread(rows: Sequence[Row]) -> float:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return max(rewards, default=0.0) - min(rewards, default=0.0)


def _group_panel(rows: Sequence[Row], samples: int, ranges: Mapping[str, Range]) -> Panel:
    ranked = sorted(rows, key=lambda r: float("-inf") if r["reward"] is None else r["reward"], reverse=True)
    best = (samples + 1) // 2
    chosen = ranked if len(ranked) <= samples else [*ranked[:best], *ranked[len(ranked) - samples + best :]]
    parts = [Text(printable(_prompt(rows[0])), style="cyan")]
    for row in chosen:
        caption = Text(f"▸ {_caption(row, ranges)}", style="bold" if row["advantage"] > 0 else "dim")
        parts += [caption, Text(printable(_completion(row)))]
    title = f"{rows[0]['env']} {rows[0]['group_id']} · {len(rows)} answers"
    return Panel(Group(*parts), title=Text(title), title_align="left")


def _caption(row: Row, ranges: Mapping[str, Range]) -> str:
    reward = "unscorable" if row["reward"] is None else number(row["reward"])
    bits = [f"reward {reward}"]
    if row["reward"] is not None and max(row["weight_versions"], default=0) == ENV_VERSION:
        return " · ".join(["chosen" if row["reward"] else "rejected", f"{len(row['token_ids'])} tokens", row["finish_reason"]])
    if row["reward"] is None:
        bits += [printable(str(row["info"][key]), 200) for key in ("cause", "error") if row["info"].get(key)]
    if row["reward_parts"]:
        marks = {part: ranges.get(f"reward/{row['env']}/{part}") for part in row["reward_parts"]}
        said = [f"{k} {number(v)}" + (f" {one.mark}" if (one := marks[k]) else "") for k, v in _told(row["reward_parts"])]
        bits.append(f"({', '.join(said)})")
    return " · ".join([*bits, f"advantage {row['advantage']:+.3g}", f"{len(row['token_ids'])} tokens", row["finish_reason"]])


def _told(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    """Parts without the counters that are at 0 (`tool/errors/timeout`)."""
    return [(name, value) for name, value in parts.items() if value or "/" not in name]


def _prompt(row: Row) -> str:
    return row["prompt"] or f"token ids {row['prompt_ids']}"


def _completion(row: Row) -> str:
    return row["completion"] or f"token ids {row['token_ids']}"
