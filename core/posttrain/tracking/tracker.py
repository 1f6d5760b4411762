"""The one object through which the loop reports: files, logs, display and summary. No torch.

    with Tracker(run_dir, config.tracking, total_steps=100, decode=tokenizer.decode) as tracker:
        tracker.validation(0, metrics, groups)
        with tracker.span("policy", "train", step=1):
            ...
        tracker.step(1, metrics, groups, advantages)
        summary = tracker.finish()

The context manager starts it and, at the end, also after an exception, puts the terminal back and closes the files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from posttrain.data.reward_range import Range, by_metric
from posttrain.tracking.display import Display, Sample
from posttrain.tracking.events import Events, OpenSpan
from posttrain.tracking.logs import RoleLogs
from posttrain.tracking.metrics import MetricsWriter, read_metrics, read_validation, truncate_after
from posttrain.tracking.ranges import write_ranges
from posttrain.tracking.rollouts import Decode, supersede_after, write_rollouts
from posttrain.tracking.summary import Summary, summarise, zero_start_advice
from posttrain.tracking.text import number

if TYPE_CHECKING:
    from rich.console import Console

    from posttrain.config.schema import TrackingConfig
    from posttrain.tracking.run_dir import RunDir
    from posttrain.types import Group, Trajectory


class Tracker:
    """Reports one run. `decode` turns token ids into the texts of rollout files and of the display."""

    def __init__(
        self,
        run_dir: RunDir,
        config: TrackingConfig,
        total_steps: int,
        *,
        decode: Decode | None = None,
        console: Console | None = None,
    ) -> None:
        self.run_dir, self.config, self.total_steps, self.decode = run_dir, config, total_steps, decode
        self.events = Events(run_dir.events)
        self.display = Display(config.display, total_steps, console)
        validated = read_validation(run_dir.path)
        self.display.progress.restore(read_metrics(run_dir.path), validated)
        self._validated = {int(row["step"]) for row in validated}
        self._metrics = MetricsWriter(run_dir.metrics)
        self._validation = MetricsWriter(run_dir.validation)
        self._logs = RoleLogs(run_dir.logs)
        self._before: Mapping[str, Any] = {}  # the validation before step 1
        self._closed = False

    def start(self) -> None:
        """Begin to show progress."""
        self.events.instant("loop", "start", total_steps=self.total_steps)
        self.display.start()

    def declare(self, metrics: Mapping[str, Mapping[str, Range]]) -> None:
        """Take up how parts of rewards are shown, by environment and part, and write it beside the metrics."""
        self.display.progress.ranges = ranges = by_metric(metrics)
        write_ranges(self.run_dir.path, ranges)

    def note(self, text: str) -> None:
        """Say one line now, and keep it in the events and in the log."""
        self.events.instant("loop", "note", text=text)
        logging.getLogger("posttrain.loop").info("%s", text)
        self.display.note(text)

    def span(self, role: str, name: str, **args: Any) -> AbstractContextManager[dict[str, Any]]:
        """Time a block as an event of `role`."""
        return self.events.span(role, name, **args)

    def open_spans(self) -> list[OpenSpan]:
        """What every role is doing now."""
        return self.events.open_spans()

    def step(
        self,
        step: int,
        metrics: Mapping[str, Any],
        groups: Sequence[Group] = (),
        advantages: Mapping[str, float] | None = None,
    ) -> None:
        """Record batch step `step`. `advantages` by sample id. A step that trained nothing has `loss` null.

        Raises RunInterrupted when the disk is full.
        """
        self._metrics.write(step, {"loss": None, **metrics})
        every = self.config.rollouts_every
        if groups and every and (step % every == 0 or step in (1, self.total_steps)):
            write_rollouts(self.run_dir.rollouts, step, groups, advantages=advantages, decode=self.decode)
        self.display.step(step, metrics, self._sample(groups, advantages or {}))
        if step == 1 and (advice := zero_start_advice(self._before, metrics)):
            self.note(advice)

    def validation(self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        """Record a held-out validation after batch step `step` (0: before the first)."""
        self._validation.write(step, metrics)
        self._validated.add(step)
        if groups and self.config.rollouts_every:
            write_rollouts(self.run_dir.rollouts, step, groups, decode=self.decode, kind="validation")
        self.display.validation(step, metrics)
        if step == 0:
            self._before = metrics

    def has_validation(self, step: int) -> bool:
        """Whether the held-out validation after batch step `step` is recorded, also by a run that this one resumes."""
        return step in self._validated

    def finish(self, outcome: str = "Done") -> Summary:
        """Stop the display, print the summary and return it."""
        self.display.stop()
        summary = summarise(self.run_dir.path, self.total_steps, outcome)
        for text in summary.lines():
            self.display.note(text)
        self.events.instant("loop", "finish", outcome=outcome)
        return summary

    def close(self) -> None:
        """Put the terminal back and close the files; idempotent."""
        if not self._closed:
            self._closed = True
            self.display.stop()
            self._logs.close()
            for part in (self._metrics, self._validation, self.events):
                part.close()

    def __enter__(self) -> Tracker:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _sample(self, groups: Sequence[Group], advantages: Mapping[str, float]) -> Sample | None:
        """The best answer of the first group whose rewards disagree, else the first answer."""
        if self.display.mode != "live" or self.decode is None:
            return None
        rows = _first_informative(groups)
        if not rows:
            return None
        best = max(rows, key=lambda t: t.reward if t.scorable and t.reward is not None else float("-inf"))
        title = f"{best.sample_id} · reward {number(best.reward)} · advantage {number(advantages.get(best.sample_id, 0.0))}"
        return Sample(title, self.decode(best.prompt_ids), self.decode(best.token_ids))


def cut_after(run_dir: RunDir, step: int, *, validated: int | None = None) -> dict[str, int]:
    """Before a resume from the checkpoint of `step`: put aside, as `*.superseded`, what was recorded past it.

    validated: the last validation that stays, default `step`. Call it before a Tracker opens the files. Returns how many rows
    and files were moved.
    """
    return {
        "metrics": truncate_after(run_dir.metrics, step),
        "validation": truncate_after(run_dir.validation, step if validated is None else validated),
        "rollouts": supersede_after(run_dir.path, step),
    }


def _first_informative(groups: Sequence[Group]) -> list[Trajectory]:
    for group in groups:
        if len({r for r in group.rewards if r is not None}) > 1:
            return group.trajectories
    return groups[0].trajectories if groups else []
