"""The demo's model: made by code, the same everywhere, and ignorant of the held-out problems."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.data.packer import eos_token_ids, init_data_packer
from posttrain.policy.load import load_causal_lm
from posttrain_envs.arithmetic import Arithmetic
from posttrain_experiments import tiny
from posttrain_experiments.arithmetic import EXPERIMENTS, PROBLEMS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    tiny.build(out, environment=PROBLEMS, steps=3, slip_steps=2, say=lambda line: None)
    return out


def test_it_is_an_ordinary_model_folder_under_three_million_parameters(folder: Path) -> None:
    model = load_causal_lm(str(folder), "float32")
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    assert model.config.hidden_size // model.config.num_attention_heads >= 32
    packer = init_data_packer(str(folder))
    ids = packer.get_rollout_input("12+7=")["prompt_ids"]
    assert packer.decode([*ids, 1]) == "12+7=" and eos_token_ids(str(folder)) == (1,)
    chat = packer.get_rollout_input([{"role": "user", "content": "12+7="}])["prompt_ids"]
    assert packer.decode(chat) == "12+7="  # a message alone is its bare text


def test_the_same_seed_gives_the_same_weights_and_prints_its_progress(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    tiny.build(tmp_path, environment=PROBLEMS, steps=3, slip_steps=2, say=lines.append)
    first, second = (load_causal_lm(str(p), "float32").state_dict() for p in (folder, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert "0.34M parameters" in lines[0] and "seed 0" in lines[0] and "step 5/5" in lines[-1]


def test_the_warm_up_teaches_the_answer_and_mostly_a_wrong_one() -> None:
    tokenizer = tiny.build_tokenizer()
    ids, mask = tiny.encode(tokenizer, [("9+9=", "18", "19"), ("1+0=", "1", "2")])
    answers = [tokenizer.decode(ids[slip, row][mask[slip, row]]) for slip in (0, 1) for row in (0, 1)]
    assert answers == ["18<eos>", "1<eos>", "19<eos>", "2<eos>"]
    assert tokenizer.decode(ids[0, 0][~mask[0, 0]]) == "9+9=" and tiny.SLIP_SHARES[1] > 0.5


def test_the_experiment_s_problems_are_held_out() -> None:
    tree = EXPERIMENTS["arithmetic_grpo"]
    assert tree["model"]["factory_kwargs"]["environment"] == tree["environments"][0]["options"]
    env = Arithmetic(Arithmetic.Options(**PROBLEMS))
    assert len(env.dataset("test")) == 80 and len(env.dataset("train")) == 320
