"""Each cause of a gap between engine and trainer, injected alone into real softmax log-probs, is the one that is named."""

from __future__ import annotations

import numpy as np
import pytest

from posttrain.config.schema import RLConfig, RolloutConfig, RunConfig
from posttrain.loop.mismatch import CAUSES, HIDDEN, Setup, attribute
from posttrain.types import Trajectory

TOKENS, VOCABULARY, VERSION = 40, 50, 9


def logprobs(logits, ids):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))[np.arange(len(ids)), ids]


class Rig:
    """Contexts of every entropy, tokens sampled from them, and what engine and trainer say of these."""

    def __init__(self, seed: int, rows: int = 32) -> None:
        self.rng = np.random.default_rng(seed)
        self.logits = [self.rng.normal(size=(TOKENS, VOCABULARY)) * self.rng.uniform(0.3, 5, (TOKENS, 1)) for _ in range(rows)]
        self.ids = [self.sampled(z) for z in self.logits]
        self.lags = [np.where(np.arange(TOKENS) < (20 if r % 2 else 0), 1, 0) for r in range(rows)]
        self.cut = [r % 4 == 0 for r in range(rows)]
        self.engine = [logprobs(z, ids) for z, ids in zip(self.logits, self.ids, strict=True)]
        self.trainer = [values + self.rng.normal(0, 1e-6, TOKENS) for values in self.engine]

    def sampled(self, logits):
        return np.array((logits + self.rng.gumbel(size=logits.shape)).argmax(axis=1))

    def others(self, row, spread=0.3):
        """What weights that differ a little say, on average."""
        z = self.logits[row]
        return logprobs(z + self.rng.normal(size=z.shape) * np.broadcast_to(spread, (TOKENS,))[:, None], self.ids[row])

    def inject(self, cause):
        for row in range(len(self.ids)):
            old, own = self.trainer[row], np.arange(TOKENS)
            if cause == "version":
                self.trainer[row] = np.where(self.lags[row] > 0, self.others(row), old)
            elif cause == "truncation" and self.cut[row]:
                self.trainer[row] = self.others(row)
            elif cause == "first token":
                self.trainer[row] = np.where(own == 0, old - 3, old)
            elif cause == "another prompt":
                self.trainer[row] = self.others(row, spread=2 * np.exp(-own / 8))
            elif cause.startswith("temperature"):
                self.trainer[row] = logprobs(self.logits[row] / float(cause.split()[1]), self.ids[row])
            elif cause == "all equally old":
                self.lags[row], self.trainer[row] = np.ones(TOKENS, int), self.others(row)
            elif cause == "learned":  # a step later, the first half of a short answer has moved, its end is as sure as before
                self.lags[row], self.trainer[row] = np.ones(TOKENS, int), np.where(own < TOKENS / 2, self.others(row), old)
            elif cause == "other weights":
                self.trainer[row] = self.others(row)
            elif cause == "rounding":
                self.trainer[row] = old + self.rng.normal(0, 0.05, TOKENS)
        return self

    def attribute(self, setup=None):
        made = [
            Trajectory([1], list(map(int, ids)), [True] * TOKENS, list(engine), list(map(int, VERSION - lags)),
                       "length" if cut else "stop", 1.0, sample_id=str(row))
            for row, (ids, engine, lags, cut) in enumerate(zip(self.ids, self.engine, self.lags, self.cut, strict=True))
        ]  # fmt: skip
        return attribute(made, self.trainer, version=VERSION, setup=setup or Setup())


ALONE = [
    ("version", "version"),
    ("all equally old", "version"),
    ("truncation", "truncation"),
    ("first token", "template"),
    ("another prompt", "template"),
    ("temperature 0.7", "temperature"),
    ("temperature 1.3", "temperature"),
    ("other weights", "none"),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("injected", "cause"), ALONE)
def test_a_cause_alone_is_named(injected, cause, seed):
    found = Rig(seed).inject(injected).attribute()
    assert found.cause == cause, str(found)
    lines = [line.strip() for line in found.lines if line.strip() != HIDDEN]
    assert lines[-1] == CAUSES[cause] and f"most likely: {cause}" in lines[-2]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("injected", ["learned", "all equally old"])
def test_without_a_token_of_the_newest_version_age_is_named_and_what_it_hides(injected, seed):
    found = Rig(seed).inject(injected).attribute()
    assert found.cause == "version" and "by version: lag 1: " in found.lines[1]
    assert found.lines[-1].strip() == HIDDEN and "run once with rollout.max_async_rollout=0" in HIDDEN
    assert found.scores["truncation"] == found.scores["template"] == found.scores["temperature"] == 0


def test_also_where_the_cut_samples_or_the_likely_tokens_moved_most():
    for injected in ("truncation", "temperature 0.7"):
        rig = Rig(0).inject(injected)
        rig.lags = [np.full(TOKENS, 2) for _ in rig.lags]
        assert rig.attribute().cause == "version"
    aged = Rig(0).inject("rounding")
    aged.lags = [np.full(TOKENS, 1) for _ in aged.lags]
    found = aged.attribute(Setup(rollout_dtype="bfloat16"))
    assert found.cause == "dtype" and HIDDEN not in str(found)  # nothing to explain


def test_rounding_of_the_newest_tokens_does_not_hide_the_age_of_the_others():
    """All that little gap of the tokens of lag 0 is in first halves: it still is a small part of the whole."""
    rig = Rig(0).inject("version")
    for row, lags in enumerate(rig.lags):
        noise = np.where((lags == 0) & (np.arange(TOKENS) < TOKENS / 2), 1e-5, 0.0)
        rig.trainer[row] = np.where(lags > 0, rig.trainer[row], rig.engine[row] + noise)
    found = rig.attribute()
    assert found.cause == "version" and found.scores["template"] < 0.01 and HIDDEN not in str(found)


@pytest.mark.parametrize(
    ("injected", "cause"), [a for a in ALONE if a[0] in ("version", "truncation", "first token", "temperature 0.7")]
)
def test_also_among_what_bfloat16_rounds(injected, cause):
    found = Rig(0).inject("rounding").attribute(Setup(rollout_dtype="bfloat16"))
    assert found.cause == "dtype"
    both = Rig(0).inject(injected)
    both.trainer = [values + both.rng.normal(0, 0.02, TOKENS) for values in both.trainer]
    assert both.attribute(Setup(rollout_dtype="bfloat16")).cause == cause


def test_the_report_is_short_and_has_the_numbers():
    lines = Rig(0).inject("version").attribute(Setup(temperature=0.7, policy_dtype="bfloat16")).lines
    assert 5 <= len(lines) <= 8 and max(map(len, lines)) < 230
    assert "over 1,280 tokens of 32 samples" in lines[0] and "lag 0: " in lines[1] and "lag 1: " in lines[1]
    assert "rollout.temperature=0.7" in lines[4] and "trainer bfloat16: up to 0.1 on average" in lines[5]


def test_the_setup_is_the_runs():
    config = RunConfig(rl=RLConfig(param_dtype="bfloat16"), rollout=RolloutConfig(temperature=0.8, dtype="float32"))
    assert Setup.of(config) == Setup(0.8, "float32", "bfloat16") and Setup.of(config).rounding == 0.1
    assert Setup().rounding == 1e-4


def test_tokens_that_nobody_sampled_are_left_out_and_counts_must_agree():
    turns = Trajectory([1], [2, 3, 4], [True, False, True], [-1.0, 0.0, -1.0], [9, -1, 9], "stop", 1.0, sample_id="a")
    given = Trajectory([1], [2], [True], [0.0], [-1], "stop", 1.0, sample_id="b")
    assert "over 2 tokens" in attribute([turns, given], [[-1.0, -1.5], [-3.0]], version=9, setup=Setup()).lines[0]
    with pytest.raises(ValueError, match=r"3 log-probs for 2 trained tokens of 'a'"):
        attribute([turns], [[-1.0, -1.0, -1.0]], version=9, setup=Setup())
    with pytest.raises(ValueError, match="no token of these trajectories was sampled by an engine"):
        attribute([given], [[-3.0]], version=9, setup=Setup())
