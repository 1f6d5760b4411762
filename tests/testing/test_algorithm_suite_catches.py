"""Each law of algorithms fails for the algorithm that breaks it, and says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.errors import DataError
from posttrain.objective import Algorithm, Objective, PolicyGradient, PreferenceAlgorithm, build_objective, terms
from posttrain.objective.groups import centred
from posttrain.testing import AlgorithmContract


class Good(PolicyGradient):
    """Centred, REINFORCE with a ratio."""

    def advantages(self, rewards: Any, groups: Any, trained: Any) -> Any:
        return centred(rewards, groups, trained)


class Infinite(Good):
    def policy_loss(self, batch: Any) -> Any:
        return super().policy_loss(batch) / 0.0


class Detached(Good):
    def loss(self, batch: Any) -> Any:
        return super().loss(batch).detach()


class Narrow(Good):
    def loss(self, batch: Any) -> Any:
        return super().loss(batch).float()


class MeanOfTheBatch(Good):
    def loss(self, batch: Any) -> Any:
        terms = torch.where(batch.mask, -self.ratio(batch) * batch.advantages, 0.0)
        return terms.mean() if terms.numel() else terms.sum()


class ByPosition(Good):
    def advantages(self, rewards: Any, groups: Any, trained: Any) -> Any:
        return super().advantages(rewards, groups, trained) * np.arange(1, len(rewards) + 1)


class Unmasked(Objective):
    """An objective of somebody's own, which multiplies by the mask: NaN times 0 is NaN."""

    def loss(self, batch: Any) -> Any:
        return (batch.logprobs * batch.advantages * batch.mask).sum() / batch.total_tokens


class CountsPadding(Good):
    def loss(self, batch: Any) -> Any:
        length = torch.bincount(batch.sequence, minlength=batch.num_sequences)[batch.sequence]
        return torch.where(batch.mask, -batch.logprobs * batch.advantages / length, 0.0).sum()


class WrongSign(Good):
    def policy_loss(self, batch: Any) -> Any:
        return -super().policy_loss(batch)


class LearnsNothing(Good):
    def policy_loss(self, batch: Any) -> Any:
        return super().policy_loss(batch) * 0.0


class NoBaseline(Good):
    def advantages(self, rewards: Any, groups: Any, trained: Any) -> Any:
        return np.array([0.0 if r is None or not np.isfinite(r) else r for r in rewards])


class CountsUnscorable(Good):
    """An unscorable reward is taken for a 0."""

    def advantages(self, rewards: Any, groups: Any, trained: Any) -> Any:
        values = [0.0 if r is None or not np.isfinite(r) else r for r in rewards]
        out = centred(values, groups, [True] * len(values))
        return np.where([r is not None and np.isfinite(r) and t for r, t in zip(rewards, trained, strict=True)], out, 0.0)


class FirstTwo(PreferenceAlgorithm):
    """Pairs the first two of a group, whatever they are worth."""

    def pairs(self, rewards: Any, groups: Any, trained: Any) -> Any:
        return [(1, 0)]

    def loss(self, batch: Any) -> Any:
        return -batch.logprobs.sum()


class Noisy(Good):
    def policy_loss(self, batch: Any) -> Any:
        return super().policy_loss(batch) * torch.rand(())


class Running(Good):
    """A baseline over the whole run that no checkpoint holds."""

    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.mean = 0.0

    def advantages(self, rewards: Any, groups: Any, trained: Any) -> Any:
        counted = [r for r, t in zip(rewards, trained, strict=True) if r is not None and np.isfinite(r) and t]
        self.mean = 0.9 * self.mean + 0.1 * float(np.mean(counted))
        return super().advantages(rewards, groups, trained) * (1 + self.mean)


class Kept(Running):
    """The same with a state, rightly."""

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean = float(state["mean"])


class Rounded(Kept):
    """A state that loses digits."""

    def state_dict(self) -> dict[str, Any]:
        return {"mean": round(self.mean, 1)}


class Tensors(Kept):
    def state_dict(self) -> dict[str, Any]:
        return {"mean": torch.tensor(self.mean)}


class ByNumber(Kept):
    """Its keys would come back as text."""

    def state_dict(self) -> dict[Any, Any]:
        return {"means": {0: self.mean}}


class Unpicklable(Good):
    def __init__(self, options: Any, context: Any) -> None:
        super().__init__(options, context)
        self.generator = (i for i in range(3))


class ClaimsTooMuch(AlgorithmContract):
    __test__ = False

    def invariance(self, objective: Objective) -> Any:
        return "affine"


class TestGood(AlgorithmContract):
    plugin = Good

    def invariance(self, objective: Objective) -> Any:
        return "shift"


class TestKept(AlgorithmContract):
    """An algorithm with a state of its own keeps every law, the crash included."""

    plugin = Kept


class OnlyBinary(Good):
    """Takes 0 and 1, and does not say so."""

    def advantages(self, rewards: Any, groups: Any, trained: Any) -> Any:
        if not {reward for reward in rewards if reward is not None} <= {0.0, 1.0}:
            raise DataError("rewards must be 0 or 1")
        return super().advantages(rewards, groups, trained)


class OldAnyway(Good):
    """Reads old log-probs that it did not ask for."""

    def policy_loss(self, batch: Any) -> Any:
        return terms.require(batch, "old_logprobs", "compares with the old policy") * super().policy_loss(batch)


BROKEN: dict[str, tuple[type[Algorithm] | type[Objective], str]] = {
    "test_loss_and_gradient_are_finite": (Infinite, r"the loss is (nan|-?inf)"),
    "test_loss_is_a_float64_scalar_with_gradient": (Narrow, r"torch.float32 for float64 log-probs"),
    "test_the_micro_batch_split_changes_nothing": (MeanOfTheBatch, r"micro-batches must sum: divide by batch.total_tokens"),
    "test_the_order_changes_nothing": (ByPosition, r"the order of the rows decides; go by `groups`"),
    "test_untrained_positions_count_for_nothing": (Unmasked, r"mask False holds nan; use torch.where\(mask"),
    "test_padding_changes_nothing": (CountsPadding, r"tokens that are not trained were counted; count with batch.mask"),
    "test_what_it_does_not_need_may_be_absent": (OnlyBinary, r"more than it says, groups: rewards must be 0 or 1"),
    "test_what_was_better_gets_more_likely": (WrongSign, r"pushed the wrong way: check the sign"),
    "test_advantages_of_what_cannot_teach_are_zero": (NoBaseline, r"rewards of a group agree, and it has advantages .*, not 0"),
    "test_what_does_not_count_changes_nothing_for_the_others": (CountsUnscorable, r"reward None, .* out of the baseline"),
    "test_rewards_may_be_shifted_and_scaled_as_it_says": (Good, r"rewards times 8 change the advantages"),
    "test_pairs_come_from_groups_that_disagree": (FirstTwo, r"the pairs are \[\(1, 0\)\]: the best and the worst"),
    "test_the_same_step_is_scored_the_same": (Noisy, r"scored differently: draw nothing at random"),
    "test_a_step_leaves_nothing_behind": (Running, r"changed the algorithm itself \(mean\).*state_dict"),
    "test_it_travels_to_other_processes": (Unpicklable, r"cannot be sent to another process"),
    "test_state_survives_a_crash": (Rounded, r"goes on differently after a crash"),
}


def objective(broken: type[Algorithm] | type[Objective]) -> Objective:
    return broken("broken", build_objective(Good).algorithm) if issubclass(broken, Objective) else build_objective(broken)


@pytest.mark.parametrize("law", BROKEN)
def test_the_law_catches_it(law: str, told: Callable[..., str]) -> None:
    broken, message = BROKEN[law]
    suite = ClaimsTooMuch() if "shifted" in law else AlgorithmContract()
    assert re.search(message, told(suite, law, objective(broken), garbage=float("nan")), flags=re.DOTALL)


def test_there_is_a_broken_one_for_every_law(laws: Callable[[type], set[str]]) -> None:
    assert laws(AlgorithmContract) == set(BROKEN)


@pytest.mark.parametrize(
    ("law", "broken", "message"),
    [
        ("test_loss_is_a_float64_scalar_with_gradient", Detached, "no gradient to the log-probs"),
        ("test_what_was_better_gets_more_likely", LearnsNothing, "nothing is learned from what was better"),
        ("test_what_it_does_not_need_may_be_absent", OldAnyway, "more than it says, groups: the TokenBatch has no old_logprobs"),
        ("test_state_survives_a_crash", Tensors, "state_dict()['mean'] is a Tensor, not text, a number, a list or a dict; use"),
        ("test_state_survives_a_crash", ByNumber, "state_dict()['means'] has the key 0, which would come back as text"),
    ],
)
def test_other_ways_to_break_it(law: str, broken: type[Algorithm], message: str, told: Callable[..., str]) -> None:
    assert message in told(AlgorithmContract(), law, build_objective(broken))
