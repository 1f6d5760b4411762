"""Tiny models and random rows; one thread, on which tiny tensors run fastest."""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from posttrain.policy.rows import Row


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(kind: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> Any:
    """A random two-layer causal LM of a transformers family, on two or four heads of 8."""
    import transformers

    shape = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(**shape | options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype)
    for parameter in model.parameters():  # norms and biases too, so that nothing is trivially one or zero
        parameter.data += 0.1 * torch.randn(parameter.shape, dtype=dtype)
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):  # transformers computes norms in float32, whatever the dtype
            norm.forward = types.MethodType(_wide_norm, norm)
    return model


def _wide_norm(norm: Any, states: torch.Tensor) -> torch.Tensor:
    scale = norm.weight + 1 if "Gemma" in type(norm).__name__ else norm.weight
    eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
    return scale * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)


def make_rows(sizes: Sequence[int], *, seed: int = 0, vocabulary: int = 61, longest: int = 9) -> list[Row]:
    """Groups of random rows with one prompt each; a completion has untrained tokens inside, as tool output has."""
    draw = random.Random(seed)
    rows = []
    for group, size in enumerate(sizes):
        prompt = [draw.randrange(3, vocabulary) for _ in range(draw.randint(2, 8))]
        for sample in range(size):
            length = draw.randint(1, longest)
            completion = [draw.randrange(3, vocabulary) for _ in range(length)]
            mask = [draw.random() < 0.8 for _ in range(length)]
            mask[draw.randrange(length)] = True
            logprobs = [-draw.random() * 5 if trained else 0.0 for trained in mask]
            row = Row(
                input_ids=prompt + completion, mask=[False] * len(prompt) + mask, prefix=len(prompt),
                rollout_logprobs=[0.0] * len(prompt) + logprobs, advantage=draw.gauss(0, 1), reward=float(sample % 2),
                baseline=0.5, group=f"g{group}", id=f"g{group}/{sample}",
            )  # fmt: skip
            rows.append(row)
    return rows


@pytest.fixture
def tiny() -> Any:
    return make_model


@pytest.fixture
def rows_of_groups() -> Any:
    return make_rows
