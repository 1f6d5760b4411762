"""How long the light commands take, and that they stay light; and how long a run takes to its first rollout. Fresh processes.

    python tests/benchmarks/bench_start.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    "import posttrain": [sys.executable, "-c", "import posttrain"],
    "posttrain --help": [sys.executable, "-m", "posttrain.cli", "--help"],
    "posttrain plugins list": [sys.executable, "-m", "posttrain.cli", "plugins", "list"],
    "posttrain experiments list": [sys.executable, "-m", "posttrain.cli", "experiments", "list"],
    "python -c pass (for comparison)": [sys.executable, "-c", "pass"],
}

RUN = ["train", "experiment=arithmetic_grpo", "rl.steps=1", "tracking.display=none"]


def first_rollout(root: Path) -> float:
    """Seconds from the start of `posttrain train` to the first batch of answers, generated and scored. Makes the model once."""
    began = time.time()
    subprocess.run([sys.executable, "-m", "posttrain.cli", *RUN, "--run", str(root)], check=True, stdout=subprocess.DEVNULL)
    newest = max(root.glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    events = [json.loads(line) for line in newest.read_text().splitlines()]
    first = next(event for event in events if event["name"] == "generate and score")
    return float(first["ts"] + first["dur"] - began)


if __name__ == "__main__":
    for name, command in COMMANDS.items():
        times = []
        for _ in range(7):
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        print(f"{name:35s} median {statistics.median(times):.3f} s   min {min(times):.3f} s")
    with tempfile.TemporaryDirectory() as folder:
        first_rollout(Path(folder))
        times = [first_rollout(Path(folder)) for _ in range(5)]
    print(f"{'to the first rollout, tiny model, hf':35s} median {statistics.median(times):.3f} s   min {min(times):.3f} s")
