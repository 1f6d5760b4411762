"""The tries of a prompt under `loop.commit_order=arrival`: counted over a resume, and not against what a kill cut short."""

import asyncio
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from posttrain.config.schema import ModelConfig, RLConfig, RunConfig
from posttrain.data.dataset import PromptSampler, Source
from posttrain.loop import pending
from posttrain.loop.flights import TRIES
from posttrain.loop.ledger import Ledger
from posttrain.loop.pending import Pending
from posttrain.loop.prompts import Prompts
from posttrain.loop.source import Desk
from posttrain.loop.stream import Stream
from posttrain.loop.waits import Waits
from posttrain.types import Group, Trajectory

CONFIG = RunConfig(model=ModelConfig(name_or_path="none"), rl=RLConfig(steps=1, group_size=2, batch_per_replica=2))


class Poisoned:
    """The engine gives draw 0 up each time; from dispatch `patience` on it has not answered yet."""

    def __init__(self, patience: int) -> None:
        self.dispatched: list[int] = []
        self._patience = patience
        self.silent = asyncio.Event()

    async def run(self, draws, **_):
        (draw,) = draws
        self.dispatched.append(draw.index)
        if len(self.dispatched) > self._patience:
            self.silent.set()
            await asyncio.Event().wait()
        reason = "stop" if draw.index else "aborted"
        samples = [Trajectory([1], [2], [True], [0.0], [0], reason) for _ in range(2)]
        return [Group(draw.group_id, draw.task, samples)]


def rows():
    return PromptSampler([Source("e", [{"id": str(n)} for n in range(80)])], seed=0, shuffle=False)


async def never(*_, **__):
    await asyncio.Event().wait()


async def life(folder, ahead: Pending, patience: int = 100):
    """A process that ends when the engine falls silent or a group has come. Returns the dispatches and the cut of its end."""
    sampler = rows()
    engine = Poisoned(patience)
    prompts = Prompts(sampler, prepare=lambda draw: None, again=ahead.again)
    notes: list[str] = []
    desk = Desk(
        config=CONFIG, first=1, prompts=prompts, rollouts=engine, ledger=Ledger(folder / "ledger.jsonl"), waits=Waits(),
        versions=SimpleNamespace(delivered=0, published=0, wait_published=never),
        tracker=SimpleNamespace(span=lambda *_, **__: nullcontext(), note=notes.append),
        scored=lambda step: None, screening=None, states=lambda: [],
    )  # fmt: skip
    if ahead.again:
        sampler.draw(1)  # the position that the checkpoint has
    for draw in ahead.draws:
        desk.ledger.drawn(draw)
    source = Stream(desk, ahead, slots=2)
    running = [asyncio.create_task(work) for work in (prompts.run(), source.run())]
    ends = [asyncio.create_task(work) for work in (engine.silent.wait(), desk.rounds.get())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    cut = await source.cut(1)
    for task in [*running, *ends]:
        task.cancel()
    await asyncio.gather(*running, *ends, return_exceptions=True)
    pending.write(folder / pending.FILE, cut.pending)
    return engine.dispatched, pending.read(folder / pending.FILE, sampler), notes


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_a_draw_that_fails_before_and_after_a_resume_has_three_tries_in_all(tmp_path, failed):
    before, ahead, _ = asyncio.run(life(tmp_path, Pending(), patience=failed))
    assert before == [0] * (failed + 1)
    assert [draw.index for draw in ahead.again] == [0] and ahead.tries == ({0: failed} if failed else {})
    after, _, notes = asyncio.run(life(tmp_path, ahead))
    assert after == [0] * (TRIES - failed) + [1] and notes == ["draw 0 was dropped after 3 tries: aborted"]


def test_a_checkpoint_of_before_tries_were_counted_gives_three_new_ones(tmp_path):
    asyncio.run(life(tmp_path, Pending(), patience=2))
    path = tmp_path / pending.FILE
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert entry.pop("tries") == 2
    path.write_text(json.dumps(entry) + "\n")
    ahead = pending.read(path, rows())
    assert asyncio.run(life(tmp_path, ahead))[0] == [0, 0, 0, 1]
