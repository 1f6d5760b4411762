"""The transfer plan of a trillion parameters: 1,024 policy ranks, 64 rollout bodies of 8 tensor-parallel ranks, on one core.

    python tests/benchmarks/bench_plan.py [--json] [--link GB/S]

No model is built: the shapes are those that transformers gives to a dense and to a mixture-of-experts decoder of that size.
Seconds are processor time; memory is the peak of the whole process, the second plan beside the first.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

from posttrain.policy.sharding import fsdp_shards
from posttrain.weights.makespan import limit, makespan
from posttrain.weights.plan import ParameterSpec, place_of, plan_buckets
from posttrain.weights.slices import least_bytes, megatron_cuts, slice_bytes

BODIES, TP = 64, 8
Shape = tuple[int, ...]


def dense() -> dict[str, Shape]:
    """126 layers of 24,576, grouped queries."""
    h, m, kv, vocab = 24576, 88064, 8 * 128, 128256
    layer = {"self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, h),
             "mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "mlp.down_proj": (h, m),
             "input_layernorm": (h,), "post_attention_layernorm": (h,)}  # fmt: skip
    layers = {f"model.layers.{i}.{name}.weight": shape for i in range(126) for name, shape in layer.items()}
    return {"model.embed_tokens.weight": (vocab, h), **layers, "model.norm.weight": (h,), "lm_head.weight": (vocab, h)}


def mixture() -> dict[str, Shape]:
    """61 layers of 7,168 with latent attention and 384 experts, which transformers stores together."""
    h, e, m, vocab = 7168, 384, 2048, 163840
    attention = {"q_a_proj": (1536, h), "q_a_layernorm": (1536,), "q_b_proj": (12288, 1536), "kv_a_proj_with_mqa": (576, h),
                 "kv_a_layernorm": (512,), "kv_b_proj": (16384, 512), "o_proj": (h, 8192)}  # fmt: skip
    first = {"mlp.gate_proj.weight": (18432, h), "mlp.up_proj.weight": (18432, h), "mlp.down_proj.weight": (h, 18432)}
    experts = {"mlp.experts.gate_up_proj": (e, 2 * m, h), "mlp.experts.down_proj": (e, h, m), "mlp.gate.weight": (e, h),
               "mlp.shared_experts.gate_proj.weight": (m, h), "mlp.shared_experts.up_proj.weight": (m, h),
               "mlp.shared_experts.down_proj.weight": (h, m)}  # fmt: skip
    found: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, h)}
    for i in range(61):
        own = {f"self_attn.{name}.weight": shape for name, shape in attention.items()} | (experts if i else first)
        own |= {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,)}
        found |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    return {**found, "model.norm.weight": (h,), "lm_head.weight": (vocab, h)}


MODELS: dict[str, tuple[Callable[[], dict[str, Shape]], int, int]] = {
    "dense, 1,024 shards": (dense, 1, 1024),
    "mixture, 8 x 128": (mixture, 8, 128),
}
"""Name → shapes, dp_replicate, dp_shard."""


def measure(name: str, link: float) -> dict[str, Any]:
    shapes, replicate, shard = MODELS[name]
    specs = [ParameterSpec(n, "bfloat16", shape) for n, shape in shapes().items()]
    shards, ranks, began = fsdp_shards(replicate, shard), replicate * shard, time.process_time()
    plan = plan_buckets(specs, shards=shards)
    planned = time.process_time()
    sent = [0] * ranks
    for bucket in plan.buckets:
        sent[bucket.rank] += bucket.nbytes
    cuts = megatron_cuts(TP, kv_heads=8)
    slices = slice_bytes(specs, shards, cuts, policy_ranks=ranks, ranks=TP)
    sliced = time.process_time()
    apart = [place_of(body, ranks) for body in range(BODIES)]
    whole, parts = [sent] * BODIES, slices.T.tolist() * BODIES
    apart_parts = [place_of(lane, ranks) for lane in range(BODIES * TP)]
    found = {
        "parameters": sum(spec.numel for spec in specs), "tensors": len(specs), "policy_ranks": ranks, "bodies": BODIES, "tp": TP,
        "pieces": sum(len(bucket.pieces) for bucket in plan.buckets), "buckets": len(plan.buckets),
        "full_bytes": sum(sent) * BODIES, "full_theory": sum(spec.nbytes for spec in specs) * BODIES,
        "slice_bytes": int(slices.sum()) * BODIES, "slice_theory": sum(least_bytes(specs, cuts, TP)) * BODIES,
        "body_bytes": sum(sent), "tp_rank_bytes": int(slices.sum(axis=0).max()), "rank_bytes_most": max(sent),
        "link": link,
        "limit_s": limit(whole, link), "same_start_s": makespan(whole, link), "apart_s": makespan(whole, link, starts=apart),
        "slices_limit_s": limit(parts, link), "slices_apart_s": makespan(parts, link, starts=apart_parts),
        "plan_cpu_s": planned - began, "slices_cpu_s": sliced - planned, "simulation_cpu_s": time.process_time() - sliced,
    }  # fmt: skip
    digest = time.process_time()
    plan.digest  # noqa: B018
    found["digest_cpu_s"] = time.process_time() - digest
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--json", action="store_true")
    options.add_argument("--link", type=float, default=50.0, help="GB/s")
    given = options.parse_args()
    rows = {name: measure(name, given.link * 1e9) for name in MODELS}
    if given.json:
        print(json.dumps(rows))
        return
    for name, r in rows.items():
        print(f"{name}: {r['parameters'] / 1e12:.2f}T parameters, {r['tensors']} tensors, {r['policy_ranks']} policy ranks")
        print(f"  plan       {r['plan_cpu_s']:.1f} s for {r['pieces']:,} pieces in {r['buckets']:,} buckets; peak "
              f"{r['peak_bytes'] / 2**30:.2f} GiB; digest {r['digest_cpu_s']:.1f} s; slices {r['slices_cpu_s']:.1f} s; "
              f"simulation {r['simulation_cpu_s']:.1f} s")  # fmt: skip
        for what, to in (("full", f"{BODIES} bodies"), ("slice", f"{BODIES * TP} ranks")):
            moved, theory = r[f"{what}_bytes"], r[f"{what}_theory"]
            print(f"  {what:<9}  {moved / 1e12:.3f} TB to {to}, {'equal to' if moved == theory else 'NOT'} theory")
        print(f"  makespan   limit {r['limit_s']:.1f} s; bodies that begin apart {r['apart_s']:.1f} s, "
              f"all at the same rank {r['same_start_s']:.0f} s")  # fmt: skip
        print(f"  of slices  limit {r['slices_limit_s']:.2f} s; ranks that begin apart {r['slices_apart_s']:.2f} s")
    print(
        f"assumed: {given.link:g} GB/s out of each policy rank and into each body (of slices: into each rank), shared evenly by"
    )
    print("those that pull from the same policy rank, one rank at a time; copies, digests and latency free")


if __name__ == "__main__":
    main()
