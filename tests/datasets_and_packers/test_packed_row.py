"""A packer's row is held to the trajectory, and each way to get it wrong has its own words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.packed_row import packed_row
from posttrain.errors import PackerError
from posttrain.types import Trajectory

PROMPT, SAMPLED = [7, 8, 9], [4, 5, 6]


def shaped(ids: list[int], mask: list[Any], trained: list[bool] | None = None) -> Any:
    """The row of a packer that returns these, for a trajectory of three sampled tokens."""
    made = Trajectory(list(PROMPT), list(SAMPLED), trained or [True] * 3, [-1.0] * 3, [0] * 3, "stop", sample_id="a/0")
    packer: Any = SimpleNamespace(get_policy_input=lambda _: {"input_ids": ids, "mask": mask})
    return packed_row(packer, made)


def fault(ids: list[int], mask: list[Any], trained: list[bool] | None = None) -> PackerError:
    with pytest.raises(PackerError, match=r"get_policy_input changed the trajectory 'a/0': ") as caught:
        shaped(ids, mask, trained)
    assert caught.value.anchor == "howto/custom-datapacker.md#masks"
    return caught.value


def test_the_row_comes_back_as_plain_values() -> None:
    assert shaped([*PROMPT, *SAMPLED], [0, 0, 0, 1, 1, 1]) == ([7, 8, 9, 4, 5, 6], [False] * 3 + [True] * 3, 3)


@pytest.mark.parametrize(("mask", "fix"), [([0, 0, 1, 1, 1, 0], "[False, *mask[:-1]]"), ([0, 0, 1, 1, 1], "[False, *mask]")])
def test_the_mask_of_predictions_is_called_by_its_name(mask: list[int], fix: str) -> None:
    told = fault([*PROMPT, *SAMPLED], mask)
    assert "its mask is shifted by one" in told.message
    assert told.cause == (
        "entry t is about the token that position t predicts, as in cosmos-rl's logprob_masks; "
        "here mask[t] is about token t itself"
    )
    assert told.fix == f"shift it to the right: return {fix}"


def test_the_other_direction_is_told_too() -> None:
    told = fault([*PROMPT, *SAMPLED], [0, 0, 0, 0, 1, 1])
    assert "shifted by one" in told.message and "token t - 1" in told.cause and "to the left" in told.fix


@pytest.mark.parametrize(
    ("ids", "mask", "what"),
    [
        ([*PROMPT, 4, 5], [0, 0, 0, 1, 1], "its ids do not end with the 3 sampled ones"),
        ([*PROMPT, 4, 5, 30], [0, 0, 0, 1, 1, 1], "its ids do not end with the 3 sampled ones"),
        ([4, 5], [1, 1], "its ids do not end with the 3 sampled ones"),
        ([*PROMPT, *SAMPLED], [1, 0, 0, 1, 1, 1], "its mask says that token 0, in the prompt, is trained"),
        ([*PROMPT, *SAMPLED], [0, 0, 0, 1, 1, 0], "its mask says that token 5, in the completion, is not trained"),
        ([*PROMPT, *SAMPLED], [1, 1, 1], "its mask has 3 entries for 6 ids"),
    ],
)
def test_what_else_is_wrong(ids: list[int], mask: list[Any], what: str) -> None:
    assert what in fault(ids, mask).message


@given(st.lists(st.booleans(), min_size=3, max_size=3))
def test_right_masks_pass_and_only_they(trained: list[bool]) -> None:
    whole = [False] * 3 + trained
    assert shaped([*PROMPT, *SAMPLED], whole, trained)[1] == whole
    shifted = [*whole[1:], False]
    if shifted != whole:
        assert "shifted" in fault([*PROMPT, *SAMPLED], shifted, trained).message
