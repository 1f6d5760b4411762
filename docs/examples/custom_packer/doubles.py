"""A packer and a dataset in a repository of one's own: nothing here is part of posttrain, and nothing is registered.

The problems are doubles (`7+7`). The packer writes a text prompt in a form that the dataset does not have, with a leading `?`.
Everything else (ids, chat template, masks, padding) it inherits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.data.environment import Prompt
from posttrain_datapackers.decoder_only import DecoderOnlyPacker


class Doubles(DecoderOnlyPacker):
    """Puts a question mark before every text prompt."""

    def get_rollout_input(self, prompt: Prompt) -> dict[str, Any]:
        return super().get_rollout_input(f"?{prompt}" if isinstance(prompt, str) else prompt)


def make_packer() -> Doubles:
    """The zero-argument factory that `rl.data.packer` names."""
    return Doubles()


def rows(count: int, first: int = 0) -> list[Mapping[str, Any]]:
    """The dataset factory that `rl.data.factory` names; its arguments come from `rl.data.factory_kwargs`."""
    return [{"id": f"double-{n}", "problem": f"{n}+{n}", "answer": str(2 * n)} for n in range(first, first + count)]
