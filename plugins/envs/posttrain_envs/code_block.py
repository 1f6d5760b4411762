"""The program in a completion: the last fenced block after the model's thinking.

    program("<think>…</think> So:\\n```python\\nprint(1)\\n```\\n")         # "print(1)\\n"

A block that is marked as Python goes before one without a mark (which may be an example of output); blocks of other languages are
none, and neither is one that is never closed: the model was cut off in it. Linear in the text.
"""

from __future__ import annotations

import re

from posttrain_envs.tags import visible

_FENCE = re.compile(r"[ \t]{0,3}(`{3,}|~{3,})[ \t]*([^`\n]*)")
_PYTHON = {"python", "py", "python3", "py3"}


def program(completion: str) -> str | None:
    """The last Python block; None without one."""
    marked = plain = None
    for language, text in _blocks(visible(completion)):
        if language in _PYTHON:
            marked = text
        elif not language:
            plain = text
    return plain if marked is None else marked


def _blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of every closed block, in order."""
    found: list[tuple[str, str]] = []
    fence, language = "", ""
    inside: list[str] = []
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line.rstrip("\r"))
        if not fence:
            if match:
                fence, language, inside = match[1], match[2].strip().split(" ")[0].lower(), []
        elif match and match[1][0] == fence[0] and len(match[1]) >= len(fence) and not match[2].strip():
            found.append((language, "".join(f"{part}\n" for part in inside)))
            fence = ""
        else:
            inside.append(line)
    return found
