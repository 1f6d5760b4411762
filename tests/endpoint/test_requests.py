"""What the server says to requests that are odd, wrong, too large or too many; tools; and engines that fail. In OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from chat_styles import CHATML, TOOLS
from served import MODEL, Script, client_of, on_script, session_of, user

from posttrain.endpoint.answering import stopped
from posttrain.endpoint.server import Endpoint
from posttrain.errors import ConfigError, RunInterrupted, WeightSyncError
from posttrain.types import Completion

WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


async def post(endpoint: Endpoint, body: Any, path: str = "chat/completions") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as http, http.post(f"{endpoint.base_url}/{path}", data=data) as response:
        return response.status, await response.json()


OK = {"model": MODEL, "messages": [user("a")]}
BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "the body is not JSON"),
    (b"[]", 400, "the body must be a JSON object"),
    ({"messages": [user("a")]}, 400, "model must be the name of a model"),
    ({**OK, "model": "gpt-9"}, 404, "the model 'gpt-9' does not exist; here is 'tiny'"),
    ({**OK, "messages": []}, 400, "messages must be a list of at least one message"),
    ({**OK, "messages": [{"role": "wizard"}]}, 400, "messages[0].role must be one of"),
    ({**OK, "messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content must be a text, or a list of parts"),
    ({**OK, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "part of type 'image_url'"),
    ({**OK, "messages": [{"role": "assistant", "tool_calls": [3]}, user("a")]}, 400, "messages[0].tool_calls[0] must be"),
    ({**OK, "n": 0}, 400, "n is 0, and must be at least 1"),
    ({**OK, "n": 1000}, 400, "n is 1000, and must be at most 128"),
    ({**OK, "max_tokens": "many"}, 400, "max_tokens must be an integer"),
    ({**OK, "temperature": -1}, 400, "temperature is -1, and must be at least 0"),
    ({**OK, "temperature": "hot"}, 400, "temperature must be a number"),
    ({**OK, "stop": [""]}, 400, "stop must be a text"),
    ({**OK, "stream": "yes"}, 400, "stream must be true or false"),
    ({**OK, "logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
    ({**OK, "response_format": {"type": "json_object"}}, 400, "response_format is not supported"),
    ({**OK, "top_logprobs": 3}, 400, "top_logprobs is not supported"),
    ({**OK, "tools": [{"type": "function"}]}, 400, "tools[0] must be"),
    ({**OK, "tools": [WEATHER], "tool_choice": "required"}, 400, "tool_choice='required' is not supported"),
]


def test_every_wrong_request_is_told_what_is_wrong(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Script) -> None:
        for body, status, words in BAD:
            for stream in (False, True) if isinstance(body, dict) and "stream" not in body else (None,):
                got, said = await post(endpoint, {**body, "stream": stream} if stream is not None else body)
                assert got == status and words in said["error"]["message"], said
                assert set(said["error"]) == {"message", "type", "param", "code"}
        assert not engine.requests
        for path, body in {"completions": {"model": MODEL, "prompt": []}, "embeddings": OK}.items():
            assert (await post(endpoint, body, path))[0] == {"completions": 400, "embeddings": 404}[path]
        status, said = await post(endpoint, {**OK, "messages": [user("x" * 9000)]})
        assert (status, said["error"]["type"]) == (413, "request_too_large")
        harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True, "presence_penalty": 0.0,
                    "response_format": {"type": "text"}, "tools": None, "stop": None, "logit_bias": {}}  # fmt: skip
        assert (await post(endpoint, {**OK, **harmless}))[0] == 200
        async with aiohttp.ClientSession() as http, http.get(endpoint.base_url.replace("/v1", "/health")) as response:
            assert await response.json() == {"status": "ok", "model": MODEL, "sessions": 0, "open": 0}

    on_script(tmp_path, lambda prompt: "fine", work, max_body=8192)


def test_engines_that_fail(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Script) -> None:
        for said, status, words in [
            (WeightSyncError("the hf engine has no weights yet", code="no-weights"), 409, "the engine has no weights yet"),
            (RunInterrupted("the engine died"), 500, "the engine died"),
            (Completion("", 0, [], [], [], "error", "out of paper"), 500, "the engine failed: out of paper"),
            (Completion("", 0, [5], [0.0], [1], "aborted"), 500, "the engine failed: aborted"),
            (KeyError("oops"), 500, "KeyError"),
        ]:
            engine.say = lambda prompt, said=said: said  # type: ignore[misc]
            got, error = await post(endpoint, OK)
            assert got == status and words in error["error"]["message"]
            with session_of(endpoint) as session:
                with pytest.raises(openai.APIStatusError):
                    await client_of(session).chat.completions.create(model=MODEL, messages=[user("a")])  # type: ignore[list-item]
                assert session.trajectory() is None
        with pytest.raises(openai.InternalServerError):
            async for _ in await client_of(endpoint).chat.completions.create(**OK, stream=True):  # type: ignore[call-overload]
                pass

    on_script(tmp_path, lambda prompt: "", work)


def test_a_stream_that_fails_late_says_so_in_an_event(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Script) -> None:
        stream = await client_of(endpoint).chat.completions.create(**OK, stream=True)  # type: ignore[call-overload]
        engine.go.set()  # type: ignore[attr-defined]
        with pytest.raises(openai.APIError, match="it broke"):
            async for _ in stream:
                pass

    class Late(Script):
        async def generate(self, requests: Any) -> Any:
            await self.go.wait()  # type: ignore[attr-defined]
            raise RunInterrupted("it broke")
            yield

    async def with_late(endpoint: Any, engine: Script) -> None:
        late = Late(lambda prompt: "")
        late.go = asyncio.Event()  # type: ignore[attr-defined]
        endpoint._answering.engine = late
        await work(endpoint, late)

    on_script(tmp_path, lambda prompt: "", with_late)


def test_more_requests_than_may_wait(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Script) -> None:
        waiting = asyncio.ensure_future(post(endpoint, OK))
        await engine.running.wait()
        status, said = await post(endpoint, OK)
        assert status == 429 and said["error"]["code"] == "too_many_requests"
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        while not engine.cancelled:
            await asyncio.sleep(0.01)

    on_script(tmp_path, lambda prompt: None, work, max_open=1)


@pytest.mark.parametrize("style", [TOOLS, CHATML], ids=["own format", "described"])
def test_tools_are_rendered_and_calls_are_found(tmp_path: Path, style: Any) -> None:
    def say(prompt: str) -> str:
        return "It is wet." if "wet" in prompt else f"I look.\n{CALL}\n{CALL.replace('Ulm', 'Bonn')}"

    async def work(endpoint: Any, engine: Script) -> None:
        with session_of(endpoint, sampling=session_sampling()) as session:
            client = client_of(session)
            asked: dict[str, Any] = {"model": MODEL, "tools": [WEATHER]}
            messages: list[Any] = [user("Ulm?")]
            first = (await client.chat.completions.create(messages=messages, **asked)).choices[0]
            calls = first.message.tool_calls
            assert first.finish_reason == "tool_calls" and first.message.content == "I look."
            assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
                ("weather", {"city": "Ulm"}), ("weather", {"city": "Bonn"})]  # fmt: skip
            assert len({c.id for c in calls}) == 2 and all(len(c.id) == 9 and c.id.isalnum() for c in calls)
            messages += [first.message.model_dump(exclude_none=True)]
            messages += [{"role": "tool", "tool_call_id": c.id, "content": "wet"} for c in calls]
            last = (await client.chat.completions.create(messages=messages, **asked)).choices[0]
            assert (last.finish_reason, last.message.content, last.message.tool_calls) == ("stop", "It is wet.", None)
        packer = engine.packer
        row = session.trajectory()
        assert not row.earlier and [t.role for t in row.turns] == ["model", "env", "model"], "never rendered again"
        assert '"city"' in packer.spell(row.prompt_ids) and packer.spell(row.prompt_ids).endswith("assistant\n")
        assert packer.spell(row.token_ids[: row.turns[0].end]) == say("") + "<|im_end|>"
        assert packer.spell(row.token_ids[row.turns[1].start : row.turns[1].end]).count("wet") == 2
        assert row.messages[1]["content"] == say("") and [m["role"] for m in row.messages[2:4]] == ["tool", "tool"]

        text = (await client_of(endpoint).chat.completions.create(messages=[user("a")], tool_choice="none", **asked)).choices[0]
        assert text.message.tool_calls is None and text.message.content == say("")
        stream = await client_of(endpoint).chat.completions.create(messages=[user("a")], stream=True, **asked)
        deltas = [event.choices[0].delta async for event in stream]
        assert "".join(d.content or "" for d in deltas) == "I look."
        assert [json.loads(c.function.arguments)["city"] for d in deltas for c in d.tool_calls or []] == ["Ulm", "Bonn"]

    def session_sampling() -> Any:
        from posttrain.types import Sampling

        return Sampling(max_tokens=400)

    on_script(tmp_path, say, work, style=style)


def test_a_call_that_cannot_be_read_stays_in_the_text(tmp_path: Path) -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": </tool_call>'

    async def work(endpoint: Any, engine: Script) -> None:
        answer = (await client_of(endpoint).chat.completions.create(**OK, tools=[WEATHER])).choices[0]  # type: ignore[call-overload]
        assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (broken, None, "stop")

    on_script(tmp_path, lambda prompt: broken, work)


def test_a_port_that_is_taken_names_its_holder(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Script) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            other = Endpoint(engine, engine.packer, max_model_len=64)
            with pytest.raises(ConfigError, match=f"port {port} is taken by process {os.getpid()}") as caught:
                await other.start(port)
        assert caught.value.where == "rollout.base_port" and "another rollout.base_port" in caught.value.fix
        await other.start(port)
        assert other.port == port
        await other.close()
        await other.close()

    on_script(tmp_path, lambda prompt: "", work)


def test_the_first_stop_text_counts() -> None:
    ids = [ord(c) for c in "one STOP two END STOP"]

    def text_of(some: Any) -> str:
        return "".join(map(chr, some))

    assert stopped(text_of, ids, ["END", "STOP"]) == ("one ", 8)
    assert stopped(text_of, ids, ["nothing"]) == ("one STOP two END STOP", len(ids))
    assert stopped(text_of, ids, ["o"]) == ("", 1)
