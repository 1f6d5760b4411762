"""One wave of the embedded engine: rows that decode together, from their prompts to their last token.

Prompts are padded on the left and computed once per request; every position is explicit, and padding is found by length,
never by id. A row that has ended leaves the batch when a quarter of the rows have ended. All of this depends on ids alone,
so the same requests under the same weights give the same bits.

Columns: `0..P-1` hold the padded prompt, `P..P+M-1` the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.rollout.kv_cache import cache_argument, new_cache, select_rows
from posttrain.rollout.sampling import draw, is_stop, processed_logprobs
from posttrain.types import Completion, FinishReason, Sampling

RETIRE_SHARE = 0.25
"""Rows leave the batch when at least this share of them has ended."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One sample of one request: `noise` is its row of uniforms, `prompt` its index among the wave's distinct prompts."""

    request_id: str
    index: int
    prompt: int
    budget: int
    noise: torch.Tensor


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts padded on the left: ids, valid (bool), position ids, each `[G, P]`. Real tokens have positions 0, 1, …"""
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    valid = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.int64)
        valid[row, width - len(prompt) :] = True
    return ids, valid, (valid.cumsum(1) - 1).clamp_(min=0)


def causal_mask(valid: torch.Tensor) -> torch.Tensor:
    """Who attends to whom: bool `[B, 1, L, L]` from valid `[B, L]`. Padding attends to itself only, so that no row is empty."""
    length = valid.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (causal & valid[:, None, None, :]) | torch.eye(length, dtype=torch.bool)


class Wave:
    """Decodes `slots` of `prompts` in lockstep. `step(version)` draws one token for every row and yields what has ended.

    model       causal LM whose attention is `posttrain_decode`
    stop_ids    every id that ends a completion
    sampling    shared by all rows; `max_tokens` is per row, in `Slot.budget`
    spell       the text of ids, special tokens too; for `sampling.stop`
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], slots: Sequence[Slot], sampling: Sampling, stop_ids: Sequence[int],
        spell: Callable[[Sequence[int]], str] | None = None,
    ) -> None:  # fmt: skip
        self._spell, self._longest = spell, max((len(text.encode()) for text in sampling.stop), default=0)
        self.model, self.sampling = model, sampling
        self.cache_argument = cache_argument(model)
        self.stop_ids = () if sampling.ignore_eos else tuple(dict.fromkeys((*stop_ids, *sampling.stop_token_ids)))
        self.slots = list(slots)
        self.room = max(slot.budget for slot in slots)
        ids, valid, positions = left_pad(prompts)
        self.width = ids.shape[1]
        owner = torch.tensor([slot.prompt for slot in slots])
        self.cache, logits = self._forward(ids, valid, positions)
        select_rows(self.cache, owner)
        self.logits = logits[owner]
        self.ids = torch.cat([ids[owner], torch.zeros(len(slots), self.room, dtype=torch.int64)], dim=1)
        self.valid = torch.cat([valid[owner], torch.ones(len(slots), self.room, dtype=torch.bool)], dim=1)
        self.next_position = positions[owner, -1:] + 1
        self.noise = torch.zeros(len(slots), self.room, dtype=torch.float64)
        for row, slot in enumerate(slots):
            self.noise[row, : slot.budget] = slot.noise[: slot.budget]
        self.logprobs = torch.zeros(len(slots), self.room)
        self.budgets = torch.tensor([slot.budget for slot in slots])
        self.ended = torch.zeros(len(slots), dtype=torch.bool)
        self.versions: list[int] = []
        self.rows = torch.arange(len(slots))
        self._shortest = min(slot.budget for slot in slots)

    @property
    def running(self) -> bool:
        return len(self.rows) > 0

    def step(self, version: int) -> list[Completion]:
        """Draw token `t` of every row from the logits at hand, retire what ended, run the forward for the next token."""
        t = len(self.versions)
        logprobs = processed_logprobs(self.logits, self.sampling)
        tokens, chosen = draw(logprobs, self.noise[:, t], greedy=self.sampling.temperature == 0)
        self.ids[:, self.width + t], self.logprobs[:, t] = tokens, chosen
        self.versions.append(version)
        done = self._retire(tokens, t)
        if self.running:
            self._advance(t)
        return done

    def abort(self, request_id: str) -> list[Completion]:
        """End every unfinished row of a request where it is."""
        mine = [r for r in range(len(self.rows)) if not self.ended[r] and self.slots[int(self.rows[r])].request_id == request_id]
        done = [self._complete(r, len(self.versions), "aborted") for r in mine]
        self.ended[mine] = True
        self._drop_ended(force=True)
        return done

    def recompute(self) -> None:
        """Compute the cache of all running rows again, under the weights now in place."""
        end = self.width + len(self.versions)
        if self.running and len(self.versions):
            positions = (self.valid[:, :end].cumsum(1) - 1).clamp_(min=0)
            self.cache, self.logits = self._forward(self.ids[:, :end], self.valid[:, :end], positions)

    def _retire(self, tokens: torch.Tensor, t: int) -> list[Completion]:
        stopped = is_stop(tokens, self.stop_ids)
        if self._longest:
            stopped |= self._spelled(t)
        if t + 1 < self._shortest and not bool(stopped.any()):
            return []
        fresh = (stopped | (self.budgets == t + 1)) & ~self.ended
        flags = stopped.tolist()
        done = [self._complete(r, t + 1, "stop" if flags[r] else "length") for r in fresh.nonzero().flatten().tolist()]
        self.ended |= fresh
        self._drop_ended()
        return done

    def _spelled(self, t: int) -> torch.Tensor:
        """Which rows have spelled a stop text with token `t`: bool `[B]`. A token spells a byte of it at least."""
        assert self._spell is not None, "stop texts need a tokenizer"
        tails = self.ids[:, self.width + max(0, t + 1 - self._longest) : self.width + t + 1].tolist()
        texts = [self._spell(tail) for tail in tails]
        return torch.tensor([any(stop in text for stop in self.sampling.stop) for text in texts], dtype=torch.bool)

    def _complete(self, row: int, length: int, reason: FinishReason) -> Completion:
        slot = self.slots[int(self.rows[row])]
        ids = self.ids[row, self.width : self.width + length].tolist()
        return Completion(slot.request_id, slot.index, ids, self.logprobs[row, :length].tolist(), self.versions[:length], reason)

    def _drop_ended(self, *, force: bool = False) -> None:
        ended = int(self.ended.sum())
        if not ended or (not force and ended < RETIRE_SHARE * len(self.rows) and ended < len(self.rows)):
            return
        keep = (~self.ended).nonzero().flatten()
        for name in ("rows", "ids", "valid", "next_position", "noise", "logprobs", "budgets", "ended", "logits"):
            setattr(self, name, getattr(self, name)[keep])
        if len(keep):
            select_rows(self.cache, keep)

    def _advance(self, t: int) -> None:
        column = self.width + t
        self.logits = self.model(
            input_ids=self.ids[:, column : column + 1],
            attention_mask=self.valid[:, None, None, : column + 1],
            position_ids=self.next_position,
            use_cache=True,
            **{self.cache_argument: self.cache},
        ).logits[:, -1]
        self.next_position = self.next_position + 1

    def _forward(self, ids: torch.Tensor, valid: torch.Tensor, positions: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Compute whole rows `[B, L]` into a new cache; returns it and the logits `[B, V]` of the last column."""
        cache = new_cache(self.model.config.num_hidden_layers, self.width + self.room)
        out = self.model(
            input_ids=ids,
            attention_mask=causal_mask(valid),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self.cache_argument: cache},
        )
        return cache, out.logits[:, -1]
