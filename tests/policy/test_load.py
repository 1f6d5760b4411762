"""Failures of loading a model are told apart, each with its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import ConfigError, EngineStartError
from posttrain.policy.load import load_causal_lm


@pytest.fixture
def folder(tiny: Any, tmp_path: Path) -> Path:
    tiny("Llama", dtype=torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder: Path, **changes: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


@pytest.mark.parametrize("tied", [True, False])
def test_loads_the_weights_in_the_wanted_dtype(tiny, tmp_path, tied):
    model = tiny("Qwen3", dtype=torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(str(tmp_path), "bfloat16")
    assert not loaded.training
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    for name, value in loaded.named_parameters():
        assert torch.equal(value, model.get_parameter(name).bfloat16())


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"model_type": "zork"}, "architecture", "model_type='zork'"),
        ({"model_type": "vit"}, "architecture", "model_type='vit'"),
        ({"model_type": "zork", "transformers_version": "99.1.0"}, "model-version", "transformers>=99.1.0"),
        ({"num_hidden_layers": 3}, "weights-damaged", "lack 9 parameter"),
        ({"vocab_size": 62}, "weights-damaged", "other shapes"),
    ],
)
def test_configs_that_do_not_fit(folder, changes, code, said):
    with pytest.raises(EngineStartError) as caught:
        load_causal_lm(rewrite(folder, **changes), "float32")
    assert caught.value.code == code and caught.value.fix and caught.value.where == "model.name_or_path"
    assert said in str(caught.value)


def test_absent_model_and_absent_or_cut_weights(folder, tmp_path):
    with pytest.raises(EngineStartError) as caught:
        load_causal_lm(str(tmp_path / "nowhere"), "float32")
    assert caught.value.code == "model-absent"
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(EngineStartError) as caught:
        load_causal_lm(str(folder), "float32")
    assert caught.value.code == "weights-damaged"
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineStartError) as caught:
        load_causal_lm(str(folder), "float32")
    assert caught.value.code == "weights-absent"


@pytest.mark.parametrize("text", ["You are trying to access a gated repo.", "401 Client Error: Unauthorized", "403 Client Error"])
def test_a_gated_model_names_the_token(folder, monkeypatch, text):
    import transformers

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(text)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    with pytest.raises(EngineStartError) as caught:
        load_causal_lm(str(folder), "float32")
    assert caught.value.code == "model-gated" and "HF_TOKEN" in caught.value.fix


def test_remote_code_and_unknown_attention_name_their_keys(folder):
    with pytest.raises(ConfigError) as caught:
        load_causal_lm(str(folder), "float32", attn_implementation="zork")
    assert "model.attn_implementation" in caught.value.fix
    path = rewrite(folder, model_type="zork", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    with pytest.raises(ConfigError) as caught:
        load_causal_lm(path, "float32")
    assert "model.trust_remote_code" in caught.value.fix
