"""What is told before the policy loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.config.load import load_config
from posttrain.errors import EngineStartError, PosttrainError, WeightSyncError
from posttrain.loop.run import train
from posttrain.policy import policy
from posttrain.rollout import vllm_start
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.weights import nixl_agent

ENGINE = """
from posttrain.errors import EngineStartError
from posttrain.rollout.hf import HFEngine

class Picky(HFEngine):
    @classmethod
    def preflight(cls, spec, options):
        raise EngineStartError(f"trust_remote_code={spec.trust_remote_code}", cause=spec.model_path, code="picky")
"""


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error of a run with these overrides, which must end before its policy is made."""
    write_tiny_model(tmp_path / "model")
    (tmp_path / "user_engines.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(policy, "Policy", lambda *_: pytest.fail("the policy was loaded first"))
    base = ["experiment=arithmetic_grpo", "model.factory=null", f"model.name_or_path={tmp_path}/model", "tracking.display=none"]

    def run(*overrides: str, kind: type[PosttrainError] = EngineStartError) -> PosttrainError:
        with pytest.raises(kind) as caught:
            train(load_config([*base, *overrides]), run_dir=tmp_path)
        return caught.value

    return run


def test_the_engine_chosen_is_asked_with_the_whole_spec(refusal, tmp_path):
    for trust in (False, True):
        error = refusal("rollout.engine=user_engines:Picky", f"model.trust_remote_code={str(trust).lower()}")
        assert (error.code, error.message, error.cause) == ("picky", f"trust_remote_code={trust}", f"{tmp_path}/model")


def test_a_vllm_that_is_absent_or_cannot_take_weights(refusal, monkeypatch):
    monkeypatch.setattr(vllm_start, "_installed_version", lambda: None)
    assert refusal("rollout.engine=vllm").code == "vllm-absent"
    monkeypatch.setattr(vllm_start, "_installed_version", lambda: "0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert refusal("rollout.engine=vllm").code == "vllm-plugins"


def test_a_nixl_of_another_version_is_told_before_the_policy_loads(refusal, monkeypatch):
    monkeypatch.setattr(nixl_agent, "version", lambda name: "1.4.2")
    assert "pip install 'nixl>=1.5,<1.6'" in refusal("weights.transport=nixl", kind=WeightSyncError).fix
