"""The laws of an algorithm as tests: subclass, name the plug-in or give one fixture.

    class TestMine(AlgorithmContract):
        plugin = MyAlgorithm                      # a name, `file.py:Class` or the class
        options = {"clip_low": 0.1}

or, for full control, a fixture `objective` that returns `build_objective(MyAlgorithm, group_size=4)`. Everything is in float64.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch

from posttrain.config.fit import algorithm_needs
from posttrain.errors import PosttrainError
from posttrain.objective import Objective, PreferenceAlgorithm, build_objective
from posttrain.plugins.capabilities import declared
from posttrain.testing.laws import by_value, changed, has_state, kept, survives_a_crash, travelled
from posttrain.testing.rows import ScoredRow, ScoredStep, score_rows, token_batch

GARBAGE = (math.nan, math.inf, -math.inf)


class AlgorithmContract:
    """What every algorithm does. `binary_rewards` for algorithms that take only 0 and 1."""

    plugin: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}
    binary_rewards = True
    tolerance = 1e-12

    @pytest.fixture
    def objective(self) -> Objective:
        if self.plugin is None:
            raise NotImplementedError("give the contract an algorithm: the class variable `plugin`, or a fixture `objective`")
        return build_objective(self.plugin, **self.options)

    def invariance(self, objective: Objective) -> Literal["", "shift", "affine"]:
        """What advantages do not depend on: a constant that is added to the rewards of a group, and also a positive factor."""
        return ""

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

    def score(self, objective: Objective, rows: Sequence[ScoredRow], parts: Sequence[Sequence[int]] | None = None) -> ScoredStep:
        """One optimizer step of a fresh copy, so that an algorithm with a state begins from the same one every time."""
        by_value(objective.algorithm)
        return score_rows(travelled(objective), rows, parts)

    def same(self, a: ScoredStep, b: ScoredStep, what: str) -> None:
        """Two steps agree to rounding. `what`: what would be wrong if they did not, and what to do."""
        tolerance = self.tolerance
        assert a.loss == pytest.approx(b.loss, abs=tolerance, rel=tolerance), f"the loss is {a.loss!r} and {b.loss!r}: {what}"
        for row, (mine, theirs) in enumerate(zip(a.grads, b.grads, strict=True)):
            close = mine == pytest.approx(theirs, abs=tolerance, rel=tolerance)
            assert close, f"the gradient of row {row} is {mine} and {theirs}: {what}"

    # --- the loss -----------------------------------------------------------------------------------------------------

    def test_loss_and_gradient_are_finite(self, objective: Objective) -> None:
        result = self.score(objective, self.rows(objective))
        assert math.isfinite(result.loss), f"the loss is {result.loss}"
        bad = [row for row, grads in enumerate(result.grads) if not all(map(math.isfinite, grads))]
        assert not bad, f"the gradient of row {bad[0]} is {result.grads[bad[0]]}: torch.where passes NaN of the branch not taken"

    def test_loss_is_a_float64_scalar_with_gradient(self, objective: Objective) -> None:
        rows = self.rows(objective)
        given, means, _ = self.advantages_of(objective, rows)
        loss = travelled(objective).loss(token_batch(rows, range(len(rows)), given, means))
        assert loss.shape == (), f"the loss has shape {tuple(loss.shape)}, not ()"
        assert loss.dtype == torch.float64, f"the loss is {loss.dtype} for float64 log-probs: make no tensor without a dtype"
        assert loss.requires_grad, "the loss has no gradient to the log-probs: .item(), .detach() or numpy lost it"

    def test_the_micro_batch_split_changes_nothing(self, objective: Objective) -> None:
        rows = self.rows(objective)
        parts = [[0, 1], list(range(2, 10)), [], list(range(10, 16))]
        what = "contributions of micro-batches must sum: divide by batch.total_tokens or batch.total_sequences"
        self.same(self.score(objective, rows, parts), self.score(objective, rows), what)

    def test_the_order_changes_nothing(self, objective: Objective) -> None:
        rows = self.rows(objective)
        order = random.Random(1).sample(range(16), 16)
        moved = self.score(objective, [rows[i] for i in order])
        back = [moved.grads[order.index(i)] for i in range(16)]
        what = "the order of the rows decides; go by `groups` and batch.sequence, not by position"
        self.same(dataclasses.replace(moved, grads=back), self.score(objective, rows), what)

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_untrained_positions_count_for_nothing(self, objective: Objective, garbage: float) -> None:
        rows = self.rows(objective)

        def spoil(row: ScoredRow) -> ScoredRow:
            def fill(values: object) -> list[float]:
                return [v if m else garbage for v, m in zip(values, row.trained, strict=True)]  # type: ignore[call-overload]

            old, rollout, ref = fill(row.old), fill(row.rollout), fill(row.ref)
            return dataclasses.replace(row, logprobs=fill(row.logprobs), old=old, rollout=rollout, ref=ref)

        spoilt = self.score(objective, [spoil(row) for row in rows])
        self.same(spoilt, self.score(objective, rows), f"a position with mask False holds {garbage}; use torch.where(mask, …, 0)")
        for number, (row, grads) in enumerate(zip(rows, spoilt.grads, strict=True)):
            bad = [t for t, (g, m) in enumerate(zip(grads, row.trained, strict=True)) if not m and g != 0]
            assert not bad, f"token {bad[0]} of row {number} is not trained and has gradient {grads[bad[0]]}"

    def test_padding_changes_nothing(self, objective: Objective) -> None:
        rows = self.rows(objective)

        def pad(row: ScoredRow) -> ScoredRow:
            def more(values: object) -> list[float]:
                return [*values, -1.5, -2.5]  # type: ignore[misc]

            old, rollout, ref = more(row.old), more(row.rollout), more(row.ref)
            mask = [*(row.mask or [True] * len(row.logprobs)), False, False]
            return dataclasses.replace(row, logprobs=more(row.logprobs), old=old, rollout=rollout, ref=ref, mask=mask)

        padded = self.score(objective, [pad(row) for row in rows])
        padded = dataclasses.replace(padded, grads=[grads[:-2] for grads in padded.grads])
        self.same(padded, self.score(objective, rows), "tokens that are not trained were counted; count with batch.mask")

    def test_what_was_better_gets_more_likely(self, objective: Objective) -> None:
        """On policy: every log-prob that the algorithm compares with is the current one."""
        rows = [dataclasses.replace(r, old=r.logprobs, rollout=r.logprobs, ref=r.logprobs) for r in self.rows(objective)]
        paired = isinstance(objective.algorithm, PreferenceAlgorithm)
        pushed = {True: 0.0, False: 0.0}
        given, _, _ = self.advantages_of(objective, rows)
        grads = self.score(objective, rows).grads
        for number, row in enumerate(rows):
            good = bool(row.chosen) if paired else given[number] > 0
            if any(row.trained) and (paired or given[number] != 0):
                worst = max(grads[number]) if good else max(-g for g in grads[number])
                side = "better" if good else "worse"
                assert worst <= self.tolerance, f"row {number} is {side} and its tokens are pushed the wrong way: check the sign"
                pushed[good] += sum(map(abs, grads[number]))
        assert pushed[True] > 0, "nothing is learned from what was better: its gradient is 0 everywhere"

    def test_what_it_does_not_need_may_be_absent(self, objective: Objective) -> None:
        """Log-probs of others than the policy, and rewards between 0 and 1: who needs them says so, and a run is told."""
        algorithm = objective.algorithm
        rows, needs = self.rows(objective), {*declared("algorithms", algorithm).needs, *algorithm_needs(algorithm)}
        fields = {"old_logprobs": "old", "rollout_logprobs": "rollout", "reference": "ref"}
        absent: dict[str, Any] = {field: None for need, field in fields.items() if need not in needs}
        bare = [dataclasses.replace(row, **absent) for row in rows]
        if "binary_rewards" not in needs:
            bare = [dataclasses.replace(row, reward=None if row.reward is None else 0.25 + row.reward / 2) for row in bare]
        try:
            result = self.score(objective, bare)
        except PosttrainError as exc:
            pytest.fail(f"it needs more than it says, {', '.join(sorted(needs)) or 'nothing'}: {exc.message}")
        assert math.isfinite(result.loss), f"without {', '.join(absent)} the loss is {result.loss}"

    # --- advantages ---------------------------------------------------------------------------------------------------

    def test_advantages_of_what_cannot_teach_are_zero(self, objective: Objective) -> None:
        self._learns_from_advantages(objective)
        rewards: list[float | None] = [1.0, 1.0, 1.0, 1.0, 0.0, None, 1.0, 0.0]
        groups, trained = ["tied"] * 4 + ["mixed"] * 4, [True] * 7 + [False]
        advantages = np.asarray(travelled(objective).advantages(rewards, groups, trained))
        assert advantages.dtype == np.float64 and advantages.shape == (8,), "advantages are float64, one for each trajectory"
        assert advantages[:4].tolist() == [0.0] * 4, f"rewards of a group agree, and it has advantages {advantages[:4]}, not 0"
        assert advantages[5] == advantages[7] == 0.0, "a row that is unscorable, or has no trained token, must have advantage 0"
        assert advantages[6] > 0 > advantages[4], f"reward 1 has advantage {advantages[6]}, reward 0 has {advantages[4]}"

    def test_what_does_not_count_changes_nothing_for_the_others(self, objective: Objective) -> None:
        self._learns_from_advantages(objective)
        rewards, groups = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0], ["a", "a", "a", "b", "b", "b"]
        alone = np.asarray(travelled(objective).advantages(rewards, groups, [True] * 6))
        for extra, trained in ((None, True), (math.nan, True), (math.inf, True), (1.0, False)):
            among = np.asarray(travelled(objective).advantages([*rewards, extra], [*groups, "a"], [True] * 6 + [trained]))
            assert among[:6].tolist() == alone.tolist() and among[6] == 0, (
                f"a row with reward {extra}, trained={trained}, changes the others of its group: leave it out of the baseline "
                "(posttrain.objective.groups does)"
            )

    def test_rewards_may_be_shifted_and_scaled_as_it_says(self, objective: Objective) -> None:
        claim = self.invariance(objective)
        if not claim:
            pytest.skip("invariance(objective) claims nothing")
        rewards, groups = [1.0, 0.0, 1.0, 0.0, 1.0, 1.0], ["a", "a", "a", "b", "b", "b"]
        plain = np.asarray(travelled(objective).advantages(rewards, groups, [True] * 6))
        shifted = np.asarray(travelled(objective).advantages([r + 4 for r in rewards], groups, [True] * 6))
        assert shifted == pytest.approx(plain, abs=self.tolerance * 100), "a constant added to all rewards changes the advantages"
        if claim == "affine":
            scaled = np.asarray(travelled(objective).advantages([8 * r for r in rewards], groups, [True] * 6))
            assert scaled == pytest.approx(plain, rel=1e-5), "rewards times 8 change the advantages: divide by the deviation"

    def test_pairs_come_from_groups_that_disagree(self, objective: Objective) -> None:
        if not isinstance(objective.algorithm, PreferenceAlgorithm):
            pytest.skip("learns from advantages")
        pairs = objective.pairs([1.0, 0.0, None, 0.5, 1.0, 1.0], ["a", "a", "a", "a", "b", "b"], [True] * 6)
        assert pairs == [(0, 1)], f"the pairs are {pairs}: the best and the worst of each group whose rewards disagree, [(0, 1)]"

    # --- the object ---------------------------------------------------------------------------------------------------

    def test_the_same_step_is_scored_the_same(self, objective: Objective) -> None:
        rows = self.rows(objective)
        what = "the same batch is scored differently: draw nothing at random in an algorithm"
        one, two = self.score(objective, rows), self.score(objective, rows)
        assert one == two, what

    def test_a_step_leaves_nothing_behind(self, objective: Objective) -> None:
        if has_state(objective.algorithm):
            pytest.skip("has a state_dict")
        mine = travelled(objective)
        before = kept(mine.algorithm)
        score_rows(mine, self.rows(objective))
        names = changed(before, kept(mine.algorithm))
        assert not names, (
            f"a step changed the algorithm itself ({', '.join(names)}): a resumed run would not have it. Put it into "
            "state_dict() and take it back in load_state_dict(state), or keep nothing"
        )

    def test_it_travels_to_other_processes(self, objective: Objective) -> None:
        there = travelled(objective)
        assert there.options == objective.options, "the copy in another process has other options"
        rows = self.rows(objective)
        self.same(self.score(there, rows), self.score(objective, rows), "the copy in another process scores differently")

    def test_state_survives_a_crash(self, objective: Objective) -> None:
        if not has_state(objective.algorithm):
            pytest.skip("has no state_dict")
        by_value(objective.algorithm)

        def step(algorithm: Any) -> list[Any]:
            steps = (score_rows(Objective(objective.name, algorithm), self.rows(objective, seed)) for seed in (1, 2))
            return [(result.advantages, result.loss) for result in steps]

        survives_a_crash(objective.algorithm, step)

    # --- how ----------------------------------------------------------------------------------------------------------

    def advantages_of(self, objective: Objective, rows: Sequence[ScoredRow]) -> tuple[list[float], list[float], list[bool]]:
        """Advantages, group means and which rows have a trained token."""
        by_value(objective.algorithm)
        rewards, groups, trained = [r.reward for r in rows], [r.group for r in rows], [any(r.trained) for r in rows]
        means = [float(m) for m in objective.baselines(rewards, groups, trained)]
        return [float(a) for a in travelled(objective).advantages(rewards, groups, trained)], means, trained

    def _learns_from_advantages(self, objective: Objective) -> None:
        if isinstance(objective.algorithm, PreferenceAlgorithm):
            pytest.skip("learns from pairs")
        by_value(objective.algorithm)
