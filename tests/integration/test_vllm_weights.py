"""Weight updates of a running vLLM, on an untied model with biases: meaning, caches, coverage, death and rebirth.

The tests of one class share one engine and run in order; the last ones break it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.config.schema import WeightsConfig
from posttrain.errors import RunInterrupted, WeightSyncError
from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.vllm import VllmEngine
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Completion, Request, Sampling
from posttrain.weights.canary import Canary, make_probe
from posttrain.weights.digest import bucket_digest
from posttrain.weights.memory import shared_region
from posttrain.weights.plan import ParameterSpec, plan_buckets
from posttrain.weights.plane import WeightPlane
from posttrain.weights.shm import ShmTransport
from posttrain.weights.transport import Staged, views

pytestmark = pytest.mark.integration

VOCABULARY = 100


class Rig:
    """An engine, the transformers model that it must equal, and the loop that all calls run in."""

    def __init__(self, model: Any, folder: Path, **config: Any) -> None:
        self.model, self.runner = model, asyncio.Runner()
        self.first, self.changes = [parameter.detach().clone() for parameter in model.parameters()], 0
        self.engine = VllmEngine(EngineSpec(str(folder), "float32", 256, 64, (1,), log_dir=folder / "logs"))
        self.config = WeightsConfig(bucket_bytes=8192, **config)
        canary = Canary(self.score, make_probe(40), self.config, dtype="float32")
        source = lambda: iter(model.named_parameters())  # noqa: E731
        self.plane = WeightPlane.local(self.engine, ShmTransport(), self.config, source, canary=canary)

    def run(self, work: Any) -> Any:
        return self.runner.run(asyncio.wait_for(work, 240))

    @torch.no_grad()
    def score(self, sequences: Any, temperature: float = 1.0) -> list[list[float]]:
        out = []
        for ids in sequences:
            logprobs = (self.model(torch.tensor([list(ids)])).logits[0, :-1].double() / temperature).log_softmax(-1)
            out.append(logprobs.gather(1, torch.tensor(list(ids)[1:])[:, None]).squeeze(1).tolist())
        return out

    @torch.no_grad()
    def change(self) -> None:
        """Other weights, all at the same distance from the first; summed up, changes would make log-probs that fp32 rounds."""
        self.changes += 1
        for parameter, first in zip(self.model.parameters(), self.first, strict=True):
            noise = torch.Generator().manual_seed(parameter.numel() + 1_000_003 * self.changes)
            parameter.copy_(first + 0.1 * torch.randn(parameter.shape, generator=noise))

    def generate(self, *requests: Request) -> list[Completion]:
        return self.run(collect(self.engine, *requests))

    def gap(self, request: Request, completions: list[Completion]) -> float:
        scored = self.score([[*request.prompt_ids, *c.token_ids] for c in completions], request.sampling.temperature)
        rows = [(c.logprobs, s[-len(c.token_ids) :]) for c, s in zip(completions, scored, strict=True)]
        return max(abs(a - b) for mine, theirs in rows for a, b in zip(mine, theirs, strict=True))

    def close(self) -> None:
        self.run(self.engine.close())
        self.run(self.plane.close())
        self.runner.close()


def write_untied_model(folder: Path) -> Any:
    """Qwen2: biases on the fused q, k and v; a vocabulary that vLLM pads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return model


def ask(name: str, *, n: int = 2, prompt: Any = range(2, 12), seed: int = 0, **sampling: Any) -> Request:
    return Request(name, list(prompt), n, seed, Sampling(**{"max_tokens": 12, "ignore_eos": True, **sampling}))


class TestUntied:
    @pytest.fixture(scope="class")
    def rig(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        folder = tmp_path_factory.mktemp("untied")
        rig = Rig(write_untied_model(folder), folder)
        rig.run(rig.engine.start())
        rig.run(rig.plane.sync(1))
        yield rig
        rig.close()

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
    def test_logprobs_agree_before_and_after_an_update(self, rig: Rig, temperature: float) -> None:
        request = ask(f"t{temperature}", temperature=temperature, n=4)
        assert rig.gap(request, rig.generate(request)) < 1e-4
        rig.change()
        assert rig.gap(request, rig.generate(request)) > 1e-2, "the change is large enough to be seen"
        rig.run(rig.plane.sync(rig.plane.version + 1))
        completions = rig.generate(request)
        assert rig.gap(request, completions) < 1e-4
        assert {v for c in completions for v in c.versions} == {rig.plane.version}

    def test_the_prefix_cache_is_used_and_not_stale_after_an_update(self, rig: Rig) -> None:
        request = ask("prefix", prompt=[3 + i % 90 for i in range(160)])
        rig.generate(request)
        assert rig.run(cached_tokens(rig.engine, request)) >= 128
        rig.change()
        rig.run(rig.plane.sync(rig.plane.version + 1))
        assert rig.run(cached_tokens(rig.engine, request)) == 0
        assert rig.gap(request, rig.generate(request)) < 1e-4

    def test_samples_of_one_prompt_share_its_blocks_and_stay_exact(self, rig: Rig) -> None:
        request = ask("shared", n=8, prompt=[2 + (11 * i) % 97 for i in range(100)], temperature=1.3)
        completions = rig.generate(request)
        assert len({tuple(c.token_ids) for c in completions}) > 1
        assert rig.gap(request, completions) < 1e-4
        assert rig.run(cached_tokens(rig.engine, request)) == 96

    def test_more_seeded_prompt_tokens_than_one_forward_takes(self, rig: Rig) -> None:
        prompts = [[2 + (7 * i + j) % 95 for j in range(200)] for i in range(40)]
        requests = [ask(f"long{i}", n=1, seed=i, prompt=prompt, max_tokens=3) for i, prompt in enumerate(prompts)]
        assert len(rig.generate(*requests)) == 40

    def test_a_prompt_that_leaves_no_room_comes_back_as_an_error(self, rig: Rig) -> None:
        (long,) = rig.generate(ask("long", n=1, prompt=[5] * 256))
        assert long.finish_reason == "error" and "max_model_len=256" in (long.error or "")
        (short,) = rig.generate(ask("short", n=1, prompt=[5] * 250, max_tokens=50))
        assert short.finish_reason == "length" and len(short.token_ids) == 6

    def test_the_parameters_it_takes_are_those_that_the_policy_has(self, rig: Rig) -> None:
        assert rig.engine.parameters() == {name: tuple(p.shape) for name, p in rig.model.named_parameters()}

    @pytest.mark.parametrize("fault", ["raise", "stall", "corrupt", "partial"])
    def test_a_fault_before_the_vote_touches_nothing(self, rig: Rig, fault: str) -> None:
        """The request that runs meanwhile, and those after it, are served by the old weights; the next update heals."""
        lane, version, request = rig.plane.lanes[0], rig.plane.version, ask("before", temperature=0.0)
        (before, _), middle, long = rig.generate(request), lane.lane.plan.buckets[-1].index // 2, ask("long", max_tokens=200)
        gate, pull = threading.Event(), lane._transport.pull

        def faulty(handle: Any, pieces: Any, into: Any) -> None:
            if lane.at != middle:
                return pull(handle, pieces, into)
            if fault == "raise":
                raise RuntimeError("injected fault")
            if fault == "stall":
                gate.wait(60)
            if fault != "partial":
                pull(handle, pieces, into)
            if fault == "corrupt":
                into.buffer[pieces[0].target] ^= 1

        async def work() -> list[Completion]:
            running = asyncio.ensure_future(collect(rig.engine, long))
            with pytest.raises(WeightSyncError, match=f"lane rollout-0.*(\n.*)*bucket {middle} of policy rank 0"):
                await rig.plane.sync(version + 1)
            return await running

        rig.change()
        lane._transport.pull = faulty
        rig.plane.config = dataclasses.replace(rig.config, stage_timeout_s=3.0 if fault == "stall" else 120.0)
        during = rig.run(work())
        gate.set()
        lane._transport.pull, rig.plane.config = pull, rig.config
        assert {v for c in during for v in c.versions} == {version} == {rig.plane.version}
        after, _ = rig.generate(request)
        assert after.token_ids == before.token_ids and set(after.versions) == {version}
        assert max(abs(a - b) for a, b in zip(after.logprobs, before.logprobs, strict=True)) < 1e-4
        rig.run(rig.plane.sync(version + 2))
        assert rig.gap(ask("healed"), rig.generate(ask("healed"))) < 1e-4

    def test_a_worker_killed_while_it_loads_is_rebuilt_to_the_trainer_s_weights(self, rig: Rig) -> None:
        engine, version = rig.engine, rig.plane.version + 1
        worker, rpc = engine._processes[-1], engine._rpc

        async def kill(llm: Any, method: str, **kwargs: Any) -> None:
            if method == "update_weights" and worker.is_running():
                worker.kill()
            await rpc(llm, method, **kwargs)

        rig.change()
        engine._rpc = kill
        rig.plane.config = dataclasses.replace(rig.config, on_failure="rebuild_and_retry")
        rig.run(rig.plane.sync(version))
        rig.plane.config, engine._rpc = rig.config, rpc
        failure = rig.plane.last_failure
        assert failure.peer == "rollout-0" and failure.phase == "apply" and "vllm.log" in failure.cause
        assert not worker.is_running()
        request = ask("rebuilt")
        completions = rig.generate(request)
        assert rig.gap(request, completions) < 1e-4 and {v for c in completions for v in c.versions} == {version}

    def test_a_late_epoch_is_refused_by_the_worker_too(self, rig: Rig) -> None:
        """Two bodies on one worker: their epochs cross (E27). The engine cannot be trusted afterwards, and is rebuilt."""
        staged = stage(rig.model.named_parameters(), version=99, epoch=1)
        with pytest.raises(WeightSyncError, match=r"begin_weight_update\(1\) does not advance past epoch"):
            rig.run(apply(rig.engine, staged))
        with pytest.raises(WeightSyncError, match="invalid"):
            rig.generate(ask("refused"))
        assert rig.engine.weight_version() is None

    def test_a_rebuilt_engine_serves_the_current_version(self, rig: Rig) -> None:
        rig.run(rig.plane.lanes[0].rebuild())
        with pytest.raises(WeightSyncError, match="no weights yet"):
            rig.generate(ask("early"))
        rig.run(rig.plane.sync(rig.plane.version + 1))
        request = ask("again")
        assert rig.gap(request, rig.generate(request)) < 1e-4

    def test_case_sync_1_a_fused_part_that_is_missing_is_not_served(self, rig: Rig) -> None:
        """vLLM alone finishes such an update silently; here it names the layer, and nothing is served."""
        without = [(n, p) for n, p in rig.model.named_parameters() if n != "model.layers.1.self_attn.v_proj.weight"]
        with pytest.raises(WeightSyncError, match=r"model.layers.1.self_attn.qkv_proj: \d+ of \d+ elements"):
            rig.run(apply(rig.engine, stage(without, version=99, epoch=50)))
        with pytest.raises(WeightSyncError, match="invalid"):
            rig.generate(ask("refused"))
        assert not any(p.is_running() for p in rig.engine._processes), "a mixed model is not left running"


class TestTied:
    """The trap: without the re-pack a tied head keeps its first weights. The canary catches it; with the re-pack all is well."""

    @pytest.fixture(scope="class")
    def rig(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
        folder = tmp_path_factory.mktemp("tied")
        rig = Rig(write_tiny_model(folder, tied=True), folder)
        yield rig
        rig.close()

    def test_the_canary_catches_a_tied_head_that_keeps_its_old_weights(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("POSTTRAIN_ENGINE_REPACK_TIED", "0")
        rig.run(rig.engine.start())
        with pytest.raises(WeightSyncError, match="does not compute the policy's function") as caught:
            rig.run(rig.plane.sync(1))
        assert caught.value.code == "canary" and "nats at row" in caught.value.message
        with pytest.raises(WeightSyncError, match="invalid"):
            rig.generate(ask("refused", prompt=[5, 6]))

    def test_with_the_repack_the_canary_agrees(self, rig: Rig) -> None:
        rig.run(rig.plane.lanes[0].rebuild())
        metrics = rig.run(rig.plane.sync(2))
        request = ask("tied", prompt=[5, 6, 7])
        assert rig.gap(request, rig.generate(request)) < 1e-4
        expected = rig.score(make_probe(40))
        got = rig.run(rig.engine.logprobs(make_probe(40)))
        assert max(abs(a - b) for x, y in zip(got, expected, strict=True) for a, b in zip(x, y, strict=True)) < 1e-4
        assert metrics["weights/canary_max"] < 1e-4

    def test_a_dead_worker_ends_the_requests_with_its_log_named(self, rig: Rig) -> None:
        async def work() -> None:
            stream = rig.engine.generate([ask("last", prompt=[5, 6], max_tokens=250)])
            asyncio.get_running_loop().call_later(0.1, rig.engine._processes[-1].kill)
            async for _ in stream:
                pass

        with pytest.raises(RunInterrupted, match="the vLLM engine died") as caught:
            rig.run(work())
        assert "vllm.log" in caught.value.cause and caught.value.retryable


async def collect(engine: VllmEngine, *requests: Request) -> list[Completion]:
    return [completion async for completion in engine.generate(requests)]


async def cached_tokens(engine: VllmEngine, request: Request) -> int:
    """How many prompt tokens of `request` come from the prefix cache."""
    from vllm import SamplingParams

    assert engine._llm is not None
    output = await engine._run(engine._llm, list(request.prompt_ids), SamplingParams(max_tokens=1, detokenize=False), "cache/0")
    return output.num_cached_tokens or 0


async def apply(engine: VllmEngine, staged: Staged) -> None:
    await engine.pause()
    await engine.apply(staged)


def stage(parameters: Any, *, version: int, epoch: int) -> Staged:
    """Staged weights made by hand, past the checks of the plane."""
    tensors = dict(parameters)
    plan = plan_buckets(ParameterSpec(n, "float32", tuple(p.shape)) for n, p in tensors.items())
    region = shared_region(plan.nbytes)
    for name, view in views(plan, region.buffer):
        view.copy_(tensors[name].detach())
    digests = tuple(bucket_digest(region.buffer, [(p.target, p.nbytes) for p in b.pieces]) for b in plan.buckets)
    return Staged(version, epoch, plan, digests, region)
