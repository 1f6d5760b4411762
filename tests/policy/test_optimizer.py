"""Optimizers: the same numbers as float32 storage, states that round-trip, a guarded step, and apex told from its namesake."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from posttrain.config.schema import OptimizerConfig, RLConfig
from posttrain.errors import ConfigError, OptimizerDependencyError
from posttrain.policy import optimizer as module
from posttrain.policy.optimizer import MasterWeights, build_optimizer, check_optimizer, clip_and_step

SHAPES = ((5, 3), (7,), (2, 2, 2))
UNSUPPORTED = [Parameter(torch.empty(2, device="meta"))]
"""Parameters for which torch has no fused kernel."""


def rl(name: str = "adamw", master: str = "float32", **optimizer: Any) -> RLConfig:
    return RLConfig(steps=1, master_dtype=master, optimizer=OptimizerConfig(name=name, **optimizer))  # type: ignore[arg-type]


def parameters(dtype: torch.dtype, seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator).bfloat16().to(dtype)) for shape in SHAPES]


def set_gradients(weights: list[Parameter], step: int) -> None:
    """Gradients that bfloat16 holds exactly, the same for every dtype."""
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).bfloat16().to(weight.dtype)


def train(optimizer: torch.optim.Optimizer, weights: list[Parameter], steps: range, grad_clip: float | None = None) -> None:
    for step in steps:
        set_gradients(weights, step)
        clip_and_step(optimizer, weights, grad_clip)


def equal(some: list[Any], others: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("impl", ["auto", "fused", "foreach", "forloop"])
def test_every_kernel_gives_the_numbers_of_torch_adamw(impl):
    config = rl(impl=impl, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    train(build_optimizer(config, ours), ours, range(4))
    plain = torch.optim.AdamW(theirs, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False)
    train(plain, theirs, range(4))
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)


def test_auto_takes_the_fused_kernel_where_torch_has_it():
    assert build_optimizer(rl(), parameters(torch.float32)).defaults["fused"] is True
    assert not build_optimizer(rl(), UNSUPPORTED).defaults["fused"]


def test_a_kernel_that_cannot_serve_the_parameters_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"rl\.optimizer\.impl=fused"):
        build_optimizer(rl(impl="fused"), UNSUPPORTED)


def test_frozen_parameters_are_left_out():
    weights = parameters(torch.float32)
    weights[1].requires_grad_(False)
    assert [len(group["params"]) for group in build_optimizer(rl(), weights).param_groups] == [2]


@pytest.mark.parametrize("grad_clip", [None, 0.5])
def test_adamw_master_is_float32_adamw_rounded_at_the_end(grad_clip):
    narrow, wide = parameters(torch.bfloat16), parameters(torch.float32)
    masters = build_optimizer(rl("adamw_master", "bfloat16", lr=1e-3, weight_decay=0.1), narrow)
    reference = build_optimizer(rl(lr=1e-3, weight_decay=0.1), wide)
    assert isinstance(masters, MasterWeights)
    if grad_clip is None:
        train(masters, narrow, range(20))
        train(reference, wide, range(20))
        assert equal(masters.masters, wide)
        assert equal(narrow, [weight.bfloat16() for weight in wide])
    else:  # clipped gradients are rounded to the parameters' dtype before they reach the masters
        train(masters, narrow, range(20), grad_clip)
        train(reference, wide, range(20), grad_clip)
        for mine, weight in zip(masters.masters, wide, strict=True):
            torch.testing.assert_close(mine, weight, rtol=0, atol=1e-4)


def test_small_updates_vanish_in_bf16_storage_and_add_up_in_masters():
    plain, kept = [Parameter(torch.ones(4, dtype=torch.bfloat16))], [Parameter(torch.ones(4, dtype=torch.bfloat16))]
    for name, weights in (("adamw", plain), ("adamw_master", kept)):
        optimizer = build_optimizer(rl(name, "bfloat16", lr=1e-3), weights)
        for _ in range(50):
            weights[0].grad = torch.ones_like(weights[0])
            clip_and_step(optimizer, weights, None)
    assert torch.equal(plain[0], torch.ones(4, dtype=torch.bfloat16))
    torch.testing.assert_close(kept[0].float(), torch.full((4,), 0.95), rtol=0, atol=0.004)


def test_masters_follow_the_schedule_and_wide_parameters_are_not_copied():
    weights = [*parameters(torch.bfloat16)[:1], Parameter(torch.ones(3))]
    optimizer = build_optimizer(rl("adamw_master", "bfloat16", lr=1e-2), weights)
    assert isinstance(optimizer, MasterWeights)
    assert optimizer.masters[1] is weights[1] and optimizer.masters[0].dtype == torch.float32
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [weight.detach().clone() for weight in weights]
    train(optimizer, weights, range(2))
    assert equal(weights, before)
    optimizer.param_groups[0]["lr"] = 0.1
    train(optimizer, weights, range(2))
    assert not any(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


@pytest.mark.parametrize(("name", "dtype"), [("adamw", torch.float32), ("adamw_master", torch.bfloat16)])
def test_a_loaded_state_continues_bit_for_bit(name, dtype, tmp_path):
    config = rl(name, lr=1e-3, weight_decay=0.1)
    whole, first, second = parameters(dtype), parameters(dtype), parameters(dtype)
    train(build_optimizer(config, whole), whole, range(12))
    stopped = build_optimizer(config, first)
    train(stopped, first, range(5))
    torch.save(stopped.state_dict(), tmp_path / "optimizer.pt")
    with torch.no_grad():
        for weight, saved in zip(second, first, strict=True):
            weight.copy_(saved)
    resumed = build_optimizer(config, second)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    train(resumed, second, range(5, 12))
    assert equal(second, whole)
    if isinstance(resumed, MasterWeights):
        assert {state["exp_avg"].dtype for state in resumed.inner.state.values()} == {torch.float32}


def test_the_state_of_other_parameters_is_refused():
    optimizer = build_optimizer(rl("adamw_master"), parameters(torch.bfloat16))
    fewer = build_optimizer(rl("adamw_master"), parameters(torch.bfloat16)[:2])
    with pytest.raises(ValueError, match="holds 2 masters"):
        optimizer.load_state_dict(fewer.state_dict())


def test_the_norm_is_measured_over_all_gradients_and_clips_only_from_above():
    weights = [Parameter(torch.zeros(1)), Parameter(torch.zeros(1))]
    moved = {}
    for clip in (None, 10.0, 1.0):
        optimizer = torch.optim.SGD(weights, lr=1.0)
        with torch.no_grad():
            for weight, gradient in zip(weights, (3.0, 4.0), strict=True):
                weight.zero_()
                weight.grad = torch.tensor([gradient])
        outcome = clip_and_step(optimizer, weights, clip)
        assert (outcome.grad_norm, outcome.skipped) == (5.0, False)
        assert all(weight.grad is None for weight in weights)
        moved[clip] = [-weight.item() for weight in weights]
    assert moved[None] == moved[10.0] == [3.0, 4.0]
    assert moved[1.0] == pytest.approx([0.6, 0.8], abs=1e-5)


def test_the_norm_of_bf16_gradients_does_not_have_bf16_precision():
    weight = Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    outcome = clip_and_step(torch.optim.SGD([weight], lr=0.0), [weight], None)
    assert outcome.grad_norm == pytest.approx(1000**0.5, rel=1e-6)


def test_no_gradient_at_all_is_a_norm_of_zero():
    weights = parameters(torch.float32)
    before = copy.deepcopy(weights)
    outcome = clip_and_step(build_optimizer(rl(weight_decay=0.1), weights), weights, 1.0)
    assert (outcome.grad_norm, outcome.skipped) == (0.0, False) and equal(weights, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "dtype"), [("adamw", torch.float32), ("adamw_master", torch.bfloat16)])
@pytest.mark.parametrize("grad_clip", [None, 1.0])
def test_a_gradient_that_is_not_finite_moves_nothing(bad, name, dtype, grad_clip):
    weights = parameters(dtype)
    optimizer = build_optimizer(rl(name, lr=0.1), weights)
    train(optimizer, weights, range(2))
    before, state = copy.deepcopy(weights), copy.deepcopy(optimizer.state_dict())
    set_gradients(weights, 2)
    weights[1].grad[3] = bad  # type: ignore[index]
    outcome = clip_and_step(optimizer, weights, grad_clip)
    assert outcome.skipped and not torch.isfinite(torch.tensor(outcome.grad_norm))
    assert equal(weights, before) and all(weight.grad is None for weight in weights)
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)


def test_adamw_on_bf16_storage_is_warned_about_and_other_choices_are_not():
    (warning,) = check_optimizer(rl("adamw", "bfloat16"))
    assert warning.startswith("WARNING") and "rl.master_dtype=float32" in warning and "adamw_master" in warning
    assert check_optimizer(rl("adamw")) == check_optimizer(rl("adamw_master", "bfloat16")) == []


@pytest.fixture
def apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path in which a test writes its own `apex`."""
    for name in [name for name in sys.modules if name in ("apex", "amp_C") or name.startswith("apex.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path  # type: ignore[misc]
    for name in [name for name in sys.modules if name in ("apex", "amp_C") or name.startswith("apex.")]:
        del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


FUSED_ADAM = """
import torch

class FusedAdam(torch.optim.AdamW):
    def __init__(self, params, adam_w_mode, **kwargs):
        assert adam_w_mode
        super().__init__(params, foreach=False, **kwargs)
"""


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"apex/__init__.py": "raise SyntaxError('python 2')"}, "another package"),
        ({"apex/__init__.py": "", "apex/optimizers/__init__.py": "import apex_C_missing"}, "No module named 'apex_C_missing'"),
        ({"apex/__init__.py": "", "apex/optimizers/__init__.py": ""}, "no attribute 'FusedAdam'"),
        ({"apex/__init__.py": "", "apex/optimizers/__init__.py": FUSED_ADAM}, "without its CUDA extensions"),
    ],
    ids=["namesake", "broken", "without FusedAdam", "without CUDA extensions"],
)
def test_fusedadam_is_refused_for_each_reason_by_its_own_words(apex, files, said):
    write(apex, files)
    with pytest.raises(OptimizerDependencyError, match="No module named 'apex'") as caught:
        check_optimizer(rl("fusedadam", "bfloat16"))
    assert caught.value.code == "E16" and said in caught.value.cause
    assert "rl.master_dtype=float32" in caught.value.fix and "pip install" not in str(caught.value)


def test_fusedadam_without_any_apex_says_so(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    for use in (check_optimizer, lambda config: build_optimizer(config, parameters(torch.float32))):
        with pytest.raises(OptimizerDependencyError) as caught:
            use(rl("fusedadam"))
        assert "no package named apex is installed" in caught.value.cause


def test_fusedadam_runs_over_masters(apex):
    write(apex, {"apex/__init__.py": "", "apex/optimizers/__init__.py": FUSED_ADAM, "amp_C.py": ""})
    config = rl("fusedadam", "bfloat16", lr=1e-3)
    assert check_optimizer(config) == []
    weights, wide = parameters(torch.bfloat16), parameters(torch.float32)
    train(build_optimizer(config, weights), weights, range(10))
    train(build_optimizer(rl(lr=1e-3, impl="forloop"), wide), wide, range(10))
    assert equal(weights, [weight.bfloat16() for weight in wide])
