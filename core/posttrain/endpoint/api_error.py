"""Errors as the OpenAI API has them: a status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    409: "conflict_error", 410: "session_over", 413: "request_too_large", 429: "rate_limit_error",
}  # fmt: skip

TOO_LONG = "context_length_exceeded"
"""The code by which clients know that a conversation has become too long."""


class ApiError(Exception):
    """What is answered instead of a completion. `retry_after`: seconds, for a client that asks again.

    400 the request itself · 401 the key · 404 no such session, model or path · 409 the engine has no weights yet · 410 the
    session is over · 413 the body is too large · 429 too many at once · 500 the engine failed. Clients ask again after 409, 429
    and 5xx.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400."""
    return ApiError(400, message, code=code, param=param)
