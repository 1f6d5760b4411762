"""The special-token guard: a BOS or EOS must be in the ids exactly as often as the model expects.

A tokenizer that merely has a BOS is fine. Two things are not: text handed to an engine by a tokenizer that puts special
tokens around it (the engine would put them there once more, or not at all), and ids in which the BOS is doubled or missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.errors import error

_PROBE = "a"


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a tokenizer puts around a plain text, ids before it (BOS) and after it (EOS), and the ids that `stop` a completion."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()

    @classmethod
    def probe(cls, tokenizer: Any, stop: Sequence[int] = ()) -> SpecialTokens:
        bare = list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
        full = list(tokenizer(_PROBE)["input_ids"])
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return cls(tuple(full[:start]), tuple(full[start + len(bare) :]), tuple(stop))
        return cls(stop=tuple(stop))

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """The ids of a plain-text prompt: the prefix once (also when the text spells it), never the suffix.

        An EOS that the tokenizer appends ends a text; a prompt goes on, so it does not belong there.
        """
        prefix = list(self.prefix)
        return list(ids) if list(ids[: len(prefix)]) == prefix else prefix + list(ids)

    def check(self, ids: Sequence[int]) -> None:
        """Raise E13 when the BOS that the tokenizer puts before a text is missing from a prompt, or is there twice."""
        n = len(self.prefix)
        if not n:
            return
        if tuple(ids[:n]) != self.prefix:
            raise error("E13", reason=f"the ids miss the tokenizer's leading {list(self.prefix)}: they begin {list(ids[:4])}; "
                        "the chat template does not write the BOS that the tokenizer puts before a plain text")
        if tuple(ids[n : 2 * n]) == self.prefix:
            raise error("E13", reason=f"the leading {list(self.prefix)} is there twice: the ids begin {list(ids[:4])}")

    def check_ending(self, ids: Sequence[int]) -> None:
        """Raise E13 when a completion that stopped ends with its stop token twice."""
        if len(ids) > 1 and ids[-1] in self.stop and ids[-2] == ids[-1]:
            raise error("E13", reason=f"the completion ends with the stop token {ids[-1]} twice")

    def check_text(self) -> None:
        """Raise E13 when text may not be handed to an engine: the tokenizer would add special tokens to it."""
        if self.prefix or self.suffix:
            raise error("E13", reason=f"it puts {list(self.prefix)} before and {list(self.suffix)} after a plain text, "
                        "so text handed to an engine would get them twice or not at all")
