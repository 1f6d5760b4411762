"""One episode at the endpoint: what its agent asks is sampled under the run's settings, and recorded to the token.

The prompt of a request that goes on with an answer recorded here is that answer's ids, as they were read and sampled, followed by
the new messages: never tokenised again. A request that does not (the agent rewrote or trimmed its history, or asks something
else; or the template rewrites what was said, unless `verbatim`) is rendered as a whole, and begins a row of its own (`record`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import TracebackType

from posttrain.data.seeds import derive_seed
from posttrain.endpoint.answering import Answering, Choice
from posttrain.endpoint.api_error import TOO_LONG, ApiError, bad
from posttrain.endpoint.asked import Asked
from posttrain.endpoint.chat_messages import essence, goes_on, history
from posttrain.endpoint.record import Answer, episode
from posttrain.types import Message, Sampling, Trajectory


@dataclass(frozen=True, slots=True)
class Reply:
    """The answers to one request, and the tokens of its prompt."""

    choices: list[Choice]
    prompt_tokens: int


class Session:
    """Made by `Endpoint.open`. `answers`: what was sampled so far.   over: why it is closed, "" while it is open.

    exhausted: the limit that the last request ran into, "max_turns" or "context_length_exceeded"; "" when it was answered.
    """

    def __init__(
        self,
        answering: Answering,
        sampling: Sampling,
        seed: int,
        *,
        name: str = "",
        verbatim: bool = False,
        max_turns: int | None = None,
        max_open: int = 64,
        trains: bool = True,
        priority: int = 0,
    ) -> None:
        self.name, self.base_url, self.api_key = name, "", secrets.token_urlsafe(24)
        self.answers: list[Answer] = []
        self.over = self.exhausted = ""
        self.on_close: Callable[[], None] = lambda: None
        self._answering, self._sampling, self._seed = answering, sampling, seed
        self._verbatim, self._max_turns, self._max_open = verbatim, max_turns, max_open
        self._trains, self._priority = trains, priority
        self._asked: Counter[bytes] = Counter()  # how often each prompt was asked: its seeds
        self._known: dict[bytes, Answer] = {}  # by the history that ends with the answer
        self._said: dict[bytes, Message] = {}  # answers as their client got them -> as they were sampled
        self._turns = 0
        self._work: set[asyncio.Task[Reply]] = set()

    async def answer(self, asked: Asked) -> Reply:
        """Sample and record. Raises ApiError; 410 also for what is under way when the session is closed."""
        self._check(asked)
        with self._turn() as earlier:
            # who has been at it longer goes first, as in `Rollouts._next`
            task = asyncio.ensure_future(self._sampled(asked, self._priority - earlier))
            self._work.add(task)
            try:
                reply = await task
                self.exhausted = ""
                return reply
            except ApiError as exc:
                self.exhausted = exc.code if exc.code == TOO_LONG else ""
                raise
            except asyncio.CancelledError:
                if self.over and not _cancelled():
                    raise self._gone() from None
                task.cancel()  # the client went away
                await asyncio.gather(task, return_exceptions=True)
                raise
            finally:
                self._work.discard(task)

    def trajectory(self, sample_id: str = "", group_id: str = "", env: str = "") -> Trajectory | None:
        """All that was sampled, as rows (`Trajectory.earlier`), without a reward; None when nothing was."""
        return episode(self.answers, sample_id or self.name, group_id, env)

    def close(self, reason: str = "its episode has ended") -> None:
        """End the session: what is under way is aborted in the engine, what comes later is answered 410. Idempotent."""
        if not self.over:
            self.over = reason
            for task in self._work:
                task.cancel()
            self.on_close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[int]:
        """Count a turn, and say how many were before it; one that gave no answer is given back."""
        if self.over:
            raise self._gone()
        if len(self._work) >= self._max_open:
            said = f"{len(self._work)} requests of this session wait already"
            raise ApiError(429, said, code="too_many_requests", retry_after=1)
        if self._max_turns is not None and self._turns >= self._max_turns:
            self.exhausted = "max_turns"
            raise ApiError(410, f"this session is over: it had its {self._max_turns} turns", code="max_turns")
        self._turns += 1
        try:
            yield self._turns - 1
        except BaseException:
            self._turns -= 1
            raise

    async def _sampled(self, asked: Asked, priority: int) -> Reply:
        names = await self._answering.in_thread(history, asked.tools, asked.messages) if asked.chat else []
        before, kept, prompts = await self._prompts(asked, names)
        found = await asyncio.gather(*(self._choices(ids, asked, priority) for ids in prompts))
        for ids, choices in zip(prompts, found, strict=True):
            for choice in choices:
                self._record(asked, names, before, kept, ids, choice)
        return Reply([choice for choices in found for choice in choices], sum(map(len, prompts)))

    async def _choices(self, ids: list[int], asked: Asked, priority: int) -> list[Choice]:
        stop = (*self._sampling.stop, *asked.stop)
        sampling = replace(self._sampling, max_tokens=self._answering.room(ids, asked, self._sampling.max_tokens), stop=stop)
        done = await self._answering.sample(ids, asked.n, self._next_seed(ids, asked), sampling, priority)
        return await self._answering.choices(ids, done, asked)

    async def _prompts(self, asked: Asked, names: Sequence[bytes]) -> tuple[Answer | None, bool, list[list[int]]]:
        """The answer that a request goes on with, if any, whether its ids do, and the ids to sample from.

        names: of the beginnings of its conversation.
        """
        at = next((n for n in range(len(names) - 2, 0, -1) if names[n] in self._known), 0)
        if not at:
            as_said = [self._said.get(essence(message), message) for message in asked.messages]
            return None, False, await self._answering.prompt_ids(replace(asked, messages=as_said))
        before = self._known[names[at]]
        ids, kept = await self._answering.next_ids(
            before.ids, before.conversation, asked.messages[at:], asked, verbatim=self._verbatim
        )
        return before, kept, [ids]

    def _record(
        self, asked: Asked, names: Sequence[bytes], before: Answer | None, kept: bool, ids: list[int], choice: Choice
    ) -> None:
        """Keep what was sampled as it was sampled; the client's form of it is only what the next request is matched with."""
        context = len(before.ids) if before is not None and kept else 0
        earlier = len(before.conversation) if before is not None else 0
        said = Message(role="assistant", content=choice.said)
        answer = Answer(
            before, kept, ids[context:], [*asked.messages[earlier:], said], choice.token_ids, choice.logprobs, choice.versions,
            choice.finish_reason,
        )  # fmt: skip
        self.answers.append(answer)
        if asked.chat:
            self._known[goes_on(names[-1], choice.message)] = answer
            self._said[essence(choice.message)] = said

    def _next_seed(self, ids: list[int], asked: Asked) -> int:
        """By what is asked and how often, not by when: the order of parallel requests changes nothing.

        The client's own seed is one more name: taken as it is, it would make all episodes of a group alike.
        """
        name = blake2b(array("q", ids).tobytes() + str(asked.seed).encode(), digest_size=16).digest()
        self._asked[name] += 1
        return derive_seed(self._seed, "endpoint", name.hex(), self._asked[name])

    def _check(self, asked: Asked) -> None:
        """What cannot be trained on. Raises ApiError 400."""
        if not self._trains:
            return
        run = self._sampling.temperature
        if asked.temperature is not None and abs(asked.temperature - run) > 1e-6:
            raise bad(
                f"temperature={asked.temperature:g}, and this is a session of a run that samples at {run:g} "
                "(rollout.temperature): the trainer computes log-probs at that one. Leave it out, or set it to the run's",
                "temperature",
                "temperature_mismatch",
            )  # fmt: skip
        for name, value, off in (("top_p", asked.top_p, self._sampling.top_p), ("top_k", asked.top_k, self._sampling.top_k),
                                 ("min_p", asked.min_p, self._sampling.min_p)):  # fmt: skip
            if value is not None and value != off and not (name == "top_k" and value <= 0 and off == 0):
                raise bad(f"{name}={value:g} is not the run's ({off:g}), and cannot be trained on; leave it out", name)

    def _gone(self) -> ApiError:
        return ApiError(410, f"this session is over: {self.over}", code="session_over")


def _cancelled() -> bool:
    """Whether it is the current task that was cancelled, and not what it waits for."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0
