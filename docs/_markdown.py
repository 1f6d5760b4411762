"""Pieces of Markdown that the generators share."""

from __future__ import annotations

import re
from collections.abc import Sequence

GROUPS = "model|rl|rollout|grid|validation|weights|loop|checkpoint|tracking"
KEY = re.compile(rf"(?<![\w.`])((?:{GROUPS})\.[a-z][\w.]*\w(?:=(?:\[[^\]]*\]|\w+))?)")
"""A key of the configuration, perhaps with a value, in running text."""
TAG = re.compile(r"(?<!`)(</?\w+>(?:…</?\w+>)?)(?!`)")
"""A tag, or an opening and a closing one, in running text."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([row(head), row(["---"] * len(head)), *map(row, rows)]) + "\n"


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def prose(comment: str) -> str:
    """A comment of the code as Markdown: keys and tags are code, stars are stars."""
    return TAG.sub(r"`\1`", KEY.sub(r"`\1`", comment.replace("*", r"\*")))
