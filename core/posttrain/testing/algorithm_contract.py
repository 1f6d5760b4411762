"""The laws of an algorithm as tests: subclass, give one fixture.

    class TestMine(AlgorithmContract):
        @pytest.fixture
        def objective(self):
            return build_objective(MyAlgorithm, group_size=4)
"""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from posttrain.objective import Objective, PreferenceAlgorithm
from posttrain.testing.rows import ScoredRow, ScoredStep, score_rows


class AlgorithmContract:
    """What every algorithm does, in float64. `binary_rewards` for algorithms that take only 0 and 1."""

    binary_rewards = True
    tolerance = 1e-12

    @pytest.fixture
    def objective(self) -> Objective:
        raise NotImplementedError("give the contract an objective")

    def rows(self, objective: Objective, seed: int = 0) -> list[ScoredRow]:
        """Four groups of four rows: mixed, tied and unscorable rewards, masks with holes; pairs for preference algorithms."""
        rng = random.Random(seed)
        made = []
        paired = isinstance(objective.algorithm, PreferenceAlgorithm)
        for index in range(16):
            length = rng.randint(1, 6)
            reward = float(rng.random() < 0.5) if self.binary_rewards else rng.gauss(0, 1)
            made.append(
                ScoredRow(
                    group=index // 4,
                    reward=None if index == 5 else 1.0 if index // 4 == 3 else reward,
                    mask=[True] + [rng.random() < 0.8 for _ in range(length - 1)],
                    logprobs=[-3 * rng.random() for _ in range(length)],
                    old=[-3 * rng.random() for _ in range(length)],
                    rollout=[-3 * rng.random() for _ in range(length)],
                    ref=[-3 * rng.random() for _ in range(length)],
                    pair=index // 2 if paired else None,
                    chosen=index % 2 == 0 if paired else None,
                )
            )
        return made

    def same(self, a: ScoredStep, b: ScoredStep) -> None:
        assert a.loss == pytest.approx(b.loss, abs=self.tolerance, rel=self.tolerance)
        for mine, theirs in zip(a.grads, b.grads, strict=True):
            assert mine == pytest.approx(theirs, abs=self.tolerance, rel=self.tolerance)

    def test_loss_and_gradient_are_finite(self, objective: Objective) -> None:
        result = score_rows(objective, self.rows(objective))
        assert math.isfinite(result.loss) and all(math.isfinite(g) for grads in result.grads for g in grads)

    def test_the_micro_batch_split_changes_nothing(self, objective: Objective) -> None:
        rows = self.rows(objective)
        parts = [[0, 1], list(range(2, 10)), [], list(range(10, 16))]
        self.same(score_rows(objective, rows, parts), score_rows(objective, rows))

    def test_the_order_changes_nothing(self, objective: Objective) -> None:
        rows = self.rows(objective)
        order = random.Random(1).sample(range(16), 16)
        moved = score_rows(objective, [rows[i] for i in order])
        back = [moved.grads[order.index(i)] for i in range(16)]
        self.same(dataclasses.replace(moved, grads=back), score_rows(objective, rows))

    @pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
    def test_untrained_positions_count_for_nothing(self, objective: Objective, garbage: float) -> None:
        rows = self.rows(objective)

        def spoil(row: ScoredRow) -> ScoredRow:
            def fill(values: object) -> list[float]:
                return [v if m else garbage for v, m in zip(values, row.trained, strict=True)]  # type: ignore[call-overload]

            old, rollout, ref = fill(row.old), fill(row.rollout), fill(row.ref)
            return dataclasses.replace(row, logprobs=fill(row.logprobs), old=old, rollout=rollout, ref=ref)

        spoilt = score_rows(objective, [spoil(row) for row in rows])
        self.same(spoilt, score_rows(objective, rows))
        for row, grads in zip(rows, spoilt.grads, strict=True):
            assert all(g == 0 for g, m in zip(grads, row.trained, strict=True) if not m)

    def test_advantages_of_what_cannot_teach_are_zero(self, objective: Objective) -> None:
        if isinstance(objective.algorithm, PreferenceAlgorithm):
            pytest.skip("learns from pairs")
        rewards: list[float | None] = [1.0, 1.0, 1.0, 1.0, 0.0, None, 1.0, 0.0]
        groups, trained = ["tied"] * 4 + ["mixed"] * 4, [True] * 7 + [False]
        advantages = np.asarray(objective.advantages(rewards, groups, trained))
        assert advantages.dtype == np.float64 and advantages.shape == (8,)
        assert advantages[:4].tolist() == [0.0] * 4 and advantages[5] == advantages[7] == 0.0
        assert advantages[6] > 0 > advantages[4]

    def test_pairs_come_from_groups_that_disagree(self, objective: Objective) -> None:
        if not isinstance(objective.algorithm, PreferenceAlgorithm):
            pytest.skip("learns from advantages")
        pairs = objective.pairs([1.0, 0.0, None, 0.5, 1.0, 1.0], ["a", "a", "a", "a", "b", "b"], [True] * 6)
        assert pairs == [(0, 1)]
