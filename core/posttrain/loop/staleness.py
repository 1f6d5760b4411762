"""How old the tokens of a batch are, and the proof that they are not. Pure functions over trajectories.

The batch of step `k` updates version `k − 1` of the weights. A token's lag is how many versions before that it was sampled: 0 is
strictly on-policy. Only tokens that train count: not the environment's, and not those of a sample that is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from posttrain.errors import RunAborted
from posttrain.loop.filters import trains
from posttrain.types import ENV_VERSION, Group, Trajectory


def versions_of(row: Trajectory) -> NDArray[np.int64]:
    """The version of each trained token of one row; none of one whose tokens came with the data."""
    versions = np.asarray(row.weight_versions, dtype=np.int64)
    return versions[np.asarray(row.mask, dtype=bool) & (versions != ENV_VERSION)]


def staleness_metrics(trajectories: Iterable[Trajectory], step: int) -> dict[str, float]:
    """`staleness/…` of the trajectories that train in batch step `step`; empty when no version sampled any of them.

    `mean`, `p95` (95% of the tokens are at most that old) and `max` are over tokens, `oldest` is the mean over trajectories of
    their oldest token.
    """
    episodes = [np.concatenate([versions_of(row) for row in t.rows]) for t in trajectories if trains(t)]
    rows = [versions for versions in episodes if versions.size]
    if not rows:
        return {}
    lags = step - 1 - np.concatenate(rows)
    return {
        "staleness/mean": float(lags.mean()),
        "staleness/p95": float(np.sort(lags)[math.ceil(0.95 * lags.size - 1)]),
        "staleness/max": float(lags.max()),
        "staleness/oldest": float(np.mean([step - 1 - versions.min() for versions in rows])),
    }


def refuse_off_policy(groups: Iterable[Group], version: int) -> None:
    """Raise RunAborted when a trained token of the groups was not sampled by exactly `version`."""
    for trajectory in (row for group in groups for t in group.trajectories if t.trained and not t.given for row in t.rows):
        for place, (own, found) in enumerate(zip(trajectory.mask, trajectory.weight_versions, strict=True)):
            if own and found != version:
                raise RunAborted(
                    f"token {place} of sample {trajectory.sample_id} was sampled by version {found}, not by version {version}",
                    cause="all tokens of a batch must be of one version, which proves what the run promises about their age; "
                    "nothing of this batch was trained on",
                    fix="the engine stamped a version that it did not have, or weights changed under a request: a fault of the "
                    "engine plug-in or of posttrain, to be reported with the run's events.jsonl",
                    anchor="troubleshooting.md#token-n-of-sample--was-sampled-by-version-v-not-by-version-w", code="off-policy",
                )
