"""A judge behind an HTTP endpoint: what it is asked, how its words are read, and what becomes of an endpoint that fails."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from posttrain.data.environment import Environment, EpisodeState, episode
from posttrain.errors import ConfigError, DataError
from posttrain.rollout.judge import Judge
from posttrain.rollout.judge_line import Line, retry_after
from posttrain.rollout.rewards import FAILED
from posttrain.rollout.scoring import Scorer
from posttrain.types import Reward

QUICK: dict[str, Any] = {"delay_s": 0.01, "longest_delay_s": 0.05, "deadline_s": 20.0, "request_s": 10.0}


def answer(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


class Server:
    """Answers as `say(number of the request, body)` says; keeps what it was asked, and when."""

    def __init__(self, say: Callable[[int, Any], Any]) -> None:
        self.say = say
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.times.append(time.monotonic())
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            said = self.say(len(self.bodies), self.bodies[-1])
            said = await said if asyncio.iscoroutine(said) else said
            return said if isinstance(said, web.StreamResponse) else answer(said)
        finally:
            self.at_once -= 1


def judged(say: Callable[[int, Any], Any], work: Callable[[str, Server], Any]) -> Any:
    """What `work(base_url, server)` comes to."""

    async def main() -> Any:
        server = Server(say)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", server)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with asyncio.timeout(60):
                return await work(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", server)
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def one(say: Callable[[int, Any], Any], **options: Any) -> tuple[Reward, Server]:
    async def work(base_url: str, server: Server) -> Any:
        judge = Judge(base_url, "m", **{"prompt": "Q: {question} A: {completion}", **QUICK, **options})
        return await judge("four", {"question": "2+2?"}), server

    return judged(say, work)  # type: ignore[no-any-return]


def test_what_is_asked_and_how_it_is_read() -> None:
    reward, server = one(lambda n, body: "Good. 7 of 10: 7.5", high=10, system="Be strict.", body={"seed": 3})
    assert reward == Reward(0.75, info={"said": "Good. 7 of 10: 7.5"})
    assert server.bodies == [{
        "model": "m", "temperature": 0.0, "max_tokens": 512, "seed": 3,
        "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "Q: 2+2? A: four"}]}]  # fmt: skip
    assert one(lambda n, body: "No... well, Yes.", parse="yes_no")[0].total == 1.0
    assert one(lambda n, body: "yes? no!", parse="yes_no")[0].total == 0.0
    assert one(lambda n, body: "abc", parse=lambda said: float(len(said)))[0].total == 3.0
    assert "temperature" not in one(lambda n, body: "1", temperature=None)[1].bodies[0]
    unreadable: list[tuple[str, Any]] = [
        ("no number", {}), ("11", {"high": 10}), ("perhaps", {"parse": "yes_no"}), ("x", {"parse": lambda said: None})
    ]  # fmt: skip
    for said, options in unreadable:
        reward, server = one(lambda n, body, said=said: said, **options)  # type: ignore[misc]
        assert reward.total is None and reward.info["cause"] == "judge_unreadable" and len(server.bodies) == 1
        assert repr(said) in reward.info["error"]


def test_a_prompt_may_show_the_whole_episode() -> None:
    messages: Any = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "{4}"}]
    state = EpisodeState({"id": "1"}, "2+2?", messages, "{4}")

    async def work(base_url: str, server: Server) -> str:
        await Judge(base_url, "m", "{prompt} | {transcript} | {{{completion}}}", **QUICK).score(state)
        return str(server.bodies[0]["messages"][0]["content"])

    assert judged(lambda n, body: "1", work) == "user: 2+2? | user: 2+2?\n\nassistant: {4} | {{4}}"


def test_a_storm_of_429_holds_everybody_once() -> None:
    """Forty answers at once, and an endpoint that refuses all it gets for a while: all are judged, none is 0."""
    opened: list[float] = []

    def say(number: int, body: Any) -> Any:
        opened.append(time.monotonic()) if not opened else None
        if time.monotonic() < opened[0] + 0.6:
            return web.Response(status=429, headers={"Retry-After": "0.3"}, text="slow down")
        return "1"

    async def work(base_url: str, server: Server) -> None:
        judge = Judge(base_url, "m", "{completion}", concurrency=8, **QUICK)
        states = [EpisodeState({}, "q", seed=number) for number in range(40)]
        rewards = await asyncio.gather(*(judge(f"a{n}", {}, state) for n, state in enumerate(states)))
        assert [r.total for r in rewards] == [1.0] * 40 and server.most_at_once <= 8
        refused = len(server.times) - 40
        assert refused <= 3 * 8, "those that were under way when it began, per pause; nobody asks meanwhile"
        quiet = [b - a for a, b in zip(server.times[:-1], server.times[1:], strict=True)]
        assert max(quiet) >= 0.25

    judged(say, work)


def test_pauses_double_when_nobody_says_how_long() -> None:
    _, server = one(lambda n, body: "1" if n == 5 else web.Response(status=503), delay_s=0.05, longest_delay_s=0.2)
    gaps = [b - a for a, b in zip(server.times[:-1], server.times[1:], strict=True)]
    assert all(gap >= least for gap, least in zip(gaps, [0.05, 0.1, 0.2, 0.2], strict=True)), gaps


@pytest.mark.parametrize(("say", "cause", "words", "asked", "options"), [
    (lambda n, body: web.Response(status=429), "judge_overloaded", "it answered 429", 3, {"tries": 3}),
    (lambda n, body: web.Response(status=429, headers={"Retry-After": "3600"}), "judge_overloaded", "429", 1, {}),
    (lambda n, body: web.Response(status=500, text="boom"), "judge_unreachable", "it answered 500: boom", 3, {"tries": 3}),
    (lambda n, body: web.Response(status=401, text="bad key"), "judge_refused", "it answered 401: bad key", 1, {}),
    (lambda n, body: web.Response(text="<html>"), "judge_unreadable", "no chat completion: '<html>'", 3, {"tries": 3}),
    (lambda n, body: web.json_response({"choices": []}), "judge_unreadable", "no chat completion", 3, {"tries": 3}),
    (lambda n, body: asyncio.sleep(60, "1"), "judge_timeout", "no answer within 0.1 s", 2, {"request_s": 0.1, "tries": 2}),
    (lambda n, body: asyncio.sleep(60, "1"), "judge_timeout", "no judgement within 0.3 s", 1, {"deadline_s": 0.3}),
    (lambda n, body: web.Response(status=500), "judge_unreachable", "within 0.3 s; the last try", None,
     {"deadline_s": 0.3, "delay_s": 0.1, "longest_delay_s": 0.1, "tries": 100}),
], ids=["429", "long pause", "500", "401", "html", "no choices", "hangs", "hangs on", "500 for ever"])  # fmt: skip
def test_what_cannot_be_had_is_unscorable_with_its_cause(
    say: Any, cause: str, words: str, asked: int | None, options: Any
) -> None:
    reward, server = one(say, **options)
    assert reward.total is None and reward.info["cause"] == cause and words in reward.info["error"], reward
    assert asked is None or len(server.bodies) == asked
    assert cause in FAILED


def test_what_passes_by_is_tried_again() -> None:
    failures = {1: web.Response(status=500), 2: web.Response(text="{"), 3: web.Response(status=429), 4: web.Response(status=408)}
    reward, server = one(lambda n, body: failures.get(n, "0.5"))
    assert reward.total == 0.5 and len(server.bodies) == 5


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    judge = Judge(base_url, "m", "{completion}", **{**QUICK, "tries": 2})
    reward = asyncio.run(judge("a", {}))
    assert reward.info["cause"] == "judge_unreachable" and "ClientConnectorError" in reward.info["error"]


def test_the_key_comes_from_the_environment_and_stands_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="JUDGE_PASS is not set"):
        Judge("http://h/v1", "m", "{completion}", api_key_env="JUDGE_PASS")
    monkeypatch.setenv("JUDGE_PASS", "hush-hush")
    caplog.set_level(logging.DEBUG)
    echo = web.Response(status=403, text="wrong key hush-hush")
    reward, server = one(lambda n, body: echo, api_key_env="JUDGE_PASS")
    assert server.keys == ["Bearer hush-hush"]
    judge = Judge("http://h/v1", "m", "{completion}", api_key_env="JUDGE_PASS")
    for text in (str(reward), repr(judge), caplog.text, pickle.dumps(judge).decode("latin1")):
        assert "hush-hush" not in text
    assert "wrong key ***" in reward.info["error"]


def test_what_cannot_work_is_refused_before_anything_is_asked() -> None:
    for options, words in [
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'"),
        ({"prompt": "no answer in it"}, "shows it no answer"),
        ({"prompt": "{completion} {"}, "cannot be read"),
        ({"low": 1.0, "high": 1.0}, "low < high"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Judge(**{"base_url": "http://h/v1", "model": "m", "prompt": "{completion}", **options})
    with pytest.raises(DataError, match="names {question}, and the row has no such column"):
        asyncio.run(Judge("http://h/v1", "m", "{question} {completion}")("a", {"id": "1"}))


def test_how_long_an_endpoint_asks_to_wait() -> None:
    assert retry_after({"Retry-After": "3"}) == 3 and retry_after({"retry-after-ms": "250", "Retry-After": "3"}) == 0.25
    assert 58 < (retry_after({"Retry-After": formatdate(time.time() + 60, usegmt=True)}) or 0) <= 60
    assert retry_after({}) is None and retry_after({"Retry-After": "soon"}) is None and retry_after({"Retry-After": "-5"}) == 0


def test_a_line_is_one_for_all_judges_of_an_endpoint_and_leaves_nothing_open() -> None:
    async def work(base_url: str, server: Server) -> None:
        judges = [Judge(base_url + end, "m", "{completion}", concurrency=2, **QUICK) for end in ("", "/", "")]
        await asyncio.gather(*(judge(str(n), {}) for judge in judges for n in range(4)))
        line = Line.of(base_url, 2)
        assert server.most_at_once == 2 and line._http is None and line._users == 0

    judged(lambda n, body: asyncio.sleep(0.01, "1"), work)


class Judged(Environment):
    """A class whose reward is a judge's word."""

    judge: Any = None

    def dataset(self, split: Any) -> list[dict[str, Any]]:
        return [{"id": "0", "prompt": "2+2?"}]

    async def compute_reward(self, state: EpisodeState) -> Reward:
        return await self.judge.score(state)  # type: ignore[no-any-return]


def test_in_an_environment_and_in_the_list_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_judge.py").write_text(
        "import os\nfrom posttrain.rollout.judge import Judge\n"
        "judge = Judge(os.environ['JUDGE_URL'], 'm', '{question} {completion}', parse='yes_no', tries=1)\n"
        "def short(completion): return float(len(completion) < 9)\n"
    )
    (tmp_path / "my.jsonl").write_text(json.dumps({"prompt": "2+2?", "question": "2+2?"}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def say(number: int, body: Any) -> Any:
        text = body["messages"][0]["content"]
        return web.Response(status=500) if "broken" in text else "yes" if text == "2+2? four" else "no"

    async def work(base_url: str, server: Server) -> None:
        from posttrain import plugins

        monkeypatch.setenv("JUDGE_URL", base_url)
        entries = [{"name": "good", "reward": "my_judge.py:judge", "weight": 0.5}, {"reward": "my_judge.py:short"}]
        function = plugins.load("envs", "function", reward=entries, data="my.jsonl")
        own = Judged()
        own.judge = Judge(base_url, "m", "2+2? {completion}", parse="yes_no", **QUICK)
        scorer = Scorer({"function": function, "class": own})
        await scorer.start()
        try:
            texts = ["four", "five", "broken"]
            scores = [
                [await scorer.score(name, episode(env, env.dataset("train")[0], text)) for text in texts]
                for name, env in (("function", function), ("class", own))
            ]
        finally:
            await scorer.close()
        assert [r.total for r in scores[0]] == [1.5, 1.0, None] and scores[0][0].parts == {"good": 1.0, "short": 1.0}
        assert scores[0][0].info["good"]["said"] == "yes" and scores[0][2].info["cause"] == "judge_unreachable"
        assert [r.total for r in scores[1]] == [1.0, 0.0, None]

    judged(say, work)
