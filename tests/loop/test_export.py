"""An exported folder is the policy: to plain transformers, with its tokenizer, template and ids; whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from posttrain.cli.main import main
from posttrain.config.load import load_config
from posttrain.errors import ConfigError, DataError, EngineStartError, PosttrainError, RunInterrupted
from posttrain.loop import checkpoint
from posttrain.loop import export as exporter
from posttrain.loop.export import export
from posttrain.loop.run import train
from posttrain.objective.objective import build_objective
from posttrain.policy.policy import Policy
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.tracking.run_dir import RunDir

ENVIRONMENT = '''
from posttrain.data.environment import Environment

class Letters(Environment):
    """The share of vowels."""

    def dataset(self, split):
        return [{"id": f"{split}{i}", "text": split[1] + "abcdefghijkl"[: 2 + i]} for i in range(8)]

    def format_prompt(self, task):
        return [{"role": "user", "content": task["text"]}]

    async def compute_reward(self, state):
        return sum(letter in "aeiou0123" for letter in state.completion) / (1 + len(state.completion))
'''
TEMPLATE = "{{ bos_token }}{% for m in messages %}q{{ m['content'] }}z{% endfor %}"
SEQUENCES = [[1, 5, 6, 7, 8, 30, 2], [1, *range(4, 30)], [9, 9, 9]]


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def run_once(root: Path, family: str, *overrides: str, tied: bool = True) -> Path:
    """A run of two steps with a checkpoint each, on a model whose folder has what real ones have."""
    root.mkdir(exist_ok=True)
    (root / "vowels.py").write_text(ENVIRONMENT)
    (root / "template.jinja").write_text(TEMPLATE)
    write_tiny_model(root / "model", family=family, tied=tied, bos=True)
    rewrite(root / "model" / "config.json", dtype=None, torch_dtype="bfloat16", eos_token_id=2)
    rewrite(root / "model" / "generation_config.json", eos_token_id=3, do_sample=False, temperature=0.6, top_k=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(root))
        config = load_config([
            f"model.name_or_path={root}/model", f"model.chat_template={root}/template.jinja", "name=letters",
            "environments=[{name: 'vowels:Letters'}]", "rl.objective.name=grpo", "rl.steps=2", "rl.group_size=4",
            "rl.batch_per_replica=16", "rl.optimizer.lr=1e-2", "rollout.max_tokens=8", "rollout.max_model_len=32",
            "validation.prompts=2", "checkpoint.every=1", "checkpoint.keep_last=null", "grid.threads=1", "tracking.display=none",
            *overrides,
        ])  # fmt: skip
        return train(config, run_dir=root / "outputs").run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_once(tmp_path_factory.mktemp("run"), "smollm3")


def quietly(*args: Any, **options: Any) -> Path:
    return export(*args, say=lambda line: None, **options)


def policy_of(run: Path, step: int, mesh: Any = None) -> Policy:
    """The policy itself, from the checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(run.parent.parent))
        config = load_config([], config_file=run / "config.yaml").config
    policy = Policy(config, config.model.name_or_path, build_objective("grpo", group_size=4), mesh=mesh)
    policy.load(run / "checkpoints" / f"step_{step}" / "policy")
    return policy


@torch.no_grad()
def logprobs(folder: Path, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """By transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    tables = [model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1) for ids in SEQUENCES]
    return [table.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1) for table, ids in zip(tables, SEQUENCES, strict=True)]


def largest_gap(found: list[torch.Tensor], wanted: list[list[float]]) -> float:
    return max(float((a - torch.tensor(b)).abs().max()) for a, b in zip(found, wanted, strict=True))


def test_float32_is_the_policy_and_the_narrow_ones_are_its_rounded_weights(run, tmp_path):
    policy = policy_of(run, 2)
    exact = policy.score(SEQUENCES, "float32")
    for dtype in (None, "float32", "bfloat16", "float16"):
        out = quietly(run, tmp_path / str(dtype), dtype=dtype)
        stored = dtype or "float32"
        assert {str(t.dtype) for t in load_file(out / "model.safetensors").values()} == {f"torch.{stored}"}
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == stored
        assert largest_gap(logprobs(out), policy.score(SEQUENCES, stored)) < 5e-6
        assert (largest_gap(logprobs(out), exact) < 5e-6) is (stored == "float32")
    assert largest_gap(logprobs(tmp_path / "bfloat16", torch.bfloat16), exact) < 0.5
    assert largest_gap(logprobs(run.parent.parent / "model"), exact) > 1e-2, "training moved the weights"


@pytest.mark.parametrize(("family", "tied"), [("gemma2", True), ("qwen2", False), ("qwen3_moe", False)])
def test_other_families_tied_and_untied(tmp_path, family, tied):
    run = run_once(tmp_path / "run", family, "rl.steps=1", tied=tied)
    out = quietly(run, tmp_path / "out")
    held = load_file(out / "model.safetensors")
    assert ("lm_head.weight" in held) is not tied, "a tied head is the embedding and saved once"
    assert held.keys() == load_file(tmp_path / "run" / "model" / "model.safetensors").keys(), "experts too, under their own names"
    assert largest_gap(logprobs(out), policy_of(run, 1).score(SEQUENCES, "float32")) < 5e-6


def test_config_ids_tokenizer_and_template_are_those_of_the_run(run, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    base, out = run.parent.parent / "model", quietly(run, tmp_path / "out")
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (base, out))
    assert now == was | {"torch_dtype": "float32"}
    was, now = (json.loads((folder / "generation_config.json").read_text()) for folder in (base, out))
    assert now == was | {"eos_token_id": [3, 2]}, "every id that ended a completion, the rest as it was"
    assert GenerationConfig.from_pretrained(out).eos_token_id == [3, 2]
    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(out)
    assert after("abc")["input_ids"] == before("abc")["input_ids"] == [1, 4, 5, 6]
    assert after.chat_template == TEMPLATE != before.chat_template
    asked = after.apply_chat_template([{"role": "user", "content": "ab"}], add_generation_prompt=True)
    assert list(asked["input_ids"] if hasattr(asked, "keys") else asked) == [1, 20, 4, 5, 29]


def test_the_card_says_where_the_model_comes_from_and_no_path_of_this_machine(run, tmp_path):
    text = (quietly(run, tmp_path / "out", step=1) / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers" and {"posttrain", "grpo"} <= set(front["tags"])
    assert "base_model" not in front, "a local folder is no name on a hub"
    for words in ("step 1 of 2", "`model`", "reward on held-out prompts", "fingerprint `", "config: sha256 `", "transformers 5"):
        assert words in text, words
    assert str(run.parent) not in text and str(run.parent.parent) not in text


def test_the_card_keeps_the_last_part_of_what_a_file_holds(run, tmp_path):
    """A run that resumes from anywhere names its files by absolute paths; its model card does not."""
    from posttrain.loop.model_card import card

    copy, mine = copy_of(run, tmp_path), f"{tmp_path}/mine.py"
    tree = yaml.safe_load((copy / "config.yaml").read_text())
    tree["rl"]["data"]["factory"] = f"{mine}:rows"
    tree["rl"]["objective"] = {"name": f"{mine}:Mine", "prompts": f"{tmp_path}/prompts.txt"}
    tree["environments"] = [{"name": f"{mine}:Env"}]
    (copy / "config.yaml").write_text(yaml.safe_dump(tree))
    found = checkpoint.find(copy / "checkpoints")[0]
    rewrite(found.path / "loop.json", fingerprints={f"{mine}:Env": "abc"})
    model = exporter.ModelConfig(name_or_path="x", factory=f"{mine}:make")
    text = card(copy, found, model, "float32")
    for words in ("`mine.py:rows`", "`mine.py:Env`, fingerprint", "`mine.py:make`", "`mine.py:Mine prompts=prompts.txt`"):
        assert words in text, words
    assert str(tmp_path) not in text


def test_a_name_on_the_hub_is_the_base_model_of_the_card(run):
    from dataclasses import replace

    from posttrain.loop.model_card import card

    model = replace(exporter.run_model(run), name_or_path="some/model")
    text = card(run, checkpoint.find(run / "checkpoints")[0], model, "float32")
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "some/model"


def test_which_checkpoint(run, tmp_path):
    first, second = (load_file(run / "checkpoints" / f"step_{n}" / "policy" / "model.safetensors") for n in (1, 2))
    named = run / "checkpoints" / "step_1"
    cases = [(run, None, second), (run, 1, first), (named, None, first), (named, 1, first)]
    for number, (given, step, wanted) in enumerate(cases):
        held = load_file(quietly(given, tmp_path / str(number), step=step) / "model.safetensors")
        assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_large_models_come_in_shards(run, tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "SHARD_SIZE", "60KB")
    out = quietly(run, tmp_path / "out")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and not (out / "model.safetensors").exists()
    assert largest_gap(logprobs(out), policy_of(run, 2).score(SEQUENCES, "float32")) < 5e-6


def test_a_run_that_goes_on_may_be_exported(run, tmp_path):
    with RunDir.open(run):
        quietly(run, tmp_path / "out")


def test_an_empty_folder_is_taken_and_nothing_is_overwritten(run, tmp_path):
    (tmp_path / "empty").mkdir()
    assert (quietly(run, tmp_path / "empty") / "config.json").is_file()
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "empty", tmp_path / "file"):
        with pytest.raises(ConfigError, match="already there") as caught:
            quietly(run, out)
        assert caught.value.code == "out-exists" and "remove this one" in caught.value.fix
    assert (tmp_path / "file").read_text() == "mine"


def test_what_no_folder_can_be_written_to(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty")
    for out, said in (
        (".", "is the current folder"),
        (tmp_path / "link", "already there, a link"),
        (tmp_path / "file" / "out", "cannot write under"),
        (tmp_path / ("x" * 300), "cannot write"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            quietly(run, out)
        assert caught.value.fix
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "link"]


def test_a_failure_at_any_point_leaves_nothing(run, tmp_path, monkeypatch):
    for part in ("_write_model", "load_tokenizer", "_write_configs", "write_card"):
        with monkeypatch.context() as patch:
            patch.setattr(exporter, part, fail)
            with pytest.raises(KeyboardInterrupt):
                quietly(run, tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


def fail(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_a_disk_without_room_is_told_before_anything_is_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 100, 2**20))
    with pytest.raises(RunInterrupted, match="and .* has 1 MiB free") as caught:
        quietly(run, tmp_path / "out")
    assert caught.value.code == "disk_full" and caught.value.retryable and list(tmp_path.iterdir()) == []


def copy_of(run: Path, root: Path) -> Path:
    return Path(shutil.copytree(run, root / "copied"))


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of one rank: this process."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    distributed.destroy_process_group()


def test_a_checkpoint_of_a_sharded_policy_is_exported_as_any_other(run, tmp_path, mesh):
    """The same files, byte for byte, as from the checkpoint of one process."""
    copy = copy_of(run, tmp_path)
    saved = copy / "checkpoints" / "step_2" / "policy"
    policy = policy_of(run, 2, mesh)
    shutil.rmtree(saved)
    policy.save(saved)
    assert not list(saved.glob("*.safetensors")) and list(saved.glob("*.distcp"))
    one, other = quietly(run, tmp_path / "one"), quietly(copy, tmp_path / "other")
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    shard = next(saved.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match="cannot be read") as caught:
        quietly(copy, tmp_path / "damaged")
    assert "is not what was written" in caught.value.cause


def test_what_is_not_there_is_named(run, tmp_path):
    out = tmp_path / "out"
    copy = copy_of(run, tmp_path)
    refused: list[tuple[Any, dict[str, Any], type[PosttrainError], str, str]] = [
        (tmp_path / "nowhere", {}, ConfigError, "there is no run", "directory that the run printed"),
        (run, {"step": 7}, DataError, "no checkpoint of step 7", "are there: 1, 2"),
        (run / "checkpoints" / "step_1", {"step": 2}, ConfigError, "contradicts step_1", "leave one"),
        (run, {"dtype": "int8"}, ConfigError, "dtype='int8'", "bfloat16"),
    ]
    for given, options, kind, said, fix in refused:
        with pytest.raises(kind, match=said) as caught:
            quietly(given, out, **options)
        assert fix in caught.value.fix and not out.exists()
    (copy / "checkpoints" / "step_2" / "policy" / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(DataError, match="cannot be read") as caught:
        quietly(copy, out)
    assert caught.value.code == "checkpoint-damaged" and "1, 2" in caught.value.fix
    for step in (1, 2):
        shutil.rmtree(copy / "checkpoints" / f"step_{step}")
    (copy / "checkpoints" / "tmp_step_3").mkdir()
    with pytest.raises(DataError, match="no complete checkpoint yet") as caught:
        quietly(copy, out)
    assert "checkpoint.every" in caught.value.fix and not out.exists()


def test_a_base_model_that_is_gone_or_another_one(run, tmp_path):
    copy, out = copy_of(run, tmp_path), tmp_path / "out"
    tree = yaml.safe_load((copy / "config.yaml").read_text())
    tree["model"]["name_or_path"] = str(tmp_path / "moved")
    (copy / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(EngineStartError, match="the base model of copied was not found") as caught:
        quietly(copy, out)
    assert caught.value.code == "model-absent" and "put it back" in caught.value.fix
    write_tiny_model(tmp_path / "moved", family="qwen3")
    with pytest.raises(DataError, match="does not fit the model") as caught:
        quietly(copy, out)
    assert caught.value.code == "another-model" and not out.exists()


OWN_CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class ZorkConfig(LlamaConfig):
    model_type = "zork"

class ZorkForCausalLM(LlamaForCausalLM):
    config_class = ZorkConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.register_buffer("calibration", torch.zeros(3))
"""


def test_a_model_with_its_own_code_keeps_code_and_buffers(tmp_path, monkeypatch):
    """No checkpoint holds buffers; the export takes them from the base model."""
    from safetensors.torch import save_file

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = {"AutoConfig": "code.ZorkConfig", "AutoModelForCausalLM": "code.ZorkForCausalLM"}
    run = run_once(tmp_path / "run", "llama", "rl.steps=1")
    base = tmp_path / "run" / "model"
    rewrite(base / "config.json", model_type="zork", auto_map=own, architectures=["ZorkForCausalLM"])
    (base / "code.py").write_text(OWN_CODE)
    calibration = torch.tensor([1.0, 2.0, 3.0])
    weights = load_file(base / "model.safetensors")
    save_file(weights | {"model.calibration": calibration}, base / "model.safetensors", {"format": "pt"})
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["model"]["trust_remote_code"] = True
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    out = quietly(run, tmp_path / "out", dtype="bfloat16")
    assert (out / "code.py").read_text() == OWN_CODE
    assert load_file(out / "model.safetensors")["model.calibration"].tolist() == calibration.tolist()


def test_the_command_on_a_model_made_by_a_factory(tmp_path, capsys, monkeypatch):
    (tmp_path / "vowels.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    overrides = [
        "model.factory=posttrain.testing.tiny_model:write_tiny_model", "model.factory_kwargs.family=gemma3",
        "environments=[{name: 'vowels:Letters'}]", "rl.objective.name=grpo", "rl.steps=1", "rl.group_size=2",
        "rl.batch_per_replica=4", "rollout.max_tokens=4", "rollout.max_model_len=32", "validation.prompts=0", "grid.threads=1",
        "tracking.display=none",
    ]  # fmt: skip
    run = train(load_config(overrides), run_dir="outputs").run
    made = next((tmp_path / "outputs" / "models").iterdir())
    shutil.rmtree(made)  # it is made again
    capsys.readouterr()
    assert main(["export", os.path.relpath(run), "my-model", "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "exported to my-model (" in said and "MiB)" in said and "model: making" in said
    assert "tiny_model:write_tiny_model" in (tmp_path / "my-model" / "README.md").read_text()
    assert main(["export", str(run), "my-model"]) == 2
    assert "already there and not empty" in capsys.readouterr().err
