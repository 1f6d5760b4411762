"""Shapes and the documented messages E1 to E4."""

from __future__ import annotations

import pytest

from posttrain.config.load import load_config
from posttrain.config.schema import GridConfig, ShapesConfig
from posttrain.placement.grid import check_grid, resolve_grid, transport_of


def ray(**kwargs) -> GridConfig:
    shapes = {key: kwargs.pop(key) for key in ("policy", "rollout") if key in kwargs}
    return GridConfig(backend="ray", shapes=ShapesConfig(**shapes), **kwargs)


def test_shapes_from_ranks_or_as_given() -> None:
    assert resolve_grid(GridConfig()).rollout == (1, 1) and resolve_grid(GridConfig()).dp_world == 1
    grid = resolve_grid(ray(policy=(1, 4), rollout=(3, 2), dp_replicate=2, dp_shard=2))
    assert (grid.policy, grid.rollout, grid.dp_world) == ((1, 4), (3, 2), 4)
    assert resolve_grid(ray(ranks=2, dp_shard=8)).policy == (1, 8)


@pytest.mark.parametrize(
    ("config", "tp", "messages"),
    [
        (GridConfig(), 1, []),
        (ray(rollout=(2, 4), policy=(1, 8), dp_shard=8), 4, []),
        (ray(rollout=(2, 2), policy=(1, 1)), 4, ["ROLLOUT_RANKS=2 must equal rollout.tensor_parallel_size=4"]),
        (ray(ranks=2), 1, ["ROLLOUT_RANKS=2 must equal rollout.tensor_parallel_size=1"]),
        (ray(policy=(2, 1)), 1, ["POLICY_REPLICAS=2 is unsupported"]),
        (GridConfig(shapes=ShapesConfig(policy=(1, 1))), 1, ["grid.shapes requires grid.backend='ray'"]),
        (GridConfig(), 2, ["per-replica rendezvous not run (need ranks=TP>1 on GPU)"]),
        (
            GridConfig(shapes=ShapesConfig(rollout=(1, 2), policy=(3, 1))),
            4,
            [
                "grid.shapes requires grid.backend='ray'",
                "per-replica rendezvous not run (need ranks=TP>1 on GPU)",
                "ROLLOUT_RANKS=2 must equal rollout.tensor_parallel_size=4",
                "POLICY_REPLICAS=3 is unsupported",
            ],
        ),
        (ray(policy=(1, 4), dp_shard=2), 1, ["POLICY_RANKS=4 must equal dp_replicate * dp_shard = 2"]),
        (GridConfig(grouping="single"), 1, []),
        (GridConfig(grouping="per_role"), 1, ["per_role under grid.backend=local, which is one process"]),
        (ray(grouping="per_role"), 1, []),
        (ray(grouping="single"), 1, ["single under grid.backend=ray, where every role has processes of its own"]),
        (GridConfig(dp_shard=2), 1, ["dp_replicate * dp_shard = 2 under grid.backend=local, which is one process"]),
        (ray(rollout=(0, 1), dp_shard=-1), 1, ["is -1, must be at least 1", "is 0, must be at least 1"]),
    ],
)
def test_rules(config, tp, messages) -> None:
    assert [problem.what for problem in check_grid(config, tp)] == messages


def test_e2_names_what_to_use_instead() -> None:
    (problem,) = check_grid(ray(policy=(2, 1)), 1)
    assert "grid.shapes.policy=[1,POLICY_RANKS]" in problem.fix and "dp_replicate * dp_shard" in problem.fix
    assert problem.error is not None and problem.error.code == "E2"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["rollout.engine=hf"], "inproc"),
        (["rollout.engine=vllm"], "shm"),
        (["rollout.engine=hf", "grid.backend=ray"], "nixl"),
        (["rollout.engine=hf", "weights.transport=shm"], "shm"),
        (["rollout.engine=vllm", "grid.backend=ray", "weights.transport=shm"], "shm"),
    ],
)
def test_the_transport_of_a_run_follows_where_its_roles_live(overrides, name) -> None:
    assert transport_of(load_config(["experiment=arithmetic_grpo", *overrides]).config) == name
