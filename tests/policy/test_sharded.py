"""The sharded policy on real processes: one process's numbers, whatever the mesh and however the rows are cut."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch

from posttrain.config.schema import LRSchedulerConfig, OptimizerConfig
from posttrain.errors import RunAborted
from posttrain.policy.ranks import agree_on_old_logprobs
from posttrain.policy.saving import read_optimizer, read_weights
from posttrain.policy.sharding import fsdp_shards
from posttrain.weights.plan import ParameterSpec, plan_buckets

SGD_LIKE = OptimizerConfig(lr=1e-2, impl="forloop", eps=1.0)
"""Adam's division by a tiny second moment magnifies rounding; a large eps makes the step nearly linear in the gradient."""

TOLERANCE = {"float64": 1e-11, "float32": 1e-5}
EXACT = 1e-5
"""In float32, of the loss, of the gradient's norm, and of each parameter's gradient: the norm of the difference over its own."""

MESHES = [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)]


def policy_keys(dtype: str = "float64", **changes: Any) -> dict[str, Any]:
    return {"master_dtype": dtype, "param_dtype": dtype, "optimizer": SGD_LIKE, **changes}


def largest_gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def same_everywhere(results: list[Any], world: int) -> Any:
    """What every rank of the mesh says; ranks outside say nothing."""
    first, *rest = results[:world]
    assert results[world:] == [None] * (len(results) - world)
    for other in rest:
        for name in first:
            if name == "weights":
                assert largest_gap(first[name], other[name]) == 0
            elif name == "random":
                assert torch.equal(first[name], other[name])
            else:
                assert repr(first[name]) == repr(other[name]), name  # a NaN is not itself
    return first


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert largest_gap(found["weights"], wanted["weights"]) < tolerance
    for mine, reference in zip(found["metrics"], wanted["metrics"], strict=True):
        for name in ("loss", "grad_norm"):
            limit = min(100 * tolerance, EXACT)
            assert mine[name] == pytest.approx(reference[name], rel=limit, abs=limit), name
        assert mine == pytest.approx(reference, rel=100 * tolerance, abs=100 * tolerance)
    assert found["evaluate"] == pytest.approx(wanted["evaluate"], rel=100 * tolerance, abs=100 * tolerance)
    for name in ("start", "logprobs", "score"):
        # Weights on the border between two bf16 numbers round either way.
        limit = 0.05 if name == "score" else 100 * tolerance
        for mine, reference in zip(found[name], wanted[name], strict=True):
            assert mine == pytest.approx(reference, abs=limit)
    assert (found["version"], found["skipped"]) == (wanted["version"], wanted["skipped"])


@pytest.fixture(scope="module")
def alone(ranks: Any, uneven_model: Any) -> Any:
    """What one process without a mesh says of a case, computed once."""
    known: dict[str, Any] = {}

    def run(*, tied: bool = True, dtype: str = "float64", **changes: Any) -> Any:
        key = repr((tied, dtype, changes))
        if key not in known:
            known[key] = ranks("train", ranks.case(uneven_model(tied=tied, dtype=dtype), None, **changes))[0]
        return known[key]

    return run


OBJECTIVES = {
    "grpo": {"objective": "grpo", "options": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    "gspo": {"objective": "gspo"},
    "dpo": {"objective": "dpo"},
}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_mesh_has_the_numbers_of_one_process(ranks, alone, uneven_model, name, mesh):
    """Loss, gradient norm, every metric, log-probs and the updated weights, for two optimizer steps of each of two batches."""
    tied = mesh in ((1, 2), (2, 2))
    case = OBJECTIVES[name] | {"rl": policy_keys(mini_batch_per_replica=8)}
    wanted = alone(tied=tied, **case)
    found = same_everywhere(ranks("train", ranks.case(uneven_model(tied=tied), mesh, **case)), mesh[0] * mesh[1])
    assert_same(found, wanted, TOLERANCE["float64"])
    assert wanted["version"] == (2, 4) and wanted["metrics"][0]["grad_norm"] > 0


SPLITS = {
    "one-piece": {"micro_batch_per_replica": 16},
    "one-row": {"micro_batch_per_replica": 4},
    "tokens": {"micro_batch_tokens": 30},
    "padded": {"micro_batch_per_replica": 8, "shared_prefix": False},
    "checkpointed": {"logprob_chunk_tokens": 5, "gradient_checkpointing": True},
    "unclipped": {"optimizer": OptimizerConfig(lr=1e-2, impl="fused", eps=1.0, grad_clip=None)},
}


@pytest.mark.parametrize(("dtype", "mesh"), [("float64", (1, 4)), ("float32", (2, 2))])
@pytest.mark.parametrize("split", SPLITS)
def test_no_split_of_the_rows_changes_anything(ranks, alone, uneven_model, split, dtype, mesh):
    wanted = alone(dtype=dtype, rl=policy_keys(dtype))
    case = ranks.case(uneven_model(dtype=dtype), mesh, rl=policy_keys(dtype) | SPLITS[split])
    found = same_everywhere(ranks("train", case), 4)
    if split == "unclipped":
        wanted = alone(dtype=dtype, rl=policy_keys(dtype) | SPLITS[split])
    assert_same(found, wanted, TOLERANCE[dtype])


CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "half": {"micro_batch_per_replica": 8},
    **{name: SPLITS[name] for name in ("one-row", "tokens", "padded", "checkpointed")},
}


@pytest.mark.parametrize(("name", "mesh"), [*(("grpo", mesh) for mesh in MESHES), ("gspo", (2, 2)), ("dpo", (1, 4))], ids=str)
def test_loss_and_every_gradient_are_those_of_one_process_to_1e_5(ranks, uneven_model, name, mesh):
    """Before clipping and before any optimizer, which could hide or magnify what differs."""
    model = uneven_model(tied=False, dtype="float32")

    def said(where: Any, cut: dict[str, Any]) -> list[Any]:
        return ranks("gradients", ranks.case(model, where, rl=policy_keys("float32") | cut, **OBJECTIVES[name]))

    loss, norm, wanted = said(None, {})[0]
    assert norm > 1e-2 and len(wanted) > 10
    for cut, keys in CUTS.items():
        for found in said(mesh, keys)[: mesh[0] * mesh[1]]:
            assert found[:2] == pytest.approx((loss, norm), rel=EXACT, abs=0.0), cut
            assert found[2].keys() == wanted.keys()
            for parameter, gradient in wanted.items():
                difference = float((found[2][parameter] - gradient).norm() / gradient.norm())
                assert difference < EXACT, (cut, parameter, difference)


FAMILIES = {
    "Qwen3Moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_are_sharded_alike(ranks, uneven_model, kind):
    """Experts are cut along their number; soft caps and windows stay. In float32: transformers has neither in float64."""
    model = uneven_model(kind=kind, dtype="float32", **FAMILIES[kind])
    case = {"rl": policy_keys("float32"), "steps": 1}
    wanted = ranks("train", ranks.case(model, None, **case))[0]
    found = same_everywhere(ranks("train", ranks.case(model, (2, 2), **case)), 4)
    assert_same(found, wanted, TOLERANCE["float32"])


def test_bf16_compute_is_that_of_one_process(ranks, alone, uneven_model):
    """Each row by itself, so that kernels see the same shapes: then FSDP changes no bit of the body's forward. Of log-probs,
    which are fp32, the last bit may differ: some processors add up otherwise where memory begins at another place."""
    keys = {"master_dtype": "float32", "param_dtype": "bfloat16", "optimizer": SGD_LIKE, "shared_prefix": False}
    wanted = alone(dtype="float32", rl=keys | {"micro_batch_per_replica": 1}, steps=1)
    case = ranks.case(uneven_model(dtype="float32"), (2, 2), rl=keys | {"micro_batch_per_replica": 4}, steps=1)
    found = same_everywhere(ranks("train", case), 4)
    for mine, theirs in zip(found["start"], wanted["start"], strict=True):
        assert mine == pytest.approx(theirs, abs=2e-6)  # a bf16 in the body that differs would move it by 1e-3
    assert largest_gap(found["weights"], wanted["weights"]) < 1e-6
    wide = alone(dtype="float32", rl=policy_keys("float32"))["start"]
    assert wide[0] != pytest.approx(found["start"][0], abs=1e-4)  # it did compute in bf16


def test_ranks_without_a_row_keep_step_with_the_others(ranks, alone, uneven_model):
    """Three rows and two optimizer steps on four ranks; and rows whose padded forwards differ in number between ranks."""
    few = {"sizes": (2, 1), "rl": policy_keys(mini_batch_per_replica=8)}
    found = same_everywhere(ranks("train", ranks.case(uneven_model(), (1, 4), **few)), 4)
    assert_same(found, alone(**few), TOLERANCE["float64"])
    long = {"sizes": (1, 7, 60), "rl": policy_keys(micro_batch_tokens=100_000, shared_prefix=False)}
    found = same_everywhere(ranks("train", ranks.case(uneven_model(), (2, 2), **long)), 4)
    assert_same(found, alone(**long), TOLERANCE["float64"])


def test_a_gradient_that_is_not_finite_is_skipped_by_all(ranks, alone, uneven_model):
    """One row of one rank is broken: no weight and no moment moves anywhere, and the step after it is an ordinary one."""
    case = {"break_on": 0, "rl": policy_keys(optimizer=OptimizerConfig(lr=1e-2))}
    found = same_everywhere(ranks("train", ranks.case(uneven_model(), (1, 4), **case)), 4)
    assert found["skipped"] == [True, False]
    wanted = alone(steps=1, rl=case["rl"])
    assert found["metrics"][1]["loss"] == pytest.approx(wanted["metrics"][0]["loss"], abs=1e-11)
    assert largest_gap(found["weights"], wanted["weights"]) < 1e-6


def test_a_forward_that_moves_on_one_rank_stops_all(ranks, uneven_model):
    case = ranks.case(uneven_model(), (2, 2), rl=policy_keys(mini_batch_per_replica=8))
    found = ranks("drift", case, 3)
    assert len(set(found)) == 1 and found[0][0] == "E8" and found[0][2]
    assert "PINNED" in found[0][1]


def test_ranks_that_were_not_built_alike_are_refused(ranks):
    with pytest.raises(RunAborted, match="rank 0: no, rank 1: yes") as caught:
        agree_on_old_logprobs([False, True])
    assert caught.value.code == "E5" and not caught.value.retryable
    assert agree_on_old_logprobs([True, True]) is True


def test_a_policy_is_not_built_on_ranks_that_would_record_old_logprobs_on_some(ranks, uneven_model):
    """One rank takes two optimizer steps to a batch, and so would run a forward more than the others, in which they hang."""
    case = ranks.case(uneven_model(), (2, 2), rl=policy_keys())
    found = ranks("built_unlike", case, 2, {"mini_batch_per_replica": 8})
    assert [code for code, _ in found] == ["E5"] * 4
    assert all("rank 1: no, rank 2: yes" in said for _, said in found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_rank_holds_and_publishes_what_the_plan_says(ranks, uneven_model, mesh):
    """Against the DTensors themselves: start and length of each chunk; and every element is published once, by who holds it."""
    world = mesh[0] * mesh[1]
    found = ranks("parts", ranks.case(uneven_model(tied=False), mesh, rl=policy_keys()))[:world]
    whole = found[0][2]
    specs = [ParameterSpec(name, "float64", shape) for name, shape, _, _ in found[0][0]]
    assert [spec.name for spec in specs] == list(whole) and "lm_head.weight" in whole
    plan = plan_buckets(specs, bucket_bytes=2**12, shards=fsdp_shards(*mesh))
    sizes = set()
    for rank, (held, told, _) in enumerate(found):
        parts = {name: (start, values) for name, _, start, values in held}
        for name, shape, start, values in held:
            local, offset = told[name]
            row = whole[name][0].numel() if whole[name].dim() > 1 else 1
            assert values.numel() == local[0] * row and (not len(values) or start == offset[0] * row)
            sizes.add((name, values.numel()))
            assert torch.equal(values, whole[name].reshape(-1)[start : start + len(values)]) and shape == whole[name].shape
        for piece in (piece for bucket in plan.buckets if bucket.rank == rank for piece in bucket.pieces):
            start, values = parts[piece.name]
            assert start <= piece.start and piece.stop <= start + len(values)
    if mesh == (1, 4):
        assert {number for name, number in sizes if name.endswith("layers.0.mlp.gate_proj.weight")} == {64, 32, 0}


def test_replicas_share_the_work_of_publishing():
    spec = ParameterSpec("w", "float32", (5, 3))
    assert list(fsdp_shards(1, 4)(spec)) == [(0, 0, 6), (1, 6, 12), (2, 12, 15)]
    assert list(fsdp_shards(2, 2)(spec)) == [(0, 0, 5), (2, 5, 9), (1, 9, 12), (3, 12, 15)]
    assert list(fsdp_shards(4, 1)(ParameterSpec("b", "float32", (2,)))) == [(0, 0, 1), (1, 1, 2)]


STORAGE = {
    "wide": policy_keys(lr_scheduler=LRSchedulerConfig(name="linear", warmup_steps=1), optimizer=OptimizerConfig(lr=1e-2)),
    "bf16-compute": {"master_dtype": "float32", "param_dtype": "bfloat16", "optimizer": OptimizerConfig(lr=1e-2)},
    "bf16-storage": {
        "master_dtype": "bfloat16", "param_dtype": "bfloat16", "optimizer": OptimizerConfig(name="adamw_master", lr=1e-2)
    },
}  # fmt: skip


@pytest.mark.parametrize("storage", STORAGE)
def test_a_checkpoint_continues_on_any_number_of_ranks(ranks, uneven_model, tmp_path, storage):
    """Saved on one mesh, loaded on another and saved again there: the same bits, whichever way; then trained on."""
    rl = STORAGE[storage]
    model = uneven_model(dtype=rl["master_dtype"])

    def run(mesh: Any, **changes: Any) -> Any:
        results = ranks("train", ranks.case(model, mesh, rl=rl, **changes))
        return same_everywhere(results, mesh[0] * mesh[1] if mesh else 1)

    chain = [None, (1, 4), (2, 2), None, (2, 1), (1, 2), (1, 1)]
    first = run(chain[0], steps=1, save=str(tmp_path / "0"))
    for number, mesh in enumerate(chain[1:], 1):
        copy = run(mesh, steps=0, load=str(tmp_path / f"{number - 1}"), save=str(tmp_path / f"{number}"))
        assert largest_gap(copy["weights"], first["weights"]) == 0 and copy["version"] == (1, 1)
        assert torch.equal(copy["random"], first["random"])
        assert ("model.safetensors" in copy["names"]) is (mesh is None) and ("shards.json" in copy["names"]) is (mesh is not None)
        weights = read_weights(tmp_path / f"{number}")
        assert largest_gap({name: value.double() for name, value in weights.items()}, first["weights"]) == 0
        moments, whole = read_optimizer(tmp_path / f"{number}"), read_optimizer(tmp_path / "0")
        assert "exp_avg" in min(whole) and moments.keys() == whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in moments.items())
    wanted, found = (run(None, steps=1, load=str(tmp_path / str(number))) for number in (0, len(chain) - 1))
    assert largest_gap(found["weights"], wanted["weights"]) == 0  # moments and masters went through every layout unchanged
    assert found["metrics"] == wanted["metrics"] and found["version"] == (2, 2)


def test_a_damaged_or_incomplete_checkpoint_changes_nothing(ranks, uneven_model, tmp_path):
    rl = policy_keys(optimizer=OptimizerConfig(lr=1e-2))
    for mesh, layout in (((1, 2), "shards"), (None, "whole")):
        ranks("train", ranks.case(uneven_model(), mesh, rl=rl, steps=1, save=str(tmp_path / layout)))
    files = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert sum(name.endswith(".distcp") for name in files) == 2 and {"shards.json", "policy.pt", ".metadata"} < set(files)
    damages: list[tuple[str, str, str]] = [("shards", name, "absent") for name in files]
    damages += [("shards", name, "flipped") for name in files]
    damages += [("whole", name, how) for name in ("model.safetensors", "policy.pt") for how in ("absent", "cut")]
    for number, (layout, name, how) in enumerate(damages):
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / layout, folder)
        data = bytearray((folder / name).read_bytes())
        (folder / name).unlink()
        if how == "flipped":
            data[len(data) // 2] ^= 0x11
        if how != "absent":
            (folder / name).write_bytes(data[: len(data) // 2] if how == "cut" else data)
        for mesh in ((1, 4), None):
            found = [said for said in ranks("load_damaged", ranks.case(uneven_model(), mesh, rl=rl, load=str(folder))) if said]
            assert len(set(found)) == 1, (layout, name, how)
            code, text, unmoved = found[0]
            assert code == "checkpoint-damaged" and unmoved and str(folder) in text, (layout, name, how, text)
        shutil.rmtree(folder)
    found = ranks("load_damaged", ranks.case(uneven_model(tied=False), (1, 4), rl=rl, load=str(tmp_path / "shards")))
    assert "holds another model" in found[0][1] and "lm_head.weight" in found[0][1]
    assert json.loads((tmp_path / "shards" / "shards.json").read_text())["policy.pt"][0] > 0


@pytest.mark.parametrize("mesh", [None, (1, 2), (2, 2)])
def test_a_snapshot_is_what_the_policy_was_though_training_went_on(ranks, uneven_model, tmp_path, mesh):
    at_once, beside = tmp_path / "at-once", tmp_path / "beside"
    rl = policy_keys(optimizer=OptimizerConfig(lr=1e-2), lr_scheduler=LRSchedulerConfig(name="linear", warmup_steps=1))
    case = ranks.case(uneven_model(), mesh, rl=rl, load=str(at_once), save=str(beside))
    results = [found for found in ranks("write_beside_training", case) if found]
    assert len(results) == (mesh[0] * mesh[1] if mesh else 1)
    for wanted, found in results:
        for one, other in zip(wanted[:2], found[:2], strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert found[2][:2] == wanted[2][:2] == (1, 1) and torch.equal(found[2][2], wanted[2][2])
        assert wanted[3] and found[3]  # the two later steps come out as they did beside the writing
    names = sorted(path.name for path in at_once.iterdir())
    assert names == sorted(path.name for path in beside.iterdir())
    for name in names:
        if name != ".metadata" and (mesh is None or name != "shards.json"):  # those hold the time and its digest
            assert (at_once / name).read_bytes() == (beside / name).read_bytes(), name


def test_a_rank_whose_peers_do_not_write_gives_up_and_trains_on(ranks, uneven_model, tmp_path):
    case = ranks.case(uneven_model(), (1, 2), rl=policy_keys(), save=str(tmp_path), deadline_s=1.0)
    (kind, seconds), *others = ranks("writes_alone", case)
    assert kind == "RuntimeError" and 0.9 < seconds < 5 and others == [None, None, None]


def test_a_rank_that_cannot_write_is_told_by_all(ranks, uneven_model, tmp_path):
    (tmp_path / "__0_0.distcp").mkdir()
    found = ranks("fails_to_save", ranks.case(uneven_model(), (1, 4), rl=policy_keys(), save=str(tmp_path)))
    assert len(set(found)) == 1 and found[0][0] == "OSError" and "rank 0" in found[0][1] and "directory" in found[0][1].lower()
