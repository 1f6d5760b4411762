"""Contract suites for plug-ins: subclass one, give its fixture, and the laws of the contract run as tests on a CPU.

    from posttrain.testing import AlgorithmContract, DataPackerContract, EnvContract, HookContract      # what people write most
    from posttrain.testing import EngineContract, SandboxContract, TransportContract
    from posttrain.testing import play                # an episode with scripted replies, for tests of environments

Names are imported when they are first used, so that a test of an environment loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.testing.algorithm_contract import AlgorithmContract as AlgorithmContract
    from posttrain.testing.datapacker_contract import DataPackerContract as DataPackerContract
    from posttrain.testing.engine_contract import EngineContract as EngineContract
    from posttrain.testing.env_contract import EnvContract as EnvContract
    from posttrain.testing.hook_contract import HookContract as HookContract
    from posttrain.testing.playing import aplay as aplay
    from posttrain.testing.playing import play as play
    from posttrain.testing.sandbox_contract import SandboxContract as SandboxContract
    from posttrain.testing.transport_contract import TransportContract as TransportContract

_HOME_OF = {
    "AlgorithmContract": "algorithm_contract",
    "DataPackerContract": "datapacker_contract",
    "EngineContract": "engine_contract",
    "EnvContract": "env_contract",
    "HookContract": "hook_contract",
    "aplay": "playing",
    "play": "playing",
    "SandboxContract": "sandbox_contract",
    "TransportContract": "transport_contract",
}

__all__ = [
    "AlgorithmContract", "DataPackerContract", "EngineContract", "EnvContract", "HookContract", "SandboxContract",
    "TransportContract", "aplay", "play",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
