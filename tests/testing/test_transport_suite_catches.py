"""Each law of transports fails for the transport that breaks it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from posttrain.testing import TransportContract
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.memory import Region, attach
from posttrain.weights.plan import Piece
from posttrain.weights.shm import ShmTransport
from posttrain.weights.transport import Handle, Transport, copy_pieces


class Transports(TransportContract):
    __test__ = False


class Rounds(InprocTransport):
    def allocate(self, nbytes: int) -> tuple[Region, Handle]:
        return super().allocate(-(-nbytes // 64) * 64)


class Wrong(InprocTransport):
    """One bit."""

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        super().pull(handle, pieces, into)
        into.buffer[pieces[0].target] ^= 1


class Spills(InprocTransport):
    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        before = into.buffer.clone()
        super().pull(handle, pieces, into)
        into.buffer[:1] = before[:1] + 1


class Shares(InprocTransport):
    memory: Region | None = None

    def allocate(self, nbytes: int) -> tuple[Region, Handle]:
        if self.memory is None:
            self.memory, self.handle = super().allocate(nbytes)
        return self.memory, self.handle


class HoldsALock(InprocTransport):
    def allocate(self, nbytes: int) -> tuple[Region, Handle]:
        region, handle = super().allocate(nbytes)
        return region, {**handle, "lock": threading.Lock()}


class OneAtATime(InprocTransport):
    """All lanes share one place on the way, which each of them clears."""

    busy = threading.Barrier(4)

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        self.busy.wait(5)
        if self.busy.wait(5) != 0:
            return
        super().pull(handle, pieces, into)


class ClosesAll(InprocTransport):
    closed: list[bool] = []  # noqa: RUF012

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        if not self.closed:
            super().pull(handle, pieces, into)

    def close(self) -> None:
        self.closed.append(True)
        super().close()


class Silent(InprocTransport):
    """Gives zeros where there is nothing any more."""

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        for piece in pieces:
            into.buffer[piece.target : piece.target + piece.nbytes] = torch.zeros(piece.nbytes, dtype=torch.uint8)


class Once(InprocTransport):
    def close(self) -> None:
        super().close()
        assert not vars(self).get("ended"), "closed twice"
        self.ended = True


class StaysHere(InprocTransport):
    """Copies within this process, and says that it does more."""

    provides = ("between_processes",)


class ReadsOfTheDead(ShmTransport):
    """Goes on with the memory that a killed publisher left."""

    def pull(self, handle: Handle, pieces: Sequence[Piece], into: Region) -> None:
        path = handle["path"]
        if path not in self._attached:
            self._attached[path] = attach(path)
        copy_pieces(self._attached[path].buffer, pieces, into.buffer)


BROKEN: dict[str, tuple[type[Transport], str]] = {
    "test_a_slot_has_the_size_asked_for": (Rounds, r"allocate\(1000\) gave 1024 bytes"),
    "test_all_buckets_bring_all_parameters": (Wrong, r"pull brought other bytes"),
    "test_a_pull_moves_its_bucket_and_nothing_else": (Spills, r"wrote outside of the pieces"),
    "test_two_slots_do_not_share_memory": (Shares, r"two slots share memory"),
    "test_a_handle_travels_as_plain_data": (HoldsALock, r"cannot be sent to another process"),
    "test_another_process_pulls_when_it_says_so": (StaysHere, r"cannot be pulled from in another process"),
    "test_a_publisher_that_dies_is_a_clear_error": (ReadsOfTheDead, r"DID NOT RAISE .*WeightSyncError"),
    "test_lanes_pull_at_the_same_time": (OneAtATime, r"is wrong after pulls at the same time"),
    "test_a_lane_that_closes_harms_no_other": (ClosesAll, r"fresh\(\) must share nothing that close\(\) ends"),
    "test_a_slot_that_is_gone_is_a_clear_error": (Silent, r"DID NOT RAISE .*WeightSyncError"),
    "test_close_twice": (Once, r"closed twice"),
}


@pytest.mark.parametrize("law", BROKEN)
def test_the_law_catches_it(law: str, told: Callable[..., Any]) -> None:
    broken, message = BROKEN[law]
    text = told(Transports(), law, broken())
    assert re.search(message, text), text


def test_there_is_a_broken_one_for_every_law(laws: Callable[[type], set[str]]) -> None:
    assert laws(TransportContract) == set(BROKEN)
