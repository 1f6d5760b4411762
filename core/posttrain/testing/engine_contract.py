"""The laws of an engine as tests: subclass, name the plug-in (`plugin = MyEngine`) or give one fixture that builds it.

    class TestMine(EngineContract):
        @pytest.fixture(scope="class")
        def make_engine(self):
            return MyEngine                      # called with an EngineSpec

The engine serves a tiny model that the contract makes, and gets its weights through the real weight plane over `transport`.
It is started once per class; one event loop runs all tests.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from posttrain.config.schema import WeightsConfig
from posttrain.errors import WeightSyncError
from posttrain.plugins.capabilities import declared
from posttrain.rollout.engine import Engine, EngineSpec
from posttrain.testing.laws import travelled
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Completion, Request, Sampling
from posttrain.weights.plane import WeightPlane

STOPS = (2, 3)
LIMIT = 256


class Rig:
    """A started engine, the transformers model whose weights it serves, and the loop that both live on."""

    def __init__(self, make_engine: Callable[[EngineSpec], Engine], folder: Path, transport: str, family: str) -> None:
        from posttrain import plugins

        self.model = write_tiny_model(folder, family=family)
        self.models: dict[int, Any] = {}
        self.runner = asyncio.Runner()
        spec = EngineSpec(str(folder), "float32", LIMIT, 16, STOPS, log_dir=folder)
        self.engine = make_engine(spec)
        self.transport = plugins.load("transports", transport)
        self.plane = WeightPlane.local(self.engine, self.transport, WeightsConfig(), lambda: iter(self.model.named_parameters()))
        self.run(self.engine.start())
        self.before_commit = self._refusal()
        self.version = 0
        self.run(self.commit())

    def run(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, 240))

    async def commit(self, *, change: bool = False) -> int:
        """Bring the engine to the model's weights, changed a lot first when asked; returns the new version."""
        if change:
            with torch.no_grad():
                for number, parameter in enumerate(self.model.parameters()):
                    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * self.version + number))
                    parameter.add_(0.05 * noise)
        self.version += 1
        self.models[self.version] = copy.deepcopy(self.model)
        await self.plane.sync(self.version)
        return self.version

    async def collect(self, requests: Sequence[Request]) -> list[Completion]:
        return [completion async for completion in self.engine.generate(requests)]

    def generate(self, *requests: Request) -> list[Completion]:
        return self.run(self.collect(requests))  # type: ignore[no-any-return]

    def reference(self, ids: Sequence[int], version: int, temperature: float = 1.0) -> torch.Tensor:
        """Log-probs `[len(ids) - 1, V]` of a plain forward in float64 over the weights of `version`."""
        with torch.no_grad():
            logits = self.models[version](torch.tensor([list(ids)])).logits[0, :-1].double()
        return torch.log_softmax(logits / (temperature or 1.0), dim=-1)

    def worst_gap(self, request: Request, completion: Completion) -> float:
        """Largest difference of a completion's log-probs to the reference, each token under the weights of its version."""
        ids, start = [*request.prompt_ids, *completion.token_ids], len(request.prompt_ids) - 1
        gaps = [0.0]
        for version in sorted(set(completion.versions)):
            logprobs = self.reference(ids, version, request.sampling.temperature)
            gaps += [
                abs(completion.logprobs[t] - float(logprobs[start + t, token]))
                for t, token in enumerate(completion.token_ids)
                if completion.versions[t] == version
            ]
        return max(gaps)

    def close(self) -> None:
        self.run(self.engine.close())
        self.run(self.plane.close())
        self.transport.close()
        self.runner.close()

    def _refusal(self) -> BaseException | None:
        try:
            self.generate(ask("early"))
        except Exception as exc:
            return exc
        return None


def ask(name: str, *, n: int = 1, seed: int = 0, prompt: Sequence[int] = (5, 6, 7), **sampling: Any) -> Request:
    return Request(name, list(prompt), n, seed, Sampling(**{"max_tokens": 16, **sampling}))


def provided(engine: Engine, capability: str) -> None:
    """Skip a law that the engine says it does not keep; a run that needs it is refused."""
    if capability not in declared("engines", engine).provides:
        pytest.skip(f"lacks {capability}, and says so")


class EngineContract:
    """What every engine does. fp32; `tolerance` in nats; `family` of the model (`posttrain.testing.tiny_model`)."""

    plugin: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}
    family: ClassVar[str] = "llama"
    transport: ClassVar[str] = "inproc"
    tolerance: ClassVar[float] = 1e-4

    @pytest.fixture(scope="class")
    def make_engine(self) -> Callable[[EngineSpec], Engine]:
        if self.plugin is None:
            raise NotImplementedError("give the contract an engine: the class variable `plugin`, or a fixture `make_engine`")
        from posttrain.plugins import load

        return lambda spec: load("engines", self.plugin, spec=spec, **self.options)  # type: ignore[no-any-return]

    @pytest.fixture(scope="class")
    def rig(self, make_engine: Callable[[EngineSpec], Engine], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        rig = Rig(make_engine, tmp_path_factory.mktemp("tiny"), self.transport, self.family)
        yield rig
        rig.close()

    def test_nothing_is_generated_before_the_first_commit(self, rig: Rig) -> None:
        found = rig.before_commit
        assert isinstance(found, WeightSyncError), f"generate before the first commit gave {found!r}: raise WeightSyncError"
        assert rig.engine.weight_version() is not None, "weight_version() is None after a commit"

    def test_every_sample_comes_back_once_and_whole(self, rig: Rig) -> None:
        requests = [ask(f"r{i}", n=3, seed=i, prompt=[5 + i] * (1 + 2 * i), ignore_eos=True, max_tokens=7) for i in range(4)]
        done = rig.generate(*requests)
        found = sorted((c.request_id, c.index) for c in done)
        assert found == sorted((r.id, i) for r in requests for i in range(3)), f"not n completions of each request: {found}"
        for c in done:
            lengths = len(c.token_ids), len(c.logprobs), len(c.versions)
            assert lengths == (7, 7, 7), f"max_tokens=7 gave {lengths} ids, log-probs and versions: one of each for each token"
            assert c.finish_reason == "length", f"a completion that reached max_tokens says {c.finish_reason!r}, not 'length'"
            assert set(c.versions) == {rig.engine.weight_version()}, "a token carries the version of the weights that sampled it"

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
    def test_logprobs_are_those_of_the_distribution_sampled_from(self, rig: Rig, temperature: float) -> None:
        provided(rig.engine, "rollout_logprobs")
        requests = [ask(f"t{i}", n=4, seed=i, prompt=range(4, 7 + 3 * i), temperature=temperature) for i in range(3)]
        by_id = {r.id: r for r in requests}
        gap = max(rig.worst_gap(by_id[c.request_id], c) for c in rig.generate(*requests))
        assert gap < self.tolerance, f"log-probs are off by {gap:.2g} nats: they are those of logits / temperature"

    def test_draws_follow_the_distribution(self, rig: Rig) -> None:
        request = ask("many", n=400, max_tokens=1, ignore_eos=True)
        counts = torch.zeros(rig.model.config.vocab_size, dtype=torch.float64)
        for c in rig.generate(request):
            counts[c.token_ids[0]] += 1
        expected = rig.reference([*request.prompt_ids, 0], rig.version)[-1].exp()
        chi2 = float(((counts - 400 * expected) ** 2 / (400 * expected)).sum())
        degrees = len(counts) - 1
        assert chi2 < degrees + 6 * (2 * degrees) ** 0.5, f"400 draws do not follow the model's distribution: chi² {chi2:.0f}"

    def test_only_the_samples_that_are_wanted_are_sampled(self, rig: Rig) -> None:
        whole = ask("whole", n=4, seed=3, ignore_eos=True)
        wanted = rig.generate(replace(whole, id="wanted", wanted=(1, 3)))
        assert sorted(c.index for c in wanted) == [1, 3], "of a request with `wanted` other samples came: ask `Request.indices`"
        alone = {c.index: c.token_ids for c in rig.generate(whole)}
        for c in wanted:
            assert c.token_ids == alone[c.index], "a sample depends on which others are wanted, not on its seed and index alone"

    def test_temperature_zero_takes_the_most_likely_token(self, rig: Rig) -> None:
        request = ask("greedy", temperature=0.0, ignore_eos=True)
        (done,) = rig.generate(request)
        logprobs = rig.reference([*request.prompt_ids, *done.token_ids], rig.version)[len(request.prompt_ids) - 1 :]
        assert done.token_ids == logprobs.argmax(-1).tolist(), "temperature 0 takes the most likely token each time"
        assert rig.worst_gap(request, done) < self.tolerance, "the log-probs of greedy tokens are those of temperature 1"

    def test_every_stop_id_ends_a_completion_and_is_part_of_it(self, rig: Rig) -> None:
        done = rig.generate(ask("stops", n=64, max_tokens=60))
        stopped = [c for c in done if c.finish_reason == "stop"]
        assert {c.token_ids[-1] for c in stopped} == set(STOPS), "with a flat model both stop ids come up"
        for c in done:
            early = c.token_ids[:-1] if c.finish_reason == "stop" else c.token_ids
            assert not set(early) & set(STOPS), "a completion goes on after a stop id: every id of spec.eos_token_ids ends it"
            assert c.finish_reason == "stop" or len(c.token_ids) == 60, "the sampled stop id is part of the completion"

    def test_a_request_s_own_stop_ids_count_too(self, rig: Rig) -> None:
        done = rig.generate(ask("own", n=32, max_tokens=40, stop_token_ids=(9,)))
        ends = {c.token_ids[-1] for c in done if c.finish_reason == "stop"}
        assert ends == {*STOPS, 9}, f"completions end with {ends}: sampling.stop_token_ids end them beside the model's own"

    def test_the_seed_names_the_draws(self, rig: Rig) -> None:
        def tokens(seed: int) -> list[list[int]]:
            done = rig.generate(ask("seeded", n=4, seed=seed, ignore_eos=True))
            return [c.token_ids for c in sorted(done, key=lambda c: c.index)]

        first = tokens(1)
        assert tokens(1) == first, "the same request draws other tokens: all noise comes from request.seed"
        assert tokens(2) != first, "another seed draws the same tokens"
        assert len({tuple(t) for t in first}) == 4, "the samples of a request differ"

    def test_evals_may_cut_the_distribution(self, rig: Rig) -> None:
        for cut in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            (done,) = rig.generate(ask("cut", ignore_eos=True, max_tokens=5, **cut))
            (greedy,) = rig.generate(ask("cut", ignore_eos=True, max_tokens=5, temperature=0.0))
            assert done.token_ids == greedy.token_ids, f"{cut} leaves one token to draw, and another one was drawn"
            assert max(map(abs, done.logprobs)) < 1e-6, "the log-prob is that of the cut distribution"

    def test_scores_of_given_sequences(self, rig: Rig) -> None:
        sequences = [[5, 6, 7, 8, 9], [4, 4], list(range(4, 30))]
        for ids, got in zip(sequences, rig.run(rig.engine.logprobs(sequences)), strict=True):
            want = rig.reference(ids, rig.version).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
            close = torch.allclose(torch.tensor(got, dtype=torch.float64), want, atol=self.tolerance)
            assert close, "logprobs(sequences) gives the log-prob of each token from the second on, at temperature 1"

    def test_an_aborted_request_ends_and_the_others_do_not(self, rig: Rig) -> None:
        provided(rig.engine, "partial_rollouts")

        async def work() -> list[Completion]:
            requests = [ask("gone", n=2, max_tokens=240, ignore_eos=True), ask("stays", n=2, max_tokens=60, ignore_eos=True)]
            collecting = asyncio.create_task(rig.collect(requests))
            await asyncio.sleep(0.05)
            await rig.engine.abort("gone")
            return await collecting

        done = rig.run(work())
        gone = [c for c in done if c.request_id == "gone"]
        stays = [c for c in done if c.request_id == "stays"]
        early = [c.finish_reason for c in gone] == ["aborted"] * 2 and all(len(c.token_ids) < 240 for c in gone)
        assert early, "abort(id) ends the request's samples where they are, with finish_reason 'aborted'"
        whole = [len(c.token_ids) for c in stays] == [60, 60] and {c.finish_reason for c in stays} == {"length"}
        assert whole, "abort(id) touched another request"

    def test_a_reader_that_goes_away_frees_the_engine(self, rig: Rig) -> None:
        async def work() -> None:
            stream = rig.engine.generate([ask("short", max_tokens=1), ask("long", n=8, max_tokens=240, ignore_eos=True)])
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]

        rig.run(work())
        assert len(rig.generate(ask("next", n=2))) == 2, "after a reader went away the next request gets nothing"

    def test_a_cancelled_reader_takes_its_requests_along(self, rig: Rig) -> None:
        """They are aborted inside the engine, so that the same ids can be asked for again."""

        async def work() -> list[Completion]:
            reading = asyncio.create_task(rig.collect([ask("again", n=4, max_tokens=240, ignore_eos=True)]))
            await asyncio.sleep(0.05)
            reading.cancel()
            await asyncio.wait({reading}, timeout=60)
            assert reading.done(), "generate goes on after its reader was cancelled: abort its requests in a finally"
            return await rig.collect([ask("again", n=2, max_tokens=7, ignore_eos=True)])

        done = rig.run(work())
        found = sorted((c.index, len(c.token_ids), c.finish_reason) for c in done)
        assert found == [(0, 7, "length"), (1, 7, "length")], (
            f"a request that was cancelled and asked again gave {found}: the first one still runs; abort it in a finally"
        )

    def test_many_readers_get_what_each_gets_alone(self, rig: Rig) -> None:
        requests = [ask(f"m{i}", n=2, seed=i, prompt=range(4, 6 + i), ignore_eos=True, max_tokens=9) for i in range(5)]

        def tokens(done: Sequence[Completion]) -> list[list[int]]:
            return [c.token_ids for c in sorted(done, key=lambda c: c.index)]

        async def together() -> list[list[Completion]]:
            return list(await asyncio.gather(*(rig.collect([request]) for request in requests)))

        alone = [tokens(rig.generate(request)) for request in requests]
        found = [tokens(done) for done in rig.run(together())]
        assert found == alone, "what is in the engine beside a request changes its draws: its noise is drawn ahead, from its seed"

    def test_what_it_is_made_of_travels(self, rig: Rig) -> None:
        for value in (rig.engine.spec, rig.engine.options):
            there = travelled(value)
            assert there == value, f"{type(value).__name__} is not the same in another process"

    def test_new_weights_are_used_and_stamped(self, rig: Rig) -> None:
        request = ask("fresh", n=4)
        version = rig.run(rig.commit(change=True))
        done = rig.generate(request)
        found = {v for c in done for v in c.versions}
        assert found == {version} == {rig.engine.weight_version()}, f"tokens of version {version} are stamped {found}"
        gap = max(rig.worst_gap(request, c) for c in done)
        assert gap < self.tolerance, f"after an update log-probs are off by {gap:.2g} nats: old weights, or an old prefix cache"

    def test_an_update_in_flight_leaves_every_token_with_its_version(self, rig: Rig) -> None:
        """Tokens before the update fit the old weights, tokens after it the new ones with a recomputed cache."""
        provided(rig.engine, "inflight_updates")
        request = ask("flight", n=4, max_tokens=240, ignore_eos=True, prompt=range(4, 14))

        async def work(wait: float) -> list[Completion]:
            collecting = asyncio.create_task(rig.collect([request]))
            await asyncio.sleep(wait)
            await rig.commit(change=True)
            return await collecting

        for wait in (0.1, 0.05, 0.02, 0.2, 0.4):
            done = rig.run(work(wait))
            for c in done:
                assert c.versions == sorted(c.versions) and len(c.token_ids) == 240, "an update in flight cut or reordered tokens"
                gap = rig.worst_gap(request, c)
                assert gap < self.tolerance, f"off by {gap:.2g} nats around an update: recompute the cache, stamp each token"
            if all(len(set(c.versions)) == 2 for c in done):
                return
        pytest.fail("no update arrived while the engine was generating")

    def test_weights_do_not_change_outside_of_a_pause(self, rig: Rig) -> None:
        with pytest.raises(WeightSyncError):
            rig.run(rig.engine.apply(None))  # type: ignore[arg-type]

    def test_aborting_what_does_not_run_harms_nobody(self, rig: Rig) -> None:
        rig.run(rig.engine.abort("later"))
        found = [c.finish_reason for c in rig.generate(ask("later", ignore_eos=True))]
        assert found == ["length"], f"abort of an id that does not run ended a later request of that id: {found}"

    def test_an_invalid_engine_refuses(self, rig: Rig) -> None:
        """The last one that uses the rig: an engine may end its processes when it becomes invalid."""
        rig.engine.invalidate("a test says so")
        with pytest.raises(WeightSyncError, match="a test says so"):
            rig.generate(ask("refused"))

    def test_closing_twice(self, make_engine: Callable[[EngineSpec], Engine], tmp_path: Path) -> None:
        write_tiny_model(tmp_path)
        engine = make_engine(EngineSpec(str(tmp_path), "float32", LIMIT, 16, STOPS, log_dir=tmp_path))

        async def work() -> None:
            await engine.close()
            await engine.close()

        asyncio.run(work())
