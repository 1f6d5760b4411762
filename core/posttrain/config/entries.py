"""The entries of `environments`: what each is called in a run, and the range of its rewards.

    environments=[{name: countdown, options: {numbers: [3]}}, {name: countdown, label: hard, options: {numbers: [4]}}]

The label stands for the entry everywhere: its draws in the ledger, its groups and trajectories, the metrics of training and
validation, the checkpoint, the processes that score. So two entries of one environment with other options are never mixed up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from posttrain.config.schema import EnvironmentConfig
from posttrain.config.walker import Problem


def label_of(entry: EnvironmentConfig) -> str:
    """What an entry is called: its label, else its name without the folders of a file and the distribution of a plug-in."""
    return entry.label if entry.label is not None else entry.name.rpartition("/")[2]


def reward_ranges(entries: Iterable[EnvironmentConfig]) -> dict[str, tuple[float, float]]:
    """`reward_range` by label, of the entries that have one."""
    return {label_of(entry): entry.reward_range for entry in entries if entry.reward_range is not None}


def check_entries(key: str, entries: Sequence[EnvironmentConfig]) -> Iterator[Problem]:
    """A problem for each entry with the label of an earlier one, a label that names nothing, or an empty range of rewards."""
    first: dict[str, int] = {}
    for i, entry in enumerate(entries):
        label = label_of(entry)
        if entry.label is not None and not re.fullmatch(r"[\w.:+=@-]+", label):
            yield Problem(f"{key}[{i}].label", f"{label!r} cannot be in a metric's name", "use letters, digits and . _ - : + = @")
        before = first.setdefault(label, i)
        if before != i:
            yield _repeated(key, before, i, entries)
        if entry.reward_range is not None and not entry.reward_range[0] < entry.reward_range[1]:
            low, high = entry.reward_range
            yield Problem(
                f"{key}[{i}].reward_range", f"[{low:g}, {high:g}] is no range", "give the least reward and then the largest"
            )


def _repeated(key: str, before: int, i: int, entries: Sequence[EnvironmentConfig]) -> Problem:
    one, two, label = entries[before], entries[i], label_of(entries[i])
    if (one.name, one.options) == (two.name, two.options):
        return Problem(f"{key}[{i}]", f"repeats {two.name!r} with the same options", "remove it, or raise the weight")
    return Problem(
        f"{key}[{i}].label", f"{label!r} is also what {key}[{before}] is called", f"tell them apart: {key}.{i}.label=NAME"
    )
