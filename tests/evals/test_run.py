"""One eval: the path of training behind training, exactly one version, and rows that go wrong are wrong."""

import asyncio
from typing import Any

import pytest
from eval_toys import Engine, made

from posttrain.errors import DataError, RunAborted, RunInterrupted
from posttrain.evals.run import AT_ONCE, BEHIND, beside, run_eval
from posttrain.types import Sampling

ROWS = [{"id": f"r{n}", "ask": f"what is {n}?"} for n in range(10)]


def ran(engine: Engine, rows: list[dict[str, Any]] = ROWS, version: int = 3, **entry: Any) -> Any:
    one, rollouts, config = made(engine, rows, **entry)

    async def main() -> Any:
        return await run_eval(one, beside(rollouts, [one]), config, version)

    return asyncio.run(main())


def test_every_row_is_asked_through_the_packer_behind_what_trains() -> None:
    engine = Engine()
    result, groups = ran(engine, samples=2, k=(1,))
    assert [row["id"] for row in result.rows] == [f"r{n}" for n in range(10)] and len(groups) == 10
    assert [row["correct"] for row in result.rows] == [2] * 10 and result.step == 3
    assert [bytes(request.prompt_ids).decode() for request in engine.requests] == [row["ask"] for row in ROWS]
    assert {request.priority for request in engine.requests} == {BEHIND} and BEHIND > 0  # vLLM serves lower ones first
    assert {request.sampling for request in engine.requests} == {Sampling(8, 1.0)}
    assert all(request.id.startswith("eval/") for request in engine.requests)


def test_one_sample_is_greedy_and_settings_are_the_entrys_own() -> None:
    engine = Engine()
    ran(engine)
    ran(engine, samples=2, temperature=0.6, top_p=0.9, top_k=5, min_p=0.1, max_tokens=4)
    assert engine.requests[0].sampling.temperature == 0
    assert engine.requests[-1].sampling == Sampling(4, 0.6, 0.9, 5, 0.1)


def test_an_eval_is_in_the_engine_piece_by_piece() -> None:
    engine = Engine()
    ran(engine, samples=4)  # two prompts are eight samples, twice what the engine decodes together
    assert engine.calls == 5 and engine.most <= AT_ONCE


def test_the_same_version_is_asked_the_same_at_any_time() -> None:
    engine = Engine()
    ran(engine)
    first, engine.requests = [request.seed for request in engine.requests], []
    ran(engine)
    assert [request.seed for request in engine.requests] == first and len(set(first)) == len(first)


def test_tokens_of_another_version_are_no_result() -> None:
    with pytest.raises(RunAborted, match="of version 3 has tokens of version 4") as caught:
        ran(Engine(version=4))
    assert caught.value.code == "eval-version"


def test_a_row_that_cannot_be_asked_and_a_reward_that_fails_are_wrong_and_told() -> None:
    rows = [*ROWS[:3], {"id": "bad", "bad": True}, {"id": "long", "ask": "x" * 99}, {"id": "raises", "ask": "?", "raises": True}]
    result, groups = ran(Engine(), rows, samples=2)
    by_id = {row["id"]: row for row in result.rows}
    assert [row["n"] for row in result.rows] == [2] * 6 and len(groups) == 4
    assert by_id["bad"]["causes"] == {"unaskable": 2} and "no question" in by_id["bad"]["error"]
    assert by_id["long"]["causes"] == {"unaskable": 2}
    assert by_id["raises"]["causes"] == {"raised": 2} and by_id["raises"]["rewards"] == [None, None]
    assert result.intervals["accuracy"].mean == 0.5 and result.causes == {"unaskable": 4, "raised": 2}


def test_what_is_correct_is_said_by_the_reward_or_a_part_of_it() -> None:
    rows = [{"id": "half", "ask": "?", "reward": 0.5}, {"id": "all", "ask": "?", "reward": 1.0}]
    assert [row["correct"] for row in ran(Engine(), rows)[0].rows] == [0, 1]
    assert [row["correct"] for row in ran(Engine(), rows, correct_at=0.5)[0].rows] == [1, 1]
    assert [row["correct"] for row in ran(Engine(), rows, correct_part="style", correct_at=0.25)[0].rows] == [1, 1]
    with pytest.raises(DataError, match="no part 'stile'"):
        ran(Engine(), rows, correct_part="stile")


def test_an_engine_that_dies_is_raised_and_nothing_goes_on() -> None:
    engine = Engine(fails=2)
    with pytest.raises(RunInterrupted, match="died"):
        ran(engine, samples=4)
    assert engine.running == 0 and engine.calls < 5


def test_a_row_id_that_is_there_twice_is_refused() -> None:
    with pytest.raises(DataError, match="same id 'r0'"):
        made(Engine(), [ROWS[0], ROWS[0]])
    with pytest.raises(DataError, match="has no rows"):
        made(Engine(), [])
