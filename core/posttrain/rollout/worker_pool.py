"""A pool of processes for what environments do in plain functions: deadlines that kill, deaths noticed at once, replacements.

Each worker has one batch in flight and answers it item by item; the deadline is that of one item, counted from the answer
before it. When a worker dies or is late, the item it was on fails and the rest of its batch goes to its replacement. When none
can be started, the batch fails with the reason, and the next batch tries again: a job never waits for a worker that will not
come. Batches get smaller as the queue does, so that slow rewards at its end do not wait for one worker while others are idle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import PluginError, PosttrainError, RunInterrupted
from posttrain.placement import stacks
from posttrain.rollout.reward_worker import HEADER, Raised

if TYPE_CHECKING:
    from posttrain.data.environment import Environment, EpisodeState

_log = logging.getLogger("posttrain.rewards")

START_TIMEOUT_S = 120.0
STACKS_S = 2.0
BATCH_LIMIT = 32
MOST_WORKERS = 8
LEFT_S = 1.0
"""For how long a process may go on with a job that nobody waits for."""
_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from posttrain.rollout.reward_worker import main; main({}, {})"


class Died(RuntimeError):
    """The process that was at a call has ended."""


@dataclass(slots=True)
class Job:
    """A call of `method(state, *args)` of an environment, and where the answer goes: what it returns and the episode's `custom`
    afterwards, or why there is none, as an exception. The worker makes a `Reward` of what `compute_reward` returns."""

    env: str
    method: str
    state: EpisodeState
    args: tuple[Any, ...]
    timeout_s: float
    answer: asyncio.Future[tuple[Any, dict[str, Any]]]


class Worker:
    """One reward process and the socket to it."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number, self.process = number, process
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    @classmethod
    async def start(cls, number: int, environments: bytes, log: Any) -> Worker:
        """Start a process and hand it the environments. Raises PluginError when it cannot build them."""
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as unused, theirs:
            unused.callback(ours.close)
            boot = _BOOT.format(theirs.fileno(), os.getpid())
            process = subprocess.Popen(
                [sys.executable, "-c", boot, json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                process_group=0,  # not a session: Linux shares a core by them, and one beside a busy engine waited for seconds
            )
            unused.pop_all()
        worker = cls(number, process)
        try:
            worker.reader, worker.writer = await asyncio.open_connection(sock=ours)
            worker.send(environments)
            problem = await worker.receive(START_TIMEOUT_S)
        except (EOFError, ConnectionError, TimeoutError) as exc:
            problem = f"{type(exc).__name__}: {await worker.stop()}"
        except BaseException:
            await worker.stop()
            raise
        if problem is not None:
            await worker.stop()
            raise PluginError(
                "the environments could not be built in a reward worker",
                cause=str(problem).rstrip(),
                fix="another Python process must be able to import their modules (install them, or set PYTHONPATH)",
            )
        return worker

    @property
    def gone(self) -> bool:
        return self.reader.at_eof() or self.process.poll() is not None

    def send(self, data: bytes) -> None:
        self.writer.write(HEADER.pack(len(data)) + data)

    async def receive(self, timeout: float) -> Any:
        """The next answer. Raises EOFError or ConnectionError when the process ended, TimeoutError when it is late."""
        async with asyncio.timeout(timeout):
            size = HEADER.unpack(await self.reader.readexactly(HEADER.size))[0]
            return pickle.loads(await self.reader.readexactly(size))

    async def stop(self) -> str:
        """End the process and everything it started; returns how it ended, in words. Idempotent."""
        died_alone = await self._ended_by_itself()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = await asyncio.to_thread(self.process.wait)
        if hasattr(self, "writer"):
            self.writer.close()
        how = f"ended with exit code {code}" if died_alone else "was killed"
        return f"reward worker {self.number} (pid {self.process.pid}) {how}"

    async def _ended_by_itself(self) -> bool:
        """Whether the process has ended or is just ending: its socket is closed a moment before its exit code is there."""
        if not hasattr(self, "reader") or not self.reader.at_eof():
            return self.process.poll() is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, 1.0)
        return self.process.poll() is not None


class WorkerPool:
    """`workers` processes that hold `environments`."""

    def __init__(self, environments: Mapping[str, Environment], *, workers: int | None, log_path: Path | None = None) -> None:
        import cloudpickle

        self._environments = cloudpickle.dumps(dict(environments))
        self._size = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._log_path = log_path
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._workers: dict[int, Worker] = {}
        self._servers: list[asyncio.Task[None]] = []
        self._at: dict[int, Job] = {}

    async def start(self) -> None:
        """Start all workers. Raises as `_replace` does; no process is left then."""
        try:
            begun = await asyncio.gather(*(self._replace(number) for number in range(self._size)), return_exceptions=True)
            for failure in filter(lambda one: isinstance(one, BaseException), begun):
                raise failure  # type: ignore[misc]
        except BaseException:
            await self.close()
            raise
        self._servers = [asyncio.create_task(self._serve(n), name=f"reward worker {n}") for n in range(self._size)]

    async def call(
        self, env: str, method: str, state: EpisodeState, *args: Any, timeout_s: float
    ) -> tuple[Any, dict[str, Any]]:
        """What `method(state, *args)` returns, and `state.custom` after it.

        Raises TimeoutError at the deadline, Died when its process ended, Raised for what it raised, and as `_replace` does.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, dict[str, Any]]] = loop.create_future()
        job = Job(env, method, state, args, timeout_s, answer)
        self._jobs.put_nowait(job)
        try:
            return await answer
        except asyncio.CancelledError:
            loop.call_later(LEFT_S, self._end, job)  # nobody waits: it may not hold a worker for long
            raise

    async def stacks(self) -> dict[str, str]:
        """What every worker writes of itself."""
        names = {worker.process.pid: f"reward worker {n} (pid {worker.process.pid})" for n, worker in self._workers.items()}
        return {names[pid]: text for pid, text in (await stacks.ask(list(names), timeout=STACKS_S)).items()}

    async def close(self) -> None:
        """End every process; waiting scores are cancelled. Idempotent."""
        for server in self._servers:
            server.cancel()
        await asyncio.gather(*self._servers, return_exceptions=True)
        self._servers.clear()
        while not self._jobs.empty():
            self._jobs.get_nowait().answer.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))
        self._workers.clear()

    async def _serve(self, number: int) -> None:
        while True:
            first = await self._jobs.get()
            if first.answer.done():
                continue
            batch = deque([first])
            share = min(BATCH_LIMIT, -(-self._jobs.qsize() // (2 * self._size)))
            while len(batch) < share and not self._jobs.empty():
                batch.append(self._jobs.get_nowait())
            try:
                while batch:
                    await self._run(number, batch)
            except Exception as exc:  # if it ended this task, its jobs and all later ones would wait for ever
                failure = exc if isinstance(exc, PosttrainError) else _unavailable(f"reward worker {number} cannot go on", exc)
                for job in batch:
                    _answer(job, failure)
            except asyncio.CancelledError:
                for job in batch:
                    job.answer.cancel()
                raise

    async def _run(self, number: int, batch: deque[Job]) -> None:
        """Work on a batch until it is empty, or until its first item has ended the worker; that one has failed then."""
        worker = self._workers.get(number)
        if worker is None or worker.gone:
            if worker is not None:
                _log.warning("%s between two calls; it is replaced", await self._discard(number))
            worker = await self._replace(number)
        sent = _packed(batch)
        try:
            if sent:
                worker.send(pickle.dumps(sent))
            while batch:
                self._at[number] = batch[0]
                answer = await worker.receive(batch[0].timeout_s)
                _answer(batch.popleft(), answer)
        except TimeoutError:
            how = await self._discard(number)  # first: what leaves the batch before an await that fails is never answered
            _answer(batch.popleft(), TimeoutError(how))
        except (EOFError, ConnectionError):
            how = await self._discard(number)
            _answer(batch.popleft(), Died(how))
        except Exception as exc:  # what came cannot be read here
            await self._discard(number)
            _answer(batch.popleft(), Raised(f"its answer cannot be read: {type(exc).__name__}: {exc}"))
        finally:
            self._at.pop(number, None)

    def _end(self, job: Job) -> None:
        """End the process that is still at a job that nobody waits for."""
        for number, running in self._at.items():
            if running is job and number in self._workers:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._workers[number].process.pid, signal.SIGKILL)

    async def _replace(self, number: int) -> Worker:
        """A new worker. Raises PluginError when the environments cannot be built there, RunInterrupted when it does not start."""
        try:
            with contextlib.ExitStack() as stack:
                log = stack.enter_context(open(self._log_path, "ab")) if self._log_path else None
                self._workers[number] = await Worker.start(number, self._environments, log)
        except PosttrainError:
            raise
        except Exception as exc:
            raise _unavailable(f"reward worker {number} could not be started", exc) from exc
        return self._workers[number]

    async def _discard(self, number: int) -> str:
        return await self._workers.pop(number).stop()


def _unavailable(message: str, exc: Exception) -> RunInterrupted:
    """A worker that is not to be had, through no fault of an environment: there is no process, memory or descriptor left."""
    return RunInterrupted(
        message,
        cause=f"{type(exc).__name__}: {exc}",
        fix="have fewer rollout.reward_workers, free memory, or raise the limits of processes (ulimit -u) and open files "
        "(ulimit -n); then go on with --resume",
        where="rollout.reward_workers",
        anchor="troubleshooting.md#reward-worker-n-could-not-be-started",
        code="reward-worker",
    )


def _packed(batch: deque[Job]) -> list[bytes]:
    """Jobs as they travel. Those that nobody waits for, and those that cannot be sent, which is their answer, leave the batch."""
    sent = []
    for _ in range(len(batch)):
        job = batch.popleft()
        if job.answer.done():
            continue
        try:
            sent.append(_pickled(job))
        except Exception as exc:
            _answer(job, Raised(f"the episode cannot be sent to another process: {type(exc).__name__}: {exc}"))
            continue
        batch.append(job)
    return sent


def _pickled(job: Job) -> bytes:
    """The tokens apart, so that the worker need not unpack them (see `reward_worker.Received`)."""
    trajectory = job.state.trajectory
    state = replace(job.state, trajectory=None, offload=None)
    return pickle.dumps((job.env, job.method, state, None if trajectory is None else pickle.dumps(trajectory), job.args))


def _answer(job: Job, answer: tuple[Any, dict[str, Any]] | Exception) -> None:
    if job.answer.done():
        return
    if isinstance(answer, Exception):
        job.answer.set_exception(answer)
    else:
        job.answer.set_result(answer)
