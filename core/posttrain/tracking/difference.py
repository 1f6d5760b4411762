"""What tells two runs apart: config values with their origins, what ran them, their data, and what they came to.

    difference = compare(read_side("outputs/a"), read_side("outputs/b"))
    difference.config["rl.optimizer.lr"]         # ((1e-6, "default"), (1e-5, "command line"))

A side is a run, or a config that has not run: a config file or `experiment=NAME`. It then has no provenance and no results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from posttrain.config.layers import ABSENT, differing, leaves
from posttrain.config.load import load_config
from posttrain.errors import ConfigError
from posttrain.tracking.metric_names import HELD_OUT
from posttrain.tracking.run_dir import find_run, saved_config, saved_json
from posttrain.tracking.summary import summarise

NOT_RECORDED = "not recorded"
"""The origin of every value of a run that was started before runs recorded origins."""

Value: TypeAlias = tuple[Any, str]
"""A config value and where it came from."""

_PER_START = ("time", "command", "tags", "changed")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. origins: None when the run did not record them. provenance: of its last start, flat."""

    name: str
    config: Mapping[str, Any]
    origins: Mapping[str, str] | None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, float | int | None] = field(default_factory=dict)

    def value(self, path: str, value: Any) -> Value:
        if value is ABSENT:
            return value, ""
        return value, NOT_RECORDED if self.origins is None else self.origins.get(path, "default")


@dataclass(frozen=True, slots=True)
class Difference:
    """Keys with a value for each side; those that agree are left out, unless asked for. `same` counts them in the config.

    Where one side has no such record (a config that has not run), provenance, data and results are empty.
    """

    config: Mapping[str, tuple[Value, Value]]
    same: int
    provenance: Mapping[str, tuple[Any, Any]]
    data: Mapping[str, tuple[Any, Any]]
    results: Mapping[str, tuple[Any, Any]]


def compare(a: Side, b: Side, *, everything: bool = False) -> Difference:
    """The difference of two sides; with `everything`, what agrees too. Results are always there."""
    changed = differing(a.config, b.config)
    values_a, values_b = dict(leaves(a.config)), dict(leaves(b.config))
    paths = {**values_a, **values_b} if everything else changed
    config = {path: (a.value(path, values_a.get(path, ABSENT)), b.value(path, values_b.get(path, ABSENT))) for path in paths}
    return Difference(
        config,
        same=len({*values_a, *values_b}) - len(changed),
        provenance=_pairs(a.provenance, b.provenance, everything) if a.provenance and b.provenance else {},
        data=_pairs(a.data, b.data, everything) if a.data and b.data else {},
        results=_pairs(a.results, b.results, True) if a.results and b.results else {},
    )


def read_side(named: str) -> Side:
    """The side that a run directory, one of its checkpoints, a config file or `experiment=NAME` names.

    Raises ConfigError and DataError when it is none of them or cannot be read.
    """
    if named.startswith("experiment="):
        loaded = load_config([named])
        return Side(named, loaded.tree, loaded.origins)
    path = Path(named).expanduser()
    if path.is_file():
        loaded = load_config(config_file=path)
        return Side(named, loaded.tree, loaded.origins)
    run = find_run(path)
    config = saved_config(run)
    return Side(
        named.rstrip("/"),
        config,
        saved_json(run / "origins.json"),
        _last_start(run),
        saved_json(run / "fingerprints.json") or {},
        _results(run, config),
    )


def _last_start(run: Path) -> dict[str, Any]:
    starts = saved_json(run / "provenance.json") or [{}]
    return {path: value for path, value in leaves(starts[-1]) if path.partition(".")[0] not in _PER_START}


def _results(run: Path, config: Mapping[str, Any]) -> dict[str, float | int | None]:
    try:
        found = summarise(run, config.get("rl", {}).get("steps", 0))
    except FileNotFoundError:  # ended before its first step
        return {}
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"the metrics of {run} cannot be read", cause=f"{type(exc).__name__}: {exc}", where=str(run)) from exc
    return {
        "batch steps done": found.steps,
        f"{HELD_OUT}, before": found.held_out_before,
        f"{HELD_OUT}, after": found.held_out_after,
        "reward/mean, first tenth": found.reward_first,
        "reward/mean, last tenth": found.reward_last,
        "tokens generated": found.generated_tokens,
        "seconds": found.seconds.get("step"),
    }


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any], everything: bool) -> dict[str, tuple[Any, Any]]:
    pairs = {key: (a.get(key), b.get(key)) for key in {**a, **b}}
    return {key: pair for key, pair in pairs.items() if everything or pair[0] != pair[1]}
