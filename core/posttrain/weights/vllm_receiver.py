"""The receiving end inside vLLM's worker: a WeightTransferEngine that reads a lane's staging memory.

Loaded by vLLM in each of its processes through the entry point `vllm.general_plugins: posttrain`. Whatever transport brought
the bytes, the worker maps the lane's shared memory and loads from there. It proves what it loaded: the digest of each bucket
as read, the names and bytes handed to `load_weights`, and that every layer received all its elements (vLLM itself finishes a
partial update silently and serves a mixed model).

`init_weight_transfer_engine` sets plan and staging; `update_weights` carries epoch and digests and loads everything.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from posttrain.errors import WeightSyncError, error
from posttrain.placement import stacks
from posttrain.weights.digest import bucket_digest
from posttrain.weights.memory import Region, attach
from posttrain.weights.owner import ProcessId, end_with
from posttrain.weights.plan import BucketPlan
from posttrain.weights.shared_files import sweep
from posttrain.weights.transport import views

if TYPE_CHECKING:
    from torch import nn

BACKEND = "posttrain"
OWNER_ENV = "POSTTRAIN_ENGINE_OWNER"
LOG_ENV = "POSTTRAIN_ENGINE_LOG"
REPACK_ENV = "POSTTRAIN_ENGINE_REPACK_TIED"


def register() -> None:
    """vLLM calls this once in each process: names our backend, watches the owner, sends the chatter to the log."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "SharedMemoryWeightEngine")
    owner = ProcessId.parse(os.environ.get(OWNER_ENV, ""))
    if owner is not None and owner.pid != os.getpid():
        _redirect_output(os.environ.get(LOG_ENV))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches us too; what to do about it is the owner's
        stacks.answer()  # a hang is looked into by a signal: nothing else gets through to a process that hangs
        end_with(owner, last=sweep)
        atexit.register(_leave)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """plan: `BucketPlan.to_dict()`; path: the staging memory, laid out as the plan says."""

    plan: dict[str, Any]
    path: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One whole update: its epoch, and the digest of each bucket of the plan named by `plan_digest`."""

    epoch: int
    plan_digest: str
    digests: list[str]


class SharedMemoryWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads a verified publication from shared memory into vLLM's live model, in place."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    plan: BucketPlan | None = None
    staging: Region | None = None
    epoch = 0
    loaded = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        self.plan = BucketPlan.from_dict(init_info.plan)
        self.plan.check()
        self.staging = attach(init_info.path)
        if self.staging.nbytes < self.plan.nbytes:
            raise WeightSyncError(f"the staging memory has {self.staging.nbytes} bytes, the plan needs {self.plan.nbytes}")

    def start_weight_update(self) -> None:
        self.loaded = False
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
        if self.device.type == "cpu":
            drop_expert_kernels(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # the base class synchronises an accelerator, which a CPU build of torch does not have
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        plan, staging = self.plan, self.staging
        if plan is None or staging is None:
            raise WeightSyncError("update_weights before init_weight_transfer_engine")
        if update_info.epoch <= self.epoch:
            raise error("E27", epoch=update_info.epoch, last=self.epoch)
        if update_info.plan_digest != plan.digest:
            raise WeightSyncError(f"the update is for plan {update_info.plan_digest}, this worker holds {plan.digest}")
        self.epoch = update_info.epoch
        for bucket, digest in zip(plan.buckets, update_info.digests, strict=True):
            if bucket_digest(staging.buffer, [(p.target, p.nbytes) for p in bucket.pieces]) != digest:
                raise WeightSyncError(f"bucket {bucket.index} changed between staging and loading")
        taken: dict[str, int] = {}
        with torch.device(self.device):
            self.model.load_weights(_counted(views(plan, staging.buffer), taken))
        expected = {p.name: p.nbytes for p in plan.parameters}
        if taken != expected:
            differing = _difference(expected, taken)
            raise WeightSyncError(f"load_weights took {len(taken)} of {len(expected)} parameters; differing: {differing}")
        problems = partial_layers(self.model)
        if problems:
            raise WeightSyncError("the update does not cover the model:\n  " + "\n  ".join(problems))
        self.loaded = True

    def finish_weight_update(self) -> None:
        if not self.loaded:
            raise WeightSyncError("finish_weight_update without a complete update: the model would be a mixture")
        finalize_layerwise_reload(self.model, self.model_config)
        if os.environ.get(REPACK_ENV) != "0":
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        if self.staging is not None:
            self.staging.release()
        self.plan = self.staging = None


def partial_layers(model: nn.Module) -> list[str]:
    """Layers of an open layerwise reload that did not receive every element, one line each.

    A layer that received everything has already been processed and reset by vLLM. A tied head holds the embedding's own
    tensor and receives nothing; it is exempt when the layer it shares with is complete.
    """
    owners = _kernel_owners(model)
    problems = []
    for name, layer in model.named_modules():
        absent, info = _absent(layer), get_layerwise_info(layer)
        if not absent:
            continue
        if info.kernel_tensors is not None and info.load_numel == 0 and not info.kernel_tensors[0]:
            continue  # buffers only (rotary tables): not in any checkpoint
        if info.load_numel == 0 and any(not _absent(owner) for t in _parameters(info) for owner in owners[id(t)]):
            continue
        got = ", ".join(sorted({param for param, _ in info.loaded_weights})) or "nothing"
        of = info.load_numel + absent
        problems.append(f"{name or type(layer).__name__}: {info.load_numel} of {of} elements (received: {got})")
    return problems


def repack_tied_head(model: nn.Module) -> None:
    """Pack `lm_head` again when it shares the embedding's tensor.

    On a CPU the packed copy is made when the layer is loaded, and a tied head is never loaded: it would keep the old weights.
    """
    head, embedding = getattr(model, "lm_head", None), _input_embedding(model)
    weight = getattr(head, "weight", None)
    if weight is not None and embedding is not None and weight is embedding.weight and head is not embedding:
        head.quant_method.process_weights_after_loading(head)  # type: ignore[union-attr]


def drop_expert_kernels(model: nn.Module) -> None:
    """Make vLLM build the kernels of mixture-of-experts layers again with what is loaded next.

    On a CPU it pads and packs the experts when it builds their kernel, and later loads none: it would take the rows of the update
    for packed ones. Elsewhere the kernel keeps its weights as they are loaded, and CUDA graphs may hold its addresses.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None  # type: ignore[union-attr]


def _absent(layer: nn.Module) -> int:
    """How many elements of a layer the open reload has not brought."""
    info = get_layerwise_info(layer)
    return max(0, (info.load_numel_total or 0) - _padding(layer) - info.load_numel) if info.can_load() else 0


def _padding(layer: nn.Module) -> int:
    """Elements of a vocabulary layer beyond the vocabulary: vLLM rounds its rows up, no checkpoint holds them."""
    shard = getattr(layer, "shard_indices", None)
    if shard is None:
        return 0
    return int(shard.num_org_vocab_padding + shard.num_added_vocab_padding) * int(layer.embedding_dim)  # type: ignore[arg-type]


def _counted(stream: Iterator[tuple[str, torch.Tensor]], taken: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in stream:
        taken[name] = tensor.nbytes
        yield name, tensor


def _difference(expected: dict[str, int], taken: dict[str, int]) -> str:
    return ", ".join(sorted(name for name in expected.keys() | taken.keys() if expected.get(name) != taken.get(name)))


def _input_embedding(model: nn.Module) -> Any:
    body = getattr(model, "model", model)
    return getattr(body, "embed_tokens", None)


def _parameters(info: Any) -> list[torch.Tensor]:
    return list(info.kernel_tensors[0].values()) if info.kernel_tensors is not None else []


def _kernel_owners(model: nn.Module) -> dict[int, list[nn.Module]]:
    owners: dict[int, list[nn.Module]] = {}
    for layer in model.modules():
        info = get_layerwise_info(layer)
        for tensor in _parameters(info) or [t for t in layer._parameters.values() if t is not None]:
            owners.setdefault(id(tensor), []).append(layer)
    return owners


def _leave() -> None:
    # registered early, so it runs after the exit handlers of vLLM; tearing the interpreter down takes seconds and frees nothing
    logging.shutdown()
    os._exit(0)


def _redirect_output(path: str | None) -> None:
    if not path:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
