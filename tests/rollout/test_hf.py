"""What is particular to the embedded engine: bits, padding, waves, retirement, attention, start-up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.errors import ConfigError, EngineStartError, RunInterrupted, WeightSyncError
from posttrain.rollout.decode import causal_mask, left_pad
from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.hf import HFEngine
from posttrain.rollout.kv_cache import attend
from posttrain.rollout.module import build_module
from posttrain.rollout.sampling import draw, processed_logprobs, request_noise
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Completion, Request, Sampling


class Weights:
    """A publication of a model's parameters, without a plane."""

    def __init__(self, model: Any, version: int, **changes: Any) -> None:
        self.version = version
        self.parameters = {**dict(model.named_parameters()), **changes}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value.detach()) for name, value in self.parameters.items() if value is not None)


async def started(folder: Path, model: Any, *, rows: int = 64, limit: int = 128, **spec: Any) -> HFEngine:
    engine = HFEngine(EngineSpec(str(folder), spec.pop("dtype", "float32"), limit, rows, (2, 3), **spec))
    await engine.start()
    await put(engine, Weights(model, 1))
    return engine


async def put(engine: HFEngine, weights: Any) -> None:
    await engine.pause()
    try:
        await engine.apply(weights)
    finally:
        await engine.resume()


async def collect(engine: HFEngine, *requests: Request) -> list[Completion]:
    return [c async for c in engine.generate(requests)]


def ask(name: str, prompt: Any = (5, 6, 7), n: int = 2, seed: int = 0, **sampling: Any) -> Request:
    return Request(name, list(prompt), n, seed, Sampling(**{"max_tokens": 12, **sampling}))


def on_engine(folder: Path, work: Any, **spec: Any) -> Any:
    model = write_tiny_model(folder)

    async def main() -> Any:
        engine = await started(folder, model, **spec)
        try:
            return await work(engine, model)
        finally:
            await engine.close()

    return asyncio.run(main())


def test_the_same_cohort_gives_the_same_bits(tmp_path: Path) -> None:
    requests = [ask(f"r{i}", range(4, 6 + i % 5), n=3, seed=i, max_tokens=20) for i in range(7)]

    async def work(engine: HFEngine, model: Any) -> Any:
        torch.manual_seed(99)  # the global generator plays no part
        first = await collect(engine, *requests)
        torch.rand(10)
        noise = asyncio.create_task(collect(engine, *[ask(f"x{i}", seed=i + 50, max_tokens=30) for i in range(5)]))
        second = await collect(engine, *requests)
        await noise
        return first, second

    first, second = on_engine(tmp_path, work, rows=8)
    assert first == second, "order, ids and log-probs, to the bit"
    assert first == on_engine(tmp_path, work, rows=8)[0], "also in a fresh engine"


def test_a_request_s_tokens_do_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    async def work(engine: HFEngine, model: Any) -> Any:
        alone = await collect(engine, ask("me", n=2, seed=3))
        among = await collect(engine, *[ask(f"n{i}", [9] * (3 + i), seed=i) for i in range(5)], ask("me", n=2, seed=3))
        return [{c.index: c.token_ids for c in done if c.request_id == "me"} for done in (alone, among)]

    alone, among = on_engine(tmp_path, work)
    assert alone == among


def test_more_samples_of_a_request_do_not_change_the_first() -> None:
    few, many = request_noise(ask("a", n=2)), request_noise(ask("a", n=5))
    assert torch.equal(few, many[:2]) and few.dtype == torch.float64 and few.shape == (2, 12)


def test_case_mask_1_left_padding_is_by_length_and_real_tokens_see_no_padding(tmp_path: Path) -> None:
    ids, valid, positions = left_pad([[2, 8, 2, 9], [4, 5, 6, 7, 8, 9]], pad_id=2)  # an EOS id, which the prompt holds too
    assert ids[0].tolist() == [2, 2, 2, 8, 2, 9] and valid[0].tolist() == [False, False, True, True, True, True]
    assert positions[0, 2:].tolist() == [0, 1, 2, 3]
    mask = causal_mask(valid)
    assert mask[0, 0, 5].tolist() == [False, False, True, True, True, True] and bool(mask.any(-1).all())

    async def work(engine: HFEngine, model: Any) -> Any:
        return await collect(engine, ask("short", [2, 8, 2, 9], n=1), ask("long", range(4, 30), n=1))

    model = write_tiny_model(tmp_path)
    short = next(c for c in on_engine(tmp_path, work) if c.request_id == "short")
    sequence = torch.tensor([[2, 8, 2, 9, *short.token_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(sequence).logits[0, 3:-1].double(), -1)
    expected = logprobs.gather(1, sequence[0, 4:, None]).squeeze(1)
    assert torch.allclose(torch.tensor(short.logprobs, dtype=torch.float64), expected, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_waves_of_any_width_return_every_sample_with_its_own_noise(tmp_path: Path, rows: int) -> None:
    async def work(engine: HFEngine, model: Any) -> Any:
        done = await collect(engine, *[ask(f"r{i}", [5 + i], n=4, seed=i) for i in range(3)], ask("g", n=1, temperature=0.0))
        return {(c.request_id, c.index): c.token_ids for c in done}

    narrow = on_engine(tmp_path, work, rows=rows)
    assert len(narrow) == 13 and narrow == on_engine(tmp_path, work, rows=16)


def test_ended_rows_leave_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.rollout.decode import Wave

    widths: list[int] = []
    advance = Wave._advance
    monkeypatch.setattr(Wave, "_advance", lambda self, t: (widths.append(len(self.rows)), advance(self, t))[1])

    async def work(engine: HFEngine, model: Any) -> Any:
        return await collect(engine, *[ask(f"r{i}", n=1, max_tokens=4 * (i + 1), ignore_eos=True) for i in range(8)])

    done = on_engine(tmp_path, work)
    assert sorted(len(c.token_ids) for c in done) == [4 * (i + 1) for i in range(8)]
    assert widths[0] == 8 and widths[-1] < 4 and widths == sorted(widths, reverse=True)
    assert sum(widths) < 0.75 * 8 * len(widths)


def test_case_tok_5_prompts_without_room_and_budgets_at_the_border(tmp_path: Path) -> None:
    async def work(engine: HFEngine, model: Any) -> Any:
        lengths = {"over": 19, "full": 16, "one": 15, "none": 0, "fine": 5}
        asked = [ask(name, [7] * length, n=1, ignore_eos=True) for name, length in lengths.items()]
        return {c.request_id: c for c in await collect(engine, *asked)}

    done = on_engine(tmp_path, work, limit=16)
    for name in ("over", "full", "none"):
        assert done[name].finish_reason == "error" and done[name].token_ids == [] and "prompt" in (done[name].error or "")
    assert len(done["one"].token_ids) == 1 and done["one"].finish_reason == "length"
    assert len(done["fine"].token_ids) == 11


def test_the_event_loop_lives_while_the_engine_decodes(tmp_path: Path) -> None:
    async def work(engine: HFEngine, model: Any) -> tuple[int, float]:
        decoding = asyncio.create_task(collect(engine, ask("r", n=64, max_tokens=120, ignore_eos=True)))
        beats, worst, last = 0, 0.0, time.perf_counter()
        while not decoding.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            beats, worst, last = beats + 1, max(worst, now - last), now
        await decoding
        return beats, worst

    beats, _ = on_engine(tmp_path, work)
    assert beats > 20


def test_attention_without_copies_equals_attention_with_repeated_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(3, 2, 10, 8, generator=generator) for _ in range(2))
    for length in (1, 4):
        query = torch.randn(3, 6, length, 8, generator=generator)
        mask = torch.rand(3, 1, length, 10, generator=generator) < 0.7
        mask[..., 0] = True
        got, _ = attend(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
        scores = (query @ key.repeat_interleave(3, 1).transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf).softmax(-1)
        assert torch.allclose(got, (scores @ value.repeat_interleave(3, 1)).transpose(1, 2), atol=1e-6)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2001, 5)
    uniform = torch.linspace(0, 1 - 2**-53, 2001, dtype=torch.float64)
    tokens, logprobs = draw(processed_logprobs(logits, Sampling(1)), uniform)
    assert set(tokens.tolist()) == {1, 3} and torch.allclose(logprobs, torch.tensor(0.5).log())
    assert tokens[0] == 1 and tokens[-1] == 3


def test_cut_distributions_keep_what_they_should() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()

    def kept(**sampling: Any) -> list[int]:
        return processed_logprobs(logits, Sampling(1, **sampling))[0].isfinite().nonzero().flatten().tolist()

    assert kept(top_k=2) == [0, 1] and kept(top_p=0.74) == [0, 1] and kept(top_p=0.76) == [0, 1, 2]
    assert kept(min_p=0.25) == [0, 1, 2] and kept(top_p=1e-9) == [0] and kept() == [0, 1, 2, 3]
    assert torch.allclose(processed_logprobs(logits, Sampling(1, top_k=2)).exp(), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))


def test_a_publication_that_does_not_fit_writes_nothing(tmp_path: Path) -> None:
    async def work(engine: HFEngine, model: Any) -> None:
        before = [p.clone() for p in engine._model.parameters()]
        norm = "model.norm.weight"
        for changes, word in (({norm: None}, "missing"), ({"extra": torch.ones(1)}, "unknown"), ({norm: torch.ones(3)}, "shape")):
            wrong = Weights(model, 2, **{"model.embed_tokens.weight": torch.zeros(40, 64), **changes})
            with pytest.raises(WeightSyncError, match="does not fit") as caught:
                await put(engine, wrong)
            assert word in caught.value.cause
        assert all(torch.equal(a, b) for a, b in zip(before, engine._model.parameters(), strict=True))
        assert engine.weight_version() == 1
        assert engine.parameters() == {n: tuple(p.shape) for n, p in model.named_parameters()}

    on_engine(tmp_path, work)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    async def work(engine: HFEngine, model: Any) -> Any:
        return await engine.logprobs([list(range(4, 20))])

    assert on_engine(tmp_path, work, dtype="bfloat16")[0] == pytest.approx(on_engine(tmp_path, work)[0], abs=0.2)


def test_the_weights_of_the_folder_are_not_read_and_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    async def main() -> None:
        torch.manual_seed(5)
        engine = HFEngine(EngineSpec(str(tmp_path), "float32", 64, 4, (2,), seed=7))
        await engine.start()
        assert torch.initial_seed() == 5 and torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))
        await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (None, "model-absent", "was not found"),
        ({"model_type": "no_such_thing"}, "architecture", "no_such_thing"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "architecture", "full and sliding attention only"),
    ],
)
def test_a_start_that_fails_says_why(tmp_path: Path, change: dict[str, Any] | None, code: str, words: str) -> None:
    folder = tmp_path / "m"
    if change is not None:
        folder.mkdir()
        write_tiny_model(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))

    spec = EngineSpec(str(folder), "float32", 64, 4, (2,))

    async def main() -> None:
        engine = HFEngine(spec)
        try:
            await engine.start()
        finally:
            await engine.close()

    for attempt in (lambda: HFEngine.preflight(spec, None), lambda: asyncio.run(main())):
        with pytest.raises(EngineStartError) as caught:
            attempt()
        assert words in str(caught.value) and caught.value.code == code and caught.value.exit_code == 4


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class ZorkConfig(LlamaConfig):
    model_type = "zork"

class ZorkForCausalLM(LlamaForCausalLM):
    config_class = ZorkConfig
"""


def test_a_model_s_own_code_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "zork"
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    own = {"AutoConfig": "code.ZorkConfig", "AutoModelForCausalLM": "code.ZorkForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "zork", "auto_map": own}))
    (folder / "code.py").write_text(OWN_CODE)
    spec = EngineSpec(str(folder), "float32", 64, 4, (2,))
    with pytest.raises(ConfigError, match="brings its own code") as caught:
        HFEngine.preflight(spec, None)
    assert "model.trust_remote_code" in caught.value.fix
    assert type(build_module(replace(spec, trust_remote_code=True))).__name__ == "ZorkForCausalLM"


def test_closing_ends_a_running_generation(tmp_path: Path) -> None:
    async def work(engine: HFEngine, model: Any) -> float:
        decoding = asyncio.create_task(collect(engine, ask("r", n=32, max_tokens=120, ignore_eos=True)))
        await asyncio.sleep(0.05)
        await engine.pause()
        began = time.perf_counter()
        await engine.close()
        await asyncio.wait_for(decoding, 20)
        return time.perf_counter() - began

    assert on_engine(tmp_path, work) < 20


def test_a_closed_engine_starts_anew_without_weights(tmp_path: Path) -> None:
    async def work(engine: HFEngine, model: Any) -> None:
        engine.invalidate("a test says so")
        await engine.close()
        await engine.start()
        assert engine.weight_version() is None and engine.invalid is None
        with pytest.raises(WeightSyncError, match="no weights yet"):
            await collect(engine, ask("early"))
        await put(engine, Weights(model, 4))
        assert {c.versions[0] for c in await collect(engine, ask("r"))} == {4}

    on_engine(tmp_path, work)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_cache_goes_by_the_name_that_this_transformers_has(name: str) -> None:
    from posttrain.rollout.kv_cache import cache_argument

    scope: dict[str, Any] = {}
    exec(f"class Model:\n    def forward(self, input_ids, {name}=None): ...", scope)
    assert cache_argument(scope["Model"]()) == name


def test_closing_ends_a_generation_that_waits_for_its_turn(tmp_path: Path) -> None:
    """The thread decodes one call after the other; the second one has not begun when the engine is closed."""

    async def work(engine: HFEngine, model: Any) -> None:
        await engine.pause()  # the first one waits at the gate
        first, second = asyncio.create_task(collect(engine, ask("a"))), asyncio.create_task(collect(engine, ask("b")))
        await asyncio.sleep(0.05)
        await engine.close()
        assert await asyncio.wait_for(first, 5) == []
        try:  # it may have had its turn just before
            assert await asyncio.wait_for(second, 5) == []
        except RunInterrupted as exc:
            assert exc.code == "engine-dead"

    on_engine(tmp_path, work)


def test_a_stop_text_ends_a_completion_that_keeps_it_and_the_draws_are_the_same(tmp_path: Path) -> None:
    """Over token borders, also the bytes of one character; what comes before the stop text is as without it."""

    async def work(engine: HFEngine, model: Any) -> Any:
        free = await collect(engine, ask("free", n=8, max_tokens=30))
        tails = [engine._spell(c.token_ids) for c in free]
        stops = tuple(text[6:9] for text in tails[:3] if len(text) > 9)
        return tails, stops, await collect(engine, ask("free", n=8, max_tokens=30, stop=stops)), free, engine

    _, stops, stopped, free, engine = on_engine(tmp_path, work)
    assert stops
    for before, after in zip(sorted(free, key=lambda c: c.index), sorted(stopped, key=lambda c: c.index), strict=True):
        text = engine._spell(after.token_ids)
        assert before.token_ids[: len(after.token_ids)] == after.token_ids
        assert any(stop in text for stop in stops) == any(stop in engine._spell(before.token_ids) for stop in stops)
        if any(stop in text for stop in stops):
            assert after.finish_reason == "stop"
            assert not any(stop in engine._spell(after.token_ids[:-1]) for stop in stops), "it ends with the first token that can"
