"""The plane with toy engines: order, coverage, failures at every point, deadlines, and what serves afterwards."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

import pytest
import torch

from posttrain.config.schema import WeightsConfig
from posttrain.errors import RunAborted, WeightSyncError
from posttrain.rollout.engine import Engine, EngineSpec
from posttrain.types import Completion
from posttrain.weights.canary import Canary
from posttrain.weights.inproc import InprocTransport
from posttrain.weights.memory import Region
from posttrain.weights.owner import ProcessId
from posttrain.weights.plane import WeightPlane
from posttrain.weights.progress import WORD
from posttrain.weights.shared_files import owner_of, shared_folder
from posttrain.weights.shm import ShmTransport

SPEC = EngineSpec(model_path="", dtype="float32", max_model_len=8, max_num_seqs=1, eos_token_ids=())
QKV = {"q_proj": (1, 2), "k_proj": (1, 2), "v_proj": (1, 2)}


class FusedEngine(Engine):
    """A toy engine that fuses q, k and v into one matrix and caches f(prompt) = prompt + sum of the weights."""

    name = "toy"

    def __init__(self, spec=SPEC, options=None, *, knows_parameters: bool = True) -> None:
        super().__init__(spec, options)
        self.knows_parameters = knows_parameters
        self.fused = torch.zeros(3, 2)
        self.version: int | None = None
        self.log: list[str] = []
        self.cache: dict[int, float] = {}
        self.fail: dict[str, Exception] = {}
        self.hang: set[str] = set()
        self.starts = 0

    async def _step(self, name: str) -> None:
        self.log.append(name)
        if name in self.hang:
            await asyncio.sleep(60)
        if name in self.fail:
            raise self.fail[name]

    async def start(self) -> None:
        self.starts += 1
        self.version, self.invalid = None, None
        self.fused.zero_()
        self.cache.clear()

    async def generate(self, requests):
        self.refuse_invalid()
        if self.version is None:
            raise WeightSyncError("no weights yet")
        for request in requests:
            prompt = request.prompt_ids[0]
            value = self.cache.setdefault(prompt, prompt + float(self.fused.sum()))
            yield Completion(request.id, 0, [int(value)], [0.0], [self.version], "stop")

    async def ask(self, prompt: int) -> tuple[int, int]:
        from posttrain.types import Request, Sampling

        async for completion in self.generate([Request("r", [prompt], 1, 0, Sampling(1))]):
            return completion.token_ids[0], completion.versions[0]
        raise AssertionError

    async def abort(self, request_id: str) -> None: ...

    async def pause(self) -> None:
        await self._step("pause")

    async def apply(self, staged) -> None:
        for name, tensor in staged.tensors():
            self.fused[list(QKV).index(name)] = tensor
            await self._step(f"wrote {name}")
        await self._step("apply")
        self.cache.clear()
        self.log.append("reset cache")
        self.version = staged.version

    async def resume(self) -> None:
        await self._step("resume")

    def weight_version(self) -> int | None:
        return self.version

    def parameters(self):
        return QKV if self.knows_parameters else None

    async def logprobs(self, sequences):
        return [[-float(self.fused.sum())] * (len(s) - 1) for s in sequences]

    async def close(self) -> None: ...


def source(*values: tuple[str, float]):
    return lambda: iter([(name, torch.full((1, 2), value)) for name, value in values])


def run(work) -> object:
    return asyncio.run(asyncio.wait_for(work, 30))


def plane(engine, weights, transport=None, **config) -> WeightPlane:
    return WeightPlane.local(engine, transport or InprocTransport(), WeightsConfig(**config), weights)


# ---- SYNC-1: a fused projection whose parts arrive in different chunks

ORDERS = [("q_proj", "k_proj", "v_proj"), ("v_proj", "q_proj", "k_proj")]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bucket_bytes", [8, 16, 64, 2**20])
def test_case_sync_1_fused_projection_in_any_chunks(order, bucket_bytes):
    engine = FusedEngine()
    values = {"q_proj": 1.0, "k_proj": 2.0, "v_proj": 3.0}
    sync = plane(engine, source(*[(name, values[name]) for name in order]), bucket_bytes=bucket_bytes)
    run(sync.sync(1))
    assert engine.fused.tolist() == [[1, 1], [2, 2], [3, 3]]
    assert engine.version == 1 and sync.version == 1
    run(sync.close())


def test_case_sync_1_a_missing_part_is_named_and_the_version_stays():
    engine = FusedEngine()
    sync = plane(engine, source(("q_proj", 1.0), ("k_proj", 2.0)))
    with pytest.raises(WeightSyncError, match=r"the engine needs v_proj \[1, 2\]"):
        run(sync.sync(1))
    assert engine.version is None and sync.version is None
    assert engine.log == [], "a plan that does not cover the model touches no engine"
    run(sync.close())


# ---- SYNC-5: the prefix cache after an update


def test_case_sync_5_prefix_cache_after_an_update():
    engine = FusedEngine()
    value = [1.0]
    sync = plane(engine, lambda: iter([(name, torch.full((1, 2), value[0])) for name in QKV]))

    async def scenario() -> None:
        await sync.sync(1)
        assert await engine.ask(4) == (10, 1)
        value[0] = 2.0
        await sync.sync(2)
        assert await engine.ask(4) == (16, 2)
        await sync.sync(3)
        await sync.sync(4)
        assert engine.log.count("reset cache") == 4
        engine.fail["wrote k_proj"] = RuntimeError("half-way")
        value[0] = 5.0
        with pytest.raises(WeightSyncError, match="half-way"):
            await sync.sync(5)
        assert engine.log.count("reset cache") == 4
        with pytest.raises(WeightSyncError, match="invalid"):
            await engine.ask(4)

    run(scenario())
    run(sync.close())


def test_the_cache_is_reset_after_the_weights_landed_and_before_the_next_request():
    engine = FusedEngine()
    sync = plane(engine, source(*[(name, 1.0) for name in QKV]))
    run(sync.sync(1))
    assert engine.log == ["pause", "wrote q_proj", "wrote k_proj", "wrote v_proj", "apply", "reset cache", "resume"]
    run(sync.close())


# ---- failures


def both(transport_type=InprocTransport, engines=2, **config):
    made = [FusedEngine() for _ in range(engines)]
    return made, plane(made, source(*[(name, 1.0) for name in QKV]), transport_type(), **config)


@pytest.mark.parametrize("transport_type", [InprocTransport, ShmTransport])
@pytest.mark.parametrize("bucket", range(3))
def test_a_damaged_bucket_is_found_before_any_engine_is_touched(transport_type, bucket):
    engines, sync = both(transport_type, bucket_bytes=8)

    async def scenario() -> None:
        await sync.sync(1)
        lane = sync.lanes[1]
        pull = lane._transport.pull

        def damaged(handle, pieces, into):
            pull(handle, pieces, into)
            if pieces[0].name == list(QKV)[bucket]:
                into.buffer[pieces[0].target] ^= 1

        lane._transport.pull = damaged
        before = [list(e.log) for e in engines]
        with pytest.raises(WeightSyncError, match=rf"rollout-1: bucket {bucket} of publication 2 arrived damaged"):
            await sync.sync(2)
        assert [e.log for e in engines] == before
        assert [e.version for e in engines] == [1, 1] and sync.version == 1
        assert await engines[0].ask(0) == (6, 1), "the old version goes on serving"
        assert [r.lane.state for r in sync.lanes] == ["aborted", "aborted"]
        lane._transport.pull = pull
        await sync.sync(3)
        assert [e.version for e in engines] == [3, 3]

    run(scenario())
    run(sync.close())


def test_a_pull_that_hangs_is_abandoned_with_its_staging():
    engines, sync = both(stage_timeout_s=0.2)
    gate = threading.Event()

    async def scenario() -> None:
        await sync.sync(1)
        lane = sync.lanes[0]
        old = lane._staging
        late: list[torch.Tensor] = []

        def stuck(handle, pieces, into):
            gate.wait(10)
            late.append(into.buffer)

        lane._transport.pull = stuck
        with pytest.raises(WeightSyncError, match="rollout-0: publication 2 was not staged within 0.2 s") as caught:
            await sync.sync(2)
        assert caught.value.code == "deadline" and [e.version for e in engines] == [1, 1]
        await sync.sync(3)
        assert lane._staging is not old, "staging that may still be written to is never reused"
        gate.set()

    run(scenario())
    assert [e.version for e in engines] == [3, 3]
    run(sync.close())


def test_a_failed_pause_leaves_the_lane_valid_and_the_engine_running():
    engines, sync = both(engines=1)

    async def scenario() -> None:
        await sync.sync(1)
        engines[0].fail["pause"] = RuntimeError("no pause")
        with pytest.raises(WeightSyncError, match="no pause"):
            await sync.sync(2)
        assert sync.lanes[0].lane.state == "aborted" and engines[0].log[-1] == "resume"
        assert await engines[0].ask(0) == (6, 1)
        engines[0].fail.clear()
        await sync.sync(3)

    run(scenario())
    run(sync.close())


def test_a_hanging_apply_ends_at_its_deadline_and_the_lane_refuses_to_serve():
    engines, sync = both(engines=1, apply_timeout_s=0.2)
    engines[0].hang.add("wrote k_proj")
    with pytest.raises(WeightSyncError, match="version 1 was not applied within 0.2 s"):
        run(sync.sync(1))
    assert sync.lanes[0].lane.state == "invalid" and engines[0].invalid
    with pytest.raises(WeightSyncError, match="invalid"):
        run(engines[0].ask(1))
    with pytest.raises(WeightSyncError, match="is invalid"):
        run(sync.sync(2))
    run(sync.close())


def test_an_engine_that_stays_at_its_old_version_is_not_committed():
    engines, sync = both(engines=1)

    async def forgets(staged) -> None:
        engines[0].version = 0

    engines[0].apply = forgets
    with pytest.raises(WeightSyncError, match="says version 0 after applying 1"):
        run(sync.sync(1))
    assert sync.lanes[0].lane.version is None
    run(sync.close())


def test_on_failure_rebuild_and_retry_brings_the_same_version():
    engines, sync = both(on_failure="rebuild_and_retry")

    async def scenario() -> None:
        await sync.sync(1)
        engines[1].fail["wrote v_proj"] = RuntimeError("once")
        start = engines[1].start

        async def healed() -> None:
            engines[1].fail.clear()
            await start()

        engines[1].start = healed
        await sync.sync(2)
        assert [e.version for e in engines] == [2, 2] and engines[1].starts == 1 and engines[0].starts == 0
        assert await engines[1].ask(0) == (6, 2)

    run(scenario())
    run(sync.close())


def test_on_failure_drop_lane_goes_on_with_the_others_and_ends_with_the_last():
    engines, sync = both(on_failure="drop_lane")

    async def scenario() -> None:
        engines[0].fail["apply"] = RuntimeError("lane 0")
        await sync.sync(1)
        assert [r.name for r in sync.lanes] == ["rollout-1"] and engines[1].version == 1
        engines[1].fail["apply"] = RuntimeError("lane 1")
        with pytest.raises(RunAborted, match="no engine left"):
            await sync.sync(2)

    run(scenario())
    run(sync.close())


def test_on_failure_drop_lane_drops_no_lane_for_a_corrupt_publisher():
    engines, sync = both(engines=3, on_failure="drop_lane")
    pool = sync.publisher.pool
    write = pool._write

    def damaged(place, piece, weight):
        own = write(place, piece, weight)
        place.view(torch.uint8)[0] ^= 1
        return own

    async def scenario() -> None:
        await sync.sync(1)
        pool._write = damaged
        with pytest.raises(WeightSyncError, match=r"rollout-\d: bucket 0 of publication 2 arrived damaged"):
            await sync.sync(2)
        pool._write = write
        assert len(sync.lanes) == 3 and [await e.ask(0) for e in engines] == [(6, 1)] * 3
        await sync.sync(3)
        assert [e.version for e in engines] == [3, 3, 3]

    run(scenario())
    run(sync.close())


def test_on_failure_drop_lane_drops_no_lane_for_a_dead_publisher():
    """The first lane that sees it says so: the others, which may still map its memory, are not asked again."""
    engines, sync = both(engines=3, on_failure="drop_lane")
    pulls: list[int] = []

    async def scenario() -> None:
        await sync.sync(1)
        for i, lane in enumerate(sync.lanes):

            def gone(handle, pieces, into, i=i) -> None:
                pulls.append(i)
                raise WeightSyncError("was not pulled: its process died", code="peer")

            lane._transport.pull = gone
        with pytest.raises(WeightSyncError, match="its process died") as caught:
            await sync.sync(2)
        assert caught.value.code == "peer" and len(sync.lanes) == 3
        assert len(set(pulls)) == len(pulls), "a lane was asked again"
        assert [await e.ask(0) for e in engines] == [(6, 1)] * 3

    run(scenario())
    run(sync.close())


def test_versions_advance():
    engines, sync = both(engines=1)
    run(sync.sync(3))
    with pytest.raises(WeightSyncError, match="does not advance past 3"):
        run(sync.sync(3))
    assert engines[0].version == 3
    run(sync.close())


def test_changed_parameters_are_refused_before_any_engine_is_touched():
    engine, names = FusedEngine(), list(QKV)
    sync = plane(engine, lambda: iter([(name, torch.ones(1, 2)) for name in names]))
    run(sync.sync(1))
    names.append("extra")
    before = list(engine.log)
    with pytest.raises(WeightSyncError, match="extra"):
        run(sync.sync(2))
    assert engine.log == before
    run(sync.close())


def test_verify_weight_values_compares_bytes_even_when_digests_agree(monkeypatch):
    engines, sync = both(engines=1, verify_weight_values=True)
    published = lambda *_: next(iter(sync.publisher.pool.digests(1).values()))  # noqa: E731
    monkeypatch.setattr("posttrain.weights.receiver.bucket_digest", published)
    lane = sync.lanes[0]
    pull, calls = lane._transport.pull, []

    def flaky(handle, pieces, into):
        pull(handle, pieces, into)
        calls.extend([1] if pieces[0].name != WORD else [])
        if len(calls) == 1:
            into.buffer[0] ^= 1

    lane._transport.pull = flaky
    with pytest.raises(WeightSyncError, match="differs from what was published"):
        run(sync.sync(1))
    assert engines[0].version is None
    run(sync.close())


def own_files() -> list[str]:
    return [path.name for path in shared_folder().iterdir() if owner_of(path) == ProcessId.current()]


class SharingTransport(ShmTransport):
    """All that it pulls into is shared memory, as over NIXL. kept: every region that was ever allocated."""

    kept: ClassVar[list[Region]] = []

    def staging(self, nbytes: int, *, shared: bool = False) -> Region:
        self.kept.append(super().staging(nbytes, shared=True))
        return self.kept[-1]


def test_verify_weight_values_takes_one_more_copy_for_a_lane_and_gives_it_back(monkeypatch):
    monkeypatch.setattr(SharingTransport, "kept", [])
    before = own_files()
    engine = FusedEngine()
    sync = plane(
        engine, source(*[(name, 1.0) for name in QKV]), SharingTransport(), bucket_bytes=8, verify_weight_values=True
    )

    async def scenario() -> None:
        for version in (1, 2, 3):
            await sync.sync(version)
            assert len(sync.publisher.pool.plan.buckets) == 3 and len(SharingTransport.kept) == 2

    run(scenario())
    run(sync.close())
    assert engine.version == 3 and own_files() == before


def test_a_second_read_that_hangs_is_abandoned_with_its_region():
    _, sync = both(engines=1, stage_timeout_s=1.0, verify_weight_values=True)
    gate, lane = threading.Event(), sync.lanes[0]

    async def scenario() -> None:
        await sync.sync(1)
        again, pull, transport = lane._again, lane._transport.pull, lane._transport
        assert again is not None and again is not lane._staging

        def stuck(handle, pieces, into):
            if into is again:
                gate.wait(10)
            pull(handle, pieces, into)

        closed, close = [], transport.close
        transport.pull, transport.close = stuck, lambda: closed.append(again.nbytes) or close()
        with pytest.raises(WeightSyncError, match="was not staged within 1 s"):
            await sync.sync(2)
        assert lane._again is None and again.nbytes == 0
        assert closed[0] > 0, "it was given back before what writes to it was ended"
        await sync.sync(3)
        assert lane._again is not None and lane._again is not again
        gate.set()

    run(scenario())
    run(sync.close())
    assert lane._again is None


def test_timings_and_bytes_are_reported_and_staging_is_reused():
    _, sync = both(engines=1)

    async def scenario() -> dict[str, float]:
        await sync.sync(1)
        staging = sync.lanes[0]._staging
        metrics = await sync.sync(2)
        assert sync.lanes[0]._staging is staging
        return metrics

    metrics = run(scenario())
    assert {"time/publish_s", "time/stage_s", "time/apply_s", "weights/bytes"} <= metrics.keys()
    assert metrics["weights/bytes"] == sync.publisher.pool.plan.nbytes
    run(sync.close())


# ---- canary


def canary(scores: list[float], **config) -> Canary:
    def score(probe):
        return [[scores[0]] * (len(ids) - 1) for ids in probe]

    return Canary(score, [[1, 2, 3]], WeightsConfig(**config), dtype="float32")


def test_the_canary_sings_after_the_first_commit_and_every_n_publications():
    engine, scores, sung = FusedEngine(), [-6.0], []
    bird = canary(scores, canary_every=3)
    check = bird.check

    async def listen(*args):
        sung.append(engine.version)
        return await check(*args)

    bird.check = listen
    config = WeightsConfig(canary_every=3)
    sync = WeightPlane.local(engine, InprocTransport(), config, source(*[(name, 1.0) for name in QKV]), canary=bird)

    async def scenario() -> None:
        for version in range(1, 8):
            await sync.sync(version)

    run(scenario())
    assert sung == [1, 4, 7]
    run(sync.close())


def test_a_canary_that_differs_names_the_biggest_difference_and_ends_the_engine():
    engine = FusedEngine()
    sync = WeightPlane.local(
        engine, InprocTransport(), WeightsConfig(), source(*[(name, 1.0) for name in QKV]), canary=canary([-6.5])
    )
    with pytest.raises(WeightSyncError, match=r"0.5 nats at row 0, token 1 \(id 2\): engine -6.0000, trainer -6.5000") as caught:
        run(sync.sync(1))
    assert caught.value.code == "canary" and not caught.value.retryable
    with pytest.raises(WeightSyncError, match="invalid"):
        run(engine.ask(1))
    run(sync.close())


@pytest.mark.parametrize(
    ("dtype", "gaps", "words"),
    [
        ("float32", [0.0, 9e-5], None),
        ("float32", [0.0, 2e-4], "canary_max_fp32"),
        ("bfloat16", [0.09, 0.09], None),
        ("bfloat16", [0.0, 0.45], "canary_mean_bf16"),
        ("bfloat16", [0.0] * 9 + [0.6], "canary_max_bf16"),
        ("float32", [float("nan"), 0.0], "canary_max_fp32"),
    ],
)
def test_the_limits_of_the_canary(dtype, gaps, words):
    class Fixed(FusedEngine):
        async def logprobs(self, sequences):
            return [[-1.0 + gap for gap in gaps]]

    probe = [list(range(len(gaps) + 1))]
    bird = Canary(lambda _: [[-1.0] * len(gaps)], probe, WeightsConfig(), dtype=dtype)
    if words is None:
        metrics = run(bird.check(Fixed(), bird.expect()))
        assert metrics["weights/canary_max"] == pytest.approx(max(gaps))
        return
    with pytest.raises(WeightSyncError, match=words):
        run(bird.check(Fixed(), bird.expect()))


# ---- what an engine takes is asked beside the loop


class SlowToSay(FusedEngine):
    """It has to build its model to say what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.gate = threading.Event(), threading.Event()

    def parameters(self):
        self.asked.set()
        assert self.gate.wait(10)
        return super().parameters()


def test_an_engine_that_is_slow_to_say_what_it_takes_holds_up_no_loop():
    engine = SlowToSay()
    sync = plane(engine, source(*[(name, 1.0) for name in QKV]))

    async def scenario() -> None:
        update = asyncio.ensure_future(sync.sync(1))
        while not engine.asked.is_set():
            await asyncio.sleep(0.001)
        engine.gate.set()  # from the loop, which goes on
        await update

    run(scenario())
    assert engine.version == 1
    run(sync.close())


def test_an_update_is_stopped_while_its_engine_is_asked_what_it_takes():
    engine = SlowToSay()
    sync = plane(engine, source(*[(name, 1.0) for name in QKV]))

    async def scenario() -> None:
        update = asyncio.ensure_future(sync.sync(1))
        lane = sync.lanes[0]
        while not (engine.asked.is_set() and lane._begun.waiting == 2):  # before it is to be delivered it would be asked again
            await asyncio.sleep(0.001)
        await lane.abort("a test says so")
        with pytest.raises(WeightSyncError, match="stopped: a test says so"):
            await update
        engine.gate.set()
        assert lane.lane.state == "idle" and engine.log == []
        await sync.sync(2)

    run(scenario())
    assert engine.version == 2
    run(sync.close())


def test_an_engine_that_never_says_what_it_takes_ends_the_update():
    engine = SlowToSay()
    sync = plane(engine, source(*[(name, 1.0) for name in QKV]), stage_timeout_s=0.1)
    with pytest.raises(WeightSyncError, match=r"publication 1 was not staged within 0\.1 s"):
        run(sync.sync(1))
    engine.gate.set()
    run(sync.close())
