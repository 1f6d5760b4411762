"""The points of a run at which hooks are called, with what they are given. `docs/howto/trackers.md` is generated from this file.

Within a batch step the order is: trajectory_scored (as the samples finish), before_publish, after_publish, metrics, step_end,
then validation_end, eval_end and checkpoint_saved where they are due. What a hook gets belongs to the run: it may be kept, not
changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pluggy

if TYPE_CHECKING:
    from posttrain.types import Group, Trajectory

PROJECT = "posttrain"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""`@hookimpl(tryfirst=True)` or `(trylast=True)` on a method puts it before or after those of the other hooks."""

Outcome: TypeAlias = Literal["done", "interrupted", "failed"]


class HookSpecs:
    """Every hook: its arguments and when it is called."""

    @hookspec
    def run_start(self, path: Path, config: Mapping[str, Any], step: int, steps: int) -> None:
        """Before the engine starts. The run's directory, its resolved config without secrets, the last step done (0, or that of
        the checkpoint that the run goes on from), and the step to end with. Files and connections are opened here."""

    @hookspec
    def trajectory_scored(self, step: int, trajectory: Trajectory) -> None:
        """A completion of this batch step has its reward; in the order in which they finish. Not for held-out completions, and
        not where completions come with the data."""

    @hookspec
    def before_publish(self, version: int) -> None:
        """The weights of this version are trained and not yet on their way. Version k is that of batch step k, 0 the start."""

    @hookspec
    def after_publish(self, version: int, metrics: Mapping[str, float]) -> None:
        """Every engine serves this version. The metrics are those of the publication: seconds by phase, bytes, canary."""

    @hookspec
    def metrics(self, step: int, groups: Sequence[Group]) -> Mapping[str, float] | None:
        """Numbers to add to this batch step: `{"verbs": 3}` becomes the metric `hook/NAME/verbs`, in metrics.jsonl
        and in every tracker."""

    @hookspec
    def step_end(
        self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group], advantages: Mapping[str, float]
    ) -> None:
        """The batch step is done and recorded. Its metrics as in metrics.jsonl (None where there is no value), its groups of
        trajectories with rewards, and the advantage of each by its sample id."""

    @hookspec
    def validation_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """A held-out validation after this batch step is recorded; step 0 is before training."""

    @hookspec
    def eval_end(self, step: int, label: str, metrics: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """An eval of the version of this batch step is recorded; step 0 is before training. `eval/LABEL/failed` is 1, and alone,
        for one that failed."""

    @hookspec
    def checkpoint_saved(self, step: int, path: Path) -> None:
        """The checkpoint of this batch step is complete on disk."""

    @hookspec
    def run_end(self, outcome: Outcome, error: BaseException | None, step: int) -> None:
        """The run ends; called once for every run_start. `interrupted` is Ctrl-C or SIGTERM; `error` is what ended a run that is
        not done; `step` the last step done. Files and connections are closed here."""


EVENTS: dict[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(function).parameters)[1:]
    for name, function in vars(HookSpecs).items()
    if not name.startswith("_")
}
"""Hook -> the arguments that it may name, in the order of the specs."""
