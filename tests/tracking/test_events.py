"""events.jsonl: spans end in the file however they end, and export as a Chrome trace."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from posttrain.tracking.events import Events, export_chrome
from posttrain.tracking.jsonl import read


def test_a_span_records_role_duration_arguments_and_what_the_block_adds(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    with events.span("policy", "train", step=3) as args:
        assert [(s.role, s.name) for s in events.open_spans()] == [("policy", "train")]
        args["rows"] = 8
    events.close()
    (row,) = read(tmp_path / "events.jsonl")
    assert row["role"] == "policy" and row["name"] == "train" and row["args"] == {"step": 3, "rows": 8} and row["dur"] >= 0
    assert events.open_spans() == []


def test_a_span_that_raises_is_written_with_the_error(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    with pytest.raises(KeyError), events.span("rollout", "generate"):
        raise KeyError
    events.close()
    assert next(read(tmp_path / "events.jsonl"))["args"] == {"error": "KeyError"}


def test_tasks_and_threads_write_whole_lines(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")

    async def task(i: int) -> None:
        with events.span(f"rollout/{i}", "turn", i=i):
            await asyncio.sleep(0.001)

    async def main() -> None:
        await asyncio.gather(*(task(i) for i in range(20)))

    threads = [threading.Thread(target=lambda: [events.instant("policy", "tick") for _ in range(50)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    asyncio.run(main())
    for thread in threads:
        thread.join()
    events.close()
    assert len(list(read(tmp_path / "events.jsonl"))) == 170


def test_chrome_export_names_a_thread_per_role(tmp_path: Path) -> None:
    events = Events(tmp_path / "events.jsonl")
    with events.span("rollout", "generate", step=1):
        events.instant("weights", "stamp", version=1)
    events.close()
    assert export_chrome(tmp_path, tmp_path / "trace.json") == 2
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["args"]["name"]: e["tid"] for e in trace if e["ph"] == "M"}
    assert set(threads) == {"rollout", "weights"}
    (span,) = [e for e in trace if e["ph"] == "X"]
    (instant,) = [e for e in trace if e["ph"] == "i"]
    assert span["tid"] == threads["rollout"] and instant["tid"] == threads["weights"]
    assert span["ts"] <= instant["ts"] <= span["ts"] + span["dur"] + 1
