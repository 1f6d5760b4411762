"""posttrain: reinforcement learning after pre-training.

Public names are imported when they are first used, so that `import posttrain` loads none of torch, vLLM and Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.config.load import LoadedConfig as LoadedConfig
    from posttrain.config.load import load_config as load_config
    from posttrain.config.schema import RunConfig as RunConfig
    from posttrain.data.agent_environment import AgentEnvironment as AgentEnvironment
    from posttrain.data.environment import Environment as Environment
    from posttrain.data.environment import EpisodeState as EpisodeState
    from posttrain.data.packer import DataPacker as DataPacker
    from posttrain.data.packer import init_data_packer as init_data_packer
    from posttrain.data.source import DataOptions as DataOptions
    from posttrain.data.source import load_rows as load_rows
    from posttrain.data.source import open_rows as open_rows
    from posttrain.data.tool_environment import ToolEnvironment as ToolEnvironment
    from posttrain.data.tool_environment import tool_metrics as tool_metrics
    from posttrain.hooks.hook import Hook as Hook
    from posttrain.loop.api import train as train
    from posttrain.loop.result import RunResult as RunResult
    from posttrain.objective.algorithm import Algorithm as Algorithm
    from posttrain.objective.objective import Objective as Objective
    from posttrain.objective.objective import build_objective as build_objective
    from posttrain.plugins.build import load as load
    from posttrain.plugins.discovery import discover as discover
    from posttrain.policy.policy import Policy as Policy
    from posttrain.rollout.engine import Engine as Engine
    from posttrain.rollout.engine import EngineSpec as EngineSpec
    from posttrain.rollout.judge import Judge as Judge
    from posttrain.rollout.scoring import score as score
    from posttrain.types import Completion as Completion
    from posttrain.types import Group as Group
    from posttrain.types import Message as Message
    from posttrain.types import Request as Request
    from posttrain.types import Reward as Reward
    from posttrain.types import Sampling as Sampling
    from posttrain.types import TokenBatch as TokenBatch
    from posttrain.types import Trajectory as Trajectory
    from posttrain.types import Turn as Turn
    from posttrain.weights.transport import Transport as Transport

_HOMES = {
    "posttrain.types": ("Completion", "Group", "Message", "Request", "Reward", "Sampling", "TokenBatch", "Trajectory", "Turn"),
    "posttrain.config.load": ("LoadedConfig", "load_config"),
    "posttrain.config.schema": ("RunConfig",),
    "posttrain.data.agent_environment": ("AgentEnvironment",),
    "posttrain.data.environment": ("Environment", "EpisodeState"),
    "posttrain.data.packer": ("DataPacker", "init_data_packer"),
    "posttrain.data.source": ("DataOptions", "load_rows", "open_rows"),
    "posttrain.data.tool_environment": ("ToolEnvironment", "tool_metrics"),
    "posttrain.hooks.hook": ("Hook",),
    "posttrain.loop.api": ("train",),
    "posttrain.loop.result": ("RunResult",),
    "posttrain.objective.algorithm": ("Algorithm",),
    "posttrain.objective.objective": ("Objective", "build_objective"),
    "posttrain.plugins.build": ("load",),
    "posttrain.plugins.discovery": ("discover",),
    "posttrain.policy.policy": ("Policy",),
    "posttrain.rollout.engine": ("Engine", "EngineSpec"),
    "posttrain.rollout.judge": ("Judge",),
    "posttrain.rollout.scoring": ("score",),
    "posttrain.weights.transport": ("Transport",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("posttrain")
    elif name in _HOME_OF:
        import importlib

        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    else:
        raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
