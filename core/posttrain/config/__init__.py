"""Configuration: composed by Hydra, checked here, every problem told at once.

loaded = load_config(["experiment=arithmetic_grpo", "rl.steps=3"])
loaded.config.rl.steps, loaded.origins["rl.steps"]        # 3, "command line"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.config.load import LoadedConfig, load_config, resolved_yaml
    from posttrain.config.schema import RunConfig

_LAZY = {"LoadedConfig": "load", "load_config": "load", "resolved_yaml": "load", "RunConfig": "schema"}

__all__ = ["LoadedConfig", "RunConfig", "load_config", "resolved_yaml"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
