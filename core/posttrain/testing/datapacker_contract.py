"""The laws of a DataPacker as tests: subclass, give one fixture.

    class TestMine(DataPackerContract):
        @pytest.fixture
        def packer(self, tmp_path):
            return MyPacker().setup(str(tmp_path / "model"))
"""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

import pytest
import torch

from posttrain.data.environment import Prompt
from posttrain.data.packer import DataPacker
from posttrain.errors import PackerError
from posttrain.types import Message, Trajectory, Turn


class DataPackerContract:
    """What every packer of token sequences does. `prompts` are what it must take."""

    prompts: ClassVar[tuple[Prompt, ...]] = ("ab", [Message(role="user", content="ab")])

    @pytest.fixture
    def packer(self) -> DataPacker:
        raise NotImplementedError("give the contract a packer that is set up")

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
        )

    def test_prompts_become_ids_the_same_every_time(self, packer: DataPacker) -> None:
        for prompt in self.prompts:
            ids = self.ids(packer, prompt)
            assert ids and all(isinstance(i, int) for i in ids) and self.ids(packer, prompt) == ids

    def test_ids_pass_as_they_are(self, packer: DataPacker) -> None:
        ids = self.ids(packer, self.prompts[0])
        assert self.ids(packer, ids) == ids

    def test_the_row_is_the_trajectory_to_the_token(self, packer: DataPacker) -> None:
        """`mask[t]` is about token `t` itself; a packer ported from a library that masks predictions is off by one here."""
        made = self.trajectory(packer)
        item, prompt = packer.get_policy_input(made), len(made.prompt_ids)
        assert list(item["input_ids"]) == made.prompt_ids + made.token_ids
        assert [bool(m) for m in item["mask"]] == [False] * prompt + made.mask

    def test_batches_are_padded_cpu_tensors(self, packer: DataPacker) -> None:
        made = self.trajectory(packer)
        short = Trajectory(made.prompt_ids, made.token_ids[:1], [True], [-0.5], [3], "length")
        items: list[dict[str, Any]] = [packer.get_policy_input(t) for t in (made, short)]
        width = packer.policy_compute_max_len(items)
        batch = packer.policy_collate_fn(items, width)
        assert all(isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in batch.values())
        for row, item in enumerate(items):
            length = len(item["input_ids"])
            assert batch["input_ids"][row, :length].tolist() == list(item["input_ids"])
            assert batch["mask"][row].tolist() == [bool(m) for m in item["mask"]] + [False] * (width - length)

    def test_the_next_turn_begins_with_what_was_sampled(self, packer: DataPacker) -> None:
        made = self.trajectory(packer)
        before = made.prompt_ids + made.token_ids[:2]
        try:
            after = packer.extend(before, [{"role": "user", "content": "ab"}])
        except PackerError:
            pytest.skip("this packer or its template does not continue conversations, and says so")
        assert after[: len(before)] == before and len(after) > len(before)

    def test_it_travels_to_other_processes(self, packer: DataPacker) -> None:
        copy = pickle.loads(pickle.dumps(packer))
        assert self.ids(copy, self.prompts[-1]) == self.ids(packer, self.prompts[-1])

    def test_the_factory_takes_nothing_and_a_name_is_needed(self, packer: DataPacker) -> None:
        fresh = type(packer)()
        assert fresh is not type(packer)()
        with pytest.raises(PackerError, match="empty name_or_path"):
            fresh.setup("")

    def test_it_holds_no_weights(self, packer: DataPacker) -> None:
        assert not any(isinstance(value, torch.Tensor | torch.nn.Module) for value in vars(packer).values())
