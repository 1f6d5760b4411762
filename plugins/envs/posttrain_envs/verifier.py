"""math-verify in a process of its own, which may be killed: the only safe way to run algebra on text that a model wrote.

    verify("x^2", "x \\\\cdot x", timeout_s=5)     # Verdict.SAME, DIFFERENT or GAVE_UP

math-verify guards itself with SIGALRM, which works in main threads only and cannot interrupt big-integer arithmetic. Here the
kernel ends the process (RLIMIT_CPU) once it has *computed* for `timeout_s` seconds on one pair, so a busy machine makes no right
answer wrong; its memory is bounded too. The next pair gets a new process, which starts in about a second. What cannot be decided
within these limits is GAVE_UP, which is about the text, never about the machine: when the process was killed from outside, or
did not get its time, RuntimeError or TimeoutError is raised instead, and the reward is unscorable.
One such process belongs to each process that verifies; it ends with it. Calls from several threads take turns.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

MEMORY = 400 << 20  # bytes that a verification may add
PATIENCE = 4  # times timeout_s of wall time before the machine is to blame
_START_S = 60.0
_TOWER = re.compile(r"\^\s*\{?\s*[-+(]*[0-9.]+\s*\}?\s*\^|\^\s*\{?\s*[-+]?[0-9]{5,}|[0-9]{60,}|[0-9]{4,}\s*!|!\s*!", re.ASCII)
_DEPTH = 40
_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from posttrain_envs.verifier import serve; serve()"


class Verdict(enum.Enum):
    SAME = "same"
    DIFFERENT = "different"
    GAVE_UP = "gave up"


def verify(gold: str, answer: str, *, timeout_s: float = 5.0) -> Verdict:
    """Whether two LaTeX answers are the same by algebra. Raises RuntimeError or TimeoutError when the machine failed."""
    if hopeless(answer):
        return Verdict.GAVE_UP
    return _mine().ask(gold, answer, timeout_s)


def hopeless(answer: str) -> bool:
    """Whether an answer is not worth a process: towers of powers, huge exponents, factorials and numbers, deep nesting."""
    depth = deepest = 0
    for mark in answer:
        depth += (mark in "{([") - (mark in "})]")
        deepest = max(deepest, depth)
    return deepest > _DEPTH or _TOWER.search(answer) is not None


class _Process:
    """The process, started at the first question and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, gold: str, answer: str, timeout_s: float) -> Verdict:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                self._send({"gold": gold, "answer": answer, "timeout_s": timeout_s})
                line = self._receive(PATIENCE * timeout_s + 1)
            except BrokenPipeError:
                line = b""
            except BaseException:
                self.stop()
                raise
            return Verdict(json.loads(line)) if line else self._ended()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            self._process = None

    def _start(self) -> None:
        self.stop()
        path = [entry or os.getcwd() for entry in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            if not self._receive(_START_S):
                raise RuntimeError("math-verify could not be started: its process ended; see the log of the reward workers")
        except BaseException:
            self.stop()
            raise

    def _ended(self) -> Verdict:
        """What it means that the process ended: its own limits are about the text, anything else about the machine."""
        assert self._process is not None
        code = self._process.wait()
        self.stop()
        if code in (-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT):
            return Verdict.GAVE_UP
        raise RuntimeError(f"the process of math-verify ended with exit code {code}")

    def _send(self, question: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self, timeout_s: float) -> bytes:
        """The next line; empty when the process has ended. Raises TimeoutError."""
        assert self._process is not None and self._process.stdout is not None
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            ready = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                raise TimeoutError(f"math-verify did not answer within {timeout_s:g} s; the machine gave it too little time")
            part = os.read(self._process.stdout.fileno(), 4096)
            if not part:
                return b""
            line += part
        return line


@functools.cache
def _of(pid: int) -> _Process:
    return _Process()


def _mine() -> _Process:
    """This process's own: a fork must not share its parent's pipes."""
    return _of(os.getpid())


def serve() -> None:
    """The process itself: one question a line, one verdict a line; ends with its standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's; this ends when its input does
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not an answer
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    how = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]

    @functools.lru_cache(256)
    def read(text: str) -> list[Any]:
        return parse(f"\\boxed{{{text}}}", how, fallback_mode="no_fallback", parsing_timeout=None)

    _limit_memory()
    os.write(out, b"ready\n")
    for question in sys.stdin.buffer:
        pair = json.loads(question)
        _limit_time(pair["timeout_s"])
        try:
            same = verify(read(pair["gold"]), read(pair["answer"]), timeout_seconds=None)
            verdict = Verdict.SAME if same else Verdict.DIFFERENT
        except (MemoryError, RecursionError):
            verdict = Verdict.GAVE_UP
        except Exception:
            verdict = Verdict.DIFFERENT
        os.write(out, json.dumps(verdict.value).encode() + b"\n")


def _limit_time(timeout_s: float) -> None:
    """Let the kernel end this process when it has computed for `timeout_s` (rounded up to whole seconds) from now on."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_memory() -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or now + MEMORY < hard:
            resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
