"""Tiny models of the supported families with random weights, and a tokenizer of one token per character.

    model = write_tiny_model(folder)                                  # a Llama, as a Hugging Face folder
    model = write_tiny_model(folder, family="gemma2", tied=False)

Each family is built so that what sets it apart shows: windows shorter than the tests' rows, soft caps that the scores reach,
norms and biases away from their trivial values. Heads are 32 wide, so that vLLM runs them on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from posttrain.policy.attention import plain_attention

VOCABULARY = 40
WINDOW = 8
"""Tokens that a sliding layer sees: fewer than a prompt and its completion have in the tests."""

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Family:
    """A family of models.   kind: transformers' `<kind>Config` and `<causal or kind>ForCausalLM`.   like: models of it."""

    kind: str
    like: str
    options: dict[str, Any] = field(default_factory=dict)
    causal: str = ""


def _layers(*kinds: str) -> dict[str, Any]:
    return {"layer_types": [f"{kind}_attention" for kind in kinds]}


FAMILIES = {
    "llama": Family("Llama", "Llama 2, TinyLlama"),
    "llama3": Family("Llama", "Llama 3.1, 3.2", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "smollm2": Family("Llama", "SmolLM, SmolLM2", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}),
    "smollm3": Family("SmolLM3", "SmolLM3", {"no_rope_layers": [1, 0], "use_sliding_window": False, **_layers("full", "full")}),
    "qwen2": Family("Qwen2", "Qwen2, Qwen2.5", {"use_sliding_window": False}),
    "qwen3": Family("Qwen3", "Qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3_moe": Family("Qwen3Moe", "Qwen3-30B-A3B", {
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "mlp_only_layers": [1]}),
    "mistral": Family("Mistral", "Mistral 7B v0.1", {"sliding_window": WINDOW}),
    "gemma": Family("Gemma", "Gemma", {"initializer_range": 0.05}),
    "gemma2": Family("Gemma2", "Gemma 2", {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0,
        **_layers("sliding", "full")}),
    "gemma3": Family("Gemma3Text", "Gemma 3 (text)", {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "initializer_range": 0.08, **_layers("sliding", "full")},
        causal="Gemma3"),
}  # fmt: skip


def write_tiny_model(
    folder: Path, *, family: str = "llama", tied: bool = True, seed: int = 0, bos: bool = False, template: bool = True
) -> Any:
    """Write the folder and return the model (fp32, evaluation mode).

    Ids 0, 1, 2, 3 are padding, BOS and two ends of sequence, both in the config; the tokenizer knows one of them. `bos`: it
    puts the BOS before a text, and the chat template does. `template`: it has a chat template.
    """
    import transformers

    made = FAMILIES[family]
    write_tokenizer(folder, bos=bos, template=template)
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": tied,
        "pad_token_id": 0, "bos_token_id": 1 if bos else None, "eos_token_id": [2, 3], "initializer_range": 0.15,
    }  # fmt: skip
    config = getattr(transformers, f"{made.kind}Config")(**shape | made.options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{made.causal or made.kind}ForCausalLM")(config).eval()
        if family != "llama":
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases
                    parameter.data += 0.2 * torch.randn(parameter.shape)
    model.set_attn_implementation(plain_attention(model))
    model.save_pretrained(folder)
    return model


def write_tokenizer(folder: Path, *, bos: bool = False, template: bool = True) -> Any:
    """Write a tokenizer whose text tokens are letters and digits; any other character is an `a`."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<end>", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>"} | ({"bos_token": "<bos>"} if bos else {})
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    if template:
        tokenizer.chat_template = ("{{ bos_token }}" if bos else "") + TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
