"""Names that cannot be guessed for things that come and go, and why those that went are over."""

from __future__ import annotations

import secrets
from typing import Generic, TypeVar

T = TypeVar("T")
REMEMBERED = 100_000


class Tokens(Generic[T]):
    """Live things by token; of the last `REMEMBERED` that ended, the reason."""

    def __init__(self) -> None:
        self._live: dict[str, T] = {}
        self._over: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, thing: T) -> str:
        token = secrets.token_urlsafe(16)
        self._live[token] = thing
        return token

    def get(self, token: str) -> T | str | None:
        """The thing, or why it is over, or None when there never was one."""
        return self._live.get(token) or self._over.get(token)

    def retire(self, token: str, reason: str) -> None:
        self._live.pop(token, None)
        self._over[token] = reason
        if len(self._over) > REMEMBERED:
            self._over.pop(next(iter(self._over)))

    def all(self) -> list[T]:
        return list(self._live.values())
