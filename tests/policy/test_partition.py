"""Batches into optimizer steps and micro-batches: nothing lost, nothing split, limits kept, the same each time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.policy.partition import atoms, deal, deal_atoms, micro_batches, shared_tokens, total_tokens
from posttrain.policy.rows import Row

LAW = settings(max_examples=80, deadline=None, derandomize=True)


def row(length: int, *, group: str = "g", prefix: int = 0, pair: int | None = None) -> Row:
    return Row(
        input_ids=[1] * length, mask=[False] * (length - 1) + [True], rollout_logprobs=[0.0] * length, advantage=1.0, reward=1.0,
        baseline=0.0, group=group, id="r", prefix=prefix, pair=pair, chosen=None,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    """Rows of several groups out of order, a group's prompt of one length, some rows in pairs that need not be neighbours."""
    prefixes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    rows: list[Row] = []
    for number in range(draw(st.integers(0, 12))):
        group = draw(st.integers(0, len(prefixes) - 1))
        paired = draw(st.booleans())
        for _ in range(2 if paired else 1):
            length = prefixes[group] + draw(st.integers(2, 20))
            rows.append(row(length, group=str(group), prefix=prefixes[group], pair=number if paired else None))
    return draw(st.permutations(rows))


def flat(parts: list[list[int]]) -> list[int]:
    return [i for part in parts for i in part]


def whole_atoms(rows: list[Row], part: list[int]) -> bool:
    """Whether each pair with a member in the part has both there."""
    inside = [rows[i].pair for i in part if rows[i].pair is not None]
    return all(inside.count(pair) == 2 for pair in inside)


@pytest.mark.parametrize(
    ("items", "parts", "lengths"), [(7, 3, [3, 2, 2]), (6, 3, [2, 2, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0])]
)
def test_deal_hands_out_contiguous_shares_by_divmod(items, parts, lengths):
    shares = deal(items, parts)
    assert [len(share) for share in shares] == lengths
    assert [i for share in shares for i in share] == list(range(items))


def test_deal_refuses_no_parts():
    with pytest.raises(ValueError, match="parts=0"):
        deal(3, 0)


def test_parts_keep_a_scattered_pair_together_and_the_order_otherwise():
    rows = [row(3, pair=0), row(3), row(3, pair=0), row(3), row(3)]
    assert atoms(rows, range(5)) == [[0, 2], [1], [3], [4]]
    assert deal_atoms(rows, range(len(rows)), 2) == [[0, 2, 1], [3, 4]]
    assert deal_atoms(rows, range(len(rows)), 5) == [[0, 2], [1], [3], [4], []]


def test_by_count_rows_keep_their_order_whatever_their_length():
    rows = [row(n) for n in (5, 2, 9, 3, 7)]
    assert micro_batches(rows, range(5), count=2, tokens=1, keep_groups=False) == [[0, 1], [2, 3], [4]]


def test_by_tokens_the_longest_rows_come_first_and_ties_keep_their_order():
    rows = [row(n) for n in (2, 6, 4, 6, 2)]
    assert micro_batches(rows, range(5), count=None, tokens=10, keep_groups=False) == [[1], [3, 2], [0, 4]]


def test_a_group_costs_its_prefix_once():
    rows = [row(12, group="a", prefix=10) for _ in range(4)] + [row(12, group="b", prefix=10) for _ in range(4)]
    assert (total_tokens(rows[:4]), shared_tokens(rows[:4]), shared_tokens(rows)) == (48, 18, 36)
    assert micro_batches(rows, range(8), count=None, tokens=18, keep_groups=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(micro_batches(rows, range(8), count=None, tokens=18, keep_groups=False)) == 8


def test_groups_whose_rows_are_interleaved_are_brought_together_by_count_and_by_tokens():
    rows = [row(4, group=name, prefix=2) for name in "abab"]
    assert micro_batches(rows, range(4), count=2, tokens=1, keep_groups=True) == [[0, 2], [1, 3]]
    assert micro_batches(rows, range(4), count=None, tokens=6, keep_groups=True) == [[0, 2], [1, 3]]


def test_a_group_over_the_limit_is_split_between_its_rows():
    rows = [row(12, group="a", prefix=10) for _ in range(5)]
    assert micro_batches(rows, range(5), count=None, tokens=14, keep_groups=True) == [[0, 1], [2, 3], [4]]
    assert micro_batches(rows, range(5), count=2, tokens=1, keep_groups=True) == [[0, 1], [2, 3], [4]]


def test_one_atom_over_the_limit_stands_alone():
    rows = [row(3), row(50, pair=1), row(50, pair=1), row(3)]
    assert micro_batches(rows, range(4), count=None, tokens=10, keep_groups=False) == [[1, 2], [0, 3]]
    assert micro_batches(rows, range(4), count=1, tokens=10, keep_groups=False) == [[0], [1, 2], [3]]


def test_a_given_cost_replaces_the_count_of_tokens():
    rows = [row(3) for _ in range(6)]
    parts = micro_batches(rows, range(6), count=None, tokens=8, keep_groups=False, cost=lambda some: 4 * len(some))
    assert parts == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("count", "tokens", "what"), [(0, 10, "rows"), (None, 0, "tokens")])
def test_a_limit_that_holds_nothing_is_refused(count, tokens, what):
    with pytest.raises(ValueError, match=f"at most 0 {what}"):
        micro_batches([row(3)], [0], count=count, tokens=tokens, keep_groups=False)


@LAW
@given(rows=batches(), n_mini=st.integers(1, 6))
def test_parts_hold_every_atom_once_whole_and_in_order(rows, n_mini):
    parts = deal_atoms(rows, range(len(rows)), n_mini)
    assert sorted(flat(parts)) == list(range(len(rows)))
    assert flat(parts) == flat(atoms(rows, range(len(rows))))
    assert all(whole_atoms(rows, part) for part in parts)
    sizes = [len(atoms(rows, part)) for part in parts]
    assert len(parts) == n_mini and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@LAW
@given(
    rows=batches(), n_mini=st.integers(1, 3), count=st.none() | st.integers(1, 8), tokens=st.integers(1, 70), keep=st.booleans()
)
def test_micro_batches_hold_every_atom_once_within_the_limit(rows, n_mini, count, tokens, keep):
    measure = len if count else (shared_tokens if keep else total_tokens)
    for part in deal_atoms(rows, range(len(rows)), n_mini):
        pieces = micro_batches(rows, part, count=count, tokens=tokens, keep_groups=keep)
        assert sorted(flat(pieces)) == sorted(part) and all(pieces)
        for piece in pieces:
            assert whole_atoms(rows, piece)
            assert measure([rows[i] for i in piece]) <= (count or tokens) or len(atoms(rows, piece)) == 1
        assert pieces == micro_batches(list(rows), list(part), count=count, tokens=tokens, keep_groups=keep)


@LAW
@given(rows=batches(), count=st.none() | st.integers(1, 8), tokens=st.integers(1, 120))
def test_a_group_that_fits_is_never_split(rows, count, tokens):
    pieces = micro_batches(rows, range(len(rows)), count=count, tokens=tokens, keep_groups=True)
    measure = len if count else shared_tokens
    for group in {r.group for r in rows}:
        if measure([r for r in rows if r.group == group]) <= (count or tokens):
            assert sum(any(rows[i].group == group for i in piece) for piece in pieces) == 1


@LAW
@given(rows=batches(), count=st.none() | st.integers(1, 8), tokens=st.integers(1, 70))
def test_without_groups_pieces_follow_the_batch_by_count_and_the_length_by_tokens(rows, count, tokens):
    pieces = micro_batches(rows, range(len(rows)), count=count, tokens=tokens, keep_groups=False)
    order = atoms(rows, range(len(rows)))
    if count is None:
        order.sort(key=lambda atom: -max(len(rows[i].input_ids) for i in atom))
    assert flat(pieces) == flat(order)
