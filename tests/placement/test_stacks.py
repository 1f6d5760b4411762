"""Stacks: of this process down to where a task waits, and of others, which are asked by a signal."""

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from posttrain.placement import stacks

ASKED = """
import threading, time
from posttrain.placement import stacks

def in_a_thread():
    time.sleep(1000)

stacks.answer()
threading.Thread(target=in_a_thread, daemon=True).start()
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.fixture
def start():
    started = []

    def one(code):
        started.append(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_task_is_told_down_to_where_it_waits_also_through_an_asynchronous_generator():
    async def items():
        await asyncio.sleep(60)
        yield 1

    async def consume():
        async for _ in items():
            pass

    async def main():
        task = asyncio.create_task(consume(), name="rollouts loop")
        await asyncio.sleep(0)
        found = {stack.name: stack for stack in stacks.tasks()}
        task.cancel()
        return found["task rollouts loop"]

    stack = asyncio.run(main())
    assert [function for function, _, _ in stack.frames] == ["sleep", "items", "consume"]
    assert stack.line(2).startswith("task rollouts loop: sleep (tasks.py:")
    assert str(stack).splitlines()[0] == "task rollouts loop" and f"items  {__file__}:" in str(stack)


def test_every_thread_has_its_name_and_where_it_is():
    ready, end = threading.Event(), threading.Event()

    def waiting_for_the_end():
        ready.set()
        end.wait()

    thread = threading.Thread(target=waiting_for_the_end, name="hf-engine")
    thread.start()
    ready.wait()
    found = {stack.name: stack for stack in stacks.threads()}
    end.set()
    thread.join()
    assert "waiting_for_the_end" in found["thread hf-engine"].line()
    assert found["thread MainThread"].frames[0][0] == "threads"


def test_a_process_says_where_all_its_threads_are_as_often_as_it_is_asked(start):
    pid = start(ASKED).pid
    for _ in range(2):
        began = time.monotonic()
        (text,) = asyncio.run(stacks.ask([pid], timeout=9)).values()
        assert time.monotonic() - began < 8
        assert text.count("(most recent call first)") == 2 and "in in_a_thread" in text and "in <module>" in text


def test_one_that_is_stopped_one_that_has_ended_and_one_that_cannot_be_asked_are_silent(start):
    stopped, deaf, asked = start(ASKED), start("import time; print('ready', flush=True); time.sleep(1000)"), start(ASKED)
    stopped.send_signal(signal.SIGSTOP)
    gone = start(ASKED)
    gone.kill()
    gone.wait()
    began = time.monotonic()
    found = asyncio.run(stacks.ask([stopped.pid, deaf.pid, gone.pid, asked.pid], timeout=3))
    assert time.monotonic() - began < 6, "one after another"
    assert found[stopped.pid] == "silent: its process is stopped" and found[gone.pid] == "silent: it has ended"
    assert found[deaf.pid] == "silent: it does not answer the signal" and "in in_a_thread" in found[asked.pid]
    assert deaf.poll() is None  # the signal would have ended it
    stopped.send_signal(signal.SIGCONT)
    time.sleep(0.3)
    assert stacks._size(stacks._file_of(stopped.pid)) == 0, "no signal was waiting for it"
