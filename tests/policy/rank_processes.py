"""Real processes that hold ranks of one policy, started once per module and used for all its cases.

    with RankProcesses(4) as processes:
        results = processes("train", case)        # one result per rank; every function of this file's second half is a command

A server imports torch once and forks the ranks, so that four of them cost one start. This file is both ends: imported by the
tests, and run by itself as the server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A policy to build on a mesh, and what to do with it."""

    model: str
    mesh: tuple[int, int] | None
    objective: str = "grpo"
    options: dict[str, Any] = field(default_factory=dict)
    rl: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[int, ...] = (4, 4, 4, 4)
    load: str | None = None
    save: str | None = None
    steps: int = 2
    break_on: int | None = None
    deadline_s: float = 60.0


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


class RankProcesses:
    """`world` processes; `call(name, *args)` runs a function of this file in each and returns their results in rank order."""

    def __init__(self, world: int, *, connected: bool = True) -> None:
        """connected: into one process group, at the first call."""
        self.world, self.port = world, free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(world), str(self.port if connected else 0)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    @staticmethod
    def case(model: Path, mesh: tuple[int, int] | None, **changes: Any) -> Case:
        return Case(str(model), mesh, **changes)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        try:
            self._server.wait(20)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server.stdout.close()

    def __call__(self, name: str, *args: Any) -> list[Any]:
        """Raises what a rank raised when all of them raised the same kind, RankFailed otherwise."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(pickle.dumps((name, args)))
        self._server.stdin.flush()
        results = pickle.load(self._server.stdout)
        failures = [(rank, value) for rank, (ok, value) in enumerate(results) if not ok]
        if len(failures) == len(results) and len({type(value[0]) for _, value in failures}) == 1:
            raise failures[0][1][0]
        if failures:
            raise RankFailed("\n".join(f"rank {rank}:\n{text}" for rank, (_, text) in failures))
        return [value for _, value in results]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- in the ranks ----

STATE: dict[str, Any] = {}


def helpers() -> Any:
    """tests/policy/conftest.py, from its path: a rank has no pytest."""
    if "helpers" not in STATE:
        spec = importlib.util.spec_from_file_location("policy_helpers", Path(__file__).with_name("conftest.py"))
        assert spec is not None and spec.loader is not None
        STATE["helpers"] = module = importlib.util.module_from_spec(spec)
        sys.modules["policy_helpers"] = module
        spec.loader.exec_module(module)
    return STATE["helpers"]


def connect(rank: int, world: int, port: int) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )


def mesh_of(shape: tuple[int, int] | None) -> Any:
    """The mesh over the first ranks, None for one process alone; every rank must call."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    if shape is None:
        return None
    if shape not in STATE:
        ranks = torch.arange(shape[0] * shape[1]).view(shape)
        STATE[shape] = DeviceMesh("cpu", ranks, mesh_dim_names=("dp_replicate", "dp_shard"))
    return STATE[shape]


def writers_of(case: Case) -> Any:
    """A process group of the mesh's ranks with the case's deadline, None for one process alone; every rank must call."""
    import torch.distributed as dist

    if case.mesh is None:
        return None
    ranks = list(range(case.mesh[0] * case.mesh[1]))
    return dist.new_group(ranks, timedelta(seconds=case.deadline_s), backend="gloo")


def outside(case: Case) -> bool:
    """Whether this rank has no part in the case; it still takes part in making its mesh."""
    mesh = mesh_of(case.mesh)
    return STATE["rank"] > 0 if mesh is None else mesh.get_coordinate() is None


def build(case: Case, writers: Any = None) -> Any:
    """The case's policy on this rank, its norms in the dtype of the model."""
    from posttrain.config.schema import ModelConfig, RLConfig, RunConfig
    from posttrain.objective.objective import build_objective
    from posttrain.policy import policy as policy_file

    load = STATE.setdefault("load", policy_file.load_causal_lm)
    policy_file.load_causal_lm = lambda *args, **options: helpers().widen_norms(load(*args, **options))
    rl = RLConfig(**{"steps": 4, "group_size": 4, "batch_per_replica": 16} | case.rl)
    config = RunConfig(model=ModelConfig(name_or_path=case.model), rl=rl)
    n_mini = rl.batch_per_replica // (rl.mini_batch_per_replica or rl.batch_per_replica)
    objective = build_objective(case.objective, group_size=4, n_mini=n_mini, **case.options)
    return policy_file.Policy(config, case.model, objective, mesh=mesh_of(case.mesh), writers=writers)


def rows_of(case: Case) -> list[Any]:
    import dataclasses

    rows = helpers().make_rows(case.sizes)
    if case.objective != "dpo":
        return rows  # type: ignore[no-any-return]
    return [dataclasses.replace(row, pair=number // 2, chosen=number % 2 == 0) for number, row in enumerate(rows)]


def train(case: Case) -> dict[str, Any] | None:
    """Load, train, save; everything that a policy says on the way, and its weights at the end."""
    import dataclasses
    import math

    import torch

    if outside(case):
        return None
    policy, rows = build(case), rows_of(case)
    if case.load:
        policy.load(case.load)
    said: dict[str, Any] = {"start": policy.logprobs(rows), "evaluate": policy.evaluate(rows), "metrics": [], "skipped": []}
    for number in range(case.steps):
        broken = [dataclasses.replace(rows[0], advantage=math.inf), *rows[1:]] if case.break_on == number else rows
        result = policy.train_step(broken)
        said["metrics"].append(result.metrics)
        said["skipped"].append(result.skipped)
    assert all(p.grad is None for p in (*policy.module.parameters(), *policy.shards))
    said |= {
        "version": (policy.version, policy.updates), "logprobs": policy.logprobs(rows), "random": torch.get_rng_state(),
        "score": policy.score([row.input_ids for row in rows[:3]], "bfloat16"),
        "weights": {name: value.clone() for name, value in policy.named_weights(torch.float64)},
    }  # fmt: skip
    if case.save:
        policy.save(case.save)
        said["names"] = sorted(path.name for path in Path(case.save).iterdir())
    return said


def gradients(case: Case) -> Any:
    """The loss of one batch step, its gradient norm, and the whole gradient of every parameter before it is clipped."""
    import torch

    from posttrain.policy import policy as policy_file

    if outside(case):
        return None
    policy, found, step = build(case), dict[str, Any](), policy_file.clip_and_step

    def recorded(*args: Any) -> Any:
        for name, parameter in policy.module.model.named_parameters():
            grad = parameter.grad if policy.ranks.mesh is None else parameter.grad.full_tensor()
            found[name] = grad.to(torch.float64, copy=True)
        return step(*args)

    policy_file.clip_and_step = recorded
    try:
        metrics = policy.train_step(rows_of(case)).metrics
    finally:
        policy_file.clip_and_step = step
    return metrics["loss"], metrics["grad_norm"], found


def parts(case: Case) -> Any:
    """What the rank holds of each parameter, by its own account and by DTensor's, and what it publishes."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if outside(case):
        return None
    policy = build(case)
    told = {}
    for name, parameter in policy.module.model.named_parameters():
        assert isinstance(parameter, DTensor)
        told[name] = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    held = [(w.name, w.shape, w.start, w.values.clone()) for w in policy.local_weights()]
    whole = {name: value.clone() for name, value in policy.named_weights(policy.shards[0].dtype)}
    return held, told, whole


def drift(case: Case, rank: int) -> Any:
    """A stochastic layer on one rank alone: what every rank raises, and that no weight moved."""
    import torch

    from posttrain.errors import PosttrainError

    if outside(case):
        return None
    policy = build(case)
    before = [shard.detach().clone() for shard in policy.shards]
    if STATE["rank"] == rank:
        layer = policy.module.model.model.layers[0].mlp
        layer.register_forward_hook(lambda *args: args[-1] + 1e-6 * torch.randn_like(args[-1]))
    try:
        policy.train_step(rows_of(case))
    except PosttrainError as exc:
        return exc.code, str(exc), all(torch.equal(a, b) for a, b in zip(before, policy.shards, strict=True))
    return None


def load_damaged(case: Case) -> Any:
    """Loads and says the error, and whether any weight or count moved."""
    import torch

    from posttrain.errors import PosttrainError

    if outside(case):
        return None
    policy = build(case)
    before = [shard.detach().clone() for shard in policy.shards]
    try:
        policy.load(case.load)
    except PosttrainError as exc:
        same = all(torch.equal(a, b) for a, b in zip(before, policy.shards, strict=True))
        return exc.code, str(exc), same and policy.version == 0
    return None


def built_unlike(case: Case, rank: int, rl: dict[str, Any]) -> Any:
    """One rank builds its policy with other keys than the rest: the code of what every rank raises, and what it says."""
    from posttrain.errors import PosttrainError

    if outside(case):
        return None
    if STATE["rank"] == rank:
        case = replace(case, rl=case.rl | rl)
    try:
        build(case)
    except PosttrainError as exc:
        return exc.code, str(exc)
    return "", "was built"


def write_beside_training(case: Case) -> Any:
    """Saves at one moment in two ways, into `case.load` at once and into `case.save` from a snapshot whose writing, with its
    collectives, begins before two more steps and ends after them. Returns what a policy that loads the latter holds, and what
    the trained one holds that a policy loads from where it went on."""
    import threading

    import torch

    from posttrain.policy import saving

    writers = writers_of(case)
    if outside(case):
        return None
    policy, rows = build(case, writers), rows_of(case)
    policy.train_step(rows)
    policy.save(case.load)
    write, begun, trained, digest = policy.snapshot(), threading.Event(), threading.Event(), saving._digest

    def held_up(*args: Any) -> Any:
        begun.set()
        assert trained.wait(30)
        return digest(*args)

    saving._digest = held_up  # in the middle of a sharded write
    writing = threading.Thread(target=write, args=(case.save,))
    writing.start()
    assert case.mesh is None or begun.wait(30)
    later = [policy.train_step(rows).metrics for _ in range(2)]
    trained.set()
    writing.join(30)
    assert not writing.is_alive()
    saving._digest = digest
    found = []
    for folder in (case.load, case.save):
        fresh = build(case)
        fresh.load(folder)
        weights = {name: value.clone() for name, value in fresh.named_weights(torch.float64)}
        state = fresh.optimizer.state_dict()["state"]
        moments = {f"{number}/{name}": value.clone() for number, one in state.items() for name, value in one.items()}
        said = (fresh.version, fresh.updates, torch.get_rng_state())
        found.append((weights, moments, said, [fresh.train_step(rows).metrics for _ in range(2)] == later))
    return found


def writes_alone(case: Case) -> Any:
    """Rank 0 writes a snapshot and the others do not: what it raises, after how many seconds, and that training goes on."""
    import time

    writers = writers_of(case)
    if outside(case):
        return None
    policy, rows = build(case, writers), rows_of(case)
    write, said = policy.snapshot(), None
    if STATE["rank"] == 0:
        began = time.monotonic()
        try:
            write(case.save)
        except Exception as exc:
            said = type(exc).__name__, time.monotonic() - began
    policy.train_step(rows)
    return said


def fails_to_save(case: Case) -> Any:
    """Rank 0 cannot write its file: what each rank raises."""
    if outside(case):
        return None
    policy = build(case)
    try:
        policy.save(case.save)
    except Exception as exc:
        return type(exc).__name__, str(exc)
    return None


def rank_call(method: str, *args: Any) -> Any:
    """A method of this process's PolicyRank, run to its end: of a stream what is no number; `RANK` stands for the rank."""
    import asyncio
    import inspect

    from posttrain.policy.rank import PolicyRank

    end = STATE.setdefault("end", PolicyRank())
    result = getattr(end, method)(*(STATE["rank"] if arg == "RANK" else arg for arg in args))

    async def last() -> Any:
        return [said async for said in result if not isinstance(said, int)][-1]

    if inspect.isasyncgen(result):
        return asyncio.run(last())
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def train_and_write(number: int, folder: str, rows: Any) -> Any:
    """`train_step` in one thread while the coroutine `write` runs on the event loop, as a host has it."""
    import asyncio

    async def both() -> Any:
        writing = asyncio.ensure_future(STATE["end"].write(number, folder))
        steps = [await asyncio.to_thread(STATE["end"].train_step, rows) for _ in range(2)]
        await writing
        return steps

    return asyncio.run(both())


def start_alone(*args: Any) -> Any:
    """Rank 0 waits for a rank that never comes."""
    from posttrain.policy.rank import PolicyRank

    if STATE["rank"] == 0:
        try:
            PolicyRank().start(0, 2, *args, timeout_s=1.0)
        except Exception as exc:
            return exc
    return None


def whole_weights() -> Any:
    return {name: value.clone() for name, value in STATE["end"].policy.named_weights("float32")}


def die(rank: int, after: str, *args: Any) -> Any:
    """Rank `rank` is killed inside a collective method that the others are in too."""
    import signal as signals
    import threading
    import time

    if STATE["rank"] == rank:
        threading.Timer(0.5, os.kill, (os.getpid(), signals.SIGKILL)).start()
        time.sleep(60)
    began = time.monotonic()
    try:
        rank_call(after, *args)
    except Exception as exc:
        return exc, time.monotonic() - began
    return None


def serve_rank(rank: int, world: int, port: int, connection: Any) -> None:
    """The loop of one rank."""
    faulthandler.register(signal.SIGUSR1)
    STATE["rank"], connected = rank, port == 0
    while message := connection.recv_bytes():
        name, args = pickle.loads(message)
        try:
            if not connected:
                connect(rank, world, port)
                connected = True
            answer = (True, globals()[name](*args))
        except BaseException as exc:
            try:
                pickle.loads(pickle.dumps(exc))
            except Exception:
                exc = RuntimeError(repr(exc))
            answer = (False, (exc, traceback.format_exc()))
        connection.send_bytes(pickle.dumps(answer))
    os._exit(0)


def answer_of(pipe: Any) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return True, "dead"


def main() -> None:
    import multiprocessing

    world, port = int(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not stand between the answers
    import torch
    import transformers  # noqa: F401

    from posttrain.policy import policy  # noqa: F401

    torch.set_num_threads(1)
    helpers()
    context = multiprocessing.get_context("fork")
    pipes = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        context.Process(target=serve_rank, args=(rank, world, port, theirs), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        for pipe in pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(pickle.dumps(message))
        answers.write(pickle.dumps([answer_of(pipe) for pipe in pipes]))
        answers.flush()
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send_bytes(b"")


if __name__ == "__main__":
    sys.modules["rank_processes"] = sys.modules["__main__"]
    main()
