"""A reward that another model gives: any OpenAI-compatible endpoint, asked about an answer, whose own answer is read as a number.

    # my_rewards.py
    judge = Judge("http://127.0.0.1:8200/v1", "my-judge", prompt='''Question: {question}
    Answer: <answer>{completion}</answer>
    How good is the answer, from 0 to 10? End with the number.''', high=10)

It is an asynchronous reward function: `reward: my_rewards.py:judge` in the options of the environment `function`, and
`return await judge.score(state)` in any environment's `async def compute_reward`. All judges at one `base_url` share a limit and
a back-off (`judge_line`). A judgement that cannot be had is unscorable, never 0, under the causes `judge_overloaded` (429 or
503 to the end), `judge_unreachable`, `judge_timeout`, `judge_refused` (another 4xx: a wrong key, say) and `judge_unreadable`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from posttrain.config.secrets import conceal_text
from posttrain.data.environment import as_messages
from posttrain.data.seeds import derive_seed
from posttrain.errors import ConfigError, DataError
from posttrain.rollout.judge_line import Line, Response, Unreachable, retry_after
from posttrain.rollout.rewards import unscorable
from posttrain.types import Reward

if TYPE_CHECKING:
    from posttrain.data.environment import EpisodeState

Parse = Callable[[str], float | None]
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?!\w)")
OVERLOADED = "judge_overloaded"
_OVERLOADED = (429, 503, 529)
_AGAIN = (408, 409, 425)


class Failed(Exception):
    """No judgement. `again`: another try may give one."""

    def __init__(self, cause: str, message: str, *, again: bool = True) -> None:
        super().__init__(message)
        self.cause, self.again = cause, again


@dataclass(frozen=True, kw_only=True)
class _Settings:
    system: str | None = None
    parse: Literal["number", "yes_no"] | Parse = "number"
    low: float = 0.0
    high: float = 1.0
    api_key_env: str | None = None
    temperature: float | None = 0.0
    max_tokens: int = 512
    body: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 16
    tries: int = 6
    request_s: float = 20.0
    deadline_s: float = 25.0
    delay_s: float = 1.0
    longest_delay_s: float = 30.0


@dataclass(frozen=True, eq=False)
class Judge(_Settings):
    """One question that is asked about every answer.

    base_url         where the API is, up to `/v1`
    prompt           the question: columns of the row in braces, and {completion}, {prompt} and {transcript} (the whole episode)
    system           its system message
    parse            "number": the last number, which must lie in low..high and becomes 0..1; "yes_no": the last of the words yes
                     and no; or a function of the text that gives a number, or None where it cannot be read
    api_key_env      the environment variable that holds the key; the key itself stands nowhere
    temperature      None: left out, for models that refuse it        body: further fields of the request
    concurrency      requests at a time of all judges at this base_url (the first one says)
    tries            requests for one judgement; the pauses between them double from `delay_s` to `longest_delay_s`, give or take
                     a half that comes from the sample's seed
    request_s        of one request              deadline_s: of one judgement, waiting included; keep it under
                     `rollout.reward_timeout_s`, which cuts it off under the cause `timeout`
    """

    base_url: str
    model: str
    prompt: str

    def __post_init__(self) -> None:
        if not re.match(r"https?://\w", self.base_url):
            raise ConfigError(f"the judge's base_url is {self.base_url!r}", fix="write http://HOST:PORT/v1", code="judge")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ConfigError(
                f"the judge's key is missing: the environment variable {self.api_key_env} is not set",
                fix=f"export {self.api_key_env}=…, or leave api_key_env out where no key is needed", code="judge",
            )  # fmt: skip
        if not self.low < self.high or self.tries < 1 or self.concurrency < 1:
            raise ConfigError("a judge needs low < high, tries of at least 1 and concurrency of at least 1", code="judge")
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None]
        except ValueError as exc:
            raise ConfigError(f"the judge's prompt cannot be read: {exc}", fix="write {{ and }} for braces that stay") from exc
        if not {"completion", "transcript"} & set(names):
            raise ConfigError(
                "the judge's prompt shows it no answer", fix="write {completion} into it, or {transcript}", code="judge"
            )

    async def __call__(self, completion: str, row: Mapping[str, Any], state: EpisodeState | None = None) -> Reward:
        """The reward of an answer to `row`; unscorable with its cause where there is none."""
        seed = state.seed if state is not None else 0
        body = self._body(self._filled(completion, row, state))
        line = Line.of(self.base_url, self.concurrency)
        last: list[Failed] = []
        try:
            async with asyncio.timeout(self.deadline_s) as deadline:
                said = await self._said(line, body, seed, last, deadline)
        except Failed as exc:
            return self._none(exc.cause, str(exc))
        except TimeoutError:
            if not deadline.expired():
                raise
            cause = last[-1].cause if last else "judge_overloaded" if line.held_s else "judge_timeout"
            why = f"; the last try: {last[-1]}" if last else ""
            return self._none(cause, f"no judgement within {self.deadline_s:g} s{why}")
        value = self._read(said)
        if value is None:
            return self._none("judge_unreadable", f"its answer cannot be read ({self._how()}): {said[-200:]!r}")
        return Reward(value, info={"said": said[-2000:]})

    async def score(self, state: EpisodeState) -> Reward:
        """The same, of a finished episode."""
        return await self(state.completion, state.task, state)

    async def _said(
        self, line: Line, body: Mapping[str, Any], seed: int, last: list[Failed], deadline: asyncio.Timeout
    ) -> str:
        """What the judge says, after as many tries as it takes. `last`: gets each failure. Raises Failed."""
        for number in range(1, self.tries + 1):
            noise = random.Random(derive_seed(seed, "judge", number)).random()
            try:
                async with line.turn(noise * self.delay_s) as era:
                    return await self._try(line, era, body)
            except Failed as exc:
                last.append(exc)
                left = (deadline.when() or 0.0) - asyncio.get_running_loop().time()
                if not exc.again or number == self.tries or (exc.cause == OVERLOADED and line.held_s > left):
                    raise
                if exc.cause != OVERLOADED:  # else everybody waits, at the next turn
                    await asyncio.sleep(min(self.delay_s * 2 ** (number - 1), self.longest_delay_s) * (0.5 + noise))
        raise AssertionError("the last try returns or raises")

    async def _try(self, line: Line, era: int, body: Mapping[str, Any]) -> str:
        """One request. Raises Failed."""
        try:
            response = await line.post(f"{self.base_url.rstrip('/')}/chat/completions", body, self._headers(), self.request_s)
        except Unreachable as exc:
            raise Failed("judge_timeout" if exc.late else "judge_unreachable", str(exc)) from exc
        if response.status in _OVERLOADED:
            line.hold(era, retry_after(response.headers), self.delay_s, self.longest_delay_s)
            raise Failed(OVERLOADED, f"it answered {response.status}: {response.text[:200]}")
        return self._content(response)

    def _content(self, response: Response) -> str:
        """The text of a good answer. Raises Failed for any other."""
        if response.status in _AGAIN or response.status >= 500:
            raise Failed("judge_unreachable", f"it answered {response.status}: {response.text[:200]}")
        if response.status != 200:
            raise Failed("judge_refused", f"it answered {response.status}: {response.text[:300]}", again=False)
        try:
            return str(json.loads(response.text)["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError) as exc:
            raise Failed("judge_unreadable", f"it answered no chat completion: {response.text[:200]!r}") from exc

    def _read(self, said: str) -> float | None:
        if callable(self.parse):
            value = self.parse(said)
            return None if value is None else float(value)
        if self.parse == "yes_no":
            words = re.findall(r"\b(yes|no)\b", said, flags=re.IGNORECASE)
            return float(words[-1].lower() == "yes") if words else None
        numbers = _NUMBER.findall(said)
        value = float(numbers[-1]) if numbers else None
        return None if value is None or not self.low <= value <= self.high else (value - self.low) / (self.high - self.low)

    def _how(self) -> str:
        if callable(self.parse):
            return f"parse={getattr(self.parse, '__name__', 'a function')}"
        return f"a number from {self.low:g} to {self.high:g}" if self.parse == "number" else "yes or no"

    def _filled(self, completion: str, row: Mapping[str, Any], state: EpisodeState | None) -> str:
        said = [] if state is None else state.messages
        asked = [] if state is None else as_messages(state.prompt)
        values = {**row, "completion": completion, "prompt": _transcript(asked), "transcript": _transcript(said)}
        parts = []
        for text, name, _, _ in string.Formatter().parse(self.prompt):
            if name is not None and name not in values:
                raise DataError(
                    f"the judge's prompt names {{{name}}}, and the row has no such column",
                    cause=f"it has {', '.join(map(str, row))}", code="judge",
                    fix="name one of these, {completion}, {prompt} or {transcript}; write {{ for a brace that stays",
                )  # fmt: skip
            parts += [text, "" if name is None else str(values[name])]
        return "".join(parts)

    def _body(self, question: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        heat = {} if self.temperature is None else {"temperature": self.temperature}
        messages = [*system, {"role": "user", "content": question}]
        return {"model": self.model, "messages": messages, "max_tokens": self.max_tokens, **heat, **self.body}

    def _headers(self) -> dict[str, str]:
        return {} if self.api_key_env is None else {"Authorization": f"Bearer {os.environ.get(self.api_key_env, '')}"}

    def _none(self, cause: str, problem: str) -> Reward:
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        return unscorable(cause, conceal_text(problem.replace(key, "***") if key else problem))


def _transcript(messages: Any) -> str:
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
