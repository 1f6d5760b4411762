"""The policy's one Module: body, shared prefix and head in one forward, log-probs out.

Nobody calls a submodule from outside, so the module is the root of FSDP (`posttrain.policy.sharding`). The body runs in
evaluation mode (no dropout), without a KV cache and without an attention mask; the head is `token_logprobs`, so the logits of
a micro-batch never exist whole and prompt positions never reach the head.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.policy import prefix
from posttrain.policy.attention import head_softcap
from posttrain.policy.logprobs import token_logprobs
from posttrain.policy.packing import BodyInput, PackedRows, pack_rows
from posttrain.policy.rows import Row


class PolicyModule(nn.Module):
    """A Hugging Face causal LM that returns the log-probs of trained tokens.

    temperature: of the rollouts; divides the logits.   chunk_tokens: positions whose logits exist at once.
    shared_prefix: rows with the same prompt compute it once (`posttrain.policy.prefix`).
    compute_dtype: of the body, by autocast; None: the dtype of the parameters.
    Raises ConfigError when the model cannot share prefixes.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        chunk_tokens: int = 1024,
        shared_prefix: bool = False,
        gradient_checkpointing: bool = False,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.shared_prefix = shared_prefix
        self.compute_dtype = compute_dtype
        if shared_prefix:
            prefix.install(model)
        self.eval()
        if gradient_checkpointing:
            enable_checkpointing(model)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def plain_logits(self, input_ids: Tensor) -> Tensor:
        """The model's own logits `[B, L, V]` of token ids `[B, L]`, every row whole: for the probe."""
        with self._autocast():
            return self.model(input_ids=input_ids, use_cache=False).logits  # type: ignore[no-any-return]

    def pack(self, rows: list[Row]) -> PackedRows:
        """Lay out `rows` for `forward`."""
        return pack_rows(rows, shared_prefix=self.shared_prefix, device=self.device)

    def forward(self, rows: PackedRows, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probs `[T]` of the trained tokens in row order, and entropies `[T]` when asked; float32 or wider."""
        states = [self._body(body) for body in rows.forwards]
        hidden = (states[0] if len(states) == 1 else torch.cat(states)).index_select(0, rows.predictors)
        head = self.model.get_output_embeddings()
        return token_logprobs(
            hidden, head.weight, rows.targets,
            temperature=self.temperature, chunk_tokens=self.chunk_tokens, entropy=entropy, bias=head.bias,
            softcap=head_softcap(self.model.config),
        )  # fmt: skip

    def _body(self, body: BodyInput) -> Tensor:
        extra: dict[str, Any] = {}
        if body.layout is not None:
            extra = {"position_ids": body.position_ids, "layout": body.layout}
        with self._autocast():
            output = self.model.base_model(input_ids=body.input_ids, use_cache=False, **extra)
        return output.last_hidden_state.flatten(0, 1)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype is None:
            return nullcontext()
        # Without its cache: that would keep a narrow copy of every layer's weights until the body is through.
        return torch.autocast(self.device.type, self.compute_dtype, cache_enabled=False)


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in backward, dropout staying off.

    transformers checkpoints a layer only while its `training` flag is set; the flag is set on the layer alone, not on the
    modules inside it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = True
