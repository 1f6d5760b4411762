"""How long a run waits for its data and what it holds of it: a file of a million rows, each kind in a fresh process.

    python tests/benchmarks/bench_data.py [--rows 1000000]

Time is from before the imports to the first draw of a seeded sampler, and the processor time of it; memory is what the process
holds at most (resident, file pages that it maps included) beyond what it held before it imported anything. `all checked` is when
every row was looked at.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHILD = """
import json, sys, time

def peak():  # getrusage would count what the parent held when it forked
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

before = peak()
options = json.loads(sys.argv[1])
began, cpu = time.perf_counter(), time.process_time()
from posttrain.data.dataset import PromptSampler, Source
from posttrain.data.source import DataOptions, open_rows
made = DataOptions(**options)
rows = open_rows(made, "train", required=("problem",))
test = open_rows(made, "test")
sampler = PromptSampler([Source("e", rows)], seed=0)
checks = sampler.watch()
sampler.draw(1)
ready, busy = time.perf_counter(), time.process_time() - cpu
held = peak() - before
sampler.draw(1000)
drawn = time.perf_counter()
for check in checks:
    check.wait()
end = time.perf_counter()
print(json.dumps({"rows": len(rows), "start_s": ready - began, "cpu_s": busy, "held_mib": held,
                  "draw_us": (drawn - ready) * 1e3, "checked_s": end - began, "held_checked_mib": peak() - before}))
"""


def problems(count: int) -> Any:
    draw = random.Random(0)
    for _ in range(count):
        a, b = draw.randrange(10**6), draw.randrange(10**6)
        question = f"What is {a} plus {b}? Think step by step and end with the number alone."
        yield {"question": question, "answer": str(a + b), "level": 1}


def write(folder: Path, count: int) -> dict[str, Path]:
    """The same rows as JSON Lines, CSV and Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paths = {kind: folder / f"rows.{kind}" for kind in ("jsonl", "csv", "parquet")}
    with open(paths["jsonl"], "w", encoding="utf-8") as lines, open(paths["csv"], "w", encoding="utf-8", newline="") as table:
        writer = csv.DictWriter(table, ["question", "answer", "level"])
        writer.writeheader()
        for row in problems(count):
            lines.write(json.dumps(row) + "\n")
            writer.writerow(row)
    pq.write_table(pa.Table.from_pylist(list(problems(count))), paths["parquet"])
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    count = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write(folder, count)
        cases: dict[str, dict[str, Any]] = {kind: {"data": str(path)} for kind, path in paths.items()}
        cases["parquet, again"] = cases["parquet"]
        cases["jsonl, streaming"] = {"data": str(paths["jsonl"]), "streaming": True, "take": 100_000}
        print(f"{'':18s} file MiB  start s  cpu s held MiB  µs/draw  all checked s held then")
        for label, options in cases.items():
            options = {**options, "columns": {"problem": "question"}}
            done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(options)], capture_output=True, text=True, check=True,
                                  env={"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PATH": ""})
            m = json.loads(done.stdout.splitlines()[-1])
            size = Path(options["data"]).stat().st_size / 2**20
            print(f"{label:18s}{size:9.0f}{m['start_s']:9.2f}{m['cpu_s']:7.2f}{m['held_mib']:9.0f}{m['draw_us']:9.1f}{m['checked_s']:15.1f}"
                  f"{m['held_checked_mib']:10.0f}")
