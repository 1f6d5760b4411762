"""The memory arithmetic against what a policy really holds, and against rules of thumb."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from posttrain.config.load import load_config
from posttrain.config.schema import RunConfig
from posttrain.loop.prepare import build_run_objective
from posttrain.placement.memory import ModelShape, micro_batch_tokens, policy_memory, rollout_memory, shape_of
from posttrain.policy.policy import Policy
from posttrain.policy.rows import Row
from posttrain.policy.sharding import chunk
from posttrain.testing.tiny_model import write_tiny_model

NARROW = ("rl.master_dtype=bfloat16", "rl.param_dtype=bfloat16", "rl.optimizer.name=adamw_master")
BILLION = ModelShape(((1_000_000_000,),), unit=10**7, layers=1, hidden=64, intermediate=96, kv_heads=1, kv_elements=64, vocab=40)


def config(*overrides: str) -> RunConfig:
    base = ["model.name_or_path=/m", "rl.steps=1", "environments=[{name: arithmetic}]", "rl.objective.name=dr_grpo"]
    return load_config([*base, *overrides]).config


def terms(config: RunConfig, shape: ModelShape, **more: object) -> dict[str, int]:
    return {term.name: term.nbytes for term in policy_memory(config, shape, **more)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "gigabytes"),
    [
        # the rule of thumb: 2 GB a billion in bf16 and 8 GB for Adam; what gradients and fp32 masters add
        ((), {"weights": 4, "gradients": 4, "Adam moments": 8}),
        (("rl.param_dtype=bfloat16",), {"weights": 4, "gradients": 4, "Adam moments": 8, "compute copy": 2}),
        (NARROW, {"weights": 2, "gradients": 2, "Adam moments": 8, "master copy": 4}),
        (
            ("rl.master_dtype=bfloat16", "rl.param_dtype=bfloat16"),
            {"weights": 2, "gradients": 2, "Adam moments": 4},
        ),
    ],
)
def test_gigabytes_of_a_billion_parameters(overrides: tuple[str, ...], gigabytes: dict[str, int]) -> None:
    found, left_out = terms(config(*overrides), BILLION), ("activations", "log-prob chunk", "checkpoint copy")
    assert {name: nbytes / 1e9 for name, nbytes in found.items() if name not in left_out} == gigabytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return path


@pytest.mark.parametrize("overrides", [(), NARROW])
def test_a_policy_holds_exactly_the_bytes_of_the_terms(folder: Path, overrides: tuple[str, ...]) -> None:
    chosen = config(f"model.name_or_path={folder}", "rl.batch_per_replica=8", *overrides)
    policy = Policy(chosen, str(folder), build_run_objective(chosen))
    model = policy.module.model
    held: dict[str, int] = {"weights": _bytes(model.parameters())}
    policy.module(policy.module.pack([Row(input_ids=[4, 5, 6, 7], mask=[False, True, True, True], rollout_logprobs=[0.0] * 4)]))[
        0
    ].sum().backward()
    held["gradients"] = _bytes(p.grad for p in model.parameters())
    policy.optimizer.step()
    inner = getattr(policy.optimizer, "inner", policy.optimizer)
    held["Adam moments"] = _bytes(t for state in inner.state.values() for name, t in state.items() if name != "step")
    if overrides:
        held["master copy"] = _bytes(policy.optimizer.masters)  # type: ignore[attr-defined]
    copied = policy._copied().keywords  # type: ignore[attr-defined]
    held["checkpoint copy"] = _bytes(t for t in _tensors([copied["weights"], copied["state"]["optimizer"]]) if t.dim())
    shape = shape_of([(n, tuple(p.shape)) for n, p in model.named_parameters()], model.config.to_dict())
    found = terms(chosen, shape)
    assert {name: found[name] for name in held} == held


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        ((), "host"),
        (("grid.backend=ray",), "host"),
        (("grid.backend=ray", "weights.transport=nixl", "weights.options.device=cuda"), "device"),
        (("weights.transport=nixl", "weights.options.device=cuda:0"), "device"),
        (("weights.transport=nixl", "weights.options.device=cpu"), "host"),
    ],
)
def test_publications_are_counted_where_they_lie(overrides: tuple[str, ...], place: str) -> None:
    found = {term.name: term.place for term in policy_memory(config(*overrides), BILLION, slot_bytes=8)}
    assert found["publication slots"] == place and found["checkpoint copy"] == "host"


def _tensors(tree):  # type: ignore[no-untyped-def]
    """All tensors of a tree of dicts and lists; each is a copy of its own here, and a count of steps has no dimension."""
    if isinstance(tree, dict | list | tuple):
        return [tensor for part in (tree.values() if isinstance(tree, dict) else tree) for tensor in _tensors(part)]
    return [tree] if hasattr(tree, "dim") else []


def _bytes(tensors) -> int:  # type: ignore[no-untyped-def]
    return sum(t.numel() * t.element_size() for t in tensors)


def test_a_rank_holds_the_largest_chunk_that_fsdp_cuts() -> None:
    shapes = ((7, 3), (5,), (16, 2, 2), (1, 9))
    shape = ModelShape(shapes, unit=1, layers=1, hidden=1, intermediate=1, kv_heads=1, kv_elements=1, vocab=1)
    for ranks in (1, 2, 3, 8, 100):
        ends = [chunk(s, ranks, 0) for s in shapes]
        assert shape.on_rank(ranks) == sum(last - first for first, last in ends)


def test_the_kv_cache_is_what_a_real_cache_holds(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    chosen = config(f"model.name_or_path={folder}", "rollout.max_num_seqs=3", "rollout.max_model_len=40", "rollout.max_tokens=20")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shape = shape_of([(n, tuple(p.shape)) for n, p in model.named_parameters()], model.config.to_dict())
    with torch.no_grad():
        cache = model(torch.full((3, 40), 5), use_cache=True).past_key_values
    held = sum(_bytes([layer.keys, layer.values]) for layer in cache.layers)
    named = {term.name: term.nbytes for term in rollout_memory(chosen, shape, staging_bytes=7)}
    assert named == {"engine weights": 4 * shape.numel, "KV cache": held, "staging": 7}


def test_mixtures_and_latent_attention_count_what_a_token_passes() -> None:
    layer = [("model.layers.3.w", (4, 4)), ("model.embed_tokens.weight", (10, 4)), ("lm_head.weight", (10, 4))]
    moe = {"hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 100, "vocab_size": 10,
           "moe_intermediate_size": 6, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_hidden_layers": 5}  # fmt: skip
    shape = shape_of(layer, moe)
    assert (shape.intermediate, shape.kv_heads, shape.kv_elements, shape.unit) == (54, 1, 4, 80)
    latent = shape_of(layer, moe | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert (latent.kv_heads, latent.kv_elements) == (1, 576)
    assert shape.numel == math.prod((4, 4)) + 80


def test_a_micro_batch_is_the_budget_or_the_longest_completion_or_whole_rows() -> None:
    from posttrain.placement.grid import resolve_grid

    def tokens(*overrides: str) -> int:
        chosen = config("rollout.max_model_len=1000", *overrides)
        return micro_batch_tokens(chosen, resolve_grid(chosen.grid))[0]

    assert tokens("rl.micro_batch_tokens=4096") == 4096
    assert tokens("rl.micro_batch_tokens=10") == 1000  # a completion is never cut
    assert tokens("rl.micro_batch_per_replica=4") == 4000
