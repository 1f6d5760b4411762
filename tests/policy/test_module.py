"""The policy's forward: exact against one forward per row, whatever the layout, and in the order of the rows."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from posttrain.errors import ConfigError
from posttrain.policy import packing, prefix
from posttrain.policy.module import PolicyModule
from posttrain.policy.rows import Row

FAMILIES = [
    ("Llama", {"tie_word_embeddings": True}),
    ("Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    ("Qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    ("Qwen3", {"tie_word_embeddings": False}),
    ("Mistral", {"sliding_window": 4}),
    ("Mistral", {"sliding_window": None}),
    ("Gemma", {"num_key_value_heads": 1}),
    ("Gemma2", {"attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"], "attn_implementation": "eager"}),
    ("SmolLM3", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("Gemma3", {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}),
]
IDS = [f"{kind}-{number}" for number, (kind, _) in enumerate(FAMILIES)]


def one_by_one(model: Any, rows: list[Row], temperature: float = 1.0) -> torch.Tensor:
    """The plain way: a forward of the Hugging Face model per row, a whole log-softmax."""
    found = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0] / temperature
        table = torch.log_softmax(logits, -1)
        found += [table[position - 1, row.input_ids[position]] for position in row.trained]
    return torch.stack(found)


def gradients(logprobs: torch.Tensor, model: Any) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    return list(torch.autograd.grad((logprobs * weights).sum(), list(model.parameters())))


@pytest.mark.parametrize("shared_prefix", [False, True], ids=["padded", "shared"])
@pytest.mark.parametrize(("kind", "options"), FAMILIES, ids=IDS)
def test_values_and_gradients_equal_separate_forwards(tiny, rows_of_groups, kind, options, shared_prefix, monkeypatch):
    monkeypatch.setattr(packing, "PADDED_TOKENS", 40)  # several padded forwards
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        model = tiny(kind, dtype=dtype, **options)
        if model.config._attn_implementation == "eager":  # its softmax is in float32 whatever the dtype
            tolerance = max(tolerance, 1e-6)
        rows = rows_of_groups([3, 1, 4, 2])
        random.Random(1).shuffle(rows)
        wanted = one_by_one(model, rows, temperature=0.7)
        wanted_grads = gradients(wanted, model)
        module = PolicyModule(copy.deepcopy(model), temperature=0.7, chunk_tokens=7, shared_prefix=shared_prefix)
        got, _ = module(module.pack(rows))
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
        for value, reference in zip(gradients(got, module.model), wanted_grads, strict=True):
            scale = max(1.0, float(reference.abs().max()))
            torch.testing.assert_close(value / scale, reference / scale, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shared_prefix", [False, True], ids=["padded", "shared"])
def test_gradient_checkpointing_changes_nothing(tiny, rows_of_groups, shared_prefix):
    rows = rows_of_groups([3, 1, 4])
    results = []
    calls = {False: 0, True: 0}
    for checkpointing in (False, True):
        module = PolicyModule(
            tiny("Llama", attention_dropout=0.5), shared_prefix=shared_prefix, gradient_checkpointing=checkpointing
        )

        def count(*_: Any, checkpointing: bool = checkpointing) -> None:
            calls[checkpointing] += 1

        module.model.model.layers[0].self_attn.register_forward_hook(count)
        logprobs, _ = module(module.pack(rows))
        results.append((logprobs, gradients(logprobs, module.model)))
    assert calls[True] == 2 * calls[False]  # it did recompute
    assert torch.equal(results[0][0], results[1][0])
    for plain, checkpointed in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(plain, checkpointed, atol=1e-14, rtol=1e-14)


def test_the_prompt_of_a_group_is_computed_once(tiny, rows_of_groups):
    rows = rows_of_groups([4, 4])
    module = PolicyModule(tiny("Llama"), shared_prefix=True)
    packed = module.pack(rows)
    prompts = {row.group: row.prefix for row in rows}
    completions = sum(max(0, row.context - row.prefix) for row in rows)
    assert packed.forwards[0].input_ids.numel() == sum(prompts.values()) + completions


def test_trained_tokens_inside_the_shared_prefix(tiny):
    rows = [
        Row(input_ids=[5, 6, 7, 8, last], mask=[False, True, False, True, True], rollout_logprobs=[0.0] * 5, prefix=3)
        for last in (9, 10)
    ]
    model = tiny("Llama")
    wanted = one_by_one(model, rows)
    module = PolicyModule(model, shared_prefix=True)
    torch.testing.assert_close(module(module.pack(rows))[0], wanted, atol=1e-12, rtol=1e-12)


def test_entropy_is_that_of_the_distribution_sampled_from(tiny, rows_of_groups):
    rows, model = rows_of_groups([2, 2]), tiny("Qwen3")
    module = PolicyModule(model, temperature=1.5, chunk_tokens=3)
    _, entropy = module(module.pack(rows), entropy=True)
    logits = [model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0] / 1.5 for row in rows]
    at = [states[[position - 1 for position in row.trained]] for row, states in zip(rows, logits, strict=True)]
    wanted = torch.distributions.Categorical(logits=torch.cat(at)).entropy()
    torch.testing.assert_close(entropy, wanted, atol=1e-12, rtol=1e-12)


def test_case_mask_1_pad_id_may_equal_eos_id(tiny):
    """The mask is about tokens, not ids: an EOS that is also the padding id stays trained, and padding changes nothing."""
    prompt = [2, 8, 2, 9]
    short = Row(input_ids=[*prompt, 5, 6, 2], mask=[False] * 4 + [True] * 3, rollout_logprobs=[0.0] * 7, prefix=4)
    longer = Row(input_ids=[*prompt, 5, 6, 7, 7, 2], mask=[False] * 4 + [True] * 5, rollout_logprobs=[0.0] * 9)
    module = PolicyModule(tiny("Llama", pad_token_id=2, eos_token_id=2))
    packed = module.pack([short, longer])
    assert packed.lengths == [3, 5]
    assert packed.targets.tolist() == [5, 6, 2, 5, 6, 7, 7, 2]
    alone = module(module.pack([short]))[0]
    torch.testing.assert_close(module(packed)[0][:3], alone, atol=1e-12, rtol=1e-12)


def test_models_that_cannot_share_a_prefix_are_refused(tiny):
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(ConfigError, match="sinks"):
        PolicyModule(tiny("GptOss", num_local_experts=2, num_experts_per_tok=1), shared_prefix=True)
    layout = prefix.PrefixLayout(*[prefix.Spans.of([])] * 3, torch.zeros(0))
    with pytest.raises(ConfigError, match="s_aux"):
        prefix.refuse_unknown(torch.nn.Identity(), layout, 0.0, {"s_aux": 1})
    recurrent = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=61))
    recurrent.config.layer_types = ["linear_attention"]
    with pytest.raises(ConfigError, match="linear_attention"):
        PolicyModule(recurrent, shared_prefix=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mask": [False, True]}, "lengths"),
        ({"mask": [False] * 3}, "no trained token"),
        ({"mask": [True] * 3}, "first token"),
        ({"prefix": 4}, "prefix=4"),
    ],
)
def test_rows_that_cannot_train_are_refused(change, match):
    good = {"input_ids": [5, 6, 7], "mask": [False, True, True], "rollout_logprobs": [0.0] * 3, "id": "x"}
    with pytest.raises(ValueError, match=match):
        Row(**good | change)
