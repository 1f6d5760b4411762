"""What the hub answers for a model is told apart, by the words of its real client."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import hf_raise_for_status

from posttrain.data.hub import eos_token_ids, model_config
from posttrain.data.packer import load_packer
from posttrain.errors import EngineStartError
from posttrain.rollout.engine import EngineSpec

Answer = Callable[[str], Any]


def refusal(status: int, code: str | None = None) -> Answer:
    headers = {"X-Error-Code": code} if code else {}
    request = httpx2.Request("HEAD", "https://hub.example/some/model/resolve/main/config.json")
    return lambda _: hf_raise_for_status(httpx2.Response(status, headers=headers, request=request))


def offline(_: str) -> None:
    raise LocalEntryNotFoundError("Cannot find the requested files in the disk cache")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Answer], None]:
    """Makes the hub's client answer so to every file that is asked for, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def install(answer: Answer) -> None:
        monkeypatch.setattr("transformers.utils.hub.hf_hub_download", lambda repo, filename, **_: answer(filename))

    return install


ANSWERS = [
    pytest.param(refusal(403, "GatedRepo"), "model-gated", "HF_TOKEN", id="gated"),
    pytest.param(refusal(401, "GatedRepo"), "model-gated", "HF_TOKEN", id="gated, no token"),
    pytest.param(refusal(403), "model-gated", "HF_TOKEN", id="forbidden"),
    pytest.param(refusal(401, "Other"), "model-absent", "HF_TOKEN", id="unauthorised"),
    pytest.param(refusal(401, "RepoNotFound"), "model-absent", "model.name_or_path", id="unknown or private"),
    pytest.param(offline, "model-absent", "HF_HUB_OFFLINE", id="offline"),
]


@pytest.mark.parametrize(("answer", "code", "fix"), ANSWERS)
def test_everyone_who_needs_the_model_names_the_failure_alike(hub, answer, code, fix):
    from posttrain.policy.load import load_causal_lm
    from posttrain.rollout.hf import HFEngine

    hub(answer)
    spec = EngineSpec("some/model", "float32", 64, 4, (2,))
    callers: list[Callable[[], Any]] = [
        lambda: model_config("some/model"),
        lambda: eos_token_ids("some/model"),
        lambda: load_packer("decoder_only").setup("some/model"),
        lambda: HFEngine.preflight(spec, None),
        lambda: load_causal_lm("some/model", "float32"),
    ]
    for call in callers:
        with pytest.raises(EngineStartError) as caught:
            call()
        assert caught.value.code == code and fix in caught.value.fix and "some/model" in caught.value.message
        assert caught.value.where == "model.name_or_path" and re.match("OSError: |40[13] |Cannot", caught.value.cause)


def test_a_model_of_the_hub_need_not_have_a_generation_config(hub, tmp_path):
    cached = tmp_path / "models--some--model"
    snapshot = cached / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"eos_token_id": 7}')
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    for elsewhere in (refusal(404, "EntryNotFound"), offline):
        hub(elsewhere)
        assert eos_token_ids("some/model") == (7,)


def test_a_folder_that_is_not_a_model_and_a_config_that_is_not_json(tmp_path):
    for path, cause in ((tmp_path, "has no config.json"), (tmp_path / "nothing", "neither a folder on this machine")):
        with pytest.raises(EngineStartError, match="was not found") as caught:
            model_config(str(path))
        assert caught.value.code == "model-absent" and cause in caught.value.cause
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineStartError, match="is not valid JSON") as caught:
        model_config(str(tmp_path))
    assert caught.value.code == "model-config"
