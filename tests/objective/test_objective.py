"""The objective around an algorithm: what it needs, what it says, how it scores a model, and what it does not import."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from posttrain.errors import BatchError
from posttrain.objective import Objective, TokenInputs, build_objective

ALL = ("grpo", "rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo", "sapo", "nft", "dpo")


@pytest.mark.parametrize(
    ("asynchronous", "use_tis", "resolved"),
    [(False, False, "old"), (False, True, "old"), (True, False, "rollout"), (True, True, "old")],
)
def test_auto_reference(asynchronous: bool, use_tis: bool, resolved: str) -> None:
    objective = build_objective("grpo", asynchronous=asynchronous, use_tis=use_tis, ppo_clip_ref_logprobs="auto")
    assert objective.options.ppo_clip_ref_logprobs == resolved  # type: ignore[attr-defined]
    assert build_objective("grpo", asynchronous=asynchronous).options.ppo_clip_ref_logprobs == "old"  # type: ignore[attr-defined]


def test_ppo_clip_is_on_where_it_is_taken() -> None:
    assert build_objective("rloo").options.use_ppo_clip is True  # type: ignore[attr-defined]
    assert build_objective("rloo", use_ppo_clip=False).options.use_ppo_clip is False  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", [{"clip_low": 0.4, "clip_high": 0.5}, {"use_tis": True, "tis_cap": 2.0}])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_both_recipes_alone_and_together(recipe: dict[str, Any], asynchronous: bool) -> None:
    build_objective("grpo", asynchronous=asynchronous, ppo_clip_ref_logprobs="auto", **recipe)
    together = {"clip_low": 0.4, "clip_high": 0.5, "use_tis": True, "tis_cap": 2.0}
    build_objective("grpo", asynchronous=asynchronous, ppo_clip_ref_logprobs="auto", **together)


def test_needs_old_logprobs() -> None:
    def needs(name: str, **options: Any) -> bool:
        return build_objective(name, **options).needs_old_logprobs()

    assert not needs("grpo")  # one step: the ratio's reference is the current forward
    for name in ALL[:-1]:
        assert needs(name, n_mini=2)
        assert not needs(name, n_mini=2, ppo_clip_ref_logprobs="rollout")
    assert needs("grpo", n_mini=2, ppo_clip_ref_logprobs="rollout", seq_is_masking=True)
    assert not needs("dpo", n_mini=2)


def test_needs_reference_and_entropy() -> None:
    assert not build_objective("grpo").needs_reference()
    assert build_objective("grpo", kl_coef=0.1).needs_reference()
    assert build_objective("dpo").needs_reference()
    assert build_objective("grpo", entropy_coef=0.1).needs_entropy()
    assert not build_objective("grpo").needs_entropy()
    assert not build_objective("dpo").needs_entropy()


def test_notes_say_when_a_clip_cannot_bind() -> None:
    for name in ("grpo", "rloo", "dr_grpo", "reinforce_pp", "cispo", "gspo"):
        assert ["cannot bind" in note for note in build_objective(name).notes] == [True]
        assert build_objective(name, n_mini=2).notes == []
        assert build_objective(name, ppo_clip_ref_logprobs="rollout").notes == []
    for name in ("sapo", "nft", "dpo"):
        assert build_objective(name).notes == []
    assert build_objective("grpo", use_ppo_clip=False).notes == []
    assert "clip_ratio_c" in build_objective("cispo", n_mini=2, clip_ratio_c=3.0).notes[0]


@pytest.mark.parametrize("name", ALL)
def test_objectives_travel_to_workers(name: str) -> None:
    objective = build_objective(name, n_mini=2)
    copy: Objective = pickle.loads(pickle.dumps(objective))
    assert (copy.name, copy.options, copy.context) == (name, objective.options, objective.context)


def inputs(**changes: Any) -> TokenInputs:
    """Two sequences of two trained tokens each, and one untrained position."""
    half = torch.full((5,), math.log(0.5), dtype=torch.float64)
    fields: dict[str, Any] = {
        "rows": "the rows", "mask": torch.tensor([True, True, False, True, True]), "sequence": torch.tensor([0, 0, 0, 1, 1]),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64), "rewards": torch.tensor([1.0, 0.0]),
        "baselines": torch.tensor([0.5, 0.5]), "total_tokens": 4.0, "total_sequences": 2.0,
        "old_logprobs": half, "rollout_logprobs": half, "ref_logprobs": half,
    }  # fmt: skip
    return TokenInputs(**(fields | changes))


class Model:
    """Log-probs as a parameter; remembers whether it was asked for entropies."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.logprobs = torch.tensor([0.8, 0.2, 0.5, 0.8, 0.2], dtype=dtype).log().requires_grad_()
        self.asked: bool | None = None

    def __call__(self, rows: Any, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert rows == "the rows"
        self.asked = entropy
        return self.logprobs, torch.ones_like(self.logprobs) if entropy else None


def test_score_is_forward_and_loss_in_the_dtype_of_the_model() -> None:
    model, objective = Model(), build_objective("grpo", clip_low=0.4, clip_high=0.5)
    loss, stats = objective.score(model, inputs())
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx((-1.5 - 0.4 + 1.6 + 0.6) / 4, abs=1e-6)
    assert model.logprobs.grad is not None
    assert model.logprobs.grad.tolist() == pytest.approx([0, -0.1, 0, 0.4, 0], abs=1e-6)
    assert stats["ratio"][inputs().mask].tolist() == pytest.approx([1.6, 0.4, 1.6, 0.4], abs=1e-6)
    assert stats["clipped"].tolist() == [True, False, False, False, True]
    assert model.asked is False


def test_stats_are_detached_and_say_what_the_terms_did() -> None:
    objective = build_objective(
        "grpo", use_tis=True, tis_cap=1.2, kl_coef=0.1, entropy_coef=0.1, seq_is_masking=True, seq_is_mask_low=0.9
    )
    model = Model()
    _, stats = objective.score(model, inputs(rollout_logprobs=torch.tensor([0.5, 0.5, 0.5, 0.4, 0.4]).log()))
    assert model.asked is True
    assert set(stats) == {"ratio", "rollout_ratio", "clipped", "kl", "tis_weight", "seq_masked", "entropy"}
    assert not any(value.requires_grad for value in stats.values())
    assert all(value.shape == (5,) for value in stats.values())
    trained = inputs().mask
    assert stats["rollout_ratio"][trained].tolist() == pytest.approx([1.6, 0.4, 2.0, 0.5], abs=1e-6)
    assert stats["tis_weight"][trained].tolist() == pytest.approx([1.0, 1.0, 1.2, 1.2], abs=1e-6)
    assert stats["seq_masked"][trained].tolist() == [False, False, True, True]  # 1.25 is above 1.2
    assert stats["kl"][trained].tolist() == pytest.approx([0.095004, 0.583709, 0.095004, 0.583709], abs=1e-5)


def test_score_can_measure_entropy_that_the_loss_does_not_need() -> None:
    _, stats = build_objective("grpo").score(Model(), inputs(), entropy=True)
    assert "entropy" in stats


def test_stats_of_preferences() -> None:
    pairs = inputs(pair=torch.tensor([0, 0]), chosen=torch.tensor([True, False]), total_pairs=1.0)
    loss, stats = build_objective("dpo").score(Model(), pairs)
    assert loss.item() == pytest.approx(math.log(2))
    measures = {f"dpo/{name}" for name in ("margin", "accuracy")}
    measures |= {f"dpo/{side}_{what}" for side in ("chosen", "rejected") for what in ("reward", "logprob")}
    assert set(stats) == {"rollout_ratio", "kl"} | measures
    assert {name: stats[name].tolist() for name in ("dpo/margin", "dpo/accuracy")} == {"dpo/margin": [0.0], "dpo/accuracy": [0.5]}


def test_tokens_that_nobody_sampled_estimate_no_kl() -> None:
    pairs = inputs(rollout_logprobs=None, pair=torch.tensor([0, 0]), chosen=torch.tensor([True, False]), total_pairs=1.0)
    _, stats = build_objective("dpo").score(Model(), pairs)
    assert not set(stats) & {"rollout_ratio", "kl"}


def test_an_empty_shard_has_a_zero_loss_with_a_graph() -> None:
    changes = {"mask": torch.zeros(5, dtype=torch.bool), "pair": torch.tensor([0, 0]), "chosen": torch.tensor([True, False])}
    for name in ALL:
        model = Model()
        options = {"max_tokens": 8} if name == "dr_grpo" else {}
        loss, _ = build_objective(name, **options).score(model, inputs(**changes))
        loss.backward()
        assert loss.item() == 0.0
        assert model.logprobs.grad is not None and model.logprobs.grad.tolist() == [0.0] * 5


def test_shapes_must_agree() -> None:
    with pytest.raises(BatchError, match=r"old_logprobs.*\(4,\)"):
        build_objective("grpo").score(Model(), inputs(old_logprobs=torch.zeros(4)))


def test_building_an_objective_does_not_import_torch() -> None:
    code = (
        "import sys; from posttrain.objective import build_objective as b; [b(n) for n in {!r}]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code.format(ALL)], check=True)
