"""The recipe of preference pairs as shipped: the model that adds one too much learns from pairs alone to add."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from posttrain.config.load import load_config
from posttrain.loop import checkpoint
from posttrain.loop.run import train
from posttrain.tracking.metrics import read_validation

pytestmark = pytest.mark.integration


def right_sums(folder: Path, weights: Path | None = None) -> float:
    """Share of the held-out sums that the model answers right, greedily."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from posttrain_envs.arithmetic import Arithmetic
    from posttrain_experiments.preference import PROBLEMS

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(load_file(weights), strict=False)
        model.tie_weights()
    rows, right = Arithmetic(Arithmetic.Options(**PROBLEMS)).dataset("test"), 0
    for row in rows:
        ids = tokenizer(f"{row['problem']}=", return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        right += tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == row["answer"]
    return right / len(rows)


def test_pairs_alone_teach_to_add(tmp_path: Path) -> None:
    run = train(load_config(["experiment=preference_dpo", "tracking.display=none"]), run_dir=tmp_path).run
    first, last = read_validation(run)[0], read_validation(run)[-1]
    assert (first["validation/dpo/margin"], first["validation/dpo/accuracy"]) == (0, 0.5)
    assert last["validation/dpo/accuracy"] > 0.95 and 2 < last["validation/dpo/margin"] < 5
    assert last["validation/dpo/chosen_logprob"] > first["validation/dpo/chosen_logprob"] + 0.5
    (model,) = (tmp_path / "models").glob("tiny-*")
    weights = checkpoint.find(run / "checkpoints")[-1].policy / "model.safetensors"
    assert right_sums(model) < 0.2 and right_sums(model, weights) > 0.75
