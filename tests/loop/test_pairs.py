"""Groups from pairs: labels, causes, refusals with the place of the row, and batches that never hold half a pair."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from posttrain.data.dataset import Draw, PromptSampler, Source
from posttrain.errors import DataError, RunAborted
from posttrain.loop.batches import make_batch
from posttrain.loop.cohort import Batch, Cohort
from posttrain.loop.controller import Controller, LoopState
from posttrain.loop.pairs import Pairs, check_pairs
from posttrain.objective import build_objective
from posttrain.policy.partition import deal_atoms, micro_batches
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Group
from posttrain_datapackers.preference import PreferencePacker
from posttrain_envs.preference import Preference

ROWS = [
    {"id": "good", "prompt": "ab", "chosen": "cd", "rejected": "e"},
    {"id": "same", "prompt": "ab", "chosen": "c", "rejected": "c"},
    {"id": "none", "prompt": "ab", "chosen": "", "rejected": "c"},
    {"id": "long", "prompt": "ab", "chosen": "c" * 20, "rejected": "d"},
    {"id": "more", "prompt": "a" * 9, "chosen": "cd", "rejected": "e"},
]


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("model")
    write_tiny_model(out)
    return PreferencePacker().setup(str(out))


def env(rows: Any = ROWS, **options: Any) -> Preference:
    return Preference(Preference.Options(data=rows, test_size=0, **options))


def groups(packer: Any, rows: list[dict[str, Any]] = ROWS, **options: Any) -> tuple[list[Draw], list[Group]]:
    draws = [Draw(i, 0, "preference", row["id"], row) for i, row in enumerate(rows)]
    pairs = Pairs(packer, {"preference": env(rows, **options)}, max_model_len=8)
    return draws, asyncio.run(pairs.run(draws, n=2, sampling=None))


def test_a_pair_is_a_group_of_two_that_nobody_sampled(packer: Any) -> None:
    _, (group, *_) = groups(packer)
    chosen, rejected = group.trajectories
    assert (chosen.reward, rejected.reward) == (1.0, 0.0) and chosen.prompt_ids == rejected.prompt_ids
    for row in group.trajectories:
        assert row.given and row.mask == [True] * len(row.token_ids) and set(row.weight_versions) == {-1}
        assert set(row.rollout_logprobs) == {0.0} and row.finish_reason == "stop" and row.token_ids[-1] == 2
    assert chosen.messages == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    assert (group.group_id, chosen.sample_id, rejected.sample_id) == (
        "0:preference:good", "0:preference:good/0", "0:preference:good/1",
    )  # fmt: skip


def test_pairs_that_teach_nothing_are_counted_by_cause_and_do_not_train(packer: Any) -> None:
    draws, made = groups(packer)
    batch = make_batch(Cohort(1, draws, made), build_objective("dpo"), packer, discard_tied=True)
    assert [row.id.split(":")[-1] for row in batch.rows] == ["good/0", "good/1", "more/0", "more/1"]
    counts = {k: v for k, v in batch.metrics.items() if k.startswith("rollout/unscorable")}
    assert counts == {"rollout/unscorable_count": 6, **{f"rollout/unscorable/{c}": 2 for c in ("identical", "empty", "too_long")}}
    assert batch.metrics["train/informative_group_count"] == 2 and batch.metrics["train/effective_batch"] == 4
    assert not any(name.startswith("reward/") for name in batch.metrics) and batch.metrics["tokens/generated"] == 0


def test_rows_say_that_nobody_sampled_them(packer: Any) -> None:
    draws, made = groups(packer)
    rows = make_batch(Cohort(1, draws, made), build_objective("dpo"), packer, discard_tied=True).rows
    assert all(row.rollout_logprobs is None for row in rows)
    assert [(row.pair, row.chosen, row.prefix) for row in rows] == [(0, True, 2), (0, False, 2), (1, True, 5), (1, False, 5)]
    assert rows[2].input_ids[:5] == rows[3].input_ids[:5] and len(rows[2].input_ids) == 8


def test_cut_completions_count_as_truncated(packer: Any) -> None:
    _, made = groups(packer, truncate="keep_start")
    long = made[3].trajectories
    assert [t.finish_reason for t in long] == ["length", "stop"] and len(long[0].prompt_ids + long[0].token_ids) == 8
    assert [t.reward for t in long] == [1.0, 0.0]


@pytest.mark.parametrize(("n_mini", "count", "tokens"), [(1, 1, 9), (2, None, 9), (3, 3, 9), (3, None, 1), (1, None, 30)])
@pytest.mark.parametrize("keep_groups", [True, False])
def test_no_part_of_a_batch_holds_half_a_pair(
    packer: Any, n_mini: int, count: int | None, tokens: int, keep_groups: bool
) -> None:
    """Also where pairs were left out, so that the batch divides badly."""
    draws, made = groups(packer, ROWS + [{**ROWS[0], "id": str(i)} for i in range(4)])
    rows = make_batch(Cohort(1, draws, made), build_objective("dpo"), packer, discard_tied=True).rows
    seen = []
    for part in deal_atoms(rows, range(len(rows)), n_mini):
        for micro in micro_batches(rows, part, count=count, tokens=tokens, keep_groups=keep_groups):
            sides = sorted((rows[i].pair, rows[i].chosen) for i in micro)
            assert [chosen for _, chosen in sides] == [False, True] * (len(micro) // 2)
            seen += micro
    assert sorted(seen) == list(range(12))


def test_a_row_that_is_no_pair_is_refused_with_its_file_and_line(tmp_path: Any) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2 + [{"chosen": "b", "rejected": "c"}]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    of_file = env(str(file))
    with pytest.raises(DataError, match="row '3' of environment 'preference' is not a preference pair") as caught:
        check_pairs([Source("preference", of_file.dataset("train"))], [], {"preference": of_file})
    assert "pairs.jsonl:3" in caught.value.where and "do not begin alike" in caught.value.cause
    assert caught.value.anchor == "guides/dpo.md#the-data-it-needs"


def test_what_is_useless_or_shared_is_said_before_anything_starts() -> None:
    of_rows = env()
    source = Source("preference", of_rows.dataset("train"))
    held_out = Draw(0, 0, "preference", "x", {"prompt": "ab", "chosen": "y", "rejected": "z"})
    shared, useless = check_pairs([source], [held_out], {"preference": of_rows})
    assert shared == "1 of 1 held-out prompts also train in preference"
    assert useless == "2 of the 5 pairs of preference teach nothing: 1 empty, 1 identical; they are left out"
    bad = env([{**ROWS[1], "id": str(i)} for i in range(3)])
    with pytest.raises(DataError, match="3 of the 3 pairs of preference teach nothing: 3 identical"):
        check_pairs([Source("preference", bad.dataset("train"))], [], {"preference": bad})


def test_the_run_that_drops_every_pair_names_the_cause(packer: Any) -> None:
    draws, made = groups(packer, [ROWS[3]] * 2)
    batch = make_batch(Cohort(1, draws, made), build_objective("dpo"), packer, discard_tied=True)
    assert isinstance(batch, Batch) and not batch.rows

    class Stuck(Controller):
        def __init__(self) -> None:
            self.state = LoopState(uninformative_in_a_row=9)
            self.config = type("C", (), {"rl": type("R", (), {"max_uninformative_batches": 9})})

    with pytest.raises(RunAborted) as caught:
        Stuck()._stop_if_stuck(batch)
    assert "unscorable samples: 4 (too_long 4)" in caught.value.cause


def test_pairs_are_drawn_like_any_rows() -> None:
    sampler = PromptSampler([Source("preference", env().dataset("train"))], seed=0)
    assert sorted(draw.row_id for draw in sampler.draw(5)) == sorted(row["id"] for row in ROWS)
