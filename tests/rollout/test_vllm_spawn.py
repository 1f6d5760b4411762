"""A script without a main guard is not run again by the processes that vLLM spawns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import contextlib, multiprocessing, pathlib, time
pathlib.Path("ran").open("a").write("once ")
from posttrain.rollout.vllm_start import main_stays_here

with {context}:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
print("exit", child.exitcode, pathlib.Path(__file__).name)
"""


@pytest.mark.parametrize(("context", "runs"), [("main_stays_here()", 1), ("contextlib.nullcontext()", 2)])
def test_spawned_processes_do_not_run_the_script(tmp_path: Path, context: str, runs: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(context=context))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert len((tmp_path / "ran").read_text().split()) == runs, done.stderr
    assert done.stdout.endswith(f"exit {0 if runs == 1 else 1} train.py\n"), done.stderr
