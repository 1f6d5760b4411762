from __future__ import annotations

import os
import signal
import subprocess
import sys

from posttrain.weights.owner import ProcessId

CHILD = """
import sys, time
from posttrain.weights.owner import ProcessId, end_with
end_with(ProcessId.parse(sys.argv[1]))
print("armed", flush=True)
time.sleep(60)
"""


def test_a_process_is_named_by_pid_and_start():
    me = ProcessId.current()
    assert me.alive() and ProcessId.parse(str(me)) == me
    assert not ProcessId(me.pid, me.start + 1).alive(), "a recycled pid is another process"
    assert ProcessId.parse("nonsense") is None


def test_a_watched_process_ends_with_its_owner():
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    name = str(ProcessId(owner.pid, _start(owner.pid)))
    child = subprocess.Popen([sys.executable, "-c", CHILD, name], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "armed\n"
    owner.kill()
    owner.wait()
    assert child.wait(timeout=10) == -signal.SIGKILL
    child.stdout.close()


def test_a_process_whose_owner_is_already_gone_ends_at_once():
    child = subprocess.run([sys.executable, "-c", CHILD, f"{os.getpid()}.1"], capture_output=True, timeout=20)
    assert child.returncode == -signal.SIGKILL


def _start(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rsplit(b")", 1)[1].split()[19])
