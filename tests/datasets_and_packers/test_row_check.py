"""Every row is looked at: what is wrong past the first rows ends the run at its next draw, not when the row is drawn."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import row_check, source
from posttrain.data.dataset import PromptSampler, Source
from posttrain.data.environment import Rows
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import DataError


@pytest.fixture(autouse=True)
def few_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_check, "FIRST_ROWS", 50)
    monkeypatch.setattr(source, "CHECKED_ROWS", 50)


def watched(rows: Any, refuse: Any = None) -> PromptSampler:
    sampler = PromptSampler([Source("e", rows)], seed=0)
    for check in sampler.watch(refuse):
        if check._thread is not None:
            check._thread.join()
    return sampler


def lines(count: int, **changed: Any) -> str:
    rows = [json.dumps({"id": f"r{i}", "q": i}) for i in range(count)]
    for number, line in changed.items():
        rows[int(number[1:]) - 1] = line
    return "\n".join(rows)


@pytest.mark.parametrize("bad, message", [
    ('{"id": 1, "q"', "my.jsonl:900 is not JSON"),
    ('["q"]', "my.jsonl:900 is a list, not an object"),
    ('{"id": "x"}', "my.jsonl:900 has no column 'q'"),
    ('{"id": "r3", "q": 1}', "two rows of e have the same id 'r3': my.jsonl:4 and my.jsonl:900"),
])
def test_what_is_wrong_with_a_late_row_ends_the_run_at_its_next_draw(
    bad: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.jsonl").write_text(lines(1000, _900=bad))
    sampler = watched(open_rows(DataOptions(data="my.jsonl", test_size=0), "train", required=("q",)))
    with pytest.raises(DataError) as caught:
        sampler.draw(1)
    assert caught.value.message == message and caught.value.fix
    Path("my.jsonl").write_text(lines(1000))
    assert len(watched(open_rows(DataOptions(data="my.jsonl", test_size=0), "train", required=("q",))).draw(1000)) == 1000


def test_what_is_wrong_with_an_early_row_is_told_before_anything_starts() -> None:
    with pytest.raises(DataError, match="two rows of e have the same id '3': row 3 and row 7"):
        watched([{"id": i if i != 7 else 3} for i in range(20)])
    with pytest.raises(DataError, match="row 2 is a str, not a mapping"):
        watched([{}, {}, "text"])


def test_what_a_run_refuses_is_looked_for_in_all_rows() -> None:
    def refuse(source: Source, position: int, row: Any) -> None:
        if row["q"] == 777:
            raise DataError(f"{source.env} holds {position}")

    rows = [{"q": i} for i in range(1000)]
    with pytest.raises(DataError, match="e holds 777"):
        watched(rows, refuse).draw(1)
    assert watched(rows[:777], refuse).draw(1)


def test_rows_made_on_demand_are_not_all_made() -> None:
    made: set[int] = set()

    def make(i: int) -> dict[str, Any]:
        made.add(i)
        return {"id": str(i)}

    watched(Rows(10**9, make))
    assert made == set(range(50))


def test_the_run_waits_for_no_check() -> None:
    """Draws are made while the rest is still looked at."""
    gate = threading.Event()

    class Slow(list[Any]):
        def __iter__(self) -> Any:
            for position, row in enumerate(super().__iter__()):
                if position == 60:
                    gate.wait(30)
                yield row

    sampler = PromptSampler([Source("e", Slow({"id": i} for i in range(200)))], seed=0)
    checks = sampler.watch()
    assert len(sampler.draw(200)) == 200
    assert checks[0]._thread is not None and checks[0]._thread.is_alive()
    gate.set()
    checks[0].wait()
