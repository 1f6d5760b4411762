"""Pairs as ids: prompt and completions tokenised apart, the end of a turn once, cuts that leave something to compare."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data.packer import init_data_packer
from posttrain.data.preference import Pair, PairIds, Truncate, fit
from posttrain.data.special_tokens import SpecialTokens
from posttrain.errors import PackerError
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Trajectory
from posttrain_datapackers.preference import PreferencePacker

CHAT = "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% if m['role'] == 'assistant' %}<end>x{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("model")
    write_tiny_model(out)
    return str(out)


@pytest.fixture
def packer(folder: str) -> PreferencePacker:
    """Characters as tokens; the model stops at `<eos>` (2, the tokenizer's own) and at `<end>` (3)."""
    return made(folder)


def made(folder: str, **options: str) -> PreferencePacker:
    packer = PreferencePacker().setup(folder, **options)
    packer.tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    return cast(PreferencePacker, packer)


def row(prompt: list[int], completion: list[int]) -> Trajectory:
    n = len(completion)
    return Trajectory(prompt, completion, [True] * n, [0.0] * n, [-1] * n, "stop", 1.0)


def collated(packer: PreferencePacker, rows: list[Trajectory], width: int) -> dict[str, Any]:
    return packer.policy_collate_fn([packer.get_policy_input(r) for r in rows], width)


def test_case_mask_3_cutting_the_start_leaves_short_rows_alone(packer: PreferencePacker) -> None:
    long = fit([1, 2, 3, 4], [5, 6, 7], [5, 6], max_len=4, truncate="keep_end")
    short = fit([8], [9], [7], max_len=4, truncate="keep_end")
    batch = collated(packer, [row(p.prompt_ids, p.chosen_ids) for p in (long, short)], 4)
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7], [8, 9, 0, 0]]
    assert batch["mask"].int().tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert long.prompt_ids + long.rejected_ids == [4, 5, 6]


def test_case_mask_1_padding_is_by_length_where_pad_is_eos(packer: PreferencePacker) -> None:
    packer.tokenizer.pad_token = packer.tokenizer.eos_token
    assert packer.tokenizer.pad_token_id == 2
    batch = collated(packer, [row([4], [5, 6, 2]), row([2, 8, 2, 9], [5])], 6)
    assert batch["input_ids"].tolist() == [[4, 5, 6, 2, 2, 2], [2, 8, 2, 9, 5, 2]]
    assert batch["mask"].int().tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]
    assert batch["position_ids"][1, :5].tolist() == [0, 1, 2, 3, 4]


def test_case_mask_1_real_tokens_do_not_see_the_padding(packer: PreferencePacker) -> None:
    """With absolute positions, which padding on the left would shift."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()
    rows = [row([2, 8, 2, 9], [5, 2]), row([4], [5, 6, 2, 7, 8, 9, 2])]
    batch = collated(packer, rows, 8)
    with torch.no_grad():
        attention = batch["attention_mask"].long()
        padded = model(batch["input_ids"], position_ids=batch["position_ids"], attention_mask=attention).logits
        for number, one in enumerate(rows):
            ids = torch.tensor([one.prompt_ids + one.token_ids])
            alone = model(ids).logits[0]
            torch.testing.assert_close(padded[number, : ids.shape[1]], alone, atol=1e-5, rtol=0)


def test_the_prompt_is_the_same_in_both_rows_and_each_completion_ends_once(packer: PreferencePacker) -> None:
    ids = packer.get_preference_input(Pair("ab", "cd", "e"), max_len=16, truncate="drop")
    assert packer.tokenizer.convert_ids_to_tokens(ids.prompt_ids) == ["a", "b"]
    assert packer.tokenizer.convert_ids_to_tokens(ids.chosen_ids) == ["c", "d", "<eos>"]
    assert packer.tokenizer.convert_ids_to_tokens(ids.rejected_ids) == ["e", "<eos>"]
    assert ids.fits and not ids.chosen_cut


def test_an_end_that_the_data_wrote_out_is_not_doubled(packer: PreferencePacker) -> None:
    ids = packer.get_preference_input(Pair("ab", "cd<eos>", "e<end><eos>"), max_len=16, truncate="drop")
    assert (ids.chosen_ids[-2:], ids.chosen_ids.count(2)) == ([packer.tokenizer.convert_tokens_to_ids("d"), 2], 1)
    assert ids.rejected_ids == [packer.tokenizer.convert_tokens_to_ids("e"), 2]


def test_messages_end_with_what_the_template_writes_up_to_a_stop_token(folder: str) -> None:
    packer = made(folder, chat_template=CHAT)
    ids = packer.get_preference_input(Pair([{"role": "user", "content": "ab"}], "cd", "e"), max_len=16, truncate="drop")
    assert packer.tokenizer.convert_ids_to_tokens(ids.prompt_ids) == ["u", "a", "b"]
    assert packer.tokenizer.convert_ids_to_tokens(ids.chosen_ids) == ["c", "d", "<end>"]
    plain = packer.get_preference_input(Pair("ab", "cd", "e"), max_len=16, truncate="drop")
    assert packer.tokenizer.convert_ids_to_tokens(plain.chosen_ids) == ["c", "d", "<eos>"]


def test_tokens_do_not_merge_across_the_border(packer: PreferencePacker) -> None:
    """A tokenizer that knows `ab` as one token: prompt `a` and completion `b` stay two."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 2, "a": 4, "b": 5, "ab": 6}
    packer.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(words, [("a", "b")])), eos_token="<eos>", pad_token="<eos>"
    )
    assert packer.tokenizer("ab")["input_ids"] == [6]
    ids = packer.get_preference_input(Pair("a", "b", "a"), max_len=8, truncate="drop")
    assert (ids.prompt_ids, ids.chosen_ids, ids.rejected_ids) == ([4], [5, 2], [4, 2])


def test_a_bos_stands_once_before_the_prompt_and_survives_its_cut(packer: PreferencePacker) -> None:
    packer.special_tokens = SpecialTokens(prefix=(1,), stop=(2,))
    ids = packer.get_preference_input(Pair("abcdef", "g", "h"), max_len=5, truncate="keep_end")
    assert packer.tokenizer.convert_ids_to_tokens(ids.prompt_ids) == ["<bos>", "e", "f"]
    assert 1 not in ids.chosen_ids + ids.rejected_ids
    assert packer.get_preference_input(Pair("<bos>ab", "g", "h"), max_len=9, truncate="drop").prompt_ids[:2] == [1, 4]
    assert not fit([1, 4, 5], [6, 2], [7, 2], max_len=3, truncate="keep_end", bos=1).fits  # a BOS alone is no prompt


@pytest.mark.parametrize(
    ("truncate", "max_len", "wanted"),
    [
        ("keep_end", 5, PairIds([3, 4], [5, 6, 7], [8, 9])),
        ("keep_end", 4, PairIds([4], [5, 6, 7], [8, 9])),
        ("keep_end", 3, PairIds([1, 2, 3, 4], [5, 6, 7], [8, 9], fits=False)),
        ("keep_start", 6, PairIds([1, 2, 3, 4], [5, 6], [8, 9], True, False)),
        ("keep_start", 5, PairIds([1, 2, 3, 4], [5], [8], True, True)),
        ("keep_start", 4, PairIds([1, 2, 3, 4], [5, 6, 7], [8, 9], fits=False)),
        ("drop", 7, PairIds([1, 2, 3, 4], [5, 6, 7], [8, 9])),
        ("drop", 6, PairIds([1, 2, 3, 4], [5, 6, 7], [8, 9], fits=False)),
    ],
)
def test_what_a_pair_that_is_too_long_loses(truncate: Truncate, max_len: int, wanted: PairIds) -> None:
    assert fit([1, 2, 3, 4], [5, 6, 7], [8, 9], max_len=max_len, truncate=truncate) == wanted


def test_completions_that_a_cut_makes_equal_are_no_pair() -> None:
    assert not fit([1, 2], [5, 6, 7], [5, 6, 8], max_len=4, truncate="keep_start").fits
    assert fit([1, 2], [5, 6, 7], [5, 6, 8], max_len=5, truncate="keep_start").fits


ids = st.lists(st.integers(4, 9), min_size=1, max_size=9)


@given(ids, ids, ids, st.integers(1, 12), st.sampled_from(["keep_end", "keep_start", "drop"]))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_pair_that_fits_has_a_prompt_and_two_trained_completions(
    prompt: list[int], chosen: list[int], rejected: list[int], max_len: int, truncate: Truncate
) -> None:
    cut = fit(prompt, chosen, rejected, max_len=max_len, truncate=truncate)
    whole = PairIds(prompt, chosen, rejected)
    if not cut.fits:
        assert (cut.prompt_ids, cut.chosen_ids, cut.rejected_ids) == (prompt, chosen, rejected)
        assert len(prompt) + max(len(chosen), len(rejected)) > max_len
        return
    assert cut.prompt_ids and cut.chosen_ids and cut.rejected_ids
    assert len(cut.prompt_ids) + max(len(cut.chosen_ids), len(cut.rejected_ids)) <= max_len
    assert prompt[-len(cut.prompt_ids) :] == cut.prompt_ids
    assert chosen[: len(cut.chosen_ids)] == cut.chosen_ids and cut.chosen_cut == (cut.chosen_ids != chosen)
    assert rejected[: len(cut.rejected_ids)] == cut.rejected_ids and cut.rejected_cut == (cut.rejected_ids != rejected)
    if truncate == "drop" or len(prompt) + max(len(chosen), len(rejected)) <= max_len:
        assert cut == whole


def test_a_packer_that_is_not_made_for_pairs_says_so(folder: str) -> None:
    with pytest.raises(PackerError, match="DecoderOnlyPacker cannot shape preference pairs"):
        init_data_packer(folder).get_preference_input(Pair("a", "b", "c"), max_len=8, truncate="drop")
    assert isinstance(init_data_packer(folder, default="preference"), PreferencePacker)
