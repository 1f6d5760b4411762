import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.dataset import FIRST_FINGERPRINT_ROWS, PromptSampler, Source, fingerprint, row_id, rows_of
from posttrain.errors import DataError


def rows(n, name="r"):
    return [{"id": f"{name}{i}", "q": i} for i in range(n)]


def sampler(n=10, **options):
    return PromptSampler([Source("e", rows(n))], **{"seed": 0, "batch": 4, **options})


def test_case_data_1_every_row_once_per_epoch_and_none_lost_at_the_border():
    draws = sampler(10).draw(20)
    assert sorted(d.row_id for d in draws[:10]) == sorted(d.row_id for d in draws[10:]) == sorted(f"r{i}" for i in range(10))
    assert [d.epoch for d in draws] == [0] * 10 + [1] * 10
    assert [d.row_id for d in draws[:10]] != [d.row_id for d in draws[10:]]


def test_case_data_1_fewer_rows_than_a_batch_still_train_and_drop_last_says_both_numbers():
    draws = sampler(3).draw(8)
    assert sorted(Counter(d.row_id for d in draws).values()) == [2, 3, 3]
    assert len({d.group_id for d in draws}) == 8
    with pytest.raises(DataError, match="has 3 row.s., a batch takes 8 prompts"):
        sampler(3, drop_last=True, batch=8)


def test_case_data_1_no_rows_is_an_error_at_setup():
    with pytest.raises(DataError, match="training dataset of e is empty") as caught:
        sampler(0)
    assert caught.value.exit_code == 3


def test_drop_last_leaves_out_other_rows_in_each_epoch():
    draws = sampler(10, drop_last=True).draw(16)
    assert [d.epoch for d in draws] == [0] * 8 + [1] * 8
    left_out = [{f"r{i}" for i in range(10)} - {d.row_id for d in draws if d.epoch == e} for e in (0, 1)]
    assert all(len(rest) == 2 for rest in left_out)


def test_without_shuffle_the_file_order():
    assert [d.row_id for d in sampler(3, shuffle=False).draw(4)] == ["r0", "r1", "r2", "r0"]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(pieces=st.lists(st.integers(1, 7), min_size=1, max_size=6), seed=st.integers(0, 5), data=st.data())
def test_case_data_3_a_resume_at_any_draw_any_number_of_times_changes_nothing(pieces, seed, data):
    sources = [Source("a", rows(5, "a"), 1.0), Source("b", rows(3, "b"), 2.0)]
    whole = PromptSampler(sources, seed=seed).draw(sum(pieces))
    current, got = PromptSampler(sources, seed=seed), []
    for count in pieces:
        got += current.draw(count)
        if data.draw(st.booleans()):
            state = json.loads(json.dumps(current.state_dict()))
            current = PromptSampler(sources, seed=seed)
            current.load_state_dict(state)
            assert current.index == len(got)
    assert got == whole


def test_sources_are_drawn_by_weight():
    made = PromptSampler([Source("a", rows(50, "a"), 3.0), Source("b", rows(50, "b"), 1.0)], seed=1).draw(800)
    assert 0.70 < sum(d.env == "a" for d in made) / 800 < 0.80


def test_the_state_of_other_environments_is_refused():
    with pytest.raises(DataError, match="sampler's state is of"):
        sampler().load_state_dict({"index": 1, "taken": {"other": 1}})


def test_fingerprint_sees_size_and_content():
    assert fingerprint(rows(500)) == fingerprint(rows(500))
    assert fingerprint(rows(500)) != fingerprint(rows(501))
    assert fingerprint(rows(5)) != fingerprint([{**r, "q": 0} for r in rows(5)])


def test_fingerprint_sees_every_row_of_ten_thousand_and_more_of_more_at_a_bounded_cost():
    whole = rows(10_000)
    for edited in (0, 1, 5_000, 9_999):
        assert fingerprint(whole) != fingerprint([{**r, "q": -1} if i == edited else r for i, r in enumerate(whole)])

    class Counted(list):
        read = 0

        def __getitem__(self, position):
            self.read += 1
            return super().__getitem__(position)

    more = Counted(rows(30_000))
    assert fingerprint(more) != fingerprint([{**r, "q": -1} if i == 29_999 else r for i, r in enumerate(more)])
    assert more.read == 10_000


def test_the_fingerprint_of_an_old_checkpoint_is_as_it_was():
    """Of 64 rows, and the numbers that the first version gave."""
    found = [fingerprint(rows(n), FIRST_FINGERPRINT_ROWS) for n in (5, 64, 500)]
    assert found == ["1c6df33a7e9f", "5161e19dece0", "2e5b13f5def1"]


def test_rows_are_mappings_with_ids():
    assert row_id({"id": 7}, 0) == "7" and row_id({}, 3) == "3"
    with pytest.raises(DataError, match="row 2 is a str"):
        row_id("text", 2)


@pytest.mark.parametrize(
    "factory, text",
    [
        ("nowhere_at_all:rows", "cannot be imported"),
        ("builtins:int", "gave an int, which is no dataset"),
        ("json:loads", "failed"),
    ],
)
def test_a_factory_that_does_not_work_is_said(factory, text):
    with pytest.raises(DataError, match=text) as caught:
        rows_of(factory, {})
    assert caught.value.where == "rl.data.factory"
