"""What a policy writes into a checkpoint, in two layouts that any number of ranks reads.

    one process     model.safetensors, Hugging Face names           policy.pt: optimizer, counters, random state
    several ranks   *.distcp, .metadata: each rank its shards (DCP)   policy.pt, its large tensors named by shape alone
                    shards.json: size and digest of each file

Where the policy is sharded, writing and loading are collective. A damaged folder is refused before anything is changed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import xxhash
from torch import Tensor

from posttrain.errors import DataError
from posttrain.policy.ranks import ALONE, Ranks
from posttrain.policy.sharding import host_mesh, local, own_part, sharded_like

WEIGHTS, STATE, MANIFEST = "model.safetensors", "policy.pt", "shards.json"

Weights = Mapping[str, Tensor]
"""The policy's parameters under their Hugging Face names, in the optimizer's order."""


def snapshot(weights: Weights, state: dict[str, Any], ranks: Ranks = ALONE) -> Callable[[Path], None]:
    """Copy parameters and state to host memory, without a word to the other ranks; returns what writes the copy.

    state: `optimizer`, whose tensors are of this rank's shards, and what else is to be kept. The writer is collective
    over `ranks.writers`; each rank may call it in any thread.
    """
    state = _mapped(state, lambda _, tensor: _copy(tensor))
    held = {name: _copy(local(parameter.detach())) for name, parameter in weights.items()}
    if ranks.mesh is None:
        return partial(_write_whole, weights=held, state=state)
    parameters: list[Any] = list(weights.values())
    mesh = host_mesh(parameters[0].device_mesh)
    pairs = zip(parameters, held.items(), strict=True)
    tensors = {f"weights/{name}": sharded_like(parameter, part, mesh) for parameter, (name, part) in pairs}

    def shard(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:  # a count of steps, the same on every rank
            return tensor
        whole = tensors[_key(path)] = sharded_like(parameters[_owner(path)], tensor, mesh)
        return torch.empty(whole.shape, dtype=tensor.dtype, device="meta")

    shapes = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in weights.items()}
    state = state | {"optimizer": _mapped(state["optimizer"], shard), "weights": shapes}
    return partial(_write_sharded, tensors=tensors, state=state, ranks=ranks.aside)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _write_whole(folder: Path, *, weights: dict[str, Tensor], state: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    torch.save(state, folder / STATE)


def _write_sharded(folder: Path, *, tensors: dict[str, Any], state: dict[str, Any], ranks: Ranks) -> None:
    ranks.together(lambda: _write_shards(folder, tensors, ranks))
    digests = ranks.together(lambda: {path.name: _digest(path) for path in _mine(folder, ranks)})
    files = {name: digest for part in digests for name, digest in part.items()}
    ranks.together(lambda: _write_rest(folder, state, files) if ranks.rank == 0 else None)


def load(folder: Path, weights: Weights, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Read the parameters in place and return the state, cut to this rank's shards, from either layout.

    Raises DataError for a damaged folder and for another model's; nothing has changed then.
    """
    ranks.together(lambda: _check(folder, ranks))
    return (_load_shards if (folder / MANIFEST).exists() else _load_whole)(folder, weights, ranks)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All parameters whole, from either layout, in this process alone. Raises DataError for a damaged folder."""
    from safetensors.torch import load_file

    _check(folder, ALONE)
    if not (folder / MANIFEST).exists():
        return _read(folder, lambda: load_file(folder / WEIGHTS))
    shapes = _read(folder, lambda: torch.load(folder / STATE, weights_only=True))["weights"]
    whole = {f"weights/{name}": torch.empty(shape.shape, dtype=shape.dtype) for name, shape in shapes.items()}
    _read(folder, lambda: _read_shards(folder, whole, ALONE))
    return {name.removeprefix("weights/"): tensor for name, tensor in whole.items()}


def read_optimizer(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors whole, from either layout, in this process alone, by their place in its state: `state/3/exp_avg`.

    Numbers count parameters in the model's order. Raises DataError for a damaged folder.
    """
    _check(folder, ALONE)
    state = _read(folder, lambda: torch.load(folder / STATE, weights_only=True, map_location="cpu"))["optimizer"]
    found: dict[str, Tensor] = {}
    shards: dict[str, Tensor] = {}

    def keep(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        name = _key(path)
        found[name] = tensor
        if tensor.is_meta:
            found[name] = shards[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        return found[name]

    _mapped(state, keep)
    if shards:
        _read(folder, lambda: _read_shards(folder, shards, ALONE))
    return {name.removeprefix("optimizer/"): tensor for name, tensor in found.items()}


def _load_whole(folder: Path, weights: Weights, ranks: Ranks) -> dict[str, Any]:
    from safetensors import safe_open

    parameters = list(weights.values())

    def part(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        return tensor if tensor.dim() == 0 else own_part(tensor, parameters[_owner(path)], ranks).clone()

    def read() -> dict[str, Any]:
        state = torch.load(folder / STATE, weights_only=True, mmap=True, map_location="cpu")
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            kinds = {name: (tuple(piece.get_shape()), piece.get_dtype()) for name, piece in found.items()}
            _refuse_other_model(folder, kinds, {name: (tuple(p.shape), _SAFE[p.dtype]) for name, p in weights.items()})
            with torch.no_grad():
                for name, parameter in weights.items():
                    local(parameter.detach()).copy_(own_part(file.get_tensor(name), parameter, ranks))
        return state | {"optimizer": _mapped(state["optimizer"], part)}

    state: dict[str, Any] = {}
    ranks.together(lambda: state.update(_read(folder, read)))
    return state


_SAFE = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def _load_shards(folder: Path, weights: Weights, ranks: Ranks) -> dict[str, Any]:
    state = _read(folder, lambda: torch.load(folder / STATE, weights_only=True))
    _refuse_other_model(
        folder,
        {name: (tuple(shape.shape), shape.dtype) for name, shape in state.pop("weights").items()},
        {name: (tuple(p.shape), p.dtype) for name, p in weights.items()},
    )
    parameters: list[Any] = list(weights.values())
    tensors = {f"weights/{name}": parameter.detach() for name, parameter in weights.items()}

    def room(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        like = parameters[_owner(path)]
        own = torch.empty_like(local(like.detach()), dtype=tensor.dtype)
        tensors[_key(path)] = own if ranks.mesh is None else sharded_like(like, own)
        return own

    optimizer = _mapped(state["optimizer"], room)
    _read(folder, lambda: _read_shards(folder, tensors, ranks))
    return state | {"optimizer": optimizer}


def _write_shards(folder: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    from torch.distributed import checkpoint as dcp

    folder.mkdir(parents=True, exist_ok=True)
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _ordinary_errors():
        dcp.save(tensors, storage_writer=writer, process_group=ranks.group)


def _read_shards(folder: Path, tensors: dict[str, Any], ranks: Ranks) -> None:
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    with _ordinary_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        dcp.load(tensors, storage_reader=reader, process_group=ranks.group, no_dist=ranks.mesh is None)


@contextmanager
def _ordinary_errors() -> Iterator[None]:
    """DCP raises, on every rank, a BaseException that holds those of all ranks."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as exc:
        rank, (failure, _) = min(exc.failures.items())
        raise OSError(f"rank {rank}: {type(failure).__name__}: {failure}") from exc


def _write_rest(folder: Path, state: dict[str, Any], files: dict[str, Any]) -> None:
    torch.save(state, folder / STATE)
    for name in (STATE, ".metadata"):
        files[name] = _digest(folder / name)
    (folder / MANIFEST).write_text(json.dumps(dict(sorted(files.items())), indent=1) + "\n", encoding="utf-8")


def _mine(folder: Path, ranks: Ranks) -> list[Path]:
    """The files of shards that this rank reads for a digest: every rank some."""
    return sorted(folder.glob("*.distcp"))[ranks.rank :: ranks.world]


def _digest(path: Path) -> list[Any]:
    """`[bytes, digest]` of a file; guards against damage, not against malice."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(2**24):
            digest.update(piece)
            size += len(piece)
    return [size, digest.hexdigest()]


def _check(folder: Path, ranks: Ranks) -> None:
    """Raise DataError unless the folder is complete and this rank's share of its files is what was written."""
    try:
        if not (folder / MANIFEST).exists():
            absent = [name for name in (WEIGHTS, STATE) if not (folder / name).is_file()]
            if absent:
                raise _damaged(folder, f"it has no {' and no '.join(absent)}")
            return
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name in sorted(files)[ranks.rank :: ranks.world]:
            if not (folder / name).is_file():
                raise _damaged(folder, f"{name} is not there")
            if _digest(folder / name) != files[name]:
                raise _damaged(folder, f"{name} is not what was written")
    except (OSError, ValueError, AttributeError) as exc:
        if isinstance(exc, DataError):
            raise
        raise _damaged(folder, f"{type(exc).__name__}: {exc}") from exc


def _read(folder: Path, read: Callable[[], Any]) -> Any:
    from safetensors import SafetensorError

    try:
        return read()
    except (OSError, EOFError, RuntimeError, KeyError, UnpicklingError, SafetensorError) as exc:
        raise _damaged(folder, f"{type(exc).__name__}: {exc}") from exc


def _damaged(folder: Path, cause: str) -> DataError:
    return DataError(
        f"{folder} is no intact checkpoint of a policy",
        cause=cause,
        fix="resume from an older checkpoint: posttrain train --resume RUN/checkpoints/step_<earlier>",
        code="checkpoint-damaged",
    )


def _refuse_other_model(folder: Path, held: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if wrong := [name for name in held.keys() | own.keys() if held.get(name) != own.get(name)]:
        raise DataError(
            f"{folder} holds another model: {len(wrong)} parameter(s) differ in name, shape or dtype, such as {min(wrong)}",
            fix="resume with the model and the rl.master_dtype of the run that wrote it",
        )


def _mapped(tree: Any, change: Callable[[tuple[Any, ...], Tensor], Tensor], path: tuple[Any, ...] = ()) -> Any:
    """The tree of dicts and lists with every tensor replaced by `change(path, tensor)`."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, change, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change, (*path, number)) for number, value in enumerate(tree))
    return tree


def _owner(path: tuple[Any, ...]) -> int:
    """The number of the parameter that a tensor of the optimizer's state belongs to: states are kept by that number."""
    return next(key for key in path if isinstance(key, int))


def _key(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, ("optimizer", *path)))
