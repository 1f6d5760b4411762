"""Objectives: how rewards become advantages, and log-probs a loss. Algorithms are plug-ins; the shared terms are here."""

from __future__ import annotations

from posttrain.config.walker import Problem
from posttrain.objective.algorithm import Algorithm, Context, PolicyGradient, PreferenceAlgorithm
from posttrain.objective.groups import GroupStats, group_stats
from posttrain.objective.objective import Objective, TokenInputs, build_objective
from posttrain.objective.options import ClipOptions, Options, TokenOptions, bound

__all__ = [
    "Algorithm",
    "ClipOptions",
    "Context",
    "GroupStats",
    "Objective",
    "Options",
    "PolicyGradient",
    "PreferenceAlgorithm",
    "Problem",
    "TokenInputs",
    "TokenOptions",
    "bound",
    "build_objective",
    "group_stats",
]
