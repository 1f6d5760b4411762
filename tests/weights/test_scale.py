"""A trillion parameters, 1,024 policy ranks and 64 rollout bodies of 8 ranks are planned on one core, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bench_plan.py"


def test_a_trillion_parameters_are_planned_in_two_gibibytes() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--json"], capture_output=True, text=True, timeout=300, check=True)
    for name, row in json.loads(done.stdout).items():
        assert 0.95e12 < row["parameters"] < 1.05e12 and row["policy_ranks"] == 1024 and row["bodies"] * row["tp"] == 512, name
        assert row["peak_bytes"] < 2 * 2**30, row  # how long it takes: docs/benchmarks.md
        assert row["full_bytes"] == row["full_theory"] == row["bodies"] * 2 * row["parameters"]
        assert row["slice_bytes"] == row["slice_theory"]
        assert row["tp_rank_bytes"] < row["body_bytes"] / row["tp"] * 1.01  # little of a model is whole on every rank
        # bodies that begin at their own places take what the links allow; all at the first rank, each in turn
        assert 0.999 * row["limit_s"] < row["apart_s"] < 1.01 * row["limit_s"]
        assert row["same_start_s"] > 0.99 * row["bodies"] * row["limit_s"]
        assert row["slices_limit_s"] <= row["slices_apart_s"] < row["limit_s"]
