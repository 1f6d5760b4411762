"""Reward curves of a run as a PNG: `python -m posttrain.tracking.plot RUN OUT.png`. Needs matplotlib (posttrain[plot])."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.tracking.metric_names import HELD_OUT
from posttrain.tracking.metrics import read_metrics, read_validation


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
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as exc:
        raise ConfigError("drawing needs matplotlib", cause=str(exc), fix="pip install 'posttrain[plot]'") from exc
    figure = Figure(figsize=(7.2, 4.0), dpi=150, layout="constrained")
    _draw(figure.subplots(), rows, held_out, title or folder.name)
    figure.savefig(out)


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m posttrain.tracking.plot", description=__doc__)
    parser.add_argument("run", help="run directory or metrics.jsonl")
    parser.add_argument("out", help="PNG file to write")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    plot(arguments.run, arguments.out, arguments.title)


if __name__ == "__main__":
    main()
