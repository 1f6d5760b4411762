"""Races that other loops have had, put into this one, one at a time. Each is a context in which the loop is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from posttrain.loop import checkpoint, pending
from posttrain.loop.checkpointer import Checkpointer
from posttrain.loop.cohorts import Cohorts
from posttrain.loop.controller import Controller
from posttrain.loop.flights import Flights
from posttrain.loop.ledger import Ledger
from posttrain.loop.pending import Pending
from posttrain.loop.prompts import Prompts
from posttrain.loop.source import Cut
from posttrain.loop.stream import Stream
from posttrain.loop.versions import Versions
from posttrain.rollout.replicas import Replicas
from posttrain.weights.plane import WeightPlane
from posttrain.weights.receiver import Receiver

MUTATIONS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {}
"""By name: the worlds to look in, as options of `World.of`, and the context."""


def mutation(order: str, ahead: int | None = None) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    def register(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        MUTATIONS[function.__name__] = ({"order": order, "ahead": ahead}, contextmanager(function))
        return function

    return register


def patched(target: Any, name: str, wrong: Callable[..., Any]) -> Any:
    """`wrong` gets the original as its first argument."""
    original = getattr(target, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrong(original, self, *args, **kwargs)

    return mock.patch.object(target, name, method)


def changed_cut(source: Any, change: Callable[[Any, Cut], Cut]) -> Any:
    """What a checkpoint needs, changed once it is there."""

    def cut(original: Any, self: Any, step: int) -> Any:
        cutting = original(self, step)

        async def changed() -> Cut:
            return change(self, await cutting)

        return changed()

    return patched(source, "cut", cut)


@mutation("arrival")
def groups_are_forgotten_when_a_batch_takes_them() -> Iterator[None]:
    """A checkpoint between the making of a batch and its step loses the batch."""

    def keep(original: Any, self: Stream, step: int, round: Any) -> Any:
        kept = original(self, step, round)
        for draw, _ in kept:
            del self._arrived[draw.index]
        return kept

    with patched(Stream, "keep", keep):
        yield


@mutation("arrival")
def prompts_in_flight_are_not_in_the_checkpoint() -> Iterator[None]:
    def without(source: Stream, found: Cut) -> Cut:
        return replace(found, pending=Pending(found.pending.rounds, source.desk.prompts.waiting_again()))

    with changed_cut(Stream, without):
        yield


@mutation("logical")
def cohorts_that_are_ahead_are_not_in_the_checkpoint() -> Iterator[None]:
    with changed_cut(Cohorts, lambda source, found: replace(found, pending=Pending())):
        yield


@mutation("logical")
def a_checkpoint_is_valid_before_the_cohorts_in_flight_are_complete() -> Iterator[None]:
    async def cut(original: Any, self: Cohorts, step: int) -> Cut:
        last = max(self._marks)
        ahead = [self._marks[later] for later in range(step + 1, last + 1)]
        mark = self._marks[last]
        return Cut(mark.position, Pending.of(round for one in ahead for round in one.rounds), mark.states)

    with patched(Cohorts, "cut", cut):
        yield


@mutation("logical", ahead=3)  # a later cohort must be trained on while a checkpoint waits for one that is later still
def cohorts_that_a_checkpoint_waits_for_are_forgotten() -> Iterator[None]:
    def trained(original: Any, self: Cohorts, step: int, ended: Any) -> None:
        self._cutting.clear()
        original(self, step, ended)

    with patched(Cohorts, "trained", trained):
        yield


@mutation("arrival")
def a_slot_that_is_free_wakes_nobody() -> Iterator[None]:
    def free(original: Any, self: Flights, flight: Any, slots: int) -> None:
        with mock.patch.object(self, "_room", mock.Mock()):
            original(self, flight, slots)

    with patched(Flights, "_free", free):
        yield


@mutation("logical")
def a_published_version_wakes_nobody() -> Iterator[None]:
    async def move(original: Any, self: Versions, **versions: int) -> None:
        if "published" in versions:
            self.published = versions["published"]
        else:
            await original(self, **versions)

    with patched(Versions, "_move", move):
        yield


@mutation("arrival")
def more_prompts_asked_for_wake_nobody() -> Iterator[None]:
    def ask(original: Any, self: Stream, round: Any, more: int) -> None:
        self._extra += more

    with patched(Stream, "ask", ask):
        yield


@mutation("arrival")
def slots_leak_when_a_prompt_fails() -> Iterator[None]:
    def keep(original: Any, self: Flights, flight: Any) -> None:
        """What its samples have not given back one by one."""

    def end(original: Any, self: Flights, flight: Any) -> None:
        self.open.pop(flight.draw.index, None)

    with patched(Flights, "give_slots_back", keep), patched(Flights, "end", end):
        yield


@mutation("logical")
def an_engine_stays_paused_after_a_failed_update() -> Iterator[None]:
    async def fail(original: Any, self: Receiver, cause: str) -> None:
        self.lane.abort(cause)
        if self.lane.state == "invalid":
            self.engine.invalidate(cause)

    with patched(Receiver, "_fail", fail):
        yield


@mutation("logical")
def versions_restart_at_zero_on_resume() -> Iterator[None]:
    started: dict[int, int] = {}

    def init(original: Any, self: Controller, parts: Any, state: Any, pending: Any = None) -> None:
        started[id(parts.plane)] = state.step
        original(self, parts, state, pending)

    async def publish(original: Any, self: WeightPlane, version: int) -> Any:
        return await original(self, version - started[id(self)])

    with patched(Controller, "__init__", init), patched(WeightPlane, "publish", publish):
        yield


@mutation("arrival")
def a_prompt_is_dispatched_twice_after_it_was_given_back() -> Iterator[None]:
    def give_back(original: Any, self: Prompts, draw: Any) -> None:
        original(self, draw)
        original(self, draw)

    with patched(Prompts, "give_back", give_back):
        yield


@mutation("arrival")
def a_prompt_that_was_given_back_is_lost() -> Iterator[None]:
    with patched(Prompts, "give_back", lambda original, self, draw: None):
        yield


@mutation("logical")
def the_position_is_that_of_the_reading_ahead() -> Iterator[None]:
    async def take(original: Any, self: Prompts, step: int) -> Any:
        draw = await original(self, step)
        self.position = self._sampler.state_dict() | {"bad_rows": self.bad_rows}
        return draw

    with patched(Prompts, "take", take):
        yield


@mutation("arrival")
def tokens_that_are_too_old_train() -> Iterator[None]:
    with mock.patch("posttrain.loop.stream.oldest", lambda group: 2**62), patched(Flights, "older_than", lambda *args: []):
        yield


@mutation("arrival", ahead=1)
def prompts_are_taken_further_ahead() -> Iterator[None]:
    def init(original: Any, self: Stream, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._ahead += 1

    with patched(Stream, "__init__", init):
        yield


@mutation("arrival")
def lines_of_draws_that_end_again_stay_in_the_ledger() -> Iterator[None]:
    with patched(Ledger, "cut_after", lambda *args, **kwargs: None):
        yield


@mutation("logical")
def the_algorithm_is_saved_as_it_is_now() -> Iterator[None]:
    """With batches made ahead that is later than the step that the checkpoint is of."""

    async def begin(original: Any, self: Checkpointer, state: Any) -> None:
        self._algorithm[state.step] = self._parts.algorithm_states()
        await original(self, state)

    with patched(Checkpointer, "begin", begin):
        yield


@mutation("logical")
def environments_are_saved_as_they_are_now() -> Iterator[None]:
    with changed_cut(Cohorts, lambda source, found: replace(found, states=source.desk.states())):
        yield


@mutation("arrival")
def a_snapshot_is_replaced_while_engines_wait_for_it() -> Iterator[None]:
    async def wait_delivered(original: Any, self: Versions, version: int) -> None:
        return

    async def deliver(original: Any, self: WeightPlane, update: Any) -> Any:
        await asyncio.sleep(60)
        return await original(self, update)

    with patched(Versions, "wait_delivered", wait_delivered), patched(WeightPlane, "deliver", deliver):
        yield


@mutation("logical")
def a_checkpoint_is_written_in_place() -> Iterator[None]:
    def write(folder: Any, step: int, save_policy: Any, loop_state: Any, ahead: Any = None, **_: Any) -> Any:
        target = folder / f"step_{step}"
        (target / "policy").mkdir(parents=True, exist_ok=True)
        (target / checkpoint.LOOP_FILE).write_text(json.dumps(loop_state))
        save_policy(target / "policy")
        pending.write(target / pending.FILE, ahead or Pending())
        checkpoint.sync_tree(target)
        return checkpoint.Checkpoint(step, target)

    with mock.patch("posttrain.loop.checkpoint.write", write):
        yield


@mutation("arrival")
def what_a_dead_body_owed_is_asked_of_nobody() -> Iterator[None]:
    with patched(Replicas, "_lost", lambda original, self, *args: original(self, *args) and []):
        yield
