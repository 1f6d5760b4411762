"""Threads that outlive their wait, and the end of the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEFT_BEHIND = """
import asyncio, sys, time
import torch
from posttrain.weights.deadline import start_thread

def work():  # comes back from torch, and takes the interpreter's lock, again and again while the interpreter ends
    a, end = torch.ones(64, 64), time.monotonic() + 1.0
    while time.monotonic() < end:
        a = (a @ a).clamp_(0, 1)
    print("worked to its end", flush=True)

async def main():
    start_thread(work)
    await asyncio.sleep(0.2)

asyncio.run(main())
sys.exit(143)
"""

HANGS = """
import asyncio, sys, threading
import posttrain.weights.deadline as deadline
from posttrain.cli import main as cli

deadline.END_S = 0.2

def main():
    async def run():
        deadline.start_thread(threading.Event().wait)
        await asyncio.sleep(0.05)
    asyncio.run(run())
    print("over")
    return 75

cli.main = main
cli.command()
"""


@pytest.mark.parametrize("code, exit_code, says", [(LEFT_BEHIND, 143, "worked to its end"), (HANGS, 75, "over")])
def test_a_process_ends_with_its_own_exit_code_whatever_its_threads_do(code, exit_code, says):
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.strip()) == (exit_code, says), ended.stderr
    assert not ended.stderr


def test_ctrl_c_while_the_end_waits_ends_it_with_the_same_exit_code():
    import os
    import signal
    import time

    code = HANGS.replace("END_S = 0.2", "END_S = 60").replace('print("over")', 'print("over", flush=True)')
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "over\n"
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (75, "")
