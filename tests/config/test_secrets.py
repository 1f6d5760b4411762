"""Secrets stay in the environment: never in a dump, a saved tree or a repr; and a dump can be run again."""

from __future__ import annotations

import os
import pickle

import pytest
import yaml

from posttrain.config import load_config
from posttrain.config.secrets import Secret, conceal, conceal_text
from posttrain.errors import ConfigError

TOY = "experiment=toy_grpo"


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    for name, value in {"CUDA_VISIBLE_DEVICES": "3", "ROCR_VISIBLE_DEVICES": "1", "HF_TOKEN": "tok-123", "RL_X": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("value", ["${oc.env:HF_TOKEN}", "tok-123", "prefix-tok-123-suffix"])
def test_case_ops_3_the_token_is_in_no_dump_and_no_repr(value, tmp_path) -> None:
    before = dict(os.environ)
    loaded = load_config(
        [TOY, f"rl.data.factory_kwargs.auth={value}", f"environments=[{{name: toy, options: {{api_key: '{value}'}}}}]"]
    )
    for text in (
        loaded.yaml(),
        yaml.safe_dump(loaded.tree),
        repr(loaded),
        repr(loaded.config),
        str(loaded.config),
        str(loaded.overrides),
    ):
        assert "tok-123" not in text
    assert "tok-123" in loaded.config.environments[0].options["api_key"]
    path = tmp_path / "saved.yaml"
    path.write_text(loaded.yaml())
    again = load_config([], config_file=path)
    assert again.config == loaded.config and os.environ == before


def test_a_secret_typed_under_a_telling_key_is_hidden_and_cannot_be_reused(tmp_path) -> None:
    loaded = load_config([TOY, "environments=[{name: toy, options: {api_key: sk-typed}}]"])
    assert "sk-typed" not in loaded.yaml() and "sk-typed" not in repr(loaded.config)
    path = tmp_path / "saved.yaml"
    path.write_text(loaded.yaml())
    with pytest.raises(ConfigError, match=r"was hidden when the config was saved(.|\n)*\$\{oc.env:NAME\}"):
        load_config([], config_file=path)


def test_errors_do_not_show_the_token() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([TOY, "rl.steps=${oc.env:HF_TOKEN}"])
    assert "tok-123" not in str(caught.value)


def test_words_that_only_look_like_secrets_are_kept() -> None:
    tree = {"max_tokens": "many", "pad_token": "<pad>", "micro_batch_tokens": 3, "monkey": "x", "hf_token": "abc", "password": ""}
    assert conceal(tree) == {**tree, "hf_token": "***"}


def test_text_for_logs() -> None:
    assert conceal_text("curl -H tok-123") == "curl -H ${oc.env:HF_TOKEN}"


def test_a_secret_is_text_that_travels() -> None:
    secret = pickle.loads(pickle.dumps(Secret("tok-123")))
    assert secret == "tok-123" and repr(secret) == "'***'" and "tok-123" not in repr({"a": [secret]})


def test_case_ops_3_the_token_is_not_in_the_recorded_command(monkeypatch) -> None:
    import sys

    from posttrain.tracking.provenance import provenance

    monkeypatch.setattr(sys, "argv", ["posttrain", "train", "model.name_or_path=tok-123"])
    assert provenance()["command"][-1] == "model.name_or_path=${oc.env:HF_TOKEN}" and "tok-123" not in str(provenance())
