"""Reward curves of a run as a PNG: `python -m posttrain.tracking.plot RUN OUT.png`. Needs matplotlib (posttrain[plot])."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.reward_range import Range
from posttrain.errors import ConfigError
from posttrain.tracking.metric_names import HELD_OUT
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.ranges import read_ranges

if TYPE_CHECKING:
    from posttrain.tracking.comparison import Comparison, Row


def plot(run: str | Path, out: str | Path, title: str = "") -> None:
    """Draw training reward (mean, and ± its standard deviation) and held-out reward over batch steps into `out`.

    `run` is a run directory or a metrics.jsonl with its validation.jsonl beside it. Raises ConfigError when there is nothing to
    draw or matplotlib is absent.
    """
    source = Path(run)
    folder = source if source.is_dir() else source.parent
    rows = [r for r in read_metrics(source) if isinstance(r.get("reward/mean"), int | float)]
    held_out = [r for r in read_validation(folder) if r.get(HELD_OUT) is not None]
    if not rows and not held_out:
        raise ConfigError(f"no rewards to draw in {run}", fix="give a run directory that has done at least one batch step")
    ranges = {name: one for name, one in read_ranges(folder).items() if name.count("/") == 1 and any(name in r for r in rows)}
    lines = math.ceil(len(ranges) / 3)
    figure = _figure(7.2, 4.0 + 1.8 * lines)
    above, below = figure.subfigures(2, 1, height_ratios=[4.0, 1.8 * lines]) if ranges else (figure, None)
    _draw(above.subplots(), rows, held_out, title or folder.name)
    if below is not None:
        panels = list(below.subplots(lines, 3, squeeze=False).flat)
        for panel, (name, one) in zip(panels, ranges.items(), strict=False):
            _draw_part(panel, name.partition("/")[2], one, [(r["step"], r[name]) for r in rows if r.get(name) is not None])
        for panel in panels[len(ranges) :]:
            panel.set_axis_off()
    figure.savefig(out)


def _draw_part(axes: Any, name: str, one: Range, points: list[tuple[int, float]]) -> None:
    """A part of the reward over the steps, between its bounds."""
    axes.plot([step for step, _ in points], [value for _, value in points], color="tab:blue", linewidth=1.0)
    axes.set_ylim(bottom=one.min, top=one.max)
    weight = "" if one.weight is None else f" · weight {one.weight:g}"
    axes.set_title(f"{name} {one.mark}{weight}", fontsize=8, loc="left")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)


def _draw(axes: Any, rows: list[dict[str, Any]], held_out: list[dict[str, Any]], title: str) -> None:
    steps = [r["step"] for r in rows]
    mean = [r["reward/mean"] for r in rows]
    std = [r.get("reward/std") or 0.0 for r in rows]
    axes.plot(steps, mean, color="tab:blue", linewidth=1.0, alpha=0.6, label="training batch, mean")
    bounds = [(r.get("reward/min", -math.inf), r.get("reward/max", math.inf)) for r in rows]  # no reward lies outside
    low = [max(m - s, b[0]) for m, s, b in zip(mean, std, bounds, strict=True)]
    high = [min(m + s, b[1]) for m, s, b in zip(mean, std, bounds, strict=True)]
    axes.fill_between(steps, low, high, color="tab:blue", alpha=0.10, linewidth=0, label="± standard deviation")
    if held_out:
        scores = [r[HELD_OUT] for r in held_out]
        axes.plot([r["step"] for r in held_out], scores, "o-", color="tab:orange", label="held-out, mean")
    axes.set(xlabel="batch step", ylabel="reward", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="best", frameon=False)


def plot_comparison(comparison: Comparison, out: str | Path, title: str = "") -> None:
    """Draw the curves of a comparison into `out`: a panel for each row, its own curve dark among the pale ones of the others.

    Curves that lie on each other, as those of a sweep do, cannot be told apart in one panel, least of all without colours.
    The band is the range over seeds. Raises ConfigError when matplotlib is absent.
    """
    rows = [row for row in comparison.rows if row.curve]
    columns = min(len(rows), 3)
    lines = math.ceil(len(rows) / columns)
    figure = _figure(1.0 + 2.4 * columns, 0.9 + 1.9 * lines)
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    for panel, row in zip(panels.flat, rows, strict=False):
        for other in rows:
            panel.plot([step for step, _ in other.curve], _means(other), color="0.82", linewidth=0.9)
        _highlight(panel, row)
    for panel in panels.flat[len(rows) :]:
        panel.set_axis_off()
    figure.suptitle(title or comparison.metric, fontsize=11)
    figure.supxlabel("batch step", fontsize=9)
    if title:
        figure.supylabel(comparison.metric, fontsize=9)
    figure.savefig(out)


def _highlight(panel: Any, row: Row) -> None:
    steps, means = [step for step, _ in row.curve], _means(row)
    low, high = ([pick(values) for _, values in row.curve] for pick in (min, max))
    panel.fill_between(steps, low, high, color="tab:blue", alpha=0.25, linewidth=0)
    panel.plot(steps, means, color="tab:blue", linewidth=2.0)
    panel.plot(steps[-1:], means[-1:], "o", color="tab:blue", markersize=4)
    panel.annotate(
        f"{means[-1]:.2f}", (steps[-1], means[-1]), xytext=(0, -7), textcoords="offset points", ha="right", va="top", fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8},
    )  # fmt: skip
    panel.set_title(row.name, fontsize=9, loc="left", fontweight="bold")
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.2)


def _means(row: Row) -> list[float]:
    return [statistics.fmean(values) for _, values in row.curve]


def check_drawing(out: Path) -> None:
    """Raise ConfigError unless a drawing can be written to `out`: matplotlib, a suffix that it knows, a folder that is there."""
    kinds = _figure(1.0, 1.0).canvas.get_supported_filetypes()
    if (suffix := out.suffix.removeprefix(".").lower()) not in kinds:
        cause = f"the suffix {suffix!r} is no format of a drawing" if suffix else "it has no suffix"
        raise ConfigError(f"cannot draw into {out}", cause=cause, fix=f"name it {out.stem}.png", code="plot")
    if not out.expanduser().parent.is_dir():
        cause = f"there is no folder {out.parent}"
        raise ConfigError(f"cannot draw into {out}", cause=cause, fix=f"mkdir -p {out.parent}", code="plot")


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        raise ConfigError("drawing needs matplotlib", cause=str(exc), fix="pip install 'posttrain[plot]'") from exc
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m posttrain.tracking.plot", description=__doc__)
    parser.add_argument("run", help="run directory or metrics.jsonl")
    parser.add_argument("out", help="PNG file to write")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    plot(arguments.run, arguments.out, arguments.title)


if __name__ == "__main__":
    main()
