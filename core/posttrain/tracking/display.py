"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere, never a flood.

`live`   progress, reward curve, loss, tokens per second, time by phase and one sample rollout, redrawn in place
`lines`  one line per step
`none`   nothing
`auto`   live on a terminal; elsewhere lines, at most about one a second
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain.data.reward_range import Range
from posttrain.tracking.metric_names import SCORES, Score, score_of
from posttrain.tracking.text import duration, number, printable, sparkline

Mode = Literal["auto", "live", "lines", "none"]
PHASES = ("rollout", "train", "sync")
QUIET_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout to show: texts, reward and advantage."""

    title: str
    prompt: str
    completion: str


@dataclass(slots=True)
class Progress:
    """What the display knows of a run so far. `rewards` and `held_out` are values of `score`, the reward in most runs."""

    total: int
    step: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    sample: Sample | None = None
    score: Score = SCORES[0]
    ranges: Mapping[str, Range] = field(default_factory=dict)

    def restore(self, rows: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]) -> None:
        """Take up what a resumed run has on record."""
        self.step = max((row["step"] for row in rows), default=0)
        self.score = score_of(*rows[:1], *validations[:1])
        trained, held_out = self.score.trained, self.score.held_out
        self.rewards = [float(r[trained]) for r in rows if isinstance(r.get(trained), int | float)]
        self.held_out = [(row["step"], row[held_out]) for row in validations if row.get(held_out) is not None]

    def advance(self, step: int, metrics: Mapping[str, Any], sample: Sample | None) -> None:
        self.step, self.metrics, self.sample = step, metrics, sample or self.sample
        self.score = score_of(metrics) if not self.rewards else self.score
        if isinstance(reward := metrics.get(self.score.trained), int | float):
            self.rewards.append(float(reward))
        self.seconds.append(float(metrics.get("time/step_s") or 0.0))

    @property
    def remaining_seconds(self) -> float:
        recent = self.seconds[-20:]
        return (self.total - self.step) * sum(recent) / len(recent) if recent else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        tokens, seconds = self.metrics.get("tokens/generated"), self.metrics.get("time/step_s")
        return tokens / seconds if tokens and seconds else None

    def parts(self) -> list[tuple[str, str]]:
        """Parts of the reward whose range is known, as fields: `format`, `0.9 ↑ 0–1`."""
        known = [name for name in self.ranges if name.count("/") == 1 and self.metrics.get(name) is not None]
        return [(name.partition("/")[2], f"{number(self.metrics[name])} {self.ranges[name].mark}") for name in known]

    def phases(self) -> str:
        """`0.84 s: rollout 0.5 · train 0.25 · sync 0.03`."""
        step = self.metrics.get("time/step_s")
        parts = [f"{p} {number(self.metrics[f'time/{p}_s'], 2)}" for p in PHASES if f"time/{p}_s" in self.metrics]
        return f"{number(step, 3)} s: " + " · ".join(parts) if step is not None else ""


class Display:
    """Shows progress on `console`. `start` and `stop` bracket it; `stop` is idempotent."""

    def __init__(self, mode: Mode, total_steps: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self.progress = Progress(total_steps)
        terminal = self.console.is_terminal and not self.console.is_dumb_terminal and not self.console.is_jupyter
        self.mode: Mode = ("live" if terminal else "lines") if mode == "auto" else mode
        self._pause = QUIET_SECONDS if mode == "auto" else 0.0
        self._last_line = float("-inf")
        self._live: Live | None = None

    def start(self) -> None:
        if self.mode == "live":
            self._live = Live(panel(self.progress), console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def note(self, text: str) -> None:
        """A line that stays on the screen, above the panel."""
        if self.mode != "none":
            self.console.print(Text(text), soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, Any], sample: Sample | None = None) -> None:
        self.progress.advance(step, metrics, sample)
        if self._live is not None:
            self._live.update(panel(self.progress))
        elif self.mode == "lines" and self._due():
            self.console.print(Text(line(self.progress)), soft_wrap=True)

    def validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        score = score_of(metrics)
        value = metrics.get(score.held_out)
        if value is None:
            return
        self.progress.held_out.append((step, value))
        when = f"after step {step}" if step else "before step 1"
        self.note(f"held-out {score.name} {score.text(metrics, held_out=True)} {when}")

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _due(self) -> bool:
        now = time.monotonic()
        edge = self.progress.step in (1, self.progress.total)
        if not edge and now - self._last_line < self._pause:
            return False
        self._last_line = now
        return True


def line(progress: Progress) -> str:
    """One step in one line."""
    m, width = progress.metrics, len(str(progress.total))
    parts = [
        f"step {progress.step:>{width}}/{progress.total}",
        f"{progress.score.name} {progress.score.text(m)}",
        f"loss {number(m.get('loss'))}",
        f"length {number(m.get('length/mean'))}",
    ]
    if progress.tokens_per_second:
        parts.append(f"{number(progress.tokens_per_second)} tokens/s")
    return "  ".join([*parts, progress.phases()])


def panel(progress: Progress) -> RenderableType:
    """The live picture."""
    m = progress.metrics
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    left = f"{duration(progress.remaining_seconds)} left" if progress.seconds else "starting"
    head.add_row(
        Text(f"step {progress.step}/{progress.total}", style="bold"),
        ProgressBar(total=max(progress.total, 1), completed=progress.step),
        Text(left, style="dim"),
    )
    rows: list[RenderableType] = [head]
    if progress.rewards:
        curve = f"{number(progress.rewards[-1])} {sparkline(progress.rewards)}"
        rows.append(_fields((progress.score.name, curve), ("held-out", _held_out(progress))))
        rows.append(_fields(
            ("loss", number(m.get("loss"))),
            ("grad norm", number(m.get("grad_norm"))),
            ("length", number(m.get("length/mean"))),
            ("tokens/s", number(progress.tokens_per_second)),
        ))
        if parts := progress.parts():
            rows.append(_fields(*parts))
        rows.append(_fields(("step time", progress.phases())))
    if progress.sample is not None:
        rows.append(_sample(progress.sample))
    return Group(*rows)


def _held_out(progress: Progress) -> str:
    if not progress.held_out:
        return "–"
    first, (step, last) = progress.held_out[0][1], progress.held_out[-1]
    return number(first) if len(progress.held_out) == 1 else f"{number(first)} → {number(last)} (step {step})"


def _fields(*fields: tuple[str, str]) -> Text:
    text = Text(overflow="ellipsis", no_wrap=True)
    for name, value in fields:
        text.append(f"{name} ", style="dim").append(f"{value}   ")
    return text


def _sample(sample: Sample) -> Panel:
    body = Text(overflow="fold")
    body.append(printable(sample.prompt, 300), style="dim").append(printable(sample.completion, 600))
    return Panel(body, title=Text(sample.title), title_align="left", border_style="dim")
