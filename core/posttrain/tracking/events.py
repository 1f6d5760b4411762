"""events.jsonl: what each role did when.

    with events.span("policy", "train", step=3):
        ...
    events.instant("rollout/0", "aborted", request="r7")
    export_chrome(run_dir.events, "trace.json")        # open in Perfetto or chrome://tracing

A line is `{"ts": seconds since the epoch, "dur": seconds, "role": ..., "name": ..., "args": {...}}`; an instant has no `dur`.
A span is written when it ends, also when it ends by an exception (`args.error` names it). `open_spans()` lists what is still
going on.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.tracking.files import write_text
from posttrain.tracking.jsonl import JsonLines, read


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A span that has not ended: who, what, for how long (seconds)."""

    role: str
    name: str
    seconds: float


class Events:
    """Appends events. Safe from threads and from many tasks of one event loop."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._open: dict[int, tuple[str, str, float]] = {}
        self._ids = itertools.count()
        self._epoch = time.time() - time.perf_counter()

    @contextmanager
    def span(self, role: str, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        """Time the block. The yielded dict is the span's `args`; what the block adds to it is written too."""
        key, start = next(self._ids), time.perf_counter()
        self._open[key] = (role, name, start)
        try:
            yield args
        except BaseException as exc:
            args["error"] = type(exc).__name__
            raise
        finally:
            del self._open[key]
            self._write(role, name, args, start, time.perf_counter() - start)

    def instant(self, role: str, name: str, **args: Any) -> None:
        self._write(role, name, args, time.perf_counter(), None)

    def open_spans(self) -> list[OpenSpan]:
        """What is going on now, longest first."""
        now = time.perf_counter()
        spans = [OpenSpan(role, name, now - start) for role, name, start in list(self._open.values())]
        return sorted(spans, key=lambda span: -span.seconds)

    def close(self) -> None:
        self._lines.close()

    def _write(self, role: str, name: str, args: dict[str, Any], start: float, seconds: float | None) -> None:
        row: dict[str, Any] = {"ts": round(self._epoch + start, 6), "role": role, "name": name}
        if seconds is not None:
            row["dur"] = round(seconds, 6)
        if args:
            row["args"] = args
        self._lines.write(row)


def export_chrome(events: str | Path, out: str | Path) -> int:
    """Write a run's events (the run directory or its events.jsonl) as a Chrome trace; return how many.

    Each role is a named thread of one process, in the order in which the roles first appear.
    """
    source = Path(events)
    rows = list(read(source / "events.jsonl" if source.is_dir() else source))
    threads: dict[str, int] = {}
    trace: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda r: r["ts"]):
        thread = threads.setdefault(row["role"], len(threads) + 1)
        event = {"name": row["name"], "pid": 1, "tid": thread, "ts": row["ts"] * 1e6, "args": row.get("args", {})}
        kind = {"ph": "X", "dur": row["dur"] * 1e6} if "dur" in row else {"ph": "i", "s": "t"}
        trace.append({**event, **kind})
    names = [{"name": "thread_name", "ph": "M", "pid": 1, "tid": t, "args": {"name": role}} for role, t in threads.items()]
    write_text(Path(out), json.dumps({"traceEvents": [*names, *trace], "displayTimeUnit": "ms"}))
    return len(trace)
