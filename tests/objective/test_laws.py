"""Laws of every token objective, in float64: loss and gradient depend on the sequences, not on how they are laid out."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.objective import Algorithm, Objective, build_objective
from posttrain.objective.groups import Rewards, centred
from posttrain.objective.loss import clean
from posttrain.testing.rows import ScoredRow, ScoredStep, score_rows, token_batch
from posttrain.types import TokenBatch

ALL_TERMS = {
    "seq_is_masking": True, "seq_is_mask_low": 0.6, "seq_is_mask_high": 1.6, "use_tis": True, "tis_cap": 1.3,
    "kl_coef": 0.1, "entropy_coef": 0.05,
}  # fmt: skip
OBJECTIVES: dict[str, dict[str, object]] = {
    name: {} for name in ("grpo", "rloo", "reinforce_pp", "cispo", "gspo", "sapo", "nft", "dpo")
} | {"dr_grpo": {"max_tokens": 8}}
VARIANTS = [
    *[(name, options) for name, options in OBJECTIVES.items()],
    *[(name, {**options, **ALL_TERMS}) for name, options in OBJECTIVES.items() if name != "dpo"],
    ("grpo", {"clip_ratio_c": 1.2, "ppo_clip_ref_logprobs": "rollout"}),
    ("grpo", {"use_ppo_clip": False, "use_tis": True, "tis_mode": "icepop", "tis_floor": 0.5, "loss_aggregation": "sequence"}),
    ("dpo", {"loss_type": "ipo", "length_normalised": True}),
]
each_objective = pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(VARIANTS)])
PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**20)

Parts = list[list[int]]
BUILT: dict[str, Objective] = {}


def build(name: str, options: dict[str, object]) -> Objective:
    """Once per objective: finding a plug-in reads the metadata of all installed packages."""
    key = repr((name, options))
    if key not in BUILT:
        BUILT[key] = build_objective(name, **options)
    return BUILT[key]


def draw(name: str, rng: random.Random) -> list[ScoredRow]:
    """Some rows for this objective: groups of any size, tied ones and unscorable rewards among them, masks with holes."""
    rows = []
    for index in range(rng.randint(2, 6) * 2):
        length = rng.randint(1, 6)
        reward = rng.choice([0.0, 1.0, 1.0]) if name == "nft" else rng.choice([0.0, 1.0, rng.gauss(0, 1)])
        rows.append(
            ScoredRow(
                group=rng.randint(0, 2),
                reward=None if rng.random() < 0.1 else reward,
                mask=[rng.random() < 0.8 for _ in range(length)],
                logprobs=[-3 * rng.random() for _ in range(length)],
                old=[-3 * rng.random() for _ in range(length)],
                rollout=[-3 * rng.random() for _ in range(length)],
                ref=[-3 * rng.random() for _ in range(length)],
                entropy=[rng.random() for _ in range(length)],
                pair=index // 2 if name == "dpo" else None,
                chosen=index % 2 == 0 if name == "dpo" else None,
            )
        )
    return rows


def atoms(rows: list[ScoredRow]) -> Parts:
    """What is never split: a row, or the two rows of a pair."""
    grouped: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        grouped.setdefault(index if row.pair is None else ("pair", row.pair), []).append(index)
    return list(grouped.values())


def deal(pieces: Parts, count: int, rng: random.Random) -> Parts:
    """The pieces in any order, in `count` parts of any size, empty ones included."""
    parts: Parts = [[] for _ in range(count)]
    for piece in rng.sample(pieces, len(pieces)):
        rng.choice(parts).extend(piece)
    return parts


def assert_same(a: ScoredStep, b: ScoredStep, tolerance: float = 1e-12) -> None:
    assert a.loss == pytest.approx(b.loss, abs=tolerance, rel=tolerance)
    for mine, other in zip(a.grads, b.grads, strict=True):
        assert mine == pytest.approx(other, abs=tolerance, rel=tolerance)


@PROPERTY
@given(seed=seeds)
@each_objective
def test_micro_batch_split_and_packing_change_nothing(name: str, options: dict[str, object], seed: int) -> None:
    rng = random.Random(seed)
    objective, rows = build(name, options), draw(name, rng)
    assert_same(score_rows(objective, rows, deal(atoms(rows), rng.randint(1, 5), rng)), score_rows(objective, rows))


@PROPERTY
@given(seed=seeds)
@each_objective
def test_order_changes_nothing(name: str, options: dict[str, object], seed: int) -> None:
    rng = random.Random(seed)
    objective, rows = build(name, options), draw(name, rng)
    order = rng.sample(range(len(rows)), len(rows))
    moved = score_rows(objective, [rows[i] for i in order])
    back = [moved.grads[order.index(i)] for i in range(len(rows))]
    assert_same(dataclasses.replace(moved, grads=back), score_rows(objective, rows))


@PROPERTY
@given(seed=seeds, garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
@each_objective
def test_padding_on_any_side_with_any_content_changes_nothing(
    name: str, options: dict[str, object], seed: int, garbage: float
) -> None:
    rng = random.Random(seed)
    objective, rows = build(name, options), draw(name, rng)
    plain = score_rows(objective, rows)
    pads = [(rng.randint(0, 3), rng.randint(0, 3)) for _ in rows]
    padded = score_rows(objective, [pad(row, *side, garbage) for row, side in zip(rows, pads, strict=True)])
    for (left, right), row, grad in zip(pads, rows, padded.grads, strict=True):
        masked = [g for g, m in zip(grad[left : left + len(row.logprobs)], row.trained, strict=True) if not m]
        assert [*grad[:left], *grad[left + len(row.logprobs) :], *masked] == [0.0] * (left + right + len(masked))
    inner = [grad[left : left + len(row.logprobs)] for (left, _), row, grad in zip(pads, rows, padded.grads, strict=True)]
    assert_same(dataclasses.replace(padded, grads=inner), plain)


@PROPERTY
@given(seed=seeds, garbage=st.sampled_from([math.nan, math.inf, -1e30]))
@pytest.mark.parametrize("options", [{}, {"loss_type": "ipo", "length_normalised": True}])
def test_measures_depend_on_pairs_alone(options: dict[str, object], seed: int, garbage: float) -> None:
    """Means over the step, whatever the micro-batches, the order and the padding."""
    rng = random.Random(seed)
    objective, rows = build("dpo", options), draw("dpo", rng)
    padded = [pad(row, rng.randint(0, 3), rng.randint(0, 3), garbage) for row in rows]

    def means(rows: list[ScoredRow], parts: Parts) -> dict[str, float]:
        batches = [clean(token_batch(rows, part, [0.0] * len(rows), [0.0] * len(rows))) for part in parts]
        found = [objective.algorithm.measures(batch) for batch in batches]
        return {name: torch.cat([one[name] for one in found]).mean().item() for name in found[0]}

    expect = means(rows, [list(range(len(rows)))])
    for split in ([sorted(piece) for piece in deal(atoms(rows), rng.randint(1, 4), rng)], atoms(rows)):
        assert means(padded, split) == pytest.approx(expect, abs=1e-12, rel=1e-12, nan_ok=True)


def pad(row: ScoredRow, left: int, right: int, garbage: float) -> ScoredRow:
    """The row with untrained positions on both sides and garbage at all untrained positions."""
    trained = row.trained

    def spoil(values: object) -> list[float]:
        kept = [v if m else garbage for v, m in zip(values, trained, strict=True)]  # type: ignore[call-overload]
        return [garbage] * left + kept + [garbage] * right

    floats = {name: spoil(getattr(row, name)) for name in ("logprobs", "old", "rollout", "ref", "entropy")}
    return dataclasses.replace(row, mask=[False] * left + trained + [False] * right, **floats)


@PROPERTY
@given(seed=seeds, world=st.integers(1, 4))
@each_objective
def test_ranks_change_nothing(name: str, options: dict[str, object], seed: int, world: int) -> None:
    """Data parallelism averages gradients over ranks; each rank multiplies its loss by the world size to undo it."""
    rng = random.Random(seed)
    objective, rows = build(name, options), draw(name, rng)
    expect = score_rows(objective, rows)
    parameter = torch.zeros((), dtype=torch.float64, requires_grad=True)
    gradients = []
    for share in deal(atoms(rows), world, rng):
        batch = token_batch(rows, share, expect.advantages, list(objective.baselines(*columns(rows))))
        shifted = dataclasses.replace(batch, logprobs=batch.logprobs.detach() + parameter)
        (gradient,) = torch.autograd.grad(objective.loss(shifted) * world, parameter)
        gradients.append(gradient.item())
    total = sum(g for row in expect.grads for g in row)
    assert sum(gradients) / world == pytest.approx(total, abs=1e-11, rel=1e-11)


def columns(rows: list[ScoredRow]) -> tuple[list[float | None], list[object], list[bool]]:
    return [r.reward for r in rows], [r.group for r in rows], [any(r.trained) for r in rows]


class Careless(Algorithm):
    """Its term is NaN, in value and gradient, wherever the log-prob is 0: at every masked position."""

    def advantages(self, rewards: Rewards, groups: Sequence[Hashable], trained: Sequence[bool]) -> np.ndarray:
        return centred(rewards, groups, trained)

    def policy_loss(self, batch: TokenBatch) -> torch.Tensor:
        return batch.advantages / batch.logprobs * (-batch.logprobs).sqrt()


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_what_an_algorithm_returns_at_masked_positions_changes_nothing(how: str) -> None:
    objective = build_objective(Careless, loss_aggregation=how, max_tokens=4)
    rows = [ScoredRow(logprobs=[-1.0, -2.0], reward=1.0), ScoredRow(logprobs=[-3.0], reward=0.0)]
    expect = score_rows(objective, rows)
    result = score_rows(objective, [dataclasses.replace(rows[0], logprobs=[-1.0, -5.0, -2.0], mask=[True, False, True]), rows[1]])
    assert result.grads[0][1] == 0.0
    assert_same(dataclasses.replace(result, grads=[result.grads[0][::2], result.grads[1]]), expect)
    assert math.isfinite(expect.loss) and expect.loss != 0


@each_objective
def test_float32_agrees_with_float64(name: str, options: dict[str, object]) -> None:
    objective, rows = build(name, options), draw(name, random.Random(7))
    assert_same(score_rows(objective, rows, dtype=torch.float32), score_rows(objective, rows), 1e-5)


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, o in VARIANTS if n not in ("cispo", "nft")])
def test_the_gradient_is_that_of_the_value(name: str, options: dict[str, object]) -> None:
    """By central differences. CISPO and NFT stop gradients on purpose: theirs is not that of their value."""
    objective, rows = build(name, options), draw(name, random.Random(3))
    grads = score_rows(objective, rows).grads
    step = 1e-6
    for index, row in enumerate(rows):
        for token in range(len(row.logprobs)):
            up, down = (
                score_rows(objective, [moved if i == index else r for i, r in enumerate(rows)]).loss
                for moved in (nudge(row, token, step), nudge(row, token, -step))
            )
            assert (up - down) / (2 * step) == pytest.approx(grads[index][token], abs=1e-7)


def nudge(row: ScoredRow, token: int, by: float) -> ScoredRow:
    return dataclasses.replace(row, logprobs=[x + by * (i == token) for i, x in enumerate(row.logprobs)])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_pp", "cispo", "gspo", "sapo"])
def test_on_policy_every_objective_is_the_policy_gradient(name: str) -> None:
    """Without old log-probs the ratio is 1, and the gradient is −A over the divisor, whatever the ratio's handling."""
    rows = [ScoredRow(logprobs=[-1.0, -2.0], reward=r, group=0) for r in (1.0, 0.0, 0.0)]
    objective = build_objective(name, loss_aggregation="token")
    result = score_rows(objective, rows)
    for advantage, grad in zip(result.advantages, result.grads, strict=True):
        assert grad == pytest.approx([-advantage / 6] * 2, abs=1e-12)
