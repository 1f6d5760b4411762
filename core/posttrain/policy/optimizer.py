"""Optimizers of the policy: AdamW, AdamW over fp32 masters for bf16 storage, and apex's FusedAdam; and one guarded step.

    notes = check_optimizer(config.rl)                          # before any model loads
    optimizer = build_optimizer(config.rl, model.parameters())
    outcome = clip_and_step(optimizer, model.parameters(), config.rl.optimizer.grad_clip)

bfloat16 keeps 8 bits of a number: an update below 1/512 of a weight is rounded away, and at RL learning rates nearly all
are. So bf16 storage needs a wider copy of the weights, which `MasterWeights` holds for AdamW and FusedAdam alike.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from posttrain.config.schema import RLConfig
from posttrain.errors import ConfigError, error
from posttrain.policy.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """grad_norm: global, before clipping.   skipped: the norm was not finite and no weight moved."""

    grad_norm: float
    skipped: bool


def check_optimizer(rl: RLConfig) -> list[str]:
    """Lines to say at the start about the chosen optimizer. Raises OptimizerDependencyError (E16) where it cannot be had."""
    if rl.optimizer.name == "fusedadam" and (reason := _why_no_fused_adam()):
        raise error("E16", reason=reason)
    if rl.optimizer.name == "adamw" and rl.master_dtype == "bfloat16":
        return [
            "WARNING: rl.optimizer.name=adamw on rl.master_dtype=bfloat16 rounds most updates away (a weight moves only by "
            "steps above 1/512 of it): a diagnostic, not a training run. Set rl.master_dtype=float32, or keep bf16 storage "
            "with rl.optimizer.name=adamw_master"
        ]
    return []


def build_optimizer(rl: RLConfig, parameters: Iterable[Parameter]) -> torch.optim.Optimizer:
    """The configured optimizer over the parameters that train, in one group whose `lr` is the peak.

    Raises ConfigError when `rl.optimizer.impl` cannot serve these parameters, E16 as `check_optimizer`.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    choice = rl.optimizer
    common: dict[str, Any] = {
        "lr": choice.lr, "betas": tuple(choice.betas), "eps": choice.eps, "weight_decay": choice.weight_decay
    }

    def adamw(weights: list[Tensor]) -> torch.optim.Optimizer:
        return _adamw(weights, choice.impl, common)

    if choice.name == "fusedadam":
        if reason := _why_no_fused_adam():
            raise error("E16", reason=reason)
        fused_adam = importlib.import_module("apex.optimizers").FusedAdam
        return MasterWeights(trained, lambda weights: fused_adam(weights, adam_w_mode=True, **common))
    return MasterWeights(trained, adamw) if choice.name == "adamw_master" else adamw(list(trained))


def clip_and_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Parameter], grad_clip: float | None, ranks: Ranks = ALONE
) -> StepOutcome:
    """One step with gradients scaled down to the global norm `grad_clip` (None: as they are), then cleared. Collective.

    parameters: this rank's shards. The norm is over all of them, measured in float32 or wider in either case. When it is not
    finite nothing moves on any rank: weights, moments and the optimizer's own step count stay, the gradients are cleared and
    the outcome says `skipped`.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    own = _norm([parameter.grad for parameter in with_grad if parameter.grad is not None])
    value = ranks.norm(float(own))
    finite = math.isfinite(value)
    if finite:
        if grad_clip is not None and value > grad_clip:
            torch.nn.utils.clip_grads_with_norm_(with_grad, grad_clip, own.new_tensor(value))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepOutcome(grad_norm=value, skipped=not finite)


class MasterWeights(torch.optim.Optimizer):
    """Runs `build(weights)` over float32 copies of the parameters stored narrower; wide parameters are used as they are.

    A step widens the gradients, lets the inner optimizer move the masters and rounds them into the parameters, so the
    numerics are those of float32 storage and the parameters are always its rounding. The learning rate is read from this
    optimizer's own groups. The state holds the masters; loading it also sets the parameters to their rounding.
    """

    def __init__(
        self, parameters: Iterable[Parameter], build: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> None:
        self.parameters = list(parameters)
        self.masters: list[Tensor] = [_wide(parameter) for parameter in self.parameters]
        self.inner = build(self.masters)
        super().__init__(self.parameters, {"lr": self.inner.param_groups[0]["lr"]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of the inner optimizer. `closure` is not supported."""
        if closure is not None:
            raise ValueError("MasterWeights.step takes no closure: compute the gradients first")
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = own["lr"]
        narrow = self._narrow()
        for parameter, master in narrow:
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        self.inner.step()
        for parameter, master in narrow:
            master.grad = None
            parameter.copy_(master)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, this one's learning rates, and the masters of the narrow parameters by their number."""
        return {
            "inner": self.inner.state_dict(),
            "lr": [group["lr"] for group in self.param_groups],
            "masters": self._numbered(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of an optimizer over the same parameters. Raises ValueError when it is of others."""
        own, masters = self._numbered(), state_dict["masters"]
        if {number: m.shape for number, m in own.items()} != {number: m.shape for number, m in masters.items()}:
            raise ValueError(f"the state holds {len(masters)} masters; {len(own)} of other shapes or number are needed here")
        self.inner.load_state_dict(state_dict["inner"])
        for group, lr in zip(self.param_groups, state_dict["lr"], strict=True):
            group["lr"] = lr
        for number, master in own.items():
            master.copy_(masters[number])
            self.parameters[number].copy_(master)

    def _narrow(self) -> list[tuple[Parameter, Tensor]]:
        return [(self.parameters[number], master) for number, master in self._numbered().items()]

    def _numbered(self) -> dict[int, Tensor]:
        pairs = zip(self.parameters, self.masters, strict=True)
        return {number: master for number, (parameter, master) in enumerate(pairs) if master is not parameter}


def _wide(parameter: Parameter) -> Tensor:
    """The parameter itself if it has at least float32, else a float32 copy."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter if dtype == parameter.dtype else parameter.detach().to(dtype, copy=True).requires_grad_()


def _adamw(weights: list[Tensor], impl: str, common: dict[str, Any]) -> torch.optim.Optimizer:
    refusal = _fused_refusal(weights) if impl in ("auto", "fused") else None
    if refusal and impl == "fused":
        raise ConfigError(
            "rl.optimizer.impl=fused does not support these parameters", cause=refusal, fix="rl.optimizer.impl=auto"
        )
    if impl == "auto" and refusal:
        return torch.optim.AdamW(weights, **common)
    return torch.optim.AdamW(weights, fused=impl in ("auto", "fused"), foreach=impl == "foreach", **common)


def _fused_refusal(weights: list[Tensor]) -> str | None:
    """What torch says against its fused kernel, None when it runs. It checks at a step, so one is tried on single numbers."""
    for device, dtype in sorted({(weight.device.type, weight.dtype) for weight in weights}, key=str):
        number = Parameter(torch.zeros(1, device=device, dtype=dtype))
        number.grad = torch.zeros_like(number)
        try:
            torch.optim.AdamW([number], fused=True).step()
        except RuntimeError as exc:
            return str(exc)
    return None


def _norm(gradients: list[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))


def _why_no_fused_adam() -> str | None:
    """Why `apex.optimizers.FusedAdam` cannot be used here; None when it can.

    Another package on PyPI has the name `apex` (a web toolkit), so the name alone proves nothing.
    """
    spec = find_spec("apex")
    if spec is None:
        return "no package named apex is installed (NVIDIA's is built from its sources; `apex` on PyPI is another package)"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return (
            f"the installed apex ({folders[0] if folders else spec.origin}) has no apex.optimizers: it is another package of "
            "that name, such as the web toolkit on PyPI"
        )
    try:
        importlib.import_module("apex.optimizers").FusedAdam  # noqa: B018
        importlib.import_module("amp_C")
    except Exception as exc:  # a broken extension raises whatever its loader raises
        return f"the installed apex cannot offer it (built without its CUDA extensions?): {type(exc).__name__}: {exc}"
    return None
