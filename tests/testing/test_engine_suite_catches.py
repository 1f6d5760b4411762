"""Each law of engines fails for the engine that breaks it: the embedded engine with one fault at a time."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from posttrain.rollout.hf import HFEngine
from posttrain.testing import EngineContract
from posttrain.testing.engine_contract import Rig
from posttrain.types import Completion, Request

Patch = pytest.MonkeyPatch


class Engines(EngineContract):
    __test__ = False


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(HFEngine, tmp_path_factory.mktemp("tiny"), "inproc", "llama")
    yield rig
    rig.close()


def replies(change: Callable[[Completion], Completion | None]) -> Callable[[Rig, Patch], None]:
    """Completions come back changed; None: not at all."""

    def breaks(rig: Rig, patch: Patch) -> None:
        whole = rig.engine.generate

        async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
            async for completion in whole(requests):
                if (changed := change(completion)) is not None:
                    yield changed

        patch.setattr(rig.engine, "generate", generate)

    return breaks


def asked(change: Callable[[Request], Request]) -> Callable[[Rig, Patch], None]:
    """Other requests run than were asked."""

    def breaks(rig: Rig, patch: Patch) -> None:
        whole = rig.engine.generate
        patch.setattr(rig.engine, "generate", lambda requests: whole([change(request) for request in requests]))

    return breaks


def sampled(**other: Any) -> Callable[[Rig, Patch], None]:
    return asked(lambda request: replace(request, sampling=replace(request.sampling, **other)))


def method(name: str, make: Callable[[Rig], Any]) -> Callable[[Rig, Patch], None]:
    return lambda rig, patch: patch.setattr(rig.engine, name, make(rig))


def shifted_scores(rig: Rig) -> Any:
    whole = rig.engine.logprobs

    async def logprobs(sequences: Any) -> Any:
        return [[0.0, *row[:-1]] for row in await whole(sequences)]

    return logprobs


async def nothing(*_: Any) -> None: ...


def ends_with_its_reader(rig: Rig, patch: Patch) -> None:
    """A stream that was left never comes back."""
    whole, left = rig.engine.generate, []

    async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
        try:
            async for completion in whole(requests):
                if not left:
                    yield completion
        except GeneratorExit:
            left.append(True)
            raise

    patch.setattr(rig.engine, "generate", generate)


def keeps_the_cancelled(rig: Rig, patch: Patch) -> None:
    """Requests of a reader that was cancelled go on, and answer whoever asks for their ids next."""
    whole, stale = rig.engine.generate, []

    async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
        for completion in stale:
            yield completion
        try:
            async for completion in whole(requests):
                yield completion
        except BaseException:
            stale.append(Completion(requests[0].id, 3, [5] * 240, [0.0] * 240, [1] * 240, "length"))
            raise

    patch.setattr(rig.engine, "generate", generate)


def draws_from_one_stream(rig: Rig, patch: Patch) -> None:
    whole, running = rig.engine.generate, []

    async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
        running.append(True)
        try:
            async for completion in whole([replace(r, seed=r.seed + len(running)) for r in requests]):
                yield completion
        finally:
            running.pop()

    patch.setattr(rig.engine, "generate", generate)


def remembers_aborts(rig: Rig, patch: Patch) -> None:
    gone: set[str] = set()
    whole = rig.engine.generate

    async def abort(name: str) -> None:
        gone.add(name)

    async def generate(requests: Sequence[Request]) -> AsyncIterator[Completion]:
        async for completion in whole(requests):
            yield replace(completion, finish_reason="aborted") if completion.request_id in gone else completion

    patch.setattr(rig.engine, "abort", abort)
    patch.setattr(rig.engine, "generate", generate)


class ClosesOnce(HFEngine):
    async def close(self) -> None:
        await super().close()
        assert not vars(self).get("ended"), "closed twice"
        self.ended = True


seeds = itertools.count()
BROKEN: dict[str, tuple[Any, str]] = {
    "test_nothing_is_generated_before_the_first_commit": (
        lambda rig, patch: patch.setattr(rig, "before_commit", None), r"commit gave None: raise WeightSyncError"),
    "test_every_sample_comes_back_once_and_whole": (
        replies(lambda c: None if c.index == 2 else c), r"not n completions of each request"),
    "test_only_the_samples_that_are_wanted_are_sampled": (
        asked(lambda r: replace(r, wanted=None)), r"with `wanted` other samples came: ask `Request.indices`"),
    "test_logprobs_are_those_of_the_distribution_sampled_from": (
        replies(lambda c: replace(c, logprobs=[p - 0.01 for p in c.logprobs])), r"off by 0.01 nats: .* logits / temperature"),
    "test_draws_follow_the_distribution": (
        replies(lambda c: replace(c, token_ids=[5] * len(c.token_ids))), r"400 draws do not follow the model's distribution"),
    "test_temperature_zero_takes_the_most_likely_token": (sampled(temperature=1.0), r"takes the most likely token each time"),
    "test_every_stop_id_ends_a_completion_and_is_part_of_it": (sampled(ignore_eos=True), r"both stop ids come up"),
    "test_a_request_s_own_stop_ids_count_too": (sampled(stop_token_ids=()), r"sampling.stop_token_ids end them"),
    "test_the_seed_names_the_draws": (
        asked(lambda r: replace(r, seed=next(seeds))), r"all noise comes from request.seed"),
    "test_evals_may_cut_the_distribution": (sampled(top_k=0, top_p=1.0, min_p=0.0), r"leaves one token to draw"),
    "test_scores_of_given_sequences": (method("logprobs", shifted_scores), r"of each token from the second on"),
    "test_an_aborted_request_ends_and_the_others_do_not": (method("abort", lambda _: nothing), r"finish_reason 'aborted'"),
    "test_a_reader_that_goes_away_frees_the_engine": (ends_with_its_reader, r"the next request gets nothing"),
    "test_a_cancelled_reader_takes_its_requests_along": (keeps_the_cancelled, r"the first one still runs"),
    "test_many_readers_get_what_each_gets_alone": (draws_from_one_stream, r"changes its draws: its noise is drawn ahead"),
    "test_what_it_is_made_of_travels": (method("options", lambda _: threading.Lock()), r"cannot be sent to another process"),
    "test_new_weights_are_used_and_stamped": (
        replies(lambda c: replace(c, versions=[1] * len(c.versions))), r"tokens of version \d+ are stamped \{1\}"),
    "test_an_update_in_flight_leaves_every_token_with_its_version": (
        replies(lambda c: replace(c, versions=[max(c.versions)] * len(c.versions))), r"around an update: recompute the cache"),
    "test_weights_do_not_change_outside_of_a_pause": (method("apply", lambda _: nothing), r"DID NOT RAISE"),
    "test_aborting_what_does_not_run_harms_nobody": (remembers_aborts, r"ended a later request of that id"),
    "test_an_invalid_engine_refuses": (method("refuse_invalid", lambda _: lambda: None), r"DID NOT RAISE"),
    "test_closing_twice": (ClosesOnce, r"closed twice"),
}  # fmt: skip


@pytest.mark.parametrize("law", BROKEN)
def test_the_law_catches_it(law: str, told: Callable[..., str], rig: Rig, monkeypatch: Patch) -> None:
    breaks, message = BROKEN[law]
    if breaks is ClosesOnce:
        text = told(Engines(), law, ClosesOnce)
    else:
        breaks(rig, monkeypatch)
        text = told(Engines(), law, rig, temperature=1.0)
        rig.engine.invalid = None
    assert re.search(message, text), text


def test_there_is_a_broken_one_for_every_law(laws: Callable[[type], set[str]]) -> None:
    assert laws(EngineContract) == set(BROKEN)
