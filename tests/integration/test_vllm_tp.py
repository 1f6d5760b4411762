"""One engine of two tensor-parallel workers, a rollout body around it: both workers read the body's one staging copy.

The model has what a worker can get wrong: a tied head, a vocabulary padded for two, fused q, k, v and gate, up, and experts whose
halves the CPU kernel pads. The tests share one start and run in order; the last one breaks the engine.
"""

from __future__ import annotations

import asyncio
import copy
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.config.schema import RunConfig
from posttrain.errors import WaitExpired, WeightSyncError
from posttrain.loop.hang import attended
from posttrain.loop.waits import Waits
from posttrain.types import Completion, Request, Sampling
from posttrain.weights.canary import make_probe
from posttrain.weights.publication import PublicationPool, complete_digests, whole
from posttrain.weights.shm import ShmTransport

pytestmark = pytest.mark.integration

FAMILY, TIED = "qwen3_moe", True
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def rig(open_rig: Any) -> Iterator[Any]:
    with open_rig(FAMILY, tied=TIED, workers=2) as rig:
        rig.run(rig.body.start())
        yield rig


def test_log_probs_are_the_policy_s_before_and_after_an_update(rig: Any) -> None:
    assert rig.run(rig.plane.sync(1))["weights/canary_max"] < TOLERANCE
    assert rig.gap() < TOLERANCE
    rig.change()
    assert rig.gap() > 1e-2, "the change is large enough to be seen"
    assert rig.run(rig.plane.sync(2))["weights/canary_max"] < TOLERANCE
    assert rig.gap() < TOLERANCE


def test_both_workers_map_the_one_staging_copy_on_cores_of_their_own(rig: Any) -> None:
    workers = [p for p in rig.engine._processes if "Worker" in p.name()]
    assert len(workers) == 2, "and the core"
    staging = rig.body.receiver._staging.path
    maps = [Path(f"/proc/{p.pid}/maps").read_text() for p in workers]
    assert all(staging in text for text in maps)
    between = re.findall(r"/dev/shm/vllm_dist_.*", "".join(maps))
    # none on processors for which vLLM has no shared-memory collectives of its own
    assert all(path.endswith(" (deleted)") for path in between), "however they end, it goes with them"
    log = (rig.engine.spec.log_dir / "vllm.log").read_text()
    assert "local_world_size=2" in log and "local_rank=1, core ids=" in log


def test_an_update_in_flight_leaves_every_token_with_its_version(rig: Any) -> None:
    request = Request("flight", list(range(4, 14)), 4, 0, Sampling(240, temperature=0.8, ignore_eos=True))

    async def work(wait: float) -> list[Completion]:
        running = asyncio.ensure_future(rig.collect(request))
        await asyncio.sleep(wait)
        await rig.plane.sync(rig.plane.version + 1)
        return await running

    for wait in (0.1, 0.05, 0.02, 0.2, 0.4):
        old = copy.deepcopy(rig.policy.state_dict())
        rig.change()
        done = rig.run(work(wait))
        if all(len(set(c.versions)) == 2 for c in done):
            break
    else:
        pytest.fail("no update arrived while the engine was generating")
    ids, new = [[*request.prompt_ids, *c.token_ids] for c in done], rig.policy.state_dict()
    for version, weights in ((rig.plane.version, copy.deepcopy(new)), (rig.plane.version - 1, old)):
        rig.policy.load_state_dict(weights)
        for c, scored in zip(done, rig.score(ids, 0.8), strict=True):
            pairs = zip(c.versions, c.logprobs, scored[-len(c.token_ids) :], strict=True)
            assert max(abs(a - b) for v, a, b in pairs if v == version) < TOLERANCE


def test_the_body_stages_commits_and_scores(rig: Any) -> None:
    rig.change()
    version = rig.engine.weight_version()
    pool = PublicationPool(ShmTransport(), bucket_bytes=rig.config.bucket_bytes, dtype="float32")

    async def update() -> None:
        pool.plan_for(whole(rig.weights()))
        publication = pool.publish(version + 1, whole(rig.weights()))
        pool.hold(version + 1)
        async for _ in rig.body.stage(publication, 120.0):
            pass
        await rig.body.prove(complete_digests(publication, pool.digests(version + 1)))
        assert rig.engine.weight_version() == version, "staging touches no engine"
        await rig.body.commit(120.0)

    rig.run(update())
    pool.close()
    assert rig.engine.weight_version() == version + 1 and rig.gap() < TOLERANCE
    probe = make_probe(40)
    for got, wanted in zip(rig.run(rig.body.logprobs(probe)), rig.score(probe, 1.0), strict=True):
        assert got == pytest.approx(wanted, abs=TOLERANCE)


def test_a_core_that_is_stopped_is_what_the_report_of_a_hang_names(rig: Any, tmp_path: Path) -> None:
    core, *workers = rig.engine._processes
    given = {"engine": rig.engine, "scorer": None, "hosting": None, "config": RunConfig(), "watch": asyncio.Event().wait}
    parts: Any = SimpleNamespace(run_dir=SimpleNamespace(logs=tmp_path), **given)
    waits, request = Waits(), Request("late", [5, 6, 7], 1, 0, Sampling(200, ignore_eos=True))

    async def generate() -> None:
        core.suspend()
        work = rig.collect(request)
        await waits.bounded(work, name="completions of step 1", owner="rollout engine vllm", timeout=2, who="rollouts loop")

    began = time.monotonic()
    with pytest.raises(WaitExpired, match="waited 2 s for completions of step 1") as caught:
        rig.run(attended(generate(), waits, parts))
    took = time.monotonic() - began
    core.resume()
    report = next(tmp_path.glob("hang-*.txt"))
    text = report.read_text()
    assert took < 12 and str(report) in caught.value.fix
    assert f"== VLLM::EngineCore (pid {core.pid})\n\nsilent: its process is stopped" in text
    for number, worker in enumerate(workers):
        found = re.search(rf"== VLLM::Worker_TP{number} \(pid {worker.pid}\)\n\n(.*?)(\n== |$)", text, re.DOTALL)
        assert found and "worker_busy_loop" in found[1]
    assert re.search(r"task rollouts loop\n( +.*\n)*? +generate .*rollout/body.py", text)
    assert re.search(r"task \S+ generates late\n( +.*\n)*? +_stream .*rollout/vllm.py", text)
    assert re.search(r"task sample late/0\n( +.*\n)*? +_run .*rollout/vllm.py", text)
    assert rig.gap() < TOLERANCE, "the core goes on"


MISSING = {
    "model.embed_tokens.weight": "model.embed_tokens",
    "model.layers.0.self_attn.v_proj.weight": "model.layers.0.self_attn.qkv_proj",
    "model.layers.0.mlp.experts.down_proj": "model.layers.0.mlp.experts.routed_experts",
    "model.layers.1.mlp.up_proj.weight": "model.layers.1.mlp.gate_up_proj",
}
"""Parameters left out of an update, and the layer of a worker that lacks them."""


def test_layers_of_a_worker_that_an_update_does_not_cover_are_named(rig: Any) -> None:
    """vLLM alone would finish such an update silently, each worker with a part of the new weights."""

    async def update() -> None:
        pool = PublicationPool(ShmTransport(), bucket_bytes=2**20, dtype="float32")
        parts = [(n, p) for n, p in rig.weights() if n not in MISSING]
        pool.plan_for(whole(iter(parts)))
        publication = pool.publish(100, whole(iter(parts)))
        pool.hold(100)
        rig.body.receiver._check_coverage = lambda publication: None  # the lane would refuse it before
        try:
            async for _ in rig.body.stage(publication, 120.0):
                pass
            await rig.body.prove(complete_digests(publication, pool.digests(100)))
            await rig.body.commit(120.0)
        finally:
            pool.close()

    with pytest.raises(WeightSyncError, match="does not cover the model") as caught:
        rig.run(update())
    for layer in MISSING.values():
        assert layer in str(caught.value)
    with pytest.raises(WeightSyncError, match="invalid"):
        rig.run(rig.collect(Request("refused", [5, 6], 1, 0, Sampling(4))))
    assert not any(p.is_running() for p in rig.engine._processes), "a mixed model is not left running"
