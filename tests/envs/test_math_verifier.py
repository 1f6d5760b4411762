"""math-verify in its own process: what it decides, what ends it, and that the next answer is judged right."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain import score
from posttrain.data.environment import episode
from posttrain.rollout.scoring import Scorer
from posttrain.types import Reward
from posttrain_envs import verifier
from posttrain_envs.math_env import Math
from posttrain_envs.verifier import Verdict, hopeless, verify

pytest.importorskip("math_verify")
ENV = Math(Math.Options(data=[{"question": "?", "answer": "4"}], verify_timeout_s=2))


def reward(answer: str, completion: str) -> Reward:
    return ENV.compute_reward(episode(ENV, {"question": "?", "answer": answer}, completion))


def in_a_thread(call: Any) -> Any:
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(call()))
    thread.start()
    thread.join()
    return box[0]


def memory(pid: int | str = "self") -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


BOMBS = ("7^{7^{7^{7^7}}}", "10^{10^{10}}", "1" * 200_000, "{" * 200_000, "\\sqrt{" * 5000, "9^{99999999}", "99999!", "9!!!")


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:20])
def test_case_ans_5_a_bomb_costs_nothing_and_the_next_answer_is_judged(bomb: str) -> None:
    began, before = time.monotonic(), memory()
    first = in_a_thread(lambda: reward("4", f"\\boxed{{{bomb}}}"))
    assert time.monotonic() - began < 4 and first.total == 0.0
    assert in_a_thread(lambda: reward("4", "\\boxed{4}")).total == 1.0
    assert memory() - before < 500 << 20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("bomb", ["(7^{9999})^{9999}"])
def test_what_gets_past_the_guard_is_ended_by_the_kernel_and_is_wrong(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on computing time and on memory of the verifier's process, so that the machine's load does not matter."""
    monkeypatch.setattr(verifier, "PATIENCE", 1000)
    assert not hopeless(bomb)
    assert in_a_thread(lambda: verify("4", "\\sqrt{16}")) is Verdict.SAME
    process = verifier._mine()._process
    assert process is not None
    before, peak, done = memory(process.pid), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            try:
                peak[0] = max(peak[0], memory(process.pid))
            except (FileNotFoundError, IndexError):
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    short = Math(Math.Options(data=ENV.options.data, verify_timeout_s=1))
    got = in_a_thread(lambda: short.compute_reward(episode(short, {"question": "?", "answer": "4"}, f"\\boxed{{{bomb}}}")))
    done.set()
    watcher.join()
    assert got.total == 0.0 and got.parts["gave_up"] == 1.0 and got.info["judge"] == "gave_up"
    assert peak[0] - before < 500 << 20
    assert in_a_thread(lambda: reward("4", "\\boxed{\\sqrt{16}}")).total == 1.0


def test_a_fault_of_the_machine_is_unscorable_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify("4", "\\sqrt{16}") is Verdict.SAME
    process = verifier._mine()._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(verifier, "PATIENCE", 0)
    with pytest.raises(TimeoutError, match="too little time"):
        verify("4", "\\sqrt{16}+0")
    monkeypatch.undo()
    assert verify("4", "\\sqrt{16}+0") is Verdict.SAME
    process = verifier._mine()._process
    assert process is not None
    timer = threading.Timer(0.3, process.kill)
    timer.start()
    with pytest.raises(RuntimeError, match="exit code -9"):
        verify("4", "(7^{9999})^{9999}", timeout_s=60)
    timer.join()


def test_a_process_that_ended_between_two_answers_is_replaced() -> None:
    assert verify("4", "\\sqrt{16}") is Verdict.SAME
    process = verifier._mine()._process
    assert process is not None
    process.kill()
    process.wait()
    assert verify("4", "2+2") is Verdict.SAME


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        ("x^2+2x+1", "(x+1)^2", 1),
        ("x^2+2x+1", "(x-1)^2", 0),
        ("4", "\\sqrt{16}", 1),
        ("\\{1, 2\\}", "2, 1", 1),
        ("(1,2)", "(1,3)", 0),
        ("12", "1,2", 0),
        ("2", "2\\pi", 0),
        ("72", "72 or 73", 0),
        ("5", "5x", 0),
        ("1024", "2^{10}", 1),
        ("\\frac{3}{2}", "1\\frac{1}{2}", 1),
        ("e^{x^2}", "\\exp(x^2)", 1),
        ("4", "\\undefined{", 0),
    ],
)
def test_what_needs_algebra(gold: str, answer: str, expected: float) -> None:
    got = reward(gold, f"\\boxed{{{answer}}}")
    assert got.total == expected and got.parts["gave_up"] == 0, got


def test_several_threads_take_turns() -> None:
    got: dict[int, float | None] = {}

    def judge(n: int) -> None:
        got[n] = reward(str(n * n), f"\\boxed{{{n}^2}}").total

    threads = [threading.Thread(target=judge, args=(n,)) for n in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == dict.fromkeys(range(2, 8), 1.0)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_it_ends_with_the_worker_that_started_it() -> None:
    async def main() -> int:
        scorer = Scorer({"math": ENV})
        await scorer.start()
        try:
            await scorer.score("math", episode(ENV, {"question": "?", "answer": "4"}, "\\boxed{\\sqrt{16}}"))
            assert scorer._pool is not None
            worker = scorer._pool._workers[0].process.pid
            (child,) = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
            return int(child)
        finally:
            await scorer.close()

    child = Path(f"/proc/{asyncio.run(main())}/stat")
    deadline = time.monotonic() + 10
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the process of math-verify outlived its reward worker"
        time.sleep(0.05)


def test_in_the_pool_of_a_run_and_without_algebra() -> None:
    row = {"question": "?", "answer": "4"}
    assert score(ENV, row, "\\boxed{\\sqrt{16}}").total == 1.0
    assert score(ENV, row, "\\boxed{7^{7^{7^{7^7}}}}").parts == {"correct": 0.0, "format": 1.0, "gave_up": 1.0}
    plain = Math(Math.Options(data=[row], algebra=False))
    assert plain.compute_reward(episode(plain, row, "\\boxed{\\sqrt{16}}")).info["judge"] == "text"
