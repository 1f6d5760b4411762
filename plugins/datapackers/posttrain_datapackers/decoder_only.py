"""Text prompts for decoder-only language models: chat template in, token ids out, right-padded rows for the policy.

Messages go through the chat template, and the text it renders is tokenised without special tokens (it writes its own). A
plain string gets the BOS that the tokenizer puts before a text, once, and never its EOS: a prompt goes on. Ids pass as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from posttrain.data.environment import Prompt, is_messages
from posttrain.data.packer import DataPacker
from posttrain.data.tool_calls import MARKS
from posttrain.errors import PackerError
from posttrain.types import Message, Trajectory

if TYPE_CHECKING:
    import torch

MARK = "last-words"
BASE: tuple[Message, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": MARK})
"""A conversation to render: what the template writes after `MARK` ends an assistant's turn."""


class DecoderOnlyPacker(DataPacker):
    """Decoder-only language models: messages, a string or ids in; rows padded on the right out."""

    _special: frozenset[int] = frozenset()
    _marks: frozenset[int] = frozenset()

    def setup(self, name_or_path: str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> DataPacker:
        """As the base class; and find the special tokens that mark tool calls, which are words to whoever reads a turn."""
        super().setup(name_or_path, chat_template=chat_template, trust_remote_code=trust_remote_code)
        special = {number: str(token) for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        self._marks = frozenset(id for id, token in special.items() if token in MARKS and id not in self.special_tokens.stop)
        self._special = frozenset(special) - self._marks
        return self

    def get_rollout_input(self, prompt: Prompt) -> dict[str, Any]:
        """`{"prompt_ids": list[int]}`. Raises E13 for a doubled or missing BOS, PackerError for a prompt of another type."""
        if is_messages(prompt):
            tools = getattr(prompt, "tools", None)
            ids = self.encode(self.render(prompt, **({"tools": tools} if tools else {})))  # type: ignore[arg-type]
        elif isinstance(prompt, str):
            ids = self.special_tokens.prompt(self.encode(prompt))
        elif isinstance(prompt, Sequence) and prompt and all(isinstance(i, int) for i in prompt):
            ids = [int(i) for i in prompt]  # type: ignore[arg-type]
        else:
            raise PackerError(
                f"a prompt must be messages, a string or token ids, got {_describe(prompt)}",
                cause="format_prompt of the environment returned something else, or nothing",
                fix="return a non-empty list of {'role': …, 'content': …}, a str, or a list of int",
            )
        if not ids:
            raise PackerError("the prompt has no tokens", cause="format_prompt returned an empty text", fix="return some text")
        self.special_tokens.check(ids)
        return {"prompt_ids": ids}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens, but for those that mark tool calls, and without the stop token at its end, which some
        tokenizers take for a word."""
        ids = list(token_ids)
        if ids and ids[-1] in self.special_tokens.stop:
            ids.pop()
        if not self._marks.isdisjoint(ids):
            return self.spell([i for i in ids if i not in self._special])
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def get_policy_input(self, trajectory: Trajectory) -> dict[str, Any]:
        """The prompt, untrained, followed by the trajectory's own ids, mask and log-probs."""
        prompt = len(trajectory.prompt_ids)
        return {
            "input_ids": [*trajectory.prompt_ids, *trajectory.token_ids],
            "mask": [False] * prompt + list(trajectory.mask),
            "rollout_logprobs": [0.0] * prompt + list(trajectory.rollout_logprobs),
        }

    def policy_compute_max_len(self, items: Sequence[Mapping[str, Any]]) -> int:
        return max((len(item["input_ids"]) for item in items), default=0)

    def policy_collate_fn(self, items: Sequence[Mapping[str, Any]], max_len: int) -> dict[str, torch.Tensor]:
        """`input_ids` and `position_ids` int64, `mask` and `attention_mask` bool, `rollout_logprobs` float32, all `[B, max_len]`.

        Raises PackerError when a row is longer than `max_len`: cutting it would drop trained tokens.
        """
        import torch

        longest = self.policy_compute_max_len(items)
        if longest > max_len:
            raise PackerError(f"a row has {longest} tokens, the batch {max_len} columns", cause="max_len is too small",
                              fix="pass policy_compute_max_len(items)")
        shape = (len(items), max_len)
        out = {
            "input_ids": torch.full(shape, self._pad_id(), dtype=torch.int64),
            "mask": torch.zeros(shape, dtype=torch.bool),
            "attention_mask": torch.zeros(shape, dtype=torch.bool),
            "rollout_logprobs": torch.zeros(shape, dtype=torch.float32),
            "position_ids": torch.arange(max_len).repeat(len(items), 1),
        }
        for row, item in enumerate(items):
            length = len(item["input_ids"])
            out["input_ids"][row, :length] = torch.tensor(item["input_ids"], dtype=torch.int64)
            out["mask"][row, :length] = torch.tensor(item["mask"], dtype=torch.bool)
            out["attention_mask"][row, :length] = True
            if "rollout_logprobs" in item:
                out["rollout_logprobs"][row, :length] = torch.tensor(item["rollout_logprobs"], dtype=torch.float32)
        return out

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """`ids` and what the template writes between an assistant turn and the next one, `messages` included.

        The added text is what follows the last words of a fixed conversation, so the sampled ids are never rendered again. Its
        overlap with the end of `ids` (the sampled stop token) is written once. What the template makes of the turn before those
        words, when another follows, is not looked at: whoever must have it as the template does compares (`loop.episode`).
        """
        before = self.render(BASE, add_generation_prompt=False)
        after = self.render([*BASE, *messages])
        closing, found = before[before.rfind(MARK) + len(MARK) :], after.find(MARK)
        start = found + len(MARK)
        if MARK not in before or found < 0 or not after.startswith(closing, start):
            raise PackerError(
                "the chat template rewrites earlier turns, so the next prompt cannot continue the sampled ids",
                cause="rendering a conversation does not begin with the rendering of its first turns",
                fix="set model.chat_template to one that only appends", where="model.chat_template",
            )
        added, longest = self.encode(after[start:]), len(self.encode(closing))
        overlap = next((n for n in range(min(longest, len(ids)), 0, -1) if list(ids[-n:]) == added[:n]), 0)
        return [*ids, *added[overlap:]]

    def _pad_id(self) -> int:
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return 0 if pad is None else int(pad)


def _describe(prompt: object) -> str:
    return f"an empty {type(prompt).__name__}" if not prompt else f"{type(prompt).__name__}: {str(prompt)[:80]!r}"
