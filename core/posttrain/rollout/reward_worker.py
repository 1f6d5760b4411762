"""The process that runs plain functions of environments. It reads frames from a socket, calls, answers, dies with its owner.

A frame is a 4-byte length and a pickle. First frame: the environments (cloudpickle), answered by None or by the text of the
failure. Every later frame: a list of pickles (environment name, method, EpisodeState, its Trajectory as a pickle, further
arguments), each answered by (what the method returned, the episode's `custom` afterwards) or by Raised. It imports no torch
unless an environment does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from posttrain.data.environment import EpisodeState
from posttrain.data.seeds import derive_seed
from posttrain.placement import stacks
from posttrain.rollout.rewards import as_reward
from posttrain.types import Trajectory

HEADER = struct.Struct("<I")
REWARD = "compute_reward"


def main(descriptor: int, owner: int) -> None:
    """Serve until the socket closes."""
    _die_with(owner)
    stacks.answer()
    os.dup2(2, 1)  # what a reward prints goes to the log, not into the owner's output
    with socket.socket(fileno=descriptor) as sock, contextlib.suppress(EOFError, ConnectionError):
        environments: dict[str, Any] = {}
        try:
            environments = pickle.loads(_receive(sock))
            _send(sock, pickle.dumps(None))
        except (EOFError, ConnectionError):
            raise
        except BaseException as exc:
            _send(sock, pickle.dumps(f"{type(exc).__name__}: {exc}\n{traceback.format_exc()}"))
            return
        while True:
            for data in pickle.loads(_receive(sock)):
                name, method, state, trajectory, args = pickle.loads(data)
                _send(sock, _call(environments[name], method, Received(state, trajectory), args))


class Received(EpisodeState):
    """An episode whose tokens are unpickled when a reward looks at them; most read the text alone, and tokens are most of it."""

    __slots__ = ("_packed", "_unpacked")

    def __init__(self, state: EpisodeState, packed: bytes | None) -> None:
        super().__init__(state.task, state.prompt, state.messages, state.completion, None, state.custom, state.seed, state.turn)
        self._packed = packed

    @property
    def trajectory(self) -> Trajectory | None:  # type: ignore[override]
        if self._packed is not None:
            self.trajectory = pickle.loads(self._packed)
        return self._unpacked

    @trajectory.setter
    def trajectory(self, value: Trajectory | None) -> None:
        self._packed, self._unpacked = None, value


class Raised(RuntimeError):
    """What a method raised, or that what it returned cannot be sent: `str` says it in one line."""


def _call(env: Any, method: str, state: Received, args: Sequence[Any]) -> bytes:
    """The answer to one call, pickled."""
    random.seed(state.seed if method == REWARD else derive_seed(state.seed, method, state.turn))
    try:
        found = getattr(env, method)(state, *args)
        if method == REWARD:
            found = as_reward(found)
    except Exception as exc:
        traceback.print_exc()
        return pickle.dumps(Raised(f"{type(exc).__name__}: {exc}"))
    try:
        return pickle.dumps((found, state.custom))
    except Exception as exc:
        return pickle.dumps(Raised(f"what {method} left cannot be sent to another process: {exc}"))


def _send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(HEADER.pack(len(data)) + data)


def _receive(sock: socket.socket) -> bytes:
    return _exactly(sock, HEADER.unpack(_exactly(sock, HEADER.size))[0])


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _die_with(owner: int) -> None:
    """Ask the kernel to kill this process when its owner ends, also by SIGKILL (Linux; elsewhere the socket's end does)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != owner:
        os._exit(0)
