"""The watch over the waits, in simulated time; the watch over the event loop itself; what the report holds."""

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.config.load import load_config
from posttrain.errors import WaitExpired
from posttrain.loop import blocked, hang
from posttrain.loop.blocked import loop_watched
from posttrain.loop.hang import attended, examine, stall_limit, watchdog, write
from posttrain.loop.waits import Waits, loop_name, run_together
from posttrain.placement import stacks
from posttrain.placement.host import Beat


class Virtual(asyncio.SelectorEventLoop):
    """A loop whose clock goes on to the next timer as soon as nothing is left to do."""

    now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


def simulated(main):
    with asyncio.Runner(loop_factory=Virtual) as runner:
        return runner.run(main)


async def waiting(waits, what, owner):
    with waits.named(what, owner):
        await asyncio.Event().wait()


def test_when_nothing_moves_for_longer_than_all_deadlines_the_graph_is_raised():
    waits = Waits()

    async def main():
        waiter = asyncio.create_task(waiting(waits, "the optimizer steps", "policy"), name="train loop")
        try:
            await watchdog(waits, 7200)
        finally:
            waiter.cancel()

    with pytest.raises(WaitExpired, match="nothing has moved for 7200 s") as caught:
        simulated(main())
    assert "the chain of waits ends at policy" in caught.value.cause and "raise loop.train_timeout_s" in caught.value.fix
    assert "train loop waits for policy: the optimizer steps (7200.0 s)" in caught.value.cause


def test_waits_that_begin_and_end_are_progress():
    waits = Waits()

    async def moving():
        for _ in range(50):
            with waits.named("a batch", "batches loop"):
                await asyncio.sleep(90)

    async def main():
        watch = asyncio.create_task(watchdog(waits, 100))
        await moving()
        assert not watch.done() and asyncio.get_running_loop().time() == 4500
        watch.cancel()

    simulated(main())


def test_a_deadlock_is_raised_after_ten_seconds_and_named():
    waits = Waits()

    async def main():
        tasks = [
            asyncio.create_task(waiting(waits, "room for a cohort", "batches loop"), name="rollouts loop"),
            asyncio.create_task(waiting(waits, "a cohort", "rollouts loop"), name="batches loop"),
        ]
        try:
            await watchdog(waits, 7200)
        finally:
            assert asyncio.get_running_loop().time() == 10
            for task in tasks:
                task.cancel()

    with pytest.raises(WaitExpired, match="deadlock: rollouts loop → batches loop → rollouts loop, each waits") as caught:
        simulated(main())
    assert "the waits form a ring" in caught.value.cause and "bug in posttrain or in a plug-in" in caught.value.fix


def test_a_ring_with_a_deadline_in_it_is_left_to_the_deadline():
    waits = Waits()

    async def main():
        other = asyncio.create_task(waiting(waits, "a cohort", "rollouts loop"), name="batches loop")
        watch = asyncio.create_task(watchdog(waits, 7200))
        work = asyncio.Event().wait()
        try:
            await waits.bounded(work, name="room", owner="batches loop", timeout=60, who="rollouts loop")
        finally:
            assert not watch.done() and asyncio.get_running_loop().time() == 60
            watch.cancel()
            other.cancel()

    with pytest.raises(WaitExpired, match="waited 60 s for room"):
        simulated(main())


def test_work_that_ignores_its_cancellation_is_left_behind():
    async def deaf():
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() > 1000:
                    raise

    async def main():
        try:
            await Waits().bounded(deaf(), name="it", owner="the deaf", timeout=30)
        finally:
            loop = asyncio.get_running_loop()
            assert loop.time() == 35
            loop.now = 2000.0

    with pytest.raises(WaitExpired, match="waited 30 s for it"):
        simulated(main())


def test_the_loops_have_the_names_that_the_waits_know():
    methods = ("_prompt_loop", "_rollout_loop", "_batch_loop", "_train_loop")
    assert [loop_name(f"Controller.{m}") for m in methods] == ["prompts loop", "rollouts loop", "batches loop", "train loop"]
    assert loop_name("Parts.watch") == "Parts.watch"


def test_the_limit_of_a_stall_is_what_a_step_may_take_under_the_deadlines():
    config = load_config(["experiment=arithmetic_grpo", "hooks=[{name: tensorboard, timeout_s: 7}]"]).config
    assert stall_limit(config) == 1800 + 30 + 3600 + 120 + 120 + 10 + 600 + 7


# ---- the loop itself


def fast(monkeypatch):
    for name, value in (("PERIOD_S", 0.02), ("BLOCKED_S", 0.1), ("END_S", 1.0)):
        monkeypatch.setattr(blocked, name, value)


def spin():
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pass


def test_python_code_that_blocks_the_loop_is_ended_where_it_is(monkeypatch):
    fast(monkeypatch)
    told = []

    async def main():
        waits = Waits()
        with loop_watched(waits, 100.0, told.append), waits.named("samples", "engine", 0.1, who="rollouts loop"):
            spin()

    began = time.monotonic()
    with pytest.raises(WaitExpired, match=r"waited 0.1 s for samples, and the event loop is blocked") as caught:
        asyncio.run(main())
    assert time.monotonic() - began < 5 and len(told) == 1 and caught.value.exit_code == 75
    assert re.search(r"what blocks it: thread MainThread: spin \(test_hang_watch.py:\d+\) < main", caught.value.cause)
    assert "asyncio.to_thread" in caught.value.fix


def test_a_loop_that_is_blocked_before_any_deadline_is_left_alone_and_one_that_comes_back_too(monkeypatch):
    fast(monkeypatch)
    told = []

    async def main():
        waits = Waits()
        with loop_watched(waits, 100.0, told.append), waits.named("samples", "engine", 60.0, who="rollouts loop"):
            time.sleep(0.5)
        waits.changed = asyncio.get_running_loop().time() - 100
        with loop_watched(waits, 0.2, lambda exc: (told.append(exc), time.sleep(0.5))):
            await asyncio.sleep(0.05)
            time.sleep(0.4)
        await asyncio.sleep(0.5)

    asyncio.run(main())
    assert [exc.message for exc in told] == ["nothing has moved for 100 s, and the event loop is blocked"]


# ---- the report


class Part:
    def __init__(self, answer):
        self.answer = answer

    async def stacks(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or await asyncio.Event().wait()


def parts(logs, **fields):
    async def watch():
        await asyncio.Event().wait()

    config = load_config(["experiment=arithmetic_grpo"]).config
    given = {"engine": None, "scorer": None, "hosting": None, "config": config, "watch": watch} | fields
    return SimpleNamespace(run_dir=SimpleNamespace(logs=logs), **given)


def test_what_cannot_say_where_it_is_is_said_to_be_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(hang, "SILENT_S", 0.1)
    text = asyncio.run(examine(parts(tmp_path, engine=Part(None), scorer=Part({"reward worker 0": "in a reward"}))))
    assert "== the engine\n\nsilent: TimeoutError" in text and "== reward worker 0\n\nin a reward" in text
    text = asyncio.run(examine(parts(tmp_path, engine=Part(OSError("gone")), scorer=object())))
    assert text.endswith("== the engine\n\nsilent: OSError: gone")


def test_a_report_that_cannot_be_written_is_told_and_hides_nothing(tmp_path):
    exc = WaitExpired("waited", fix="wait longer")
    write(exc, "stacks", parts(tmp_path / "absent"))
    assert exc.fix.startswith("wait longer (the report could not be written: [Errno 2]") and not hasattr(exc, "report")


def test_roles_are_told_with_where_they_run_what_they_do_and_their_processes(tmp_path):
    stack = stacks.Stack("thread rollout-0_0", (("forward", "/x/model.py", 7),))
    beat = Beat((("generate", 12.0),), (stack,), (), {"VLLM::EngineCore (pid 9)": "in a kernel"})

    async def of_all(timeout):
        return {"policy-0": "silent: no answer within 5 s", "rollout-0": beat}

    place = SimpleNamespace(pid=4, node="n1")
    roles = {name: SimpleNamespace(place=place) for name in ("policy-0", "rollout-0")}
    hosting = SimpleNamespace(fleet=SimpleNamespace(stacks=of_all, roles=roles))
    text = asyncio.run(examine(parts(tmp_path, hosting=hosting)))
    assert "== policy-0 (pid 4 on n1)\n\nsilent: no answer within 5 s\n\n== rollout-0 (pid 4 on n1)" in text
    assert "(pid 4 on n1)\n\nin generate for 12.0 s\n\nthread rollout-0_0" in text
    assert text.endswith("thread rollout-0_0\n    forward  /x/model.py:7\n\n== VLLM::EngineCore (pid 9)\n\nin a kernel")
    assert beat.short("rollout-0") == "thread rollout-0_0: forward (model.py:7)"


def test_an_expired_wait_of_somebody_else_has_its_report_too(tmp_path):
    async def late():
        exc = WaitExpired("policy-0 did not finish train_step within 5 s", fix="see its log")
        exc.stacks = "== policy-0\n\nin train_step for 5.0 s"
        raise exc

    with pytest.raises(WaitExpired, match="policy-0 did not finish") as caught:
        asyncio.run(attended(late(), Waits(), parts(tmp_path)))
    (report,) = tmp_path.glob("hang-*.txt")
    assert caught.value.fix == f"read {report}; see its log" and "thread MainThread" in report.read_text()
    assert "== policy-0\n\nin train_step for 5.0 s" in report.read_text()


HUNG = """
import asyncio, sys, time
from pathlib import Path
from test_hang_watch import Waits, attended, parts

async def main():
    waits = Waits()
    work = waits.bounded(asyncio.to_thread(time.sleep, 1000), name="the optimizer steps", owner="policy", timeout=0.2)
    await attended(work, waits, parts(Path(sys.argv[1])))

asyncio.run(main())
"""


def test_a_thread_that_hangs_does_not_hold_up_the_end_of_the_process(tmp_path):
    began = time.monotonic()
    command = [sys.executable, "-c", HUNG, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75 and time.monotonic() - began < 30
    assert "WaitExpired: waited 0.2 s for the optimizer steps" in done.stderr
    assert "thread asyncio_0" in next(tmp_path.glob("hang-*.txt")).read_text()


def test_the_first_to_fail_ends_all_of_them():
    async def fails():
        raise WaitExpired("late")

    with pytest.raises(WaitExpired, match="late"):
        asyncio.run(run_together(asyncio.Event().wait(), fails()))
