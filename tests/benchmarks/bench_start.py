"""How long the light commands take, and that they stay light: medians of fresh processes.

    python tests/benchmarks/bench_start.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "import posttrain": [sys.executable, "-c", "import posttrain"],
    "posttrain --help": [sys.executable, "-m", "posttrain.cli", "--help"],
    "posttrain plugins list": [sys.executable, "-m", "posttrain.cli", "plugins", "list"],
    "posttrain experiments list": [sys.executable, "-m", "posttrain.cli", "experiments", "list"],
    "python -c pass (for comparison)": [sys.executable, "-c", "pass"],
}

if __name__ == "__main__":
    for name, command in COMMANDS.items():
        times = []
        for _ in range(7):
            began = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        print(f"{name:35s} median {statistics.median(times):.3f} s   min {min(times):.3f} s")
