"""Sessions: which ids a request goes on with, when a row splits, what is refused, and what a closed session answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_styles import QWEN3
from hypothesis import given, settings
from hypothesis import strategies as st
from served import MODEL, client_of, on_script, session_of, user

from posttrain.endpoint.record import Answer, rows
from posttrain.types import Sampling


def numbered() -> Callable[[str], str]:
    count = itertools.count(1)
    return lambda prompt: f"answer {next(count)}"


async def ask(session: Any, messages: list[Any], **options: Any) -> Any:
    """The message that answers, as the client would send it back."""
    answer = await client_of(session).chat.completions.create(model=MODEL, messages=messages, **options)
    return answer.choices[0].message.model_dump(exclude_none=True)


def spelled(packer: Any, session: Any) -> list[str]:
    """The rows as text, what is trained in brackets."""
    return [
        packer.spell(row.prompt_ids)
        + "".join(("[{}]" if t.role == "model" else "{}").format(packer.spell(row.token_ids[t.start : t.end])) for t in row.turns)
        for row in session.trajectory().rows
    ]


ASK = "<|im_start|>assistant\n"


def turn(text: str, role: str = "user") -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_a_conversation_that_goes_on_is_one_row(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any) -> None:
        with session_of(endpoint) as session:
            first = await ask(session, [user("a")])
            stripped = {"role": "assistant", "content": f"  {first['content']}\n", "annotations": []}
            second = await ask(session, [user("a"), stripped, user("b")])
            parts = {"role": "user", "content": [{"type": "text", "text": "b"}]}
            await ask(session, [user("a"), first, parts, second, user("c")])
        assert spelled(engine.packer, session) == [
            f"{turn('a')}{ASK}[answer 1<|im_end|>]\n{turn('b')}{ASK}[answer 2<|im_end|>]\n{turn('c')}{ASK}[answer 3<|im_end|>]"
        ]
        assert [m["content"] for m in session.trajectory().messages] == ["a", "answer 1", "b", "answer 2", "c", "answer 3"]

    on_script(tmp_path, numbered(), work)


def test_a_history_that_the_agent_rewrote_begins_a_row_of_its_own(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any) -> None:
        with session_of(endpoint) as session:
            first = await ask(session, [user("a")])
            await ask(session, [user("a"), first, user("b")])
            await ask(session, [user("a"), {"role": "assistant", "content": "never said"}, user("c")])
            await ask(session, [{"role": "system", "content": "short"}, user("b")])
            await ask(session, [user("a"), first, user("other")])  # from an earlier point, in the words that were said
        begin = turn("a") + ASK
        assert spelled(engine.packer, session) == [
            begin + "[answer 1<|im_end|>]\n" + turn("b") + ASK + "[answer 2<|im_end|>]",
            begin.removesuffix(ASK) + turn("never said", "assistant") + turn("c") + ASK + "[answer 3<|im_end|>]",
            turn("short", "system") + turn("b") + ASK + "[answer 4<|im_end|>]",
            begin + "answer 1<|im_end|>\n" + turn("other") + ASK + "[answer 5<|im_end|>]",
        ]

    on_script(tmp_path, numbered(), work)


@pytest.mark.parametrize("verbatim", [False, True])
def test_a_template_that_rewrites_splits_or_is_overruled(tmp_path: Path, verbatim: bool) -> None:
    """Earlier thinking is dropped by the template: the same choice as in an episode that an environment answers."""

    async def work(endpoint: Any, engine: Any) -> None:
        with session_of(endpoint, verbatim=verbatim, sampling=Sampling(max_tokens=64)) as session:
            first = await ask(session, [user("a")])
            assert first["content"] == "<think>\nhm\n</think>\n\nyes"
            await ask(session, [user("a"), first, user("b")])
        whole = turn("a") + ASK + "[<think>\nhm\n</think>\n\nyes<|im_end|>]"
        said = "[<think>\nhm\n</think>\n\nyes<|im_end|>]"
        assert spelled(engine.packer, session) == (
            [whole + "\n" + turn("b") + ASK + said]
            if verbatim
            else [whole, turn("a") + turn("yes", "assistant") + turn("b") + ASK + said]
        )

    on_script(tmp_path, lambda prompt: "<think>\nhm\n</think>\n\nyes", work, style=QWEN3, max_model_len=4096)


def test_parallel_and_repeated_questions_are_rows_of_their_own(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any) -> None:
        with session_of(endpoint) as session:
            first = await ask(session, [user("a")])
            await asyncio.gather(*(ask(session, [user("a"), first, user(f"b{n}")]) for n in range(3)))
            several = await client_of(session).chat.completions.create(model=MODEL, messages=[user("n")], n=2)  # type: ignore[list-item]
            await ask(session, [user("n"), several.choices[1].message.model_dump(exclude_none=True), user("on")])
        row = session.trajectory()
        assert row.sampled == sum(len(a.token_ids) for a in session.answers) and len(session.answers) == 7
        assert [sum(t.role == "model" for t in r.turns) for r in row.rows] == [2, 1, 1, 1, 2]
        seeds = {request.seed for request in engine.requests}
        assert len(seeds) == len(engine.requests) == 6

    on_script(tmp_path, numbered(), work)


def test_the_same_question_again_has_other_noise_and_another_episode_too(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any) -> None:
        for seed in (1, 2, 1):
            with session_of(endpoint, seed=seed) as session:
                await ask(session, [user("a")], seed=0)
                await ask(session, [user("a")], seed=0)
        seeds = [request.seed for request in engine.requests]
        assert seeds[:2] == seeds[4:] and len(set(seeds[:4])) == 4

    on_script(tmp_path, numbered(), work)


def test_a_stop_text_ends_what_is_trained_and_is_not_in_the_answer(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any) -> None:
        with session_of(endpoint, sampling=Sampling(max_tokens=64)) as session:
            answer = await client_of(session).chat.completions.create(
                model=MODEL, messages=[user("a")], stop=["END", "</code>"]  # type: ignore[list-item]
            )
            choice = answer.choices[0]
            assert (choice.message.content, choice.finish_reason) == ("<code>1+1", "stop")
            await ask(session, [user("a"), choice.message.model_dump(exclude_none=True), user("2")])
        assert spelled(engine.packer, session)[0].startswith(
            turn("a") + ASK + "[<code>1+1</code>]<|im_end|>\n" + turn("2") + ASK
        ), "the engine's ids up to the stop text, then the template's end of turn, which is not trained"
        assert engine.requests[0].sampling.stop == ("END", "</code>")

    on_script(tmp_path, lambda prompt: "<code>1+1</code> and more END", work)


def refused(work: Any, kind: Any, *words: str) -> Any:
    async def check() -> Any:
        with pytest.raises(kind) as caught:
            await work
        assert all(word in str(caught.value.body) for word in words), caught.value.body
        return caught.value

    return check()


def test_what_a_training_session_refuses(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any) -> None:
        with session_of(endpoint, sampling=Sampling(max_tokens=16, temperature=0.8)) as session:
            bad = openai.BadRequestError
            hot = ask(session, [user("a")], temperature=0.2)
            await refused(hot, bad, "samples at 0.8 (rollout.temperature)", "temperature_mismatch")
            await refused(ask(session, [user("a")], top_p=0.9), bad, "top_p=0.9 is not the run's (1)")
            await refused(ask(session, [user("a")], extra_body={"top_k": 5}), bad, "top_k=5")
            await refused(ask(session, [user("a")], presence_penalty=0.5), bad, "presence_penalty is not supported")
            await ask(session, [user("a")], temperature=0.8, top_p=1.0, presence_penalty=0, max_tokens=5)
            assert [r.sampling.temperature for r in engine.requests] == [0.8] and engine.requests[0].sampling.max_tokens == 5
            await ask(session, [user("a")], max_completion_tokens=500)
            assert engine.requests[1].sampling.max_tokens == 16, "the run's is the most"

    on_script(tmp_path, numbered(), work)


def test_limits_of_a_session(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any) -> None:
        with session_of(endpoint, max_turns=2) as session:
            await ask(session, [user("a")])
            long = ask(session, [user("long " * 100)])
            error = await refused(long, openai.BadRequestError, "maximum context length is 200 tokens")
            assert error.code == "context_length_exceeded" and session.exhausted == "context_length_exceeded"
            await ask(session, [user("b")])
            assert session.exhausted == ""
            gone = await refused(ask(session, [user("c")]), openai.APIStatusError, "it had its 2 turns")
            assert (gone.status_code, session.exhausted) == (410, "max_turns")

        with session_of(endpoint, max_open=1) as session:
            engine.say = lambda prompt: None
            engine.running.clear()
            waiting = asyncio.ensure_future(ask(session, [user("a")]))
            await engine.running.wait()
            busy = await refused(ask(session, [user("b")]), openai.RateLimitError, "1 requests of this session wait already")
            assert busy.response.headers["retry-after"] == "1"
            session.close("its episode was given up")
            gone = await refused(waiting, openai.APIStatusError, "its episode was given up")
            assert gone.status_code == 410 and engine.cancelled == 1 and engine.aborted

    on_script(tmp_path, numbered(), work, max_model_len=200)


def test_keys_tokens_and_closed_sessions(tmp_path: Path) -> None:
    async def work(endpoint: Any, engine: Any) -> None:
        one, other = session_of(endpoint), session_of(endpoint)
        with one, other:
            await ask(one, [user("a")])
            wrong = openai.AsyncOpenAI(base_url=one.base_url, api_key=other.api_key, max_retries=0)
            await refused(wrong.models.retrieve(MODEL), openai.AuthenticationError, "the API key is missing or wrong")
            nowhere = openai.AsyncOpenAI(base_url=one.base_url.replace("/s/", "/s/x"), api_key="x", max_retries=0)
            call = nowhere.chat.completions.create(model=MODEL, messages=[user("a")])  # type: ignore[list-item]
            await refused(call, openai.NotFoundError, "there is no such session")
        gone = await refused(ask(one, [user("b")]), openai.APIStatusError, "this session is over: its episode has ended")
        assert gone.status_code == 410 and len(one.answers) == 1
        one.close("again")
        assert one.over == "its episode has ended" and one.trajectory().sampled == len(one.answers[0].token_ids)
        assert other.trajectory() is None

    on_script(tmp_path, numbered(), work)


def test_each_later_request_of_a_session_goes_before_those_of_younger_ones(tmp_path: Path) -> None:
    said = {"second": RuntimeError("not this time")}  # is asked again

    async def work(endpoint: Any, engine: Any) -> None:
        with session_of(endpoint) as one, session_of(endpoint, priority=100, name="behind") as other:
            await ask(one, [user("first")])
            with pytest.raises(openai.InternalServerError):
                await ask(one, [user("second")])
            said.clear()
            await ask(one, [user("second")])
            await ask(other, [user("first")])
            await asyncio.gather(*(ask(one, [user(text)]) for text in ("third", "fourth")))
            await ask(other, [user("second")], n=2)
        priorities = [request.priority for request in engine.requests]
        assert priorities[:4] == [0, -1, -1, 100], "what gave no answer does not count"
        assert sorted(priorities[4:6]) == [-3, -2] and priorities[6:] == [99]

    on_script(tmp_path, lambda prompt: next((said[word] for word in said if word in prompt), "well"), work)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(-1, 12), st.booleans(), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=12))
def test_rows_hold_every_answer_once_with_its_context(made: list[tuple[int, bool, int, int]]) -> None:
    """Whatever answers go on with whichever: every sampled token is trained once, behind the ids that the engine read."""
    answers: list[Answer] = []
    tokens = itertools.count(1)
    for before, goes_on, given_, sampled in made:
        parent = answers[before] if 0 <= before < len(answers) else None
        ids = [next(tokens) for _ in range(given_ if parent else given_ + 1)]
        said = [next(tokens) for _ in range(sampled)]
        answers.append(Answer(parent, goes_on and parent is not None, ids, [], said, [-1.0] * sampled, [1] * sampled, "stop"))
    contexts = {tuple(a.token_ids): a.ids[: -len(a.token_ids)] for a in answers}
    seen = []
    for row in rows(answers):
        whole = [*row.prompt_ids, *row.token_ids]
        for span in (turn for turn in row.turns if turn.role == "model"):
            said = row.token_ids[span.start : span.end]
            assert contexts[tuple(said)] == whole[: len(row.prompt_ids) + span.start]
            seen.append(tuple(said))
        assert [bool(m) for m in row.mask] == [v != -1 for v in row.weight_versions]
    assert sorted(seen) == sorted(contexts) and rows(answers)[-1].token_ids[-1] == answers[-1].token_ids[-1]


