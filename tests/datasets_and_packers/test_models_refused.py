"""Folders that are no model that can be trained, and tokenizers that lack something: what is wrong and what to type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.schema import RunConfig
from posttrain.data.hub import eos_token_ids, stop_token_ids
from posttrain.data.packer import init_data_packer
from posttrain.errors import EngineStartError, PackerError, PosttrainError
from posttrain.policy.load import load_causal_lm
from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.hf import HFEngine
from posttrain.testing.tiny_model import write_tiny_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def rewrite(path: Path, **changes: Any) -> None:
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))


def without_tokenizer(folder: Path) -> None:
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)


def adapter(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base", "peft_type": "LORA"}')


def adapter_beside_a_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base", "peft_type": "LORA"}')


def gguf_only(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "model-q4.gguf").write_bytes(b"GGUF")


def quantised(folder: Path) -> None:
    rewrite(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def encoder_decoder(folder: Path) -> None:
    rewrite(folder / "config.json", model_type="t5", is_encoder_decoder=True)


def a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


FOLDERS: list[tuple[Callable[[Path], None], type[PosttrainError], str, str, str]] = [
    (without_tokenizer, PackerError, "packer", "tokenizer of .* cannot be loaded", "copy tokenizer.json"),
    (broken_tokenizer, PackerError, "packer", "tokenizer of .* cannot be loaded", "copy tokenizer.json"),
    (encoder_decoder, PackerError, "packer", "'t5' is an encoder-decoder model", "decoder-only"),
    (gguf_only, EngineStartError, "model-gguf", "holds GGUF weights", "gguf_file='model-q4.gguf'"),
    (adapter, EngineStartError, "model-adapter", "holds a LoRA adapter", "merge_and_unload"),
    (adapter_beside_a_config, EngineStartError, "model-adapter", "holds a LoRA adapter", "merge_and_unload"),
    (quantised, EngineStartError, "model-quantised", r"is quantised \(gptq\)", "the unquantised model"),
    (a_list, EngineStartError, "model-config", "is not valid JSON", "write the model folder again"),
]


@pytest.mark.parametrize(("spoil", "kind", "code", "said", "fix"), FOLDERS, ids=[case[0].__name__ for case in FOLDERS])
def test_the_packer_meets_it_first(folder, spoil, kind, code, said, fix):
    spoil(folder)
    with pytest.raises(kind, match=said) as caught:
        init_data_packer(str(folder))
    assert caught.value.code == code and fix in caught.value.fix


@pytest.mark.parametrize("spoil", [gguf_only, adapter, adapter_beside_a_config, quantised])
def test_policy_and_engine_say_the_same(folder, spoil):
    spoil(folder)
    said = set()
    for load in (
        lambda: init_data_packer(str(folder)),
        lambda: load_causal_lm(str(folder), "float32"),
        lambda: HFEngine.preflight(EngineSpec(str(folder), "float32", 64, 4, (2,)), None),
    ):
        with pytest.raises(EngineStartError) as caught:
            load()
        said.add(str(caught.value))
    assert len(said) == 1


def test_a_gguf_file_itself_and_an_adapter_s_base(folder):
    gguf_only(folder)
    with pytest.raises(EngineStartError, match="holds GGUF weights"):
        load_causal_lm(str(folder / "model-q4.gguf"), "float32")
    adapter(folder)
    with pytest.raises(EngineStartError) as caught:
        load_causal_lm(str(folder), "float32")
    assert "some/base" in caught.value.cause


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
def test_a_tokenizer_made_of_nothing_is_refused(tmp_path, family):
    """transformers makes one for these families without any file, and every text becomes no ids or unknown ones."""
    write_tiny_model(tmp_path, family=family)
    without_tokenizer(tmp_path)
    with pytest.raises(PackerError, match="empty vocabulary") as caught:
        init_data_packer(str(tmp_path))
    assert "tokenizer.json" in caught.value.fix and caught.value.where == "model.name_or_path"


def test_a_tokenizer_without_padding_is_fine(folder):
    rewrite(folder / "tokenizer_config.json", pad_token=None)
    packer = init_data_packer(str(folder))
    assert packer.tokenizer.pad_token_id is None
    batch = packer.policy_collate_fn([{"input_ids": [4, 5], "mask": [False, True]}, {"input_ids": [4], "mask": [False]}], 2)
    assert batch["attention_mask"].tolist() == [[True, True], [True, False]]


def test_every_source_of_an_eos_counts_and_one_must_say_it(folder):
    rewrite(folder / "generation_config.json", eos_token_id=[9, 3])
    rewrite(folder / "config.json", eos_token_id=7)
    packer = init_data_packer(str(folder))
    assert eos_token_ids(str(folder), packer.tokenizer) == packer.special_tokens.stop == (9, 3, 7, 2)
    for name in ("generation_config.json", "config.json"):
        rewrite(folder / name, eos_token_id=None)
    assert stop_token_ids(str(folder), packer.tokenizer) == (2,)
    rewrite(folder / "tokenizer_config.json", eos_token=None)
    packer = init_data_packer(str(folder))
    with pytest.raises(EngineStartError, match="no token ends a completion") as caught:
        stop_token_ids(str(folder), packer.tokenizer)
    assert caught.value.code == "no-eos" and "generation_config.json" in caught.value.fix


def test_a_run_asks_for_an_eos_unless_it_ignores_it(folder, tmp_path):
    from posttrain.config.schema import ModelConfig, RolloutConfig
    from posttrain.loop.prepare import build_engine, build_packer

    for name in ("generation_config.json", "config.json"):
        rewrite(folder / name, eos_token_id=None)
    rewrite(folder / "tokenizer_config.json", eos_token=None)

    def engine(**rollout: Any) -> Any:
        config = RunConfig(model=ModelConfig(name_or_path=str(folder)), rollout=RolloutConfig(**rollout))
        return build_engine(config, str(folder), build_packer(config, str(folder)), tmp_path)

    with pytest.raises(EngineStartError, match="no token ends a completion"):
        engine()
    assert engine(ignore_eos=True).spec.eos_token_ids == ()


def test_an_encoder_is_no_language_model_whatever_its_head(tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}
    BertLMHeadModel(BertConfig(**shape)).save_pretrained(tmp_path)
    with pytest.raises(EngineStartError, match="'bert' is no causal language model") as caught:
        load_causal_lm(str(tmp_path), torch.float32)
    assert caught.value.code == "architecture" and "decoder-only" in caught.value.fix


def test_a_value_that_a_config_cannot_have_is_named(tmp_path):
    write_tiny_model(tmp_path, family="gemma2")
    rewrite(tmp_path / "config.json", attn_logit_softcapping=50)
    with pytest.raises(EngineStartError, match="has a value that cannot be") as caught:
        load_causal_lm(str(tmp_path), torch.float32)
    assert caught.value.code == "model-config" and "attn_logit_softcapping" in caught.value.cause


def test_a_shard_that_is_missing_is_damage(folder, tmp_path):
    import shutil

    model = load_causal_lm(str(folder), torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    for name in TOKENIZER_FILES:
        if (folder / name).exists():
            shutil.copy(folder / name, tmp_path / "sharded")
    sorted((tmp_path / "sharded").glob("*.safetensors"))[-1].unlink()
    with pytest.raises(EngineStartError) as caught:
        load_causal_lm(str(tmp_path / "sharded"), torch.float32)
    assert caught.value.code in ("weights-absent", "weights-damaged") and "fetch" in caught.value.fix
