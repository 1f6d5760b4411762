"""Preference pairs for decoder-only language models: one prompt, two completions, tokenised apart.

    ids = packer.get_preference_input(Pair("2+2=", "4", "5"), max_len=64, truncate="keep_end")
    ids.prompt_ids, ids.chosen_ids, ids.rejected_ids

The prompt goes the way of every prompt (chat template with generation prompt, or text with its BOS); a completion is tokenised
without special tokens and gets, once, the token that ends the model's turn. So the prompt's ids are the same in both rows, no
token spans the border, and the trained tokens are those that the model would sample.
"""

from __future__ import annotations

from posttrain.data.environment import is_messages
from posttrain.data.preference import Pair, PairIds, Truncate, fit
from posttrain_datapackers.decoder_only import BASE, MARK, DecoderOnlyPacker


class PreferencePacker(DecoderOnlyPacker):
    """Pairs of completions that come with the data, for decoder-only language models."""

    def get_preference_input(self, pair: Pair, *, max_len: int, truncate: Truncate) -> PairIds:
        prompt = self.get_rollout_input(pair.prompt)["prompt_ids"]
        end = self.turn_end() if is_messages(pair.prompt) else self.text_end()
        chosen, rejected = ([*self._completion(text), *end] for text in (pair.chosen, pair.rejected))
        return fit(prompt, chosen, rejected, max_len=max_len, truncate=truncate, bos=len(self.special_tokens.prefix))

    def turn_end(self) -> list[int]:
        """What the chat template writes after an assistant's words, up to the first stop token of the model."""
        text = self.render(BASE, add_generation_prompt=False)
        closing = self.encode(text.rpartition(MARK)[2]) if MARK in text else []
        for place, token in enumerate(closing):
            if token in self.special_tokens.stop:
                return closing[: place + 1]
        return self.text_end()

    def text_end(self) -> list[int]:
        """The EOS of the tokenizer where the model stops at it, else the model's first stop token; none if it has none."""
        eos, stop = self.tokenizer.eos_token_id, self.special_tokens.stop
        return [eos] if eos is not None and (eos in stop or not stop) else list(stop[:1])

    def _completion(self, text: str) -> list[int]:
        """The ids of a completion without stop tokens at its end, which data may have written out."""
        ids = self.encode(text)
        while ids and ids[-1] in self.special_tokens.stop:
            ids.pop()
        return ids
