"""A pool of reward processes on the event loop: deadlines that kill, deaths that are noticed at once, replacements.

Each worker has one batch in flight and answers it item by item; the deadline is that of one item, counted from the answer
before it. When a worker dies or is late, the item it was on fails and the rest of its batch goes to its replacement. Batches
get smaller as the queue does, so that slow rewards at its end do not wait for one worker while the others are idle.
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

from posttrain.errors import PluginError, PosttrainError
from posttrain.rollout.reward_worker import HEADER
from posttrain.rollout.rewards import unscorable
from posttrain.types import Reward

if TYPE_CHECKING:
    from posttrain.data.environment import Environment, EpisodeState

_log = logging.getLogger("posttrain.rewards")

START_TIMEOUT_S = 120.0
BATCH_LIMIT = 32
MOST_WORKERS = 8
_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from posttrain.rollout.reward_worker import main; main({}, {})"


@dataclass(slots=True)
class Job:
    """One episode to score and where the answer goes."""

    env: str
    state: EpisodeState
    answer: asyncio.Future[Reward]


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
        with theirs:
            boot = _BOOT.format(theirs.fileno(), os.getpid())
            process = subprocess.Popen(
                [sys.executable, "-c", boot, json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
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
    """`workers` processes that score episodes of `environments`, each within `timeout_s` seconds."""

    def __init__(
        self, environments: Mapping[str, Environment], *, workers: int | None, timeout_s: float, log_path: Path | None = None
    ) -> None:
        import cloudpickle

        self._environments = cloudpickle.dumps(dict(environments))
        self._size = workers or min(len(os.sched_getaffinity(0)), MOST_WORKERS)
        self._timeout, self._log_path = timeout_s, log_path
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._workers: dict[int, Worker] = {}
        self._servers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers. Raises PluginError when the environments cannot be built there."""
        try:
            await asyncio.gather(*(self._replace(number) for number in range(self._size)))
        except BaseException:
            await self.close()
            raise
        self._servers = [asyncio.create_task(self._serve(n), name=f"reward worker {n}") for n in range(self._size)]

    async def score(self, env: str, state: EpisodeState) -> Reward:
        answer: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait(Job(env, state, answer))
        return await answer

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
            batch = deque([await self._jobs.get()])
            share = min(BATCH_LIMIT, -(-self._jobs.qsize() // (2 * self._size)))
            while len(batch) < share and not self._jobs.empty():
                batch.append(self._jobs.get_nowait())
            try:
                while batch:
                    await self._run(number, batch)
            except PosttrainError as exc:
                for job in batch:
                    if not job.answer.done():
                        job.answer.set_exception(exc)
            except asyncio.CancelledError:
                for job in batch:
                    job.answer.cancel()
                raise

    async def _run(self, number: int, batch: deque[Job]) -> None:
        """Score a batch until it is empty, or until its first item has ended the worker; that one is then unscorable."""
        worker = self._workers.get(number)
        if worker is None or worker.gone:
            if worker is not None:
                _log.warning("%s between two rewards; it is replaced", await self._discard(number))
            worker = await self._replace(number)
        try:
            worker.send(pickle.dumps([_packed(job) for job in batch]))
            while batch:
                reward = await worker.receive(self._timeout)
                _answer(batch.popleft(), reward)
        except TimeoutError:
            how = await self._discard(number)
            late = f"no reward within {self._timeout:g} s (rollout.reward_timeout_s); {how}"
            _answer(batch.popleft(), unscorable("timeout", late))
        except (EOFError, ConnectionError):
            how = await self._discard(number)
            _answer(batch.popleft(), unscorable("died", how))

    async def _replace(self, number: int) -> Worker:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(open(self._log_path, "ab")) if self._log_path else None
            self._workers[number] = await Worker.start(number, self._environments, log)
        return self._workers[number]

    async def _discard(self, number: int) -> str:
        return await self._workers.pop(number).stop()


def _packed(job: Job) -> tuple[str, EpisodeState, bytes | None]:
    """A job as it travels: the tokens apart, so that the worker need not unpack them (see `reward_worker.Received`)."""
    trajectory = job.state.trajectory
    return job.env, replace(job.state, trajectory=None), None if trajectory is None else pickle.dumps(trajectory)


def _answer(job: Job, reward: Reward) -> None:
    if not job.answer.done():
        job.answer.set_result(reward)
