"""What happened, in order: virtual time, who, what."""

from __future__ import annotations

from collections.abc import Callable


class Trace:
    """`lines` of all lives. `keep` False: nothing is kept, for speed."""

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self.lines: list[str] = []
        self.life = 0
        self.clock: Callable[[], float] = lambda: 0.0

    def __call__(self, who: str, what: str) -> None:
        if self.keep:
            self.lines.append(f"{self.life} {self.clock():10.3f}  {who:<10} {what}")

    def __str__(self) -> str:
        return "\n".join(["life seconds    who        what", *self.lines])
