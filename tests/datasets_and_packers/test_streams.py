"""Streams: read no further than asked, the same rows in a second epoch and after a resume, and ends that come early are told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import source as sources
from posttrain.data.dataset import PromptSampler, Source, fingerprint
from posttrain.data.row_check import RowCheck
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import DataError


class Counting:
    """A generator function over `rows` that counts what was read of it."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.read = rows, 0

    def __call__(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            self.read += 1
            yield row


def endless() -> Counting:
    return Counting({"q": i} for i in itertools.count())


def test_a_stream_is_read_as_far_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WINDOW", 16)
    stream = endless()
    options = DataOptions(data=stream, take=10_000, test_size=10)
    train, test = open_rows(options, "train"), open_rows(options, "test")
    assert [row["q"] for row in test] == list(range(10)) and len(train) == 10_000 and stream.read == 26
    sampler = PromptSampler([Source("e", train)], seed=0)
    sampler.watch()
    assert len(fingerprint(train)) == 12 and stream.read == 10 + 64
    drawn = [d.task["q"] for d in sampler.draw(160)]
    assert stream.read == 10 + 160 and train.where(0) == "data, row 11"
    blocks = [drawn[i : i + 16] for i in range(0, 160, 16)]
    assert [sorted(block) for block in blocks] == [list(range(10 + i, 26 + i)) for i in range(0, 160, 16)]
    assert sum(block == sorted(block) for block in blocks) == 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(take=st.integers(5, 30), window=st.integers(1, 12), seed=st.integers(0, 3), stops=st.lists(st.integers(1, 25), max_size=3))
def test_every_epoch_of_a_stream_draws_each_row_once_and_a_resume_changes_nothing(
    take: int, window: int, seed: int, stops: list[int]
) -> None:
    def sampler() -> PromptSampler:
        rows = open_rows(DataOptions(data=endless(), take=take, test_size=2, filter=lambda row: row["q"] % 3 > 0), "train")
        rows.window = window
        return PromptSampler([Source("e", rows)], seed=seed)

    whole = sampler().draw(100)
    for epoch in range(3):
        assert sorted(d.task["q"] for d in whole if d.epoch == epoch) == sorted(d.task["q"] for d in whole[:take])
    made, got = sampler(), []
    for count in stops:
        got += made.draw(count)
        state = made.state_dict()
        made = sampler()
        made.load_state_dict(state)
    assert got + made.draw(3) == whole[: len(got) + 3]


def test_without_take_a_stream_is_read_first_and_split_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"q": i} for i in range(100)]
    split = [[row["q"] for row in open_rows(DataOptions(data=data), "test")] for data in (rows, Counting(rows))]
    assert split[0] == split[1] and len(split[0]) == 5
    monkeypatch.setattr(sources, "LARGEST_STREAM", 100)
    assert len(open_rows(DataOptions(data=Counting(rows)), "train")) == 95
    with pytest.raises(DataError, match="data has not ended after 100 rows") as caught:
        open_rows(DataOptions(data=endless()), "train")
    assert caught.value.code == "endless-stream" and "set options.take" in caught.value.fix


def test_a_stream_that_ends_early_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WINDOW", 4)
    rows = open_rows(DataOptions(data=Counting([{"q": i} for i in range(40)]), take=50, test_size=2,
                                 filter=lambda row: row["q"] % 2 == 0), "train")
    sampler = PromptSampler([Source("e", rows)], seed=0)
    sampler.draw(16)
    with pytest.raises(DataError) as caught:
        sampler.draw(4)
    assert caught.value.message.startswith("data ended after 40 row(s), and row 2")
    assert "20 of them stay after options.filter" in caught.value.cause and "options.take" in caught.value.fix


def test_copies_of_held_out_rows_are_passed_over_and_repeated_ids_refused() -> None:
    data = Counting([{"q": 0}, {"q": 1}, {"q": 0}, {"q": 2}, {"q": 1}, {"q": 3}])
    options = DataOptions(data=data, take=2, test_size=2)
    assert [row["q"] for row in open_rows(options, "train")] == [2, 3]
    with pytest.raises(DataError, match="data, row 1 and data, row 2 have the same id '7'"):
        open_rows(DataOptions(data=[{"id": 7}, {"id": 7}].__iter__(), take=2, test_size=0), "train")


def test_a_check_of_all_rows_does_not_read_a_stream_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "WINDOW", 8)
    stream = endless()
    check = RowCheck(Source("e", open_rows(DataOptions(data=stream, take=1000, test_size=0), "train")))
    check.first()
    check.start()
    check.wait()
    assert stream.read == 8
