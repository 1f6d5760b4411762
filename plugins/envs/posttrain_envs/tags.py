"""What of a completion counts: the text outside the model's thinking, and the tags in it.

    visible("<think>maybe 9</think> It is 12.")    # " It is 12."
    visible("<think>maybe 12")                     # "": it never stopped thinking, so it has not answered

A `</think>` without its opening tag is right too: many prompts open the tag for the model. All functions are linear in the text.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"</?(?:think|answer)>")


def visible(text: str) -> str:
    """What follows the last `</think>`, up to a `<think>` that is never closed."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def last_answer(text: str) -> str | None:
    """What the last `<answer>…</answer>` holds, stripped; None without one."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, inside = before.rpartition("<answer>")
    return inside.strip() if closing and opening else None


def well_formed(text: str) -> bool:
    """Whether every tag is closed by its own kind, in order. Inside thinking only `</think>` is a tag."""
    tags = _TAG.findall(text)
    if "</think>" in tags and "<think>" not in tags[: tags.index("</think>")]:
        del tags[: tags.index("</think>") + 1]  # the prompt opened it
    opened = None
    for tag in tags:
        if opened == "<think>" and tag != "</think>":
            continue
        if tag.startswith("</"):
            if opened != tag.replace("/", ""):
                return False
            opened = None
        elif opened is not None:
            return False
        else:
            opened = tag
    return opened is None
