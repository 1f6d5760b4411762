"""Every family that the models page lists: the policy computes its log-probs, loss and gradient as transformers alone does.

transformers' side is a forward per row with its `eager` attention, the one that computes every term a config can have.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.schema import ModelConfig, RLConfig, RunConfig
from posttrain.objective.objective import build_objective
from posttrain.policy.load import load_causal_lm
from posttrain.policy.micro import MicroBatch, Totals
from posttrain.policy.module import PolicyModule
from posttrain.policy.policy import Policy
from posttrain.testing.tiny_model import FAMILIES, VOCABULARY, WINDOW, write_tiny_model

TEMPERATURE = 0.7
LAYOUTS = {
    "padded": {},
    "shared": {"shared_prefix": True},
    "padded, checkpointed": {"gradient_checkpointing": True},
    "shared, checkpointed": {"shared_prefix": True, "gradient_checkpointing": True},
}


CASES = [(family, tied) for family in FAMILIES for tied in (True, False)]
"""Family, tied head."""


@pytest.fixture(scope="module", params=CASES, ids=[f"{family}-{'tied' if tied else 'untied'}" for family, tied in CASES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, tied = request.param
    path = tmp_path_factory.mktemp(family)
    write_tiny_model(path, family=family, tied=tied)
    return path


class Plain:
    """The plain way, in the place of a PolicyModule: whole logits, a whole log-softmax, one row at a time."""

    def __init__(self, folder: Path, rows: list[Any]) -> None:
        self.model, self.rows = load_causal_lm(str(folder), "float32", attn_implementation="eager"), rows

    def __call__(self, packed: Any, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        found, entropies = [], []
        for row in self.rows:
            logits = self.model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0] / TEMPERATURE
            table = torch.log_softmax(logits, -1)
            found += [table[position - 1, row.input_ids[position]] for position in row.trained]
            entropies += [-(table[position - 1].exp() * table[position - 1]).sum() for position in row.trained]
        return torch.stack(found), torch.stack(entropies)


def measure(objective: Any, model: Any, module: Any, rows: list[Any], packed: Any) -> tuple[torch.Tensor, ...]:
    """Log-probs, loss, and the gradient of every parameter."""
    seen = []

    def record(packed: Any, *, entropy: bool = False) -> Any:
        seen.append(module(packed, entropy=entropy))
        return seen[-1]

    loss, _ = objective.score(record, MicroBatch(rows, packed, list(range(len(rows)))).inputs(Totals.of(rows)), entropy=True)
    return seen[0][0], loss, *torch.autograd.grad(loss, list(model.parameters()))


def test_logprobs_loss_and_gradient_are_those_of_transformers(folder, rows_of_groups):
    rows = rows_of_groups([3, 1, 4, 2], vocabulary=VOCABULARY, longest=2 * WINDOW)
    assert max(len(row.input_ids) for row in rows) > WINDOW + 4
    objective = build_objective("grpo", group_size=4, temperature=TEMPERATURE, entropy_coef=0.1)
    plain = Plain(folder, rows)
    packed = PolicyModule(plain.model).pack(rows)
    wanted, wanted_loss, *wanted_gradients = measure(objective, plain.model, plain, rows, packed)
    for name, options in LAYOUTS.items():
        module = PolicyModule(load_causal_lm(str(folder), "float32"), temperature=TEMPERATURE, **options)
        got, loss, *gradients = measure(objective, module.model, module, rows, module.pack(rows))
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(loss, wanted_loss, atol=1e-5, rtol=1e-5)
        scale = max(float(gradient.abs().max()) for gradient in wanted_gradients)
        for mine, theirs in zip(gradients, wanted_gradients, strict=True):
            torch.testing.assert_close(mine / scale, theirs / scale, atol=1e-5, rtol=0)


def test_what_sets_a_family_apart_shows(folder, rows_of_groups):
    """The test above can fail: without its window or its soft cap the model says something else."""
    config = json.loads((folder / "config.json").read_text())
    parts = [key for key in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping") if config.get(key)]
    rows = rows_of_groups([2], vocabulary=VOCABULARY, longest=3 * WINDOW)
    with torch.no_grad():
        wanted = Plain(folder, rows)(None)[0]
        for key in parts:
            (folder / "config.json").write_text(json.dumps(config | {key: type(config[key])(1000)}))
            gap = (Plain(folder, rows)(None)[0] - wanted).abs().max()
            (folder / "config.json").write_text(json.dumps(config))
            assert gap > 1e-2, key


def build_policy(folder: Path, **model: Any) -> Policy:
    rl = RLConfig(steps=1, group_size=4, batch_per_replica=8)
    config = RunConfig(model=ModelConfig(name_or_path=str(folder), **model), rl=rl)
    return Policy(config, str(folder), build_objective("grpo", group_size=4))


def test_what_cannot_share_a_prefix_computes_rows_separately_and_says_so_once(tmp_path, rows_of_groups, tiny, monkeypatch):
    model = tiny("Llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("transformers.LlamaForCausalLM._supports_attention_backend", False)
    policy = build_policy(tmp_path)
    assert [note.split(":")[0] for note in policy.notes] == ["rl.shared_prefix"] and "not pluggable" in policy.notes[0]
    assert all(body.layout is None for body in policy.module.pack(rows_of_groups([4])).forwards)
    assert policy.train_step(rows_of_groups([4, 4])).optimizer_steps == 1


def test_the_families_need_no_note(folder, caplog):
    with caplog.at_level(logging.WARNING):
        assert build_policy(folder).notes == [] and not caplog.records


def test_an_attention_that_would_drop_the_soft_cap_is_not_used(tmp_path):
    write_tiny_model(tmp_path, family="gemma2")
    model = load_causal_lm(str(tmp_path), "float32", attn_implementation="sdpa")
    assert model.config._attn_implementation == "eager"
    rl = RLConfig(steps=1, shared_prefix=False)
    config = RunConfig(model=ModelConfig(name_or_path=str(tmp_path)), rl=rl)
    (note,) = Policy(config, str(tmp_path), build_objective("grpo", group_size=4)).notes
    assert note.startswith("model.attn_implementation: eager") and "soft cap" in note
