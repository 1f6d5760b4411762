"""The HTTP server: routes, keys, JSON and event streams, errors in OpenAI's form. Loopback only.

    GET  /health                         GET  /v1/models
    POST /v1/chat/completions            POST /v1/completions        without a session: nothing is recorded
    …    /s/TOKEN/v1/…                                               the same of one session

A client that goes away cancels its request, in the engine too.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from posttrain.config.secrets import conceal_text
from posttrain.data.seeds import derive_seed
from posttrain.endpoint import replies
from posttrain.endpoint.answering import Answering
from posttrain.endpoint.api_error import ApiError, bad
from posttrain.endpoint.asked import Asked, read_chat, read_text
from posttrain.endpoint.session import Reply, Session
from posttrain.endpoint.together import Together
from posttrain.endpoint.tokens import Tokens
from posttrain.errors import PosttrainError
from posttrain.placement.ports import Holder, holder, occupied
from posttrain.types import Sampling

if TYPE_CHECKING:
    from posttrain.data.packer import DataPacker
    from posttrain.rollout.engine import Generates

HOST = "127.0.0.1"
KEEP_ALIVE_S = 10.0
"""A stream says something at least this often while it waits, so that no client takes it for dead."""
LARGE = 32 << 10
"""Bytes of a request from which on it is not read on the event loop."""
_log = logging.getLogger("posttrain.endpoint")
Read = Callable[[Any], Asked]


class Endpoint:
    """Serves one engine under the name `model`. All methods are called on one event loop.

    max_tokens   tokens of an answer without a session, where the request does not say
    api_key      what requests without a session must bring; None: nothing
    max_body     bytes of a request
    max_open     requests that may wait at a time; more are answered 429
    sessions_only  requests without a session are answered 404
    one_by_one   the engine answers one call after the other (`hf`): requests are gathered into calls
    """

    def __init__(
        self,
        engine: Generates,
        packer: DataPacker,
        *,
        max_model_len: int,
        model: str = "posttrain",
        max_tokens: int = 512,
        api_key: str | None = None,
        max_body: int = 16 << 20,
        max_open: int = 4096,
        seed: int = 0,
        sessions_only: bool = False,
        one_by_one: bool = False,
    ) -> None:
        self._together = Together(engine) if one_by_one else None
        self.model, self.port = model, 0
        self._answering = Answering(self._together or engine, packer, max_model_len)
        self._max_tokens, self._api_key, self._seed = max_tokens, api_key, seed
        self._max_body, self._max_open, self._sessions_only = max_body, max_open, sessions_only
        self._sessions: Tokens[Session] = Tokens()
        self._open = self._asked = 0
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0, *, chosen_by: str = "rollout.base_port") -> None:
        """Listen on `port` of this machine's loopback; 0: any that is free. Raises ConfigError naming who has it already."""
        app = web.Application(client_max_size=self._max_body, middlewares=[_errors])
        for prefix in ("", "/s/{token}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{name:.+}}", self._models)
            app.router.add_post(f"{prefix}/v1/chat/completions", lambda r: self._complete(r, read_chat))
            app.router.add_post(f"{prefix}/v1/completions", lambda r: self._complete(r, read_text))
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as exc:
            await runner.cleanup()
            if exc.errno != errno.EADDRINUSE:
                raise
            found = await asyncio.to_thread(holder, port)
            raise occupied(found or Holder(port), chosen_by) from exc
        self._runner, self.port = runner, runner.addresses[0][1]

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._sessions)

    @property
    def base_url(self) -> str:
        """Where requests without a session go."""
        return f"http://{HOST}:{self.port}/v1"

    def open(
        self,
        *,
        sampling: Sampling,
        seed: int,
        name: str = "",
        verbatim: bool = False,
        max_turns: int | None = None,
        max_open: int = 64,
        trains: bool = True,
        priority: int = 0,
    ) -> Session:
        """A session for one episode, to be closed: `with endpoint.open(…) as session`.

        sampling: the run's; its temperature is the only one, its max_tokens the most.   seed: of all that is sampled here.
        verbatim: `rollout.keep_history_verbatim`.   max_turns: answers, after which the session is over.
        max_open: requests at a time; more are answered 429.   trains: a request that would sample otherwise is refused; where
        nothing trains, it is answered under `sampling`.   priority: of its first request in the engine; each later one has
        one less, so that it goes before those of younger episodes.
        """
        session = Session(
            self._answering, sampling, seed, name=name, verbatim=verbatim, max_turns=max_turns, max_open=max_open,
            trains=trains, priority=priority,
        )
        token = self._sessions.add(session)
        session.base_url = f"http://{HOST}:{self.port}/s/{token}/v1"
        session.on_close = lambda: self._sessions.retire(token, session.over)
        return session

    async def close(self) -> None:
        """Close all sessions and stop listening; idempotent."""
        for session in self._sessions.all():
            session.close("the endpoint was shut down")
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
        if self._together is not None:
            await self._together.close()
        self._answering.close()

    # ---- routes

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model": self.model, "sessions": self.sessions, "open": self._open})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        name = request.match_info.get("name")
        self._check_model(name or self.model)
        one = {"id": self.model, "object": "model", "created": 0, "owned_by": "posttrain"}
        return web.json_response(one if name else {"object": "list", "data": [one]})

    async def _complete(self, request: web.Request, read: Read) -> web.StreamResponse:
        session = self._session(request)
        if self._open >= self._max_open:
            raise ApiError(429, f"{self._open} requests are waiting already; ask again", code="too_many_requests", retry_after=1)
        self._open += 1
        try:
            raw = await request.read()
            asked = await self._answering.in_thread(_read, read, raw) if len(raw) > LARGE else _read(read, raw)
            self._check_model(asked.model)
            answer = session.answer if session else self._answer
            if asked.stream:
                return await _stream(request, asked, answer)
            return web.json_response(replies.whole(asked, await answer(asked)))
        finally:
            self._open -= 1

    async def _answer(self, asked: Asked) -> Reply:
        """Without a session: sampled as asked, and forgotten."""
        prompts = await self._answering.prompt_ids(asked)
        choices = []
        self._asked += 1
        for number, ids in enumerate(prompts):
            sampling = Sampling(
                self._answering.room(ids, asked, asked.max_tokens or self._max_tokens),
                temperature=1.0 if asked.temperature is None else asked.temperature, min_p=asked.min_p or 0.0,
                top_p=1.0 if asked.top_p is None else asked.top_p, top_k=max(asked.top_k or 0, 0), stop=asked.stop,
            )  # fmt: skip
            seed = derive_seed(self._seed, "endpoint", self._asked) if asked.seed is None else asked.seed
            seed = seed if len(prompts) == 1 else derive_seed(seed, "prompt", number)
            choices += await self._answering.choices(ids, await self._answering.sample(ids, asked.n, seed, sampling), asked)
        return Reply(choices, sum(map(len, prompts)))

    def _session(self, request: web.Request) -> Session | None:
        """The session that a path names; None without one. Raises ApiError 401, 404 or 410."""
        token = request.match_info.get("token")
        if token is None and self._sessions_only:
            raise ApiError(404, "this endpoint answers sessions alone: take the base_url of one", code="session_not_found")
        session = None
        if token is not None:
            found = self._sessions.get(token)
            if found is None:
                raise ApiError(404, "there is no such session", code="session_not_found")
            if isinstance(found, str):
                raise ApiError(410, f"this session is over: {found}", code="session_over")
            session = found
        key = session.api_key if session else self._api_key
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise ApiError(401, "the API key is missing or wrong: send Authorization: Bearer KEY", code="invalid_api_key")
        return session

    def _check_model(self, name: str) -> None:
        if name != self.model:
            said = f"the model {name!r:.100} does not exist; here is {self.model!r}"
            raise ApiError(404, said, code="model_not_found", param="model")


def _read(read: Read, raw: bytes) -> Asked:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise bad(f"the body is not JSON: {exc}") from exc
    return read(body)


async def _stream(request: web.Request, asked: Asked, answer: Callable[[Asked], Awaitable[Reply]]) -> web.StreamResponse:
    """Server-sent events. What fails within the first moment is an ordinary error; later it is an event."""
    work = asyncio.ensure_future(answer(asked))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    try:
        done, _ = await asyncio.wait({work}, timeout=0.05)
        if done:
            work.result()
        await response.prepare(request)
        while not done:
            done, _ = await asyncio.wait({work}, timeout=KEEP_ALIVE_S)
            if not done:
                await response.write(b": still sampling\n\n")
        events: Iterable[Any]
        try:
            events = replies.pieces(asked, work.result())
        except Exception as exc:
            events = [_as_api_error(exc).body()]
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response
    finally:
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Whatever goes wrong, in OpenAI's form."""
    try:
        return await handler(request)
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception as exc:
        error = _as_api_error(exc)
        headers = {"Retry-After": f"{error.retry_after:g}"} if error.retry_after is not None else {}
        return web.json_response(error.body(), status=error.status, headers=headers)


def _as_api_error(exc: Exception) -> ApiError:
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, web.HTTPRequestEntityTooLarge):
        return ApiError(413, "the request is too large", code="request_too_large")
    if isinstance(exc, web.HTTPException):
        return ApiError(exc.status, exc.reason, code="not_found" if exc.status == 404 else None)
    _log.exception("a request failed")
    said = exc.message if isinstance(exc, PosttrainError) else f"{type(exc).__name__}: {exc}"
    return ApiError(500, conceal_text(said), code=getattr(exc, "code", None) if isinstance(exc, PosttrainError) else "internal")


