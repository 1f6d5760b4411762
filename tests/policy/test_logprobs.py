"""The log-prob kernel: exact in value and gradient at any chunk size and dtype, in a bounded piece of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.policy import logprobs as kernel
from posttrain.policy.logprobs import token_logprobs

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def leaves(tokens: int, vocabulary: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Leaves:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * width**-0.5
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return *(x.to(dtype).requires_grad_() for x in (hidden, weight, bias)), targets  # type: ignore[return-value]


def exact(hidden, weight, bias, targets, temperature, softcap=None):
    """The whole float64 log-softmax."""
    logits = hidden.double() @ weight.double().t() + bias.double()
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperature
    table = torch.log_softmax(logits, -1)
    return table.gather(1, targets[:, None]).squeeze(1), -(table.exp() * table).sum(-1)


def gradients(values, inputs):
    """Gradients of a loss in which every token has its own weight, for log-probs and entropies."""
    logprobs, entropies = values
    ramp = torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)
    return torch.autograd.grad((logprobs * ramp).sum() + 0.3 * (entropies * ramp.flip(0)).sum(), inputs)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    tokens=st.integers(1, 23), vocabulary=st.integers(2, 90), chunk=st.integers(1, 30), block=st.sampled_from([1, 64, 2**20]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]), dtype=st.sampled_from([torch.float32, torch.float64]),
    softcap=st.sampled_from([None, 0.7, 30.0]),
)  # fmt: skip
def test_equals_float64_log_softmax_in_any_chunk_size(tokens, vocabulary, chunk, block, temperature, dtype, softcap):
    *inputs, targets = leaves(tokens, vocabulary, 16, dtype)
    hidden, weight, bias = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BLOCK_ELEMENTS", block)
        values = token_logprobs(
            hidden, weight, targets, temperature=temperature, chunk_tokens=chunk, entropy=True, bias=bias, softcap=softcap
        )
        grads = gradients(values, inputs)
    wanted = exact(hidden, weight, bias, targets, temperature, softcap)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6 / min(temperature, 1.0)
    for value, reference in zip((*values, *grads), (*wanted, *gradients(wanted, inputs)), strict=True):
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), reference.double(), atol=tolerance, rtol=tolerance)


def test_without_entropy_the_gradient_is_the_same():
    hidden, weight, bias, targets = leaves(11, 70, 16, torch.float64)
    logprobs, entropies = token_logprobs(hidden, weight, targets, chunk_tokens=4, bias=bias)
    assert entropies is None
    got = torch.autograd.grad(logprobs.square().sum(), (hidden, weight, bias))
    wanted = torch.autograd.grad(exact(hidden, weight, bias, targets, 1.0)[0].square().sum(), (hidden, weight, bias))
    for value, reference in zip(got, wanted, strict=True):
        torch.testing.assert_close(value, reference, atol=1e-12, rtol=1e-12)


def test_can_be_differentiated_again_when_the_graph_is_kept():
    hidden, weight, _, targets = leaves(9, 40, 8, torch.float64)
    loss = token_logprobs(hidden, weight, targets, chunk_tokens=4)[0].sum()
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden)[0])


def test_frozen_weight_gets_no_gradient():
    hidden, weight, _, targets = leaves(5, 30, 8)
    token_logprobs(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize("tied_low", ["hidden", "weight", "both"])
def test_low_precision_inputs_are_widened(tied_low, monkeypatch):
    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", 100)  # the weight comes in several pieces
    hidden, weight, bias, targets = leaves(12, 80, 16)
    hidden = hidden.detach().to(torch.bfloat16 if tied_low != "weight" else torch.float32).requires_grad_()
    weight = weight.detach().to(torch.bfloat16 if tied_low != "hidden" else torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):  # a surrounding autocast must not reach the kernel
        values = token_logprobs(hidden, weight, targets, chunk_tokens=5, entropy=True, bias=bias)
    wanted = exact(hidden, weight, bias, targets, 1.0)
    for value, reference in zip(values, wanted, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), reference, atol=1e-6, rtol=1e-6)
    for value, leaf, reference in zip(gradients(values, (hidden, weight)), (hidden, weight),
                                      gradients(wanted, (hidden, weight)), strict=True):  # fmt: skip
        assert value.dtype == leaf.dtype
        torch.testing.assert_close(value.double(), reference.double(), atol=1e-2, rtol=1e-2)


def test_no_matrix_of_tokens_by_vocabulary_exists(monkeypatch):
    """Every allocation of forward and backward, seen by a dispatch mode, stays below an eighth of the fp32 logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(kernel, "BLOCK_ELEMENTS", 2**14)
    tokens, vocabulary = 512, 4096
    largest: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor) and tuple(x.shape) != (vocabulary, 8):
                    largest.append(x.untyped_storage().nbytes() if x.shape != (8, vocabulary) else 0)
            return out

    hidden, weight, _, targets = leaves(tokens, vocabulary, 8)
    with Sizes():
        logprobs, entropies = token_logprobs(hidden, weight, targets, chunk_tokens=48, entropy=True)
        (logprobs + entropies).sum().backward()
    assert max(largest) <= tokens * vocabulary * 4 / 8


def test_case_lp_1_temperature_divides_logits():
    hidden, weight, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.eye(3), torch.tensor([0])
    at = lambda temperature: token_logprobs(hidden, weight, target, temperature=temperature)[0].item()  # noqa: E731
    assert at(0.5) == pytest.approx(-0.142932, abs=1e-6)
    assert at(1.0) == pytest.approx(torch.log_softmax(hidden[0], -1)[0].item(), abs=1e-6)
    for refused in (0.0, -1.0):
        with pytest.raises(ValueError, match="temperature"):
            at(refused)


def test_case_lp_3_logprobs_of_bfloat16_logits():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]], dtype=torch.bfloat16).expand(5, 5)
    got, _ = token_logprobs(logits, torch.eye(5, dtype=torch.bfloat16), torch.arange(5))
    wanted = torch.log_softmax(torch.arange(4, -1, -1, dtype=torch.float64), -1)
    assert got.dtype == torch.float32
    assert (got.double() - wanted).abs().max() < 1e-6
    passes = [token_logprobs(logits, torch.eye(5), torch.full((5,), 4), chunk_tokens=n)[0] for n in (2, 5)]
    assert torch.exp((passes[0] - passes[1]).sum() * 256 / 5) == 1.0


def test_bfloat16_logprobs_hide_small_policy_changes():
    """Why float32: after a small step most bfloat16 ratios round to exactly 1, and the tokens that should clip do not."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, _, targets = leaves(4000, 512, 32)
    moved = hidden + 2e-3 * torch.randn(hidden.shape, generator=generator)
    clip = 1e-3

    def shares(logprob) -> tuple[float, float]:
        ratio = (logprob(moved) - logprob(hidden)).float().exp()
        return (ratio == 1).float().mean().item(), ((ratio - 1).abs() > clip).float().mean().item()

    def low(states):
        table = torch.log_softmax((states @ weight.t()).bfloat16(), -1)
        return table.gather(1, targets[:, None]).squeeze(1)

    with torch.no_grad():
        unmoved, clipped = shares(lambda states: token_logprobs(states, weight, targets)[0])
        unmoved_low, clipped_low = shares(low)
    assert unmoved < 0.01 and unmoved_low > 0.8
    assert clipped > 0.5 and clipped_low < 0.2 * clipped
