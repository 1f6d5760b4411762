"""The tries of a prompt under `loop.commit_order=arrival`: counted over a resume, and not against what a kill cut short."""

import asyncio
import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from posttrain.config.schema import ModelConfig, RLConfig, RunConfig
from posttrain.data.dataset import PromptSampler, Source
from posttrain.loop import pending
from posttrain.loop.flights import TRIES
from posttrain.loop.ledger import Ledger
from posttrain.loop.pending import Pending
from posttrain.loop.prompts import AHEAD, Prompts
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


class Silent:
    """An engine that answers nothing, and what it was told to end.   left: samples of each prompt that have left it"""

    def __init__(self, left: int = 0) -> None:
        self._left = left
        self.dispatched: list[int] = []
        self.aborted: list[int] = []
        self.begun = asyncio.Event()

    async def run(self, draws, *, generated, **_):
        self.dispatched += [draw.index for draw in draws]
        for _ in range(self._left):
            generated()
        self.begun.set()
        await asyncio.Event().wait()

    async def abort(self, draw):
        self.aborted.append(draw.index)


class Scripted:
    """Versions up to `last` are there at once; the validation of that one never ends, or all is over."""

    def __init__(self, delivered: int, last: int, *, before: asyncio.Event | None = None, ends: bool = False) -> None:
        self.delivered = self.published = delivered
        self._last, self._before, self._ends = last, before, ends

    async def wait_published(self, version):
        if version > self._last:
            await never()

    @property
    def next(self):
        return self._last

    async def bring(self, version, delivered):
        if self._before is not None:
            await self._before.wait()
        self.delivered = version
        await delivered()
        if not self._ends:
            await never()


def a_desk(folder, engine, versions, prompts, **config):
    return Desk(
        config=replace(CONFIG, rl=replace(CONFIG.rl, steps=20), rollout=replace(CONFIG.rollout, **config)), first=1,
        prompts=prompts, rollouts=engine, ledger=Ledger(folder / "ledger.jsonl"), waits=Waits(), versions=versions,
        tracker=SimpleNamespace(span=lambda *_, **__: nullcontext(), note=lambda text: None),
        scored=lambda step: None, screening=None, states=lambda: [],
    )  # fmt: skip


async def settled(*tasks):
    await asyncio.sleep(0.3)  # everything that can happen has happened: nothing here takes time
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_prompts_are_dispatched_as_far_ahead_as_is_allowed_and_no_further(tmp_path, ahead):
    async def run():
        engine, prompts = Silent(), Prompts(rows(), prepare=lambda draw: None)
        desk = a_desk(tmp_path, engine, Scripted(0, 0), prompts, max_async_rollout=ahead)
        source = Stream(desk, Pending(), slots=100)
        await settled(*(asyncio.create_task(work) for work in (prompts.run(), source.run())))
        return engine.dispatched

    per_step = CONFIG.rl.batch_per_replica // CONFIG.rl.group_size
    assert asyncio.run(run()) == list(range((1 + ahead) * per_step))


@pytest.mark.parametrize(("left", "dispatched"), [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2, 3, 4, 5])])
def test_each_sample_gives_its_slot_back_alone(tmp_path, left, dispatched):
    """Prompts of two samples, four slots: two prompts fit, and one more once a sample of each has left."""

    async def run():
        engine, prompts = Silent(left), Prompts(rows(), prepare=lambda draw: None)
        desk = a_desk(tmp_path, engine, Scripted(0, 0), prompts, max_async_rollout=5)
        source = Stream(desk, Pending(), slots=4)
        await settled(*(asyncio.create_task(work) for work in (prompts.run(), source.run())))
        return engine.dispatched

    assert asyncio.run(run()) == dispatched


def test_prompts_are_read_ahead_up_to_a_bound():
    sampler = PromptSampler([Source("e", [{"id": str(n)} for n in range(500)])], seed=0, shuffle=False)
    prepared = []

    async def run():
        prompts = Prompts(sampler, prepare=lambda draw: prepared.append(draw.index))
        reading = asyncio.create_task(prompts.run())
        await asyncio.sleep(0.3)
        before = len(prepared)
        for _ in range(40):
            await prompts.take(1)
        await settled(reading)
        return before

    assert AHEAD // 2 <= asyncio.run(run()) <= AHEAD and 40 < len(prepared) <= 40 + AHEAD


@pytest.mark.parametrize(("version", "aborted"), [(2, []), (3, [0])])
def test_what_is_too_old_ends_in_the_engine_as_soon_as_the_version_is_there(tmp_path, version, aborted):
    """Not only once the version is validated, which here never ends, and not only when its batch takes it."""

    async def run():
        engine, prompts = Silent(), Prompts(rows(), prepare=lambda draw: None)
        versions = Scripted(0, version, before=engine.begun)
        desk = a_desk(tmp_path, engine, versions, prompts, max_off_policy_steps=2)
        source = Stream(desk, Pending(), slots=100)
        await settled(*(asyncio.create_task(work) for work in (prompts.run(), source.run())))
        return engine.aborted

    assert asyncio.run(run()) == aborted


def test_a_draw_that_waits_to_be_asked_again_when_the_run_ends_has_an_end_too(tmp_path):
    """As after a resume with fewer steps."""

    async def run():
        draws = rows().draw(2)
        engine, prompts = Silent(), Prompts(rows(), prepare=lambda draw: None, again=draws)
        desk = a_desk(tmp_path, engine, Scripted(19, 20, ends=True), prompts)
        for draw in draws:
            desk.ledger.drawn(draw)
        await Stream(desk, Pending(again=draws), slots=0).run()
        desk.ledger.flush()
        return desk.ledger.open

    assert not asyncio.run(run())
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(line["draw"], line["state"], line["cause"]) for line in lines] == [(n, "dropped", "unused") for n in range(2)]
