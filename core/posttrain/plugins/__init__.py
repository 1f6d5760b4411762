"""Plug-ins: found by metadata, read without importing, imported when selected, checked before anything starts.

    discover("envs")                        # what is installed; nothing is imported
    resolve("algorithms", "grpo")           # the class, checked; or one of five errors that say how to fix it
    load("envs", "arithmetic", digits=2)    # an instance, its options checked

A plug-in is an entry point in the group `posttrain.<kind>`. See `kinds.KINDS` for the kinds.
"""

from __future__ import annotations

from posttrain.plugins.build import build, load, option_fields
from posttrain.plugins.discovery import PluginInfo, discover
from posttrain.plugins.doctor import Finding, doctor, quarantined
from posttrain.plugins.kinds import KINDS, Kind
from posttrain.plugins.resolution import resolve
from posttrain.plugins.state import Stateful

__all__ = [
    "KINDS",
    "Finding",
    "Kind",
    "PluginInfo",
    "Stateful",
    "build",
    "discover",
    "doctor",
    "load",
    "option_fields",
    "quarantined",
    "resolve",
]
