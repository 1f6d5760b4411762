"""The embedded engine's own module: built from a config, filled by publications, scored by plain forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from posttrain.errors import EngineStartError, WeightSyncError
from posttrain.policy.attention import KNOWN_LAYERS, has_sinks
from posttrain.rollout.decode import causal_mask, left_pad
from posttrain.rollout.kv_cache import ATTENTION

if TYPE_CHECKING:
    from posttrain.rollout.engine import EngineSpec
    from posttrain.weights.transport import Staged

_SCORE_TOKENS = 8192
"""Token budget of one forward of `score`."""


def build_module(spec: EngineSpec) -> Any:
    """The model of `spec.model_path` with seeded placeholder weights, in `spec.dtype`, on the CPU.

    Raises EngineStartError, told apart as for the policy's own loading, and for attention that this engine does not implement.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return _from_config(spec).eval().requires_grad_(False)


def check_module(spec: EngineSpec) -> None:
    """Raise what `build_module` would raise, without memory for the weights."""
    with torch.device("meta"):
        _from_config(spec)


def _from_config(spec: EngineSpec) -> Any:
    from posttrain.policy.load import model_from_config

    model = model_from_config(
        spec.model_path, getattr(torch, spec.dtype), attn_implementation=ATTENTION, trust_remote_code=spec.trust_remote_code
    )
    _refuse_layers(model, spec)
    return model


def _refuse_layers(model: Any, spec: EngineSpec) -> None:
    """State spaces, chunks and attention sinks would need another cache than this one, which has a key for every token."""
    config = model.config.get_text_config()
    foreign = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    sinks = {"attention with sinks"} if has_sinks(model) else set()
    if foreign or sinks:
        raise EngineStartError(
            f"the hf engine cannot run {spec.model_path!r}",
            cause=f"it has layers of type {', '.join(sorted(foreign | sinks))}; this engine has full and sliding attention only",
            fix="use rollout.engine=vllm",
            code="architecture",
        )


def copy_weights(model: Any, staged: Staged) -> None:
    """Write a publication into the module in place.

    Raises WeightSyncError before the first byte unless names and shapes cover the module exactly.
    """
    own = dict(model.named_parameters())
    given = dict(staged.tensors())
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    both = sorted(own.keys() & given.keys())
    shapes = [f"{n} {tuple(given[n].shape)} for {tuple(own[n].shape)}" for n in both if own[n].shape != given[n].shape]
    if missing or unknown or shapes:
        raise WeightSyncError(
            f"publication {staged.version} does not fit the engine's model",
            cause="; ".join(f"{label}: {', '.join(names[:4])} ({len(names)})"
                            for label, names in (("missing", missing), ("unknown", unknown), ("shape", shapes)) if names),
            fix="policy and engine must be built from the same model folder", retryable=False,
        )
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


@torch.inference_mode()
def score(model: Any, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probs at temperature 1 of every token after the first, by plain forwards without a cache."""
    out: list[list[float]] = []
    longest = max((len(s) for s in sequences), default=1)
    rows = max(1, _SCORE_TOKENS // max(longest, 1))
    for start in range(0, len(sequences), rows):
        chunk = sequences[start : start + rows]
        ids, valid, positions = left_pad(chunk)
        length = ids.shape[1]
        mask = causal_mask(valid)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        out += [chosen[r, length - len(s) :].tolist() if len(s) > 1 else [] for r, s in enumerate(chunk)]
    return out
