"""A coroutine run to its end from ordinary code, with and without a loop that runs already."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import Any

import pytest

from posttrain.rollout.event_loop import run_to_end


def anywhere(call: Any, inside: bool) -> Any:
    async def notebook() -> Any:
        return call()

    return asyncio.run(notebook()) if inside else call()


@pytest.mark.parametrize("inside", [False, True])
def test_the_result_and_the_failure_come_back(inside: bool) -> None:
    async def good() -> int:
        await asyncio.sleep(0)
        return 7

    async def bad() -> int:
        raise ValueError("as it is")

    assert anywhere(lambda: run_to_end(good()), inside) == 7
    with pytest.raises(ValueError, match="as it is") as caught:
        anywhere(lambda: run_to_end(bad()), inside)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("inside", [False, True])
def test_ctrl_c_ends_the_work_after_it_has_closed_everything(inside: bool) -> None:
    closed = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    async def work() -> None:
        try:
            asyncio.get_running_loop().call_later(0.1, signal.pthread_kill, main, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            closed.set()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        anywhere(lambda: run_to_end(work()), inside)
    assert time.monotonic() - began < 30, "the work went on to its own end"
    assert closed.is_set() and not [t for t in threading.enumerate() if t.name == "posttrain"]
