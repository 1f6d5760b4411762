"""A tiny Llama with random weights and a tokenizer of one token per character, written as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 40


def write_tiny_model(folder: Path, *, tied: bool = True, seed: int = 0) -> Any:
    """Write the folder and return the model (fp32, evaluation mode). Ids 0, 2, 3 are padding and two ends of sequence.

    Grouped-query attention with heads of 32, so that vLLM runs it too.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<end>", *"abcdefghijklmnopqrstuvwxyz0123456789"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=[2, 3],
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model
