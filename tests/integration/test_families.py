"""Families on a real vLLM: weights go in through the weight plane under transformers' names, log-probs come out as the policy's.

What differs between them is what vLLM does with those names: fused q, k, v and gate, up; tied heads; norms of 1 + w; windows;
soft caps. The last test loads an exported folder with vLLM's own loader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.load import load_config
from posttrain.loop import checkpoint
from posttrain.loop.export import export
from posttrain.objective.objective import build_objective
from posttrain.policy.policy import Policy
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.tracking.run_dir import RunDir

pytestmark = pytest.mark.integration

TOLERANCE = 1e-4

ON_VLLM = [("qwen3", False), ("llama3", True), ("mistral", False), ("gemma2", True), ("gemma3", False)]
"""Family, tied head. Listed in docs/reference/models.md."""

ELSEWHERE = {
    "test_vllm_contract": ("llama", True),
    "test_vllm_weights": ("qwen2", False),
    "test_vllm_tp": ("qwen3_moe", True),
}
"""What other modules of this folder run in the same way."""

EXPORTED = ("gemma3", True)


@pytest.fixture(params=ON_VLLM, ids=[f"{family}-{'tied' if tied else 'untied'}" for family, tied in ON_VLLM])
def rig(request: pytest.FixtureRequest, open_rig: Any) -> Iterator[Any]:
    family, tied = request.param
    with open_rig(family, tied=tied) as rig:
        yield rig


def test_the_engine_computes_the_policy_before_and_after_an_update(rig: Any) -> None:
    rig.run(rig.body.start())
    rig.run(rig.plane.sync(1))
    assert rig.gap() < TOLERANCE
    rig.change()
    assert rig.gap() > 1e-2, "the change is large enough to be seen"
    assert rig.run(rig.plane.sync(2))["weights/canary_max"] < TOLERANCE
    assert rig.gap() < TOLERANCE


LOAD = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4)
    asked = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
    done = llm.generate(asked, SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
    found = [[table[i].logprob for i, table in zip(d.prompt_token_ids[1:], d.prompt_logprobs[1:])] for d in done]
    many = llm.generate(asked[2:], SamplingParams(max_tokens=60, n=64, seed=0, detokenize=False), use_tqdm=False)[0].outputs
    print(json.dumps([found, [o.token_ids[-1] for o in many if o.finish_reason == "stop"]]))

if __name__ == "__main__":
    main()
"""


def test_vllm_alone_loads_an_exported_folder(tmp_path: Path) -> None:
    """Its own loader and none of our plug-ins. Left to itself it would compute float32 weights in bfloat16."""
    family, tied = EXPORTED
    write_tiny_model(tmp_path / "model", family=family, tied=tied)
    config = load_config([
        f"model.name_or_path={tmp_path}/model", "rl.objective.name=grpo", "rl.steps=1", "environments=[{name: arithmetic}]",
    ])  # fmt: skip
    policy = Policy(config.config, str(tmp_path / "model"), build_objective("grpo", group_size=8))
    with torch.no_grad():
        for number, parameter in enumerate(policy.module.parameters()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    with RunDir.create(tmp_path / "outputs", "made") as run:
        run.write_config(config.tree)
        checkpoint.write(run.checkpoints, 1, policy.save, {})
    out = export(run.path, tmp_path / "out")
    (tmp_path / "load.py").write_text(LOAD)
    sequences = [list(range(4, 30)), [9, 9, 9], [5, 6]]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "load.py"), str(out), json.dumps(sequences)],
        env=os.environ | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found, stops = json.loads(done.stdout.splitlines()[-1])
    for mine, theirs in zip(policy.score(sequences, "float32"), found, strict=True):
        assert mine == pytest.approx(theirs, abs=TOLERANCE)
    assert set(stops) == {2, 3}, "each of the two ids ends a completion"
