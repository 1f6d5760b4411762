"""The laws of a DataPacker as tests: subclass, name the plug-in or give one fixture.

    class TestMine(DataPackerContract):
        plugin = MyPacker                         # a name, `package.module:factory` or the class

It is set up for a tiny model that the contract makes; for another one, give a fixture `packer` that returns it set up.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from posttrain.data.environment import Prompt
from posttrain.data.packed_row import packed_row
from posttrain.data.packer import DataPacker, engine_input, load_packer
from posttrain.errors import PackerError
from posttrain.loop.batches import make_row
from posttrain.policy.packing import PackedRows, pack_rows
from posttrain.testing.laws import by_value, has_state, survives_a_crash, travelled
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Message, Trajectory, Turn

ODD = ("7", "日本語 ответ 🙂 é \u202e", "a\x00b", "word " * 2_000)
"""What may stand in a prompt."""


class DataPackerContract:
    """What every packer of token sequences does. `prompts` are what it must take."""

    plugin: ClassVar[Any] = None
    prompts: ClassVar[tuple[Prompt, ...]] = ("ab", [Message(role="user", content="ab")])

    @pytest.fixture
    def packer(self, tmp_path: Path) -> DataPacker:
        if self.plugin is None:
            raise NotImplementedError("give the contract a packer: the class variable `plugin`, or a fixture `packer`")
        write_tiny_model(tmp_path / "model")
        return load_packer(self.plugin).setup(str(tmp_path / "model"))

    def ids(self, packer: DataPacker, prompt: Prompt) -> list[int]:
        return list(packer.get_rollout_input(prompt)["prompt_ids"])

    def trajectory(self, packer: DataPacker) -> Trajectory:
        """Two turns of the model with an answer of the environment between them."""
        sampled = self.ids(packer, self.prompts[0])[-1:]
        return Trajectory(
            prompt_ids=self.ids(packer, self.prompts[0]),
            token_ids=sampled * 5,
            mask=[True, True, False, False, True],
            rollout_logprobs=[-0.7, -1.2, 0.0, 0.0, -0.1],
            weight_versions=[3, 3, -1, -1, 4],
            finish_reason="stop",
            reward=1.0,
            turns=[Turn(0, 2), Turn(2, 4, "env"), Turn(4, 5)],
            sample_id="contract",
        )

    def trajectories(self, packer: DataPacker) -> list[Trajectory]:
        """A batch: two groups, masks with holes, lengths from one to eight, the id of the padding among the sampled ones."""
        draw = random.Random(0)
        letters = [*self.ids(packer, self.prompts[0]), int(getattr(packer.tokenizer, "pad_token_id", None) or 0)]
        made = []
        for number in range(8):
            length = 1 if number == 3 else draw.randint(2, 8)
            mask = [draw.random() < 0.7 for _ in range(length - 1)] + [True]
            prompt = self.ids(packer, self.prompts[number % len(self.prompts)])
            ids, group = [draw.choice(letters) for _ in range(length)], str(number % 2)
            logprobs, versions = [-0.5 if m else 0.0 for m in mask], [0 if m else -1 for m in mask]
            reward, name = float(number % 2), f"contract/{number}"
            made.append(Trajectory(prompt, ids, mask, logprobs, versions, "length", reward, group_id=group, sample_id=name))
        return made

    # --- prompts ------------------------------------------------------------------------------------------------------

    def test_prompts_become_ids_the_same_every_time(self, packer: DataPacker) -> None:
        first = [self.ids(packer, prompt) for prompt in self.prompts]
        for prompt, ids in zip(self.prompts, first, strict=True):
            listed = ids and all(isinstance(i, int) for i in ids)
            assert listed, f"get_rollout_input({prompt!r:.60}) gave {ids!r:.60}: prompt_ids is a list of int"
        again = [self.ids(packer, prompt) for prompt in self.prompts[::-1]][::-1]
        assert again == first, "the same prompt gave other ids the second time: a packer keeps nothing between calls"

    def test_ids_pass_as_they_are(self, packer: DataPacker) -> None:
        ids = self.ids(packer, self.prompts[0])
        assert self.ids(packer, ids) == ids, "a prompt of token ids must pass as it is"

    def test_odd_prompts_become_ids(self, packer: DataPacker) -> None:
        """Not ASCII, 10,000 characters, with NUL."""
        for prompt in self.prompts:
            for text in ODD:
                asked: Prompt = text if isinstance(prompt, str) else [Message(role="user", content=text)]
                if isinstance(prompt, str) or (prompt and isinstance(prompt[0], dict)):
                    assert self.ids(packer, asked), f"get_rollout_input({text[:20]!r}…) gave no ids"

    def test_special_tokens_are_there_once(self, packer: DataPacker, tmp_path: Path) -> None:
        """With the given tokenizer, and with one that puts a BOS before a text: the guard of a run finds nothing (E13)."""
        for prompt in self.prompts:
            engine_input(packer, prompt)
        write_tiny_model(tmp_path / "with-bos", bos=True)
        try:
            other = type(packer)().setup(str(tmp_path / "with-bos"))
        except PackerError:
            return  # it is made for models of another kind
        for prompt in self.prompts:
            ids = engine_input(other, prompt)["prompt_ids"]
            assert list(ids).count(1) == 1, f"the BOS is {list(ids).count(1)} times in the ids of {prompt!r:.60}"

    def test_the_next_turn_begins_with_what_was_sampled(self, packer: DataPacker) -> None:
        made = self.trajectory(packer)
        before = made.prompt_ids + made.token_ids[:2]
        try:
            for turn in (1, 2, 3):
                after = list(packer.extend(before, [{"role": "user", "content": "ab"}]))
                assert after[: len(before)] == before, (
                    f"extend changed what was sampled (turn {turn}): it must start with `ids`, which are never tokenised again"
                )
                assert len(after) > len(before), "extend added nothing"
                before = after + made.token_ids[:2]
        except PackerError:
            pytest.skip("this packer or its template does not continue conversations, and says so")

    # --- rows ---------------------------------------------------------------------------------------------------------

    def test_the_mask_is_about_the_token_itself(self, packer: DataPacker) -> None:
        """The probe: a packer ported from a library that masks predictions is off by one, and is told so."""
        self.same_row(packer, self.trajectory(packer))

    def test_the_row_is_the_trajectory_to_the_token(self, packer: DataPacker) -> None:
        for made in [self.trajectory(packer), *self.trajectories(packer)]:
            ids, _ = self.same_row(packer, made)
            assert ids == made.prompt_ids + made.token_ids, "the policy must see the prompt that the engine got, id for id"

    def test_the_trajectory_is_not_written_into(self, packer: DataPacker) -> None:
        made = self.trajectory(packer)
        before = copy.deepcopy(made)
        packer.get_policy_input(made)
        assert made == before, "get_policy_input writes into the trajectory: copy its lists"

    def test_every_trained_token_has_one_producer(self, packer: DataPacker) -> None:
        """Through the layouts of the policy: rows side by side, and with their prompt computed once."""
        made = self.trajectories(packer)
        rows = [make_row(t, packer, 0.0, 0.0) for t in made]
        order = random.Random(1).sample(range(len(rows)), len(rows))
        for shared in (False, True):
            packed, moved = (pack_rows(r, shared_prefix=shared) for r in (rows, [rows[i] for i in order]))
            assert packed.lengths == [sum(t.mask) for t in made], "packing the rows lost trained tokens, or made some"
            assert [moved.lengths[order.index(i)] for i in range(len(rows))] == packed.lengths, "the order of rows counts"
            for row, pairs in zip(rows, _producers(packed), strict=True):
                expected = [(row.input_ids[t - 1], row.input_ids[t]) for t in row.trained]
                assert pairs == expected, f"row {row.id!r}: a trained token is not predicted by the one before it"

    def test_masks_are_conserved_by_a_batch(self, packer: DataPacker) -> None:
        made = self.trajectories(packer)
        items = [packer.get_policy_input(t) for t in made]
        batch = packer.policy_collate_fn(items, packer.policy_compute_max_len(items))
        total, expected = int(batch["mask"].sum()), sum(sum(t.mask) for t in made)
        assert total == expected, f"the batch trains {total} tokens, its rows {expected}"

    def test_batches_are_padded_cpu_tensors(self, packer: DataPacker) -> None:
        items = [packer.get_policy_input(t) for t in self.trajectories(packer)]
        width = packer.policy_compute_max_len(items)
        assert width == max(len(item["input_ids"]) for item in items), f"policy_compute_max_len gave {width} columns"
        for columns in (width, width + 3):
            batch = packer.policy_collate_fn(items, columns)
            assert all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in batch.values()), "a batch is CPU tensors"
            for row, item in enumerate(items):
                length = len(item["input_ids"])
                ids, mask = batch["input_ids"][row], batch["mask"][row]
                assert ids.shape == mask.shape == (columns,), f"row {row} has shape {tuple(ids.shape)}, not ({columns},)"
                assert ids[:length].tolist() == list(item["input_ids"]), "rows are padded on the right, and hold their ids"
                expected = [bool(m) for m in item["mask"]] + [False] * (columns - length)
                assert mask.tolist() == expected, "padding is found by the row's length, never by an id, which may be sampled"

    def test_a_row_is_the_same_in_any_batch(self, packer: DataPacker) -> None:
        items = [packer.get_policy_input(t) for t in self.trajectories(packer)]
        width = packer.policy_compute_max_len(items)
        whole = packer.policy_collate_fn(items, width)
        order = random.Random(2).sample(range(len(items)), len(items))
        moved = packer.policy_collate_fn([items[i] for i in order], width)
        for name, tensor in whole.items():
            if tensor.shape[:1] == (len(items),):
                for row in range(len(items)):
                    (alone,) = packer.policy_collate_fn([items[row]], width)[name]
                    there = moved[name][order.index(row)]
                    same = torch.equal(tensor[row], alone) and torch.equal(tensor[row], there)
                    assert same, f"{name!r} of a row depends on the batch around it"

    def test_a_row_that_is_too_long_is_refused(self, packer: DataPacker) -> None:
        items = [packer.get_policy_input(t) for t in self.trajectories(packer)]
        try:
            batch = packer.policy_collate_fn(items, packer.policy_compute_max_len(items) - 1)
        except (PackerError, ValueError):
            return
        columns = batch["input_ids"].shape[1]
        pytest.fail(f"policy_collate_fn cut a row to {columns} columns, and trained tokens with it: raise PackerError")

    # --- the object ---------------------------------------------------------------------------------------------------

    def test_a_text_has_no_special_tokens(self, packer: DataPacker) -> None:
        plain = self.ids(packer, self.prompts[0])[-1:]
        text = packer.decode(plain)
        assert isinstance(text, str), f"decode gave a {type(text).__name__}, not a str"
        for stop in packer.special_tokens.stop:
            got = packer.decode([*plain, stop])
            assert got == text, f"decode keeps the stop token: {got!r} is not {text!r}, and no reward compares equal"
        assert packer.get_rollout_output(plain)["text"] == text, "get_rollout_output and decode give different texts"

    def test_it_travels_to_other_processes(self, packer: DataPacker) -> None:
        there = travelled(packer)
        for prompt in self.prompts:
            assert self.ids(there, prompt) == self.ids(packer, prompt), "the copy in another process gives other ids"
        for made in self.trajectories(packer):
            assert there.get_policy_input(made) == packer.get_policy_input(made), "the copy in another process gives other rows"

    def test_the_factory_takes_nothing_and_a_name_is_needed(self, packer: DataPacker) -> None:
        try:
            fresh, other = type(packer)(), type(packer)()
        except TypeError as exc:
            pytest.fail(f"{type(packer).__name__}() failed: {exc}. Take no arguments; the model arrives through setup")
        assert fresh is not other, "the factory must return a fresh packer each time"
        with pytest.raises(PackerError, match="empty name_or_path"):
            fresh.setup("")

    def test_it_holds_no_weights(self, packer: DataPacker) -> None:
        found = [name for name, value in vars(packer).items() if isinstance(value, torch.Tensor | torch.nn.Module)]
        assert not found, f"self.{found[0]} is a tensor or a model: a packer holds no weights and calls no model"

    def test_state_survives_a_crash(self, packer: DataPacker) -> None:
        if not has_state(packer):
            pytest.skip("has no state_dict")
        survives_a_crash(packer, lambda made: [made.get_policy_input(t) for t in self.trajectories(made)])

    # --- how ----------------------------------------------------------------------------------------------------------

    def same_row(self, packer: DataPacker, made: Trajectory) -> tuple[list[int], list[bool]]:
        """Ids and mask of a row. Fails with the words of a run when it is not the trajectory."""
        by_value(packer)
        try:
            ids, mask, _ = packed_row(packer, copy.deepcopy(made))
        except PackerError as exc:
            pytest.fail(str(exc))
        return ids, mask


def _producers(packed: PackedRows) -> Sequence[list[tuple[int, int]]]:
    """Per row, for each trained token: the id at the position that predicts it, and the id itself."""
    flat = torch.cat([forward.input_ids.flatten() for forward in packed.forwards])
    pairs = list(zip(flat[packed.predictors].tolist(), packed.targets.tolist(), strict=True))
    found, start = [], 0
    for length in packed.lengths:
        found.append(pairs[start : start + length])
        start += length
    return found
