"""The endpoint in front of a real engine, driven by the real client of the OpenAI API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from served import LIMIT, MODEL, Weights, client_of, on_model, put, session_of, user

from posttrain.types import ENV_VERSION, Completion, Sampling, Trajectory


@pytest.mark.parametrize("verbatim", [True, False])
def test_a_conversation_is_recorded_to_the_token_with_the_versions_that_sampled_it(tmp_path: Path, verbatim: bool) -> None:
    """Ids are the engine's own, never those of the text again, and every trained token has the context that it was sampled in.

    The tokenizer of the tiny model spells a decoded text otherwise: without `verbatim`, every turn is a row.
    """

    async def work(endpoint: Any, engine: Any, packer: Any, model: Any) -> None:
        with session_of(endpoint, sampling=Sampling(max_tokens=12), verbatim=verbatim) as session:
            messages: list[Any] = [user("first")]
            for version in (1, 2, 3):
                if version > 1:
                    await put(engine.engine, Weights(model, version, 1 + 0.1 * version))
                answer = await client_of(session).chat.completions.create(model=MODEL, messages=messages)
                said = answer.choices[0].message
                assert said.content == packer.decode(engine.completions[-1].token_ids)
                messages += [said.model_dump(exclude_none=True), user(f"word{version}")]
        row = session.trajectory()
        assert len(engine.requests) == 3
        check_against_the_engine(row, engine)
        assert row.rows[0].prompt_ids == packer.get_rollout_input([user("first")])["prompt_ids"]
        assert [v for r in row.rows for v in dict.fromkeys(r.weight_versions) if v != ENV_VERSION] == [1, 2, 3]
        roles = [[turn.role for turn in r.turns] for r in row.rows]
        assert roles == ([["model", "env"] * 2 + ["model"]] if verbatim else [["model"]] * 3)
        assert [r.sample_id for r in row.rows] == ["0:env:1/0"] if verbatim else ["0:env:1/0#0", "0:env:1/0#1", "0:env:1/0"]
        said = [spoken(engine, packer, number) for number in range(3)]
        assert row.messages == [user("first"), *said[0], user("word1"), *said[1], user("word2"), *said[2]]

    on_model(tmp_path, work)


def spoken(engine: Any, packer: Any, number: int) -> list[Any]:
    return packer.get_rollout_output(engine.completions[number].token_ids)["messages"]  # type: ignore[no-any-return]


def check_against_the_engine(last: Trajectory, engine: Any) -> None:
    """Each completion of the engine is a trained span, behind exactly the ids that its request had."""
    left = {request.id: request for request in engine.requests}
    done: dict[str, Completion] = {c.request_id: c for c in engine.completions}
    spans = 0
    for row in last.rows:
        ids = [*row.prompt_ids, *row.token_ids]
        for turn in row.turns:
            if turn.role == "model":
                at = len(row.prompt_ids) + turn.start
                name = next(n for n, r in left.items() if list(r.prompt_ids) == ids[:at])
                assert done[name].token_ids == row.token_ids[turn.start : turn.end]
                assert done[name].logprobs == row.rollout_logprobs[turn.start : turn.end]
                assert done[name].versions == row.weight_versions[turn.start : turn.end]
                assert all(row.mask[turn.start : turn.end])
                del left[name]
                spans += 1
            else:
                assert not any(row.mask[turn.start : turn.end])
    assert spans == len(engine.completions) and not left


def test_log_probs_are_those_of_the_model_at_the_run_s_temperature(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any, packer: Any, model: Any) -> None:
        with session_of(endpoint, sampling=Sampling(max_tokens=10, temperature=0.7), verbatim=True) as session:
            client = client_of(session)
            first = await client.chat.completions.create(model=MODEL, messages=[user("a")], logprobs=True, temperature=0.7)  # type: ignore[list-item]
            messages: list[Any] = [user("a"), first.choices[0].message.model_dump(exclude_none=True), user("b")]
            await client.chat.completions.create(model=MODEL, messages=messages)
        row = session.trajectory()
        said = [one.logprob for one in first.choices[0].logprobs.content]
        assert said == row.rollout_logprobs[: len(said)]
        ids = torch.tensor([[*row.prompt_ids, *row.token_ids]])
        with torch.no_grad():
            expected = torch.log_softmax(model(ids).logits[0, :-1] / 0.7, -1).gather(1, ids[0, 1:, None])[:, 0]
        for position, (trained, logprob) in enumerate(zip(row.mask, row.rollout_logprobs, strict=True)):
            if trained:
                assert logprob == pytest.approx(float(expected[len(row.prompt_ids) + position - 1]), abs=2e-4)

    on_model(tmp_path, work)


def test_fifty_sessions_at_once_have_nothing_of_each_other(tmp_path: Path) -> None:
    async def talk(endpoint: Any, number: int) -> Any:
        with session_of(endpoint, seed=number, name=f"s{number}", sampling=Sampling(max_tokens=6)) as session:
            async with client_of(session) as client:
                messages: list[Any] = [user(f"number{number}")]
                for turn in range(3):
                    said = (await client.chat.completions.create(model=MODEL, messages=messages)).choices[0].message
                    messages += [said.model_dump(exclude_none=True), user(f"n{turn}")]
        return session.trajectory()

    async def work(endpoint: Any, engine: Any, packer: Any, model: Any) -> list[Trajectory]:
        rows = await asyncio.gather(*(talk(endpoint, number) for number in range(50)))
        prompts = {tuple(r.prompt_ids) for r in engine.requests}
        assert len(prompts) == 150 and len(engine.completions) == 150
        for number, row in enumerate(rows):
            assert row.sample_id == f"s{number}" and row.messages[0] == user(f"number{number}")
            assert sum(turn.role == "model" for r in row.rows for turn in r.turns) == 3
            for one in row.rows:
                at = [len(one.prompt_ids) + turn.start for turn in one.turns if turn.role == "model"]
                assert all(tuple([*one.prompt_ids, *one.token_ids][:n]) in prompts for n in at)
        return list(rows)

    first, again = on_model(tmp_path / "a", work), on_model(tmp_path / "b", work)
    assert [r.token_ids[:1] for r in first] == [r.token_ids[:1] for r in again], "seeds come from what is asked, not from when"
    assert len({tuple(r.token_ids) for r in first}) > 40


def test_a_stream_adds_up_to_the_whole_answer(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any, packer: Any, model: Any) -> None:
        client = client_of(endpoint)
        asked: dict[str, Any] = {"model": MODEL, "seed": 5, "n": 2, "max_tokens": 14, "logprobs": True}
        whole = await client.chat.completions.create(messages=[user("stream")], **asked)  # type: ignore[list-item]
        stream = await client.chat.completions.create(
            messages=[user("stream")], stream=True, stream_options={"include_usage": True}, **asked  # type: ignore[list-item]
        )
        texts, reasons, logprobs, usage = ["", ""], ["", ""], [[], []], None  # type: ignore[var-annotated]
        async for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []  # type: ignore[arg-type]
        assert texts == [c.message.content for c in whole.choices] and reasons == [c.finish_reason for c in whole.choices]
        assert logprobs == [c.logprobs.content for c in whole.choices] and usage == whole.usage
        assert texts[0] != texts[1], "two samples of one request"

        prompt: dict[str, Any] = {"model": MODEL, "prompt": "abc", "seed": 3, "max_tokens": 9, "logprobs": 0}
        one = (await client.completions.create(**prompt)).choices[0]
        pieces = [e.choices[0] async for e in await client.completions.create(stream=True, **prompt)]
        assert "".join(p.text for p in pieces) == one.text and pieces[-1].finish_reason == one.finish_reason
        assert next(p.logprobs for p in pieces if p.logprobs) == one.logprobs
        assert len(one.logprobs.token_logprobs) == len(engine.completions[-1].token_ids)  # type: ignore[union-attr, arg-type]

    on_model(tmp_path, work)


def test_the_synchronous_client_and_the_helper_of_streams_work(tmp_path: Path) -> None:
    def talk(base_url: str, key: str) -> list[str]:
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            assert [m.id for m in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL
            first = client.chat.completions.create(model=MODEL, messages=[user("hi")], max_completion_tokens=5)  # type: ignore[list-item]
            assert first.usage and first.usage.completion_tokens <= 5
            messages: Any = [user("hi"), {"role": "assistant", "content": first.choices[0].message.content}, user("on")]
            with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
                return [first.choices[0].message.content or "", stream.get_final_completion().choices[0].message.content or ""]

    async def work(endpoint: Any, engine: Any, packer: Any, model: Any) -> None:
        with session_of(endpoint) as session:
            said = await asyncio.to_thread(talk, session.base_url, session.api_key)
        row = session.trajectory()
        assert [m["content"] for m in row.messages if m["role"] == "assistant"] == said
        check_against_the_engine(row, engine)

    on_model(tmp_path, work)


def test_a_client_that_goes_away_ends_its_request_in_the_engine(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any, packer: Any, model: Any) -> None:
        with session_of(endpoint, sampling=Sampling(max_tokens=LIMIT, ignore_eos=True)) as session:
            await engine.engine.pause()  # nothing is sampled before we say so
            request = asyncio.ensure_future(client_of(session).chat.completions.create(model=MODEL, messages=[user("x")]))
            while not engine.requests:
                await asyncio.sleep(0.01)
            request.cancel()
            while not engine.aborted:
                await asyncio.sleep(0.01)
            await engine.engine.resume()
            assert engine.aborted == [engine.requests[0].id] and not session.answers
            again = await client_of(session).chat.completions.create(model=MODEL, messages=[user("x")], max_tokens=3)  # type: ignore[list-item]
            assert again.usage and again.usage.completion_tokens == 3
            assert session.trajectory().sampled == 3, "what nobody heard is not trained"

    on_model(tmp_path, work)


def test_the_answers_without_a_session_are_what_the_seed_says(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any, packer: Any, model: Any) -> None:
        client = client_of(endpoint)
        ids = packer.encode("same")

        async def ask(**options: Any) -> list[str]:
            return [c.text for c in (await client.completions.create(model=MODEL, max_tokens=12, **options)).choices]

        assert await ask(prompt="same", seed=1) == await ask(prompt=ids, seed=1) == (await ask(prompt=["same"], seed=1))
        assert await ask(prompt="same", seed=1) != await ask(prompt="same", seed=2)
        assert len({*await ask(prompt="same"), *await ask(prompt="same")}) == 2
        greedy = await ask(prompt=[ids, "same"], temperature=0, n=2)
        assert len(greedy) == 4 and len(set(greedy)) == 1

    on_model(tmp_path, work)
