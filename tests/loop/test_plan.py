"""`posttrain plan` says what a config means, from the model's config alone, and refuses what a run refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posttrain.cli.main import main
from posttrain.policy.load import load_causal_lm
from posttrain.testing.tiny_model import write_tiny_model

RAY = ["grid.backend=ray", "grid.gpu_placement=disaggregated", "grid.num_replicas=2", "grid.dp_shard=4", "grid.dp_replicate=2",
       "grid.ranks=2", "rollout.tensor_parallel_size=2", "rollout.engine=vllm"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without its weights."""
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    return path


@pytest.fixture
def plan(folder: Path, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    def run(*arguments: str, model: Path | None = None) -> tuple[int, str, str]:
        base = ["plan", "experiment=arithmetic_grpo", "model.factory=null", f"model.name_or_path={model or folder}"]
        code = main([*base, *arguments])
        return code, *capsys.readouterr()

    return run


def test_the_plan_of_one_process_is_a_screen(plan, folder: Path) -> None:
    code, text, _ = plan("rl.mini_batch_per_replica=64")
    lines = text.splitlines()
    assert code == 0 and len(lines) < 40 and max(map(len, lines)) <= 100
    assert "local: policy [1, 1], rollout [1, 1]; dp_world = 1 x 1 = 1" in text
    assert "8 optimizer steps of 64; rl.mini_batch_per_replica: 1, 2, 4, 8, 16, 32, 64, 128, 256, 512" in text
    assert "rl.micro_batch_per_replica: 1, 2, 4, 8, 16, 32, 64\n" in text
    policy = ("weights", "gradients", "Adam moments", "activations", "log-prob chunk", "publication slots")
    assert all(f" {term} " in text for term in (*policy, "engine weights", "KV cache", "staging"))
    assert "inproc: " in text and "assumed: links of 5 GB/s" in text


def test_the_plan_of_a_grid_names_processes_devices_and_bytes(plan) -> None:
    code, text, _ = plan(*RAY, "--json")
    found = json.loads(text)
    assert code == 0
    assert [(g["name"], g["processes"], g["ranks"]) for g in found["grid"]["actor_groups"]] == [
        ("driver", 1, 1), ("policy", 8, 1), ("rollout", 2, 2),
    ]  # fmt: skip
    assert [(g["name"], g["devices"]) for g in found["grid"]["device_groups"]] == [("policy", 8), ("rollout", 4)]
    assert found["batch"]["legal_micros"] == [8, 16, 32, 64, 128, 256, 512]
    transfer, memory = found["transfer"], {term["name"]: term["nbytes"] for term in found["memory"]["policy_rank"]}
    total = 4 * found["model"]["parameters"]
    assert transfer["lane_bytes"] == total and transfer["transport"] == "nixl" and transfer["lanes"] == 2
    assert total / 8 <= transfer["rank_bytes"] <= transfer["slot_bytes"] == memory["publication slots"] // 2
    assert total / 4 <= memory["weights"] < total / 4 * 1.01 and memory["Adam moments"] == 2 * memory["weights"]
    assert total / 2 < transfer["slice_bytes"] < total
    assert max(map(len, plan(*RAY)[1].splitlines())) <= 100


def test_colocated_roles_share_devices(plan) -> None:
    _, text, _ = plan(*RAY, "grid.gpu_placement=colocated", "--json")
    assert [(g["name"], g["devices"]) for g in json.loads(text)["grid"]["device_groups"]] == [("shared", 8)]


def test_parameters_are_those_of_the_loaded_model(plan, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, family="qwen3_moe", tied=False)
    found = json.loads(plan("--json", model=tmp_path)[1])
    assert found["model"]["parameters"] == sum(p.numel() for p in load_causal_lm(str(tmp_path), torch.float32).parameters())
    assert found["transfer"]["parameters"] == len(list(model.named_parameters()))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["grid.backend=ray", "grid.ranks=2"], "ROLLOUT_RANKS=2 must equal rollout.tensor_parallel_size=1"),
        (["grid.backend=ray", "grid.shapes.policy=[2,1]"], "POLICY_REPLICAS=2 is unsupported"),
        (["grid.shapes.rollout=[1,1]"], "grid.shapes requires grid.backend='ray'"),
        (["rollout.tensor_parallel_size=2"], "per-replica rendezvous not run"),
        (["rl.micro_batch_per_replica=7"], "legal: 1, 2, 4, 8, 16, 32, 64, 128, 256, 512"),
        (["rl.batch_per_replica=60"], "60 is not whole groups of 8"),
        (["rl.data.packer=nobody.packers:make"], "Unable to import DataPacker factory 'nobody.packers:make'"),
        (["--link=0"], "--link=0.0 is not a speed"),
    ],
)
def test_what_a_run_refuses_a_plan_refuses(plan, overrides: list[str], words: str) -> None:
    code, text, error = plan(*overrides)
    assert code == 2 and text == "" and words in error


def test_a_model_without_a_packer_is_refused_as_in_a_run(plan, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "odd_vlm", "vision_config": {}}))
    code, _, error = plan(model=tmp_path)
    assert code == 2 and "model_type='odd_vlm' declares vision_config but has no native packer" in error


def test_completions_that_come_with_the_data_have_no_rollout_and_no_transfer(folder: Path, capsys) -> None:
    assert main(["plan", "experiment=preference_dpo", "model.factory=null", f"model.name_or_path={folder}"]) == 0
    text = capsys.readouterr().out
    assert "rollout  none: completions come with the data" in text and "reference model" in text and "staging" not in text


def test_a_plan_loads_neither_ray_nor_vllm(folder: Path) -> None:
    code = f"""
import sys
from posttrain.cli.main import main
assert main(["plan", "experiment=arithmetic_grpo", "model.factory=null", "model.name_or_path={folder}", *{RAY!r}]) == 0
print(sorted({{"ray", "vllm", "nixl"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
