"""Each law of DataPackers fails for the packer that breaks it, and says what to do."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.data.packer import DataPacker
from posttrain.testing import DataPackerContract
from posttrain_datapackers.decoder_only import DecoderOnlyPacker


class Packers(DataPackerContract):
    __test__ = False


class Growing(DecoderOnlyPacker):
    def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
        self.asked = getattr(self, "asked", 0) + 1
        return {"prompt_ids": [4] * self.asked + super().get_rollout_input(prompt)["prompt_ids"]}


class Decorates(DecoderOnlyPacker):
    """Puts a token before every prompt, ids included."""

    def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
        return {"prompt_ids": [4, *super().get_rollout_input(prompt)["prompt_ids"]]}


class Ascii(DecoderOnlyPacker):
    def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
        text = prompt if isinstance(prompt, str) else prompt[0]["content"] if isinstance(prompt[0], dict) else ""
        assert text.isascii(), "only ASCII here"
        return super().get_rollout_input(prompt)


class TwoBos(DecoderOnlyPacker):
    def get_rollout_input(self, prompt: Any) -> dict[str, Any]:
        return {"prompt_ids": [*self.special_tokens.prefix, *super().get_rollout_input(prompt)["prompt_ids"]]}


class TokenisesAgain(DecoderOnlyPacker):
    def extend(self, ids: Any, messages: Any) -> list[int]:
        text = self.decode(ids[:-1]) + "".join(m["content"] for m in messages)
        return list(self.get_rollout_input(text)["prompt_ids"])


class Shifted(DecoderOnlyPacker):
    """The convention of cosmos-rl."""

    def get_policy_input(self, trajectory: Any) -> dict[str, Any]:
        item = super().get_policy_input(trajectory)
        return {**item, "mask": [*item["mask"][1:], False]}


class OtherPrompt(DecoderOnlyPacker):
    def get_policy_input(self, trajectory: Any) -> dict[str, Any]:
        item = super().get_policy_input(trajectory)
        return {**item, "input_ids": [20, *item["input_ids"]], "mask": [False, *item["mask"]]}


class WritesInto(DecoderOnlyPacker):
    def get_policy_input(self, trajectory: Any) -> dict[str, Any]:
        item = super().get_policy_input(trajectory)
        trajectory.token_ids.append(2)
        return item


class Unmatched(DecoderOnlyPacker):
    """Another row each time, so that what is packed is not what was checked."""

    calls = itertools.count()

    def get_policy_input(self, trajectory: Any) -> dict[str, Any]:
        item = super().get_policy_input(trajectory)
        return {**item, "mask": [*item["mask"][:-1], next(Unmatched.calls) % 2 == 0]}


class PaddingById(DecoderOnlyPacker):
    def policy_collate_fn(self, items: Any, max_len: int) -> dict[str, torch.Tensor]:
        batch = super().policy_collate_fn(items, max_len)
        return {**batch, "mask": batch["mask"] & (batch["input_ids"] != self._pad_id())}


class LeftPadded(DecoderOnlyPacker):
    def policy_collate_fn(self, items: Any, max_len: int) -> dict[str, torch.Tensor]:
        return {name: tensor.flip(1) for name, tensor in super().policy_collate_fn(items, max_len).items()}


class Sorted(DecoderOnlyPacker):
    """Numbers its rows."""

    def policy_collate_fn(self, items: Any, max_len: int) -> dict[str, torch.Tensor]:
        return {**super().policy_collate_fn(items, max_len), "row": torch.arange(len(items))[:, None]}


class Cuts(DecoderOnlyPacker):
    def policy_collate_fn(self, items: Any, max_len: int) -> dict[str, torch.Tensor]:
        cut = [{name: value[:max_len] for name, value in item.items()} for item in items]
        return super().policy_collate_fn(cut, max_len)


class KeepsStops(DecoderOnlyPacker):
    def decode(self, token_ids: Any) -> str:
        return str(self.tokenizer.decode(list(token_ids)))


class Local(DecoderOnlyPacker):
    def __init__(self) -> None:
        super().__init__()
        self.clean = (i for i in ())


class NeedsAName(DecoderOnlyPacker):
    def __init__(self, name: str) -> None:
        super().__init__()


class Heavy(DecoderOnlyPacker):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(3, 3)


class Counting(DecoderOnlyPacker):
    """Its rows depend on how many there were, and no checkpoint knows."""

    rows = 0

    def get_policy_input(self, trajectory: Any) -> dict[str, Any]:
        self.rows += 1
        return {**super().get_policy_input(trajectory), "number": self.rows}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": 0}

    def load_state_dict(self, state: Any) -> None: ...


BROKEN: dict[str, tuple[type[DataPacker], str]] = {
    "test_prompts_become_ids_the_same_every_time": (Growing, r"gave other ids the second time"),
    "test_ids_pass_as_they_are": (Decorates, r"a prompt of token ids must pass as it is"),
    "test_odd_prompts_become_ids": (Ascii, r"only ASCII here"),
    "test_special_tokens_are_there_once": (TwoBos, r"(packer tokenizer adds special tokens|BOS is 2 times)"),
    "test_the_next_turn_begins_with_what_was_sampled": (TokenisesAgain, r"extend changed what was sampled \(turn 1\)"),
    "test_the_mask_is_about_the_token_itself": (
        Shifted,
        r"Shifted.get_policy_input .*mask is shifted by one\n.*as in cosmos-rl's logprob_masks; "
        r"here mask\[t\] is about token t itself\n.*return \[False, \*mask\[:-1\]\]",
    ),
    "test_the_row_is_the_trajectory_to_the_token": (OtherPrompt, r"must see the prompt that the engine got"),
    "test_the_trajectory_is_not_written_into": (WritesInto, r"writes into the trajectory: copy its lists"),
    "test_every_trained_token_has_one_producer": (Unmatched, r"its mask says that token \d+, in the completion, is not trained"),
    "test_masks_are_conserved_by_a_batch": (PaddingById, r"the batch trains \d+ tokens, its rows \d+"),
    "test_batches_are_padded_cpu_tensors": (LeftPadded, r"rows are padded on the right"),
    "test_a_row_is_the_same_in_any_batch": (Sorted, r"'row' of a row depends on the batch around it"),
    "test_a_row_that_is_too_long_is_refused": (Cuts, r"cut a row to \d+ columns, .*: raise PackerError"),
    "test_a_text_has_no_special_tokens": (KeepsStops, r"decode keeps the stop token"),
    "test_it_travels_to_other_processes": (Local, r"cannot be sent to another process"),
    "test_the_factory_takes_nothing_and_a_name_is_needed": (NeedsAName, r"NeedsAName\(\) failed: .* Take no arguments"),
    "test_it_holds_no_weights": (Heavy, r"self.embedding is a tensor or a model"),
    "test_state_survives_a_crash": (Counting, r"goes on differently after a crash"),
}


@pytest.mark.parametrize("law", BROKEN)
def test_the_law_catches_it(law: str, told: Callable[..., str], posttrain_tiny_model: Path) -> None:
    broken, message = BROKEN[law]
    packer = broken("x") if broken is NeedsAName else broken()  # type: ignore[call-arg]
    text = told(Packers(), law, packer.setup(str(posttrain_tiny_model)))
    assert re.search(message, text), text


def test_there_is_a_broken_one_for_every_law(laws: Callable[[type], set[str]]) -> None:
    assert laws(DataPackerContract) == set(BROKEN)


def test_padding_by_id_is_seen_in_the_rows_too(told: Callable[..., str], posttrain_tiny_model: Path) -> None:
    text = told(Packers(), "test_batches_are_padded_cpu_tensors", PaddingById().setup(str(posttrain_tiny_model)))
    assert "found by the row's length, never by an id" in text
