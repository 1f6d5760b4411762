"""One weight update between two processes over NIXL, against a copy in memory, a safetensors file, and Ray's object store.

    python tests/benchmarks/bench_weights.py                  # the shapes of SmolLM2-135M in bf16, 9 rounds
    python tests/benchmarks/bench_weights.py --layers 4 --rounds 3

A policy process publishes, this one is the lane. Every round measures each way once, in turn, so that a busy moment of the
machine meets all of them; medians count. Copies use one thread in both processes; the lane digests in another one beside its
pulls, and the policy in another one after its copy, so that two idle cores are needed to judge `stage` and `update`. The ways to
move the weights:

    copy            one-thread memcpy of the same bytes, tensor by tensor, inside the lane's process: what memory allows
    large copy      the same in one call for each bucket, for which the C library may write around the cache
    pull            the transport alone: every bucket from the policy's slot to the lane's staging memory
    stage           what a lane does: pull and digest every bucket, and compare with the policy's digests, made before
    update          publish (a copy in the policy's process) and stage, each bucket once it is copied, while the policy digests
    safetensors     save_file in the policy's process, load_file here
    ray             ray.put in an actor, ray.get here, copied to writable memory

Then a publication beside training: the policy's process multiplies matrices, alone and while a lane pulls.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.plugins import load
from posttrain.rollout.engine import Engine, EngineSpec
from posttrain.weights.memory import copy, private_region, shared_region
from posttrain.weights.plan import BucketPlan
from posttrain.weights.publication import Digested, LocalWeight, Publication, PublicationPool, complete_digests, whole
from posttrain.weights.receiver import Receiver
from posttrain.weights.transport import copy_pieces, views

HIDDEN, LAYERS, KV, MLP, VOCABULARY = 576, 30, 192, 1536, 49152


def weights(layers: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights with the names and shapes of SmolLM2-135M (tied embedding), bf16."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        parts = {
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV, HIDDEN), "self_attn.v_proj": (KV, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in parts.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise, dtype=torch.bfloat16) for name, shape in shapes.items()}


class NoEngine(Engine):
    """A lane needs one to ask for its parameters."""

    name = "none"

    def __init__(self) -> None:
        super().__init__(EngineSpec("", "bfloat16", 8, 1, ()), None)

    def parameters(self) -> Mapping[str, tuple[int, ...]] | None:
        return None

    async def start(self) -> None: ...
    async def generate(self, requests: Sequence[Any]) -> Any:
        yield

    async def abort(self, request_id: str) -> None: ...
    async def pause(self) -> None: ...
    async def apply(self, staged: Any) -> None: ...
    async def resume(self) -> None: ...
    def weight_version(self) -> int | None: ...
    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return []

    async def close(self) -> None: ...


# ---- the policy's process


def policy(pipe: Any, transport: str, layers: int, bucket_bytes: int) -> None:
    """Answers requests: (what, …) → (seconds, result)."""
    torch.set_num_threads(1)
    values = weights(layers)
    pool = PublicationPool(load("transports", transport), bucket_bytes=bucket_bytes)

    def source() -> Iterator[LocalWeight]:
        return whole(values.items())

    def begin(version: int) -> Publication:
        """As `LocalPublisher` does: the publication as soon as lanes may pull it, and the rest in a thread."""
        opened: queue.SimpleQueue[Publication] = queue.SimpleQueue()

        def write() -> None:
            began = time.perf_counter()
            pool.begin(version)
            pool.write(version, source, opened.put)
            pool.hold(version)
            pool.release(version)
            written.put(time.perf_counter() - began)
            pool.settle()

        threading.Thread(target=write).start()
        return opened.get()

    def copied() -> None:
        for name, tensor in values.items():
            copy(tensor, spare[name])

    def save(path: str) -> None:
        from safetensors.torch import save_file

        save_file(values, path)

    def multiply(seconds: float) -> float:
        """Products per second."""
        matrix, until, done = torch.randn(512, 512), time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            matrix @ matrix
            done += 1
        return done / seconds

    written: queue.SimpleQueue[float] = queue.SimpleQueue()
    slot = shared_region(pool.plan_for(source()).nbytes)  # a copy to what others can read, as a publication is
    slot.buffer.fill_(1)
    spare = dict(views(pool.plan_for(source()), slot.buffer))
    work: dict[str, Callable[..., Any]] = {
        "begin": begin, "written": lambda: written.get(), "digests": pool.digests, "copy": copied, "save": save,
        "multiply": multiply,
    }  # fmt: skip
    while (request := pipe.recv()) is not None:
        began = time.perf_counter()
        result = work[request[0]](*request[1:])
        pipe.send((time.perf_counter() - began, result))
    pool.close()
    slot.release()


class Peer:
    """The policy's process as seen from here."""

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=policy, args=(theirs, *arguments), daemon=True)
        self.process.start()

    def ask(self, *request: Any) -> tuple[float, Any]:
        self.pipe.send(request)
        return self.pipe.recv()  # type: ignore[no-any-return]

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


# ---- the lane's process


class Ways:
    """Each method moves all weights once and returns seconds; what is not part of the way is outside of the clock."""

    def __init__(self, peer: Peer, transport: str, layers: int, folder: Path) -> None:
        self.peer, self.folder, self.version = peer, folder, 0
        self.lane = Receiver(NoEngine(), load("transports", transport))
        self.end = load("transports", transport)
        publication = self._begin()
        self._written(publication)
        plan: BucketPlan = publication.plan
        self.plan, self.staging = plan, self.end.staging(plan.nbytes)
        self.end.register(self.staging)
        self.source, self.target = private_region(plan.nbytes), private_region(plan.nbytes)
        self.source.buffer.fill_(1), self.target.buffer.fill_(2)
        both = (views(plan, self.source.buffer), views(plan, self.target.buffer))
        self.tensors = [(source, target) for (_, source), (_, target) in zip(*both, strict=True)]
        self.object_store = ObjectStore(layers)

    def _begin(self) -> Publication:
        self.version += 1
        return self.peer.ask("begin", self.version)[1]  # type: ignore[no-any-return]

    def _written(self, publication: Publication) -> tuple[float, float]:
        """Seconds of the copy, and of the digests after it."""
        copied: float = self.peer.ask("written")[1]
        return copied, self.peer.ask("digests", publication.version)[0]

    def _settled(self) -> Publication:
        """One whose digests are made."""
        publication = self._begin()
        self._written(publication)
        return publication

    def copy(self) -> float:
        began = time.perf_counter()
        for source, target in self.tensors:
            copy(source, target)
        return time.perf_counter() - began

    def large_copy(self) -> float:
        began = time.perf_counter()
        for bucket in self.plan.buckets:
            copy_pieces(self.source.buffer, bucket.pieces, self.target.buffer)
        return time.perf_counter() - began

    def pull(self) -> float:
        publication = self._settled()
        began = time.perf_counter()
        for bucket in self.plan.buckets:
            self.end.pull(publication.handles[bucket.rank], bucket.pieces, self.staging)
        return time.perf_counter() - began

    def stage(self) -> float:
        return self._stage(self._settled())

    def update(self) -> float:
        began = time.perf_counter()
        self._stage(self._begin(), written=False)
        return time.perf_counter() - began

    def safetensors(self) -> float:
        from safetensors.torch import load_file

        path = self.folder / "weights.safetensors"
        began = time.perf_counter()
        self.peer.ask("save", str(path))
        loaded = load_file(path)
        sum(int(tensor.view(torch.int16)[..., 0].sum()) for tensor in loaded.values())  # it maps: touch every row
        return time.perf_counter() - began

    def ray(self) -> float:
        return self.object_store.move()

    def publish(self) -> float:
        return self._written(self._begin())[0]

    def digested(self) -> float:
        """Until the weights may change: publish and digest."""
        return sum(self._written(self._begin()))

    def policy_copy(self) -> float:
        return self.peer.ask("copy")[0]

    def _stage(self, publication: Publication, digests: Digested | None = None, *, written: bool = True) -> float:
        began = time.perf_counter()
        asyncio.run(self._staged(publication, digests, written))
        seconds = time.perf_counter() - began
        self.lane.lane.abort("the next one")
        return seconds

    async def _staged(self, publication: Publication, digests: Digested | None, written: bool) -> None:
        await self.lane.stage(publication, timeout=120)
        if not written:
            self.peer.ask("written")
        await self.lane.prove(complete_digests(publication, digests or self._digests(publication)))

    def _digests(self, publication: Publication) -> Digested:
        return self.peer.ask("digests", publication.version)[1]  # type: ignore[no-any-return]

    def close(self) -> None:
        asyncio.run(self.lane.close())
        self.end.close()
        self.staging.release()
        self.object_store.close()


class ObjectStore:
    """Ray on this machine, with an actor that holds the same weights."""

    def __init__(self, layers: int) -> None:
        import ray

        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self.ray = ray

        @ray.remote(num_cpus=1)
        class Holder:
            def __init__(self) -> None:
                torch.set_num_threads(1)
                self.values = {name: tensor.view(torch.int16).numpy() for name, tensor in weights(layers).items()}

            def put(self) -> list[Any]:
                return [ray.put(self.values)]

        self.holder = Holder.remote()  # type: ignore[attr-defined]
        self.target = {name: torch.empty_like(tensor) for name, tensor in weights(layers).items()}
        self.move()

    def move(self) -> float:
        began = time.perf_counter()
        got = self.ray.get(self.ray.get(self.holder.put.remote())[0])
        for name, value in got.items():
            self.target[name].view(torch.int16).numpy()[...] = value
        return time.perf_counter() - began

    def close(self) -> None:
        self.ray.shutdown()


def beside_training(ways: Ways, seconds: float) -> tuple[float, float, int]:
    """Products a second of the policy's process, alone and while this process stages; how often it staged."""
    publication = ways._settled()
    digests = ways._digests(publication)
    _, alone = ways.peer.ask("multiply", seconds)
    ways.peer.pipe.send(("multiply", seconds))
    staged = 0
    while not ways.peer.pipe.poll():
        ways._stage(publication, digests)
        ways.lane.lane.version = None
        staged += 1
    return alone, ways.peer.pipe.recv()[1], staged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--transport", default="nixl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    peer = Peer(args.transport, args.layers, args.bucket_mib * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(peer, args.transport, args.layers, Path(folder))
        names = ("copy", "large_copy", "pull", "stage", "update", "publish", "digested", "policy_copy", "safetensors", "ray")
        for name in names:
            getattr(ways, name)()
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name in names:
                times[name].append(getattr(ways, name)())
        medians = {name: statistics.median(found) for name, found in times.items()}
        size = ways.plan.nbytes
        tls = os.environ.get("UCX_TLS", "all")
        print(f"{size / 1e6:.0f} MB in {len(ways.plan.buckets)} buckets over {args.transport}, UCX_TLS={tls}")
        print("| way | median ms | GB/s | to copy | to pull |\n| --- | --- | --- | --- | --- |")
        for name in ("copy", "large_copy", "pull", "stage", "update", "safetensors", "ray"):
            took = medians[name]
            print(
                f"| {name.replace('_', ' ')} | {took * 1e3:.0f} | {size / took / 1e9:.2f} | {medians['copy'] / took:.0%} | "
                f"{took / medians['pull']:.2f}x |"
            )
        print(
            f"publishing blocks the policy for {medians['publish'] * 1e3:.0f} ms, one copy of its weights to shared memory takes "
            f"{medians['policy_copy'] * 1e3:.0f} ms; they may change after {medians['digested'] * 1e3:.0f} ms"
        )
        alone, beside, staged = beside_training(ways, 3.0)
        print(f"the policy multiplies {alone:.0f} matrices a second alone, {beside:.0f} while a lane stages {staged} times")
        ways.close()
    peer.close()


if __name__ == "__main__":
    main()
