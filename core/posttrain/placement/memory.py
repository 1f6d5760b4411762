"""How many bytes each role takes, by term: arithmetic on a model's shape, made without a tensor and without a device.

    terms = policy_memory(config, shape, needs_reference=False)     # of the policy rank that holds most
    sum(term.nbytes for term in terms if term.place == "device")

Weights, gradients, moments, publications and a checkpoint's copy are exact. Activations follow the factors in
docs/performance.md; the KV cache is what all sequences together can need at most. What a process takes before it holds a model
is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from posttrain.placement.grid import Grid, resolve_grid, transport_of
from posttrain.weights.plan import ITEM_BYTES

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig

FP32 = 4
MASTERS = ("adamw_master", "fusedadam")
"""Optimizers that keep an fp32 copy of parameters that are stored narrower."""

Place = Literal["device", "host"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory depends on.

    parameters     shapes, tied ones once             unit          elements of the largest layer, which FSDP gathers whole
    intermediate   feed-forward elements that one token passes, of all experts that it is sent to
    kv_heads, kv_elements   heads, and elements that one of them keeps per token and layer, keys and values together
    """

    parameters: tuple[tuple[int, ...], ...]
    unit: int
    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    kv_elements: int
    vocab: int

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.parameters))

    def on_rank(self, dp_shard: int) -> int:
        """Elements that the policy rank with the most holds: FSDP cuts every parameter along its first axis, rounding up."""
        return sum(-(-shape[0] // dp_shard) * math.prod(shape[1:]) if shape else 1 for shape in self.parameters)


@dataclass(frozen=True, slots=True)
class Term:
    """One use of memory by one rank (or body). place: `device`, or `host` where it is host memory on a GPU machine too."""

    name: str
    nbytes: int
    why: str
    place: Place = "device"


def shape_of(parameters: Sequence[tuple[str, tuple[int, ...]]], config: Mapping[str, Any]) -> ModelShape:
    """The shape of a Hugging Face model. parameters: names and shapes, tied ones once; config: its text config as a mapping."""

    def get(*names: str, default: int = 0) -> int:
        return next((int(config[name]) for name in names if config.get(name)), default)

    hidden, heads = get("hidden_size", "n_embd"), get("num_attention_heads", "n_head", default=1)
    experts = get("num_experts_per_tok")
    dense = get("intermediate_size", "n_inner", default=4 * hidden)
    routed = get("moe_intermediate_size", default=dense) * (experts + get("n_shared_experts"))
    latent = get("kv_lora_rank")  # multi-head latent attention keeps one vector for keys and values of all heads
    return ModelShape(
        parameters=tuple(shape for _, shape in parameters),
        unit=_largest_layer(parameters),
        layers=get("num_hidden_layers", "n_layer", default=1),
        hidden=hidden,
        intermediate=routed if experts else dense,
        kv_heads=1 if latent else get("num_key_value_heads", default=heads),
        kv_elements=latent + get("qk_rope_head_dim") if latent else 2 * get("head_dim", default=hidden // heads),
        vocab=get("vocab_size"),
    )


def policy_memory(
    config: RunConfig, shape: ModelShape, *, needs_reference: bool = False, slot_bytes: int | None = None
) -> list[Term]:
    """The terms of the policy rank that holds most. slot_bytes: of its publication, from the transfer plan."""
    rl, grid = config.rl, resolve_grid(config.grid)
    own, stored, computed = shape.on_rank(grid.dp_shard), ITEM_BYTES[rl.master_dtype], ITEM_BYTES[rl.param_dtype]
    masters = rl.optimizer.name in MASTERS and stored < FP32
    moments = FP32 if rl.optimizer.name in MASTERS else stored
    shared = f" over dp_shard={grid.dp_shard}" if grid.dp_shard > 1 else ""
    terms = [
        Term("weights", own * stored, f"{rl.master_dtype}{shared}"),
        Term("gradients", own * stored, f"{rl.master_dtype}{shared}"),
        Term("Adam moments", 2 * own * moments, f"two of {8 * moments} bits"),
    ]
    if masters:
        terms.append(Term("master copy", own * FP32, f"fp32, in {rl.optimizer.name}"))
    if needs_reference:
        terms.append(Term("reference model", own * stored, "frozen"))
    if grid.dp_shard > 1:
        terms.append(Term("gathered layers", 2 * shape.unit * stored, "FSDP: one in use, the next under way"))
    if computed < stored:
        what = f"{rl.param_dtype}, of the whole model while a micro-batch is computed"
        terms.append(Term("compute copy", shape.numel * computed, what))
    tokens, which = micro_batch_tokens(config, grid)
    terms.append(Term("activations", activation_bytes(shape, tokens, computed, rl.gradient_checkpointing), which))
    chunk = min(rl.logprob_chunk_tokens, tokens)
    terms.append(Term("log-prob chunk", FP32 * shape.vocab * chunk, f"{chunk} tokens x {shape.vocab:,} in fp32"))
    if slot_bytes is not None:
        slots: Place = "device" if _slots_on_device(config) else "host"
        terms.append(Term("publication slots", 2 * slot_bytes, "two at most, the second when first needed", slots))
    copied = own * (stored + 2 * moments + (FP32 if masters else 0))
    terms.append(Term("checkpoint copy", copied, "weights and optimizer, until written", "host"))
    return terms


def _slots_on_device(config: RunConfig) -> bool:
    """Whether the policy keeps its publications in GPU memory, as the transport nixl can be told to."""
    return transport_of(config) == "nixl" and str(config.weights.options.get("device", "")).partition(":")[0] == "cuda"


def rollout_memory(config: RunConfig, shape: ModelShape, *, staging_bytes: int) -> list[Term]:
    """The terms of one rank of a rollout body; staging is one copy for all ranks of the body."""
    r = config.rollout
    size, ranks = ITEM_BYTES[r.dtype], r.tensor_parallel_size
    token = shape.layers * -(-shape.kv_heads // ranks) * shape.kv_elements * size
    over = f" over {ranks} ranks" if ranks > 1 else ""
    return [
        Term("engine weights", -(-shape.numel // ranks) * size, f"{r.dtype}{over}"),
        Term("KV cache", token * r.max_num_seqs * r.max_model_len, f"at most: {r.max_num_seqs} x {r.max_model_len} tokens{over}"),
        Term("staging", staging_bytes, f"one copy for a body, {r.dtype}", "host"),
    ]


def activation_bytes(shape: ModelShape, tokens: int, itemsize: int, checkpointing: bool) -> int:
    """What the backward pass needs of `tokens` in a micro-batch; with checkpointing: every layer's input and one layer whole."""
    token = 34 * shape.hidden + 16 * shape.intermediate if itemsize == FP32 else 31 * shape.hidden + 8 * shape.intermediate
    return tokens * (4 * shape.hidden * shape.layers + token if checkpointing else token * shape.layers)


def micro_batch_tokens(config: RunConfig, grid: Grid) -> tuple[int, str]:
    """The most tokens that one rank computes at once, and which key says so."""
    rl, longest = config.rl, config.rollout.max_model_len
    if rl.micro_batch_per_replica is None:
        return max(rl.micro_batch_tokens, longest), f"{max(rl.micro_batch_tokens, longest):,} tokens to a micro-batch"
    rows = max(rl.micro_batch_per_replica // grid.dp_world, 1)
    return rows * longest, f"{rows} x {longest:,} tokens to a micro-batch at most"


def _largest_layer(parameters: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    """Elements of the largest numbered layer; of the rest together, if that is larger: it is one unit too."""
    units: dict[str, int] = {}
    for name, shape in parameters:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        unit = ".".join(parts[: number + 1]) if number is not None else ""
        units[unit] = units.get(unit, 0) + math.prod(shape)
    return max(units.values(), default=0)
