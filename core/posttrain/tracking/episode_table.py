"""`posttrain show RUN --sample ID`: an episode token by token: who wrote it, what trains, the version that sampled it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from posttrain.errors import ConfigError
from posttrain.tracking.rollouts import ROW, read_rollouts
from posttrain.tracking.run_dir import find_run
from posttrain.tracking.text import number

Row: TypeAlias = Mapping[str, Any]
Spell: TypeAlias = Callable[[Sequence[int]], str]
MOST = 60
"""Tokens of one span that are shown; of a longer one, its two ends."""


def show_episode(
    run: str | Path, sample: str, step: int | None = None, *, spell: Spell | None = None, console: Console | None = None
) -> None:
    """Print every row of an episode. spell: the text of ids, special tokens too.

    Raises ConfigError when there is no such run, step or sample.
    """
    found = read_rollouts(find_run(run), step)
    rows = [row for row in found if row["sample_id"] in (sample, f"{sample}#{row['info'].get(ROW)}")]
    if not rows:
        raise ConfigError(
            f"there is no sample {sample!r} in step {found[0]['step'] if found else step} of {run}",
            cause=f"its samples are {', '.join(row['sample_id'] for row in found[:4])}, …" if found else "the step has none",
            fix="name one of them, or another step with --step", code="no_rollouts",
        )  # fmt: skip
    out, last = console or Console(), rows[-1]
    bits = [f"sample {sample}", f"step {last['step']}", f"reward {number(last['reward'])}", f"advantage {last['advantage']:+.3g}"]
    end = last["info"].get("stop_reason") or last["finish_reason"]
    out.print(Text(" · ".join([*bits, f"ended: {end}"]), style="bold"))
    for place, row in enumerate(rows, 1):
        if len(rows) > 1:
            out.print(Text(f"row {place} of {len(rows)}: the template rewrote what came before", style="dim"))
        out.print(_table(row, spell))


def _table(row: Row, spell: Spell | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (("at", "right"), ("id", "right"), ("text", "left"), ("who", "left"), ("trains", "left"),
                          ("version", "right"), ("log-prob", "right")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    prompt = row["prompt_ids"]
    for at in _shown(0, len(prompt)):
        _add(table, at, prompt, "prompt", "", "", spell)
    for turn in row["turns"]:
        for at in _shown(turn["start"], turn["end"]):
            trains = at is not None and row["mask"][at]
            version = str(row["weight_versions"][at]) if trains else ""
            logprob = f"{row['rollout_logprobs'][at]:.3f}" if trains else ""
            _add(table, at, row["token_ids"], "model" if turn["role"] == "model" else "env", version, logprob, spell, len(prompt))
    return table


def _shown(start: int, end: int) -> list[int | None]:
    """Places of a span; None stands for those that are left out."""
    if end - start <= MOST:
        return list(range(start, end))
    return [*range(start, start + MOST // 2), None, *range(end - MOST // 2, end)]


def _add(
    table: Table, at: int | None, ids: Sequence[int], who: str, version: str, logprob: str, spell: Spell | None, before: int = 0
) -> None:
    if at is None:
        table.add_row("…")
        return
    text = repr(spell([ids[at]])) if spell else ""
    style = "bold" if version else "dim"
    table.add_row(str(before + at), str(ids[at]), Text(text), who, "yes" if version else "", version, logprob, style=style)
