"""Chat templates in the styles of several families, written for the tests, and a byte-level tokenizer with their marks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TURN = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


@dataclass(frozen=True)
class Style:
    """A template, the marks that its tokenizer has (all special), those that are stop tokens, and whether there is a BOS."""

    template: str
    marks: tuple[str, ...]
    stop: tuple[str, ...]
    bos: str = ""


CHATML = Style("{% for m in messages %}" + _TURN + "{% endfor %}" + _ASK, ("<|im_start|>", "<|im_end|>", "<|end|>"),
               ("<|im_end|>", "<|end|>"))  # fmt: skip
LLAMA3 = Style(
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{{ '<|start|>system<|/start|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot|>' }}"
    "{% for m in messages %}{{ '<|start|>' + ('ipython' if m.role == 'tool' else m.role) + '<|/start|>\\n\\n' }}"
    "{{ m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|/start|>\\n\\n' }}{% endif %}",
    ("<|bos|>", "<|start|>", "<|/start|>", "<|eot|>"), ("<|eot|>",), bos="<|bos|>",
)  # fmt: skip
QWEN3 = Style(
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _ASK
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    CHATML.marks, ("<|im_end|>",),
)  # fmt: skip
QWEN3_LAST = Style(
    "{% for m in messages %}{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + m.content + '<|im_end|>\\n' }}"
    "{% else %}" + _TURN + "{% endif %}{% endfor %}" + _ASK,
    CHATML.marks, ("<|im_end|>",),
)  # fmt: skip
MISTRAL = Style(
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' }}"
    "{% if system is defined and loop.last %}{{ system + '\\n\\n' }}{% endif %}{{ m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]"), ("</s>",), bos="<s>",
)  # fmt: skip
GEMMA = Style(
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{ m.content | trim + '</turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}",
    ("<bos>", "<eos>", "<turn>", "</turn>"), ("<eos>", "</turn>"), bos="<bos>",
)  # fmt: skip
DEEPSEEK = Style(
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<Assistant>' + m.content.split('</think>')[-1] + '<eos>' }}{% elif m.role == 'tool' %}{{ '<Tool>' + m.content }}"
    "{% else %}{{ '<User>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<Assistant><think>\\n' }}{% endif %}",
    ("<bos>", "<eos>", "<User>", "<Assistant>", "<Tool>"), ("<eos>",), bos="<bos>",
)  # fmt: skip
TOOLS = Style(
    "{% if tools %}{{ '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<result>' + m.content + '</result><|im_end|>\\n' }}{% else %}" + _TURN + "{% endif %}{% endfor %}"
    + _ASK,
    CHATML.marks, ("<|im_end|>",),
)  # fmt: skip
PLAIN_WORDS = Style(
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% else %}"
    "{{ m.role | upper + ': ' + m.content + ' ASSISTANT:' }}{% endif %}{% endfor %}",
    ("</s>",), ("</s>",),
)  # fmt: skip
HOSTILE = Style(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content | trim if loop.last else "
    "(m.content | trim | upper)) + '<|im_end|>\\n' }}{% endfor %}" + _ASK,
    CHATML.marks, ("<|im_end|>",),
)  # fmt: skip
COUNTING = Style(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + loop.index | string + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant ' + (messages | length + 1) | string + '\\n' }}{% endif %}",
    CHATML.marks, ("<|im_end|>",),
)  # fmt: skip

STYLES = {
    "chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "qwen3_last": QWEN3_LAST, "mistral": MISTRAL, "gemma": GEMMA,
    "deepseek": DEEPSEEK, "tools": TOOLS, "plain_words": PLAIN_WORDS, "hostile": HOSTILE, "counting": COUNTING,
}  # fmt: skip


def write_style(folder: Path, style: Style, *, eos: tuple[str, ...] | None = None) -> Path:
    """A model folder without weights. `eos`: the stop tokens that its JSON files name; default: those of the style."""
    tokenizer = byte_tokenizer(style)
    tokenizer.chat_template = style.template
    tokenizer.save_pretrained(folder)
    stop = [tokenizer.convert_tokens_to_ids(mark) for mark in (style.stop if eos is None else eos)]
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": stop}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    return folder


def byte_tokenizer(style: Style) -> Any:
    """Every byte is a token; a few pairs are merged, so that the same text has several spellings in ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pairs = [("i", "s"), ("Ġ", "I"), ("Ċ", "Ċ"), ("2", "Ġ"), ("ð", "Ł")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    inner = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in style.marks])
    if style.bos:
        special = [(style.bos, inner.token_to_id(style.bos))]
        inner.post_processor = processors.TemplateProcessing(single=f"{style.bos} $A", special_tokens=special)
    named = {"bos_token": style.bos} if style.bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **named)
