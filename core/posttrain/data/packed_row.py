"""Whether a packer's training row is the trajectory, to the token; and if not, in which of the known ways it is wrong.

    ids, mask, prompt = packed_row(packer, trajectory)      # raises PackerError that names the fault

The loop holds every row to it, and `posttrain.testing.DataPackerContract` every packer. The commonest fault has a message of
its own: a mask that is about predictions, as in cosmos-rl, where here `mask[t]` is about token `t` itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.errors import PackerError

if TYPE_CHECKING:
    from posttrain.data.packer import DataPacker
    from posttrain.types import Trajectory

_FIX = "return prompt_ids + token_ids and [False] * len(prompt_ids) + mask"
_ANCHOR = "howto/custom-datapacker.md#masks"


def packed_row(packer: DataPacker, trajectory: Trajectory) -> tuple[list[int], list[bool], int]:
    """`get_policy_input` as ids, mask and the length of the prompt. Raises PackerError when it is not the trajectory."""
    sampled, trained = list(trajectory.token_ids), list(trajectory.mask)  # a packer may write into what it is given
    item = packer.get_policy_input(trajectory)
    ids, mask = [int(i) for i in item["input_ids"]], [bool(m) for m in item["mask"]]
    prompt = len(ids) - len(sampled)
    fault = _fault(ids, mask, sampled, trained)
    if fault is not None:
        what, why, fix = fault
        message = f"{type(packer).__name__}.get_policy_input changed the trajectory {trajectory.sample_id!r}: {what}"
        raise PackerError(message, cause=why, fix=fix, anchor=_ANCHOR)
    return ids, mask, prompt


def _fault(ids: list[int], mask: list[bool], sampled: list[int], trained: list[bool]) -> tuple[str, str, str] | None:
    """What is wrong, why, and the fix; None for a row that is right."""
    prompt = len(ids) - len(sampled)
    if prompt < 0 or ids[prompt:] != sampled:
        why = "the policy must see the very ids that the engine sampled; text that is decoded and encoded again differs"
        return f"its ids do not end with the {len(sampled)} sampled ones", why, _FIX
    whole = [False] * prompt + trained
    if mask == whole:
        return None
    if (shifted := _shift(mask, whole)) is not None:
        return shifted
    if len(mask) != len(whole):
        return f"its mask has {len(mask)} entries for {len(whole)} ids", "there is one entry for each id", _FIX
    place = next(t for t, (a, b) in enumerate(zip(mask, whole, strict=True)) if a != b)
    part = "the prompt" if place < prompt else "the completion"
    says = "trained" if mask[place] else "not trained"
    why = "trained are exactly the tokens whose trajectory.mask is true, no prompt token; mask[t] is about token t itself"
    return f"its mask says that token {place}, in {part}, is {says}", why, _FIX


def _shift(mask: list[bool], whole: list[bool]) -> tuple[str, str, str] | None:
    """A mask that is right but for its place, one entry too far left (with or without a last entry) or right."""
    what = "its mask is shifted by one"
    if mask in (whole[1:], [*whole[1:], False]):
        why = (
            "entry t is about the token that position t predicts, as in cosmos-rl's logprob_masks; "
            "here mask[t] is about token t itself"
        )
        return what, why, f"shift it to the right: return {'[False, *mask]' if len(mask) < len(whole) else '[False, *mask[:-1]]'}"
    if mask == [False, *whole[:-1]]:
        return what, "entry t is about token t - 1; here mask[t] is about token t itself", f"shift it to the left: {_FIX}"
    return None
