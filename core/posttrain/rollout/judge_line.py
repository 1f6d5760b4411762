"""All that waits for one judge: a limit of requests at a time, and one back-off for everybody.

When an endpoint says "too many" (429, 503), whoever asks it waits: for as long as it asked for (`Retry-After`), else for a pause
that doubles with every further refusal until an answer comes through. A hundred requests refused at once are one refusal.
Connections are kept while anybody asks, and closed when nobody does: there is nothing to close.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: Mapping[str, str]
    text: str


class Unreachable(Exception):
    """No answer: refused, broken off, or `late`."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class Line:
    """The requests of one event loop to one `base_url`."""

    _all: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Line]]] = weakref.WeakKeyDictionary()

    def __init__(self, concurrency: int) -> None:
        self._room = asyncio.Semaphore(concurrency)
        self._open_at = 0.0
        self._refusals = 0  # in a row
        self._era = 0  # refusals in all: tells a new one from an echo
        self._users = 0
        self._http: Any = None

    @classmethod
    def of(cls, base_url: str, concurrency: int) -> Line:
        lines = cls._all.setdefault(asyncio.get_running_loop(), {})
        return lines.setdefault(base_url.rstrip("/"), cls(concurrency))

    @contextlib.asynccontextmanager
    async def turn(self, spread_s: float) -> AsyncIterator[int]:
        """Wait until there is room and nobody is to wait; yields what `hold` wants to know.

        spread_s: after a common pause, so that not all begin at once.
        """
        async with self._room:
            while (left := self.held_s) > 0:
                await asyncio.sleep(left + spread_s)
            yield self._era

    @property
    def held_s(self) -> float:
        """How long everybody is to wait yet, seconds."""
        return max(self._open_at - time.monotonic(), 0.0)

    def hold(self, era: int, asked_s: float | None, delay_s: float, longest_s: float) -> None:
        """A request that began in `era` was told to wait: everybody waits."""
        if era == self._era:
            self._era += 1
            self._refusals += 1
            doubled = min(delay_s * 2 ** (self._refusals - 1), longest_s)
            self._open_at = max(self._open_at, time.monotonic() + (doubled if asked_s is None else asked_s))
        elif asked_s is not None:
            self._open_at = max(self._open_at, time.monotonic() + asked_s)

    async def post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float) -> Response:
        """Raises Unreachable."""
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                self._client() as http,
                http.post(url, json=body, headers=headers, timeout=limit, allow_redirects=False) as answer,
            ):
                found = Response(answer.status, answer.headers, await answer.text(errors="replace"))
        except TimeoutError as exc:
            raise Unreachable(f"no answer within {timeout_s:g} s (request_s)", late=True) from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise Unreachable(f"{type(exc).__name__}: {exc}") from exc
        if found.status == 200:
            self._refusals = 0
        return found

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        import aiohttp

        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        self._users += 1
        try:
            yield self._http
        finally:
            self._users -= 1
            if not self._users:
                http, self._http = self._http, None
                await http.close()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait: `retry-after-ms`, or `Retry-After` as seconds or as a date; None when it does not."""
    with contextlib.suppress(ValueError):
        return max(float(headers["retry-after-ms"]) / 1000, 0.0) if "retry-after-ms" in headers else _plain(headers)
    with contextlib.suppress(ValueError, TypeError):
        return max(parsedate_to_datetime(headers["Retry-After"]).timestamp() - time.time(), 0.0)
    return None


def _plain(headers: Mapping[str, str]) -> float | None:
    value = headers.get("Retry-After")
    return None if value is None else max(float(value), 0.0)
