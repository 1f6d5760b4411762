"""Builds the parts of a run: what `prepare` made ready first, then the policy, then what stands around the engine."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from posttrain import plugins
from posttrain.loop.cluster import Hosting, open_cluster
from posttrain.loop.ledger import Ledger
from posttrain.loop.pairs import Pairs
from posttrain.loop.parts import Parts, PolicyEnd
from posttrain.loop.prepare import Prepared, prepare
from posttrain.loop.rollouts import Rollouts
from posttrain.tracking.run_dir import output_root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw, Source
    from posttrain.data.environment import Environment
    from posttrain.data.packer import DataPacker
    from posttrain.objective.objective import Objective
    from posttrain.policy.policy import Policy
    from posttrain.rollout.engine import Engine, Generates
    from posttrain.tracking.run_dir import RunDir
    from posttrain.tracking.tracker import Tracker
    from posttrain.weights.transport import Transport

PROBE_TOKENS = 64

EMBEDDED = ("hf",)
"""Engines that live in this process: weights reach them by a copy."""


def build(config: RunConfig, run_dir: RunDir, tracker: Tracker) -> Parts:
    """Every part; engines are not started. Raises the documented errors of each part, the cheap ones first."""
    ready = prepare(config, root=output_root(run_dir.path.parent), logs=run_dir.logs, say=tracker.note)
    assert ready.model is not None and ready.packer is not None
    tracker.decode = ready.packer.decode
    hosting = open_cluster(config, run_dir, tracker.note) if config.grid.backend == "ray" else None
    try:
        return _assemble(config, run_dir, tracker, ready, hosting)
    except BaseException:
        if hosting is not None:
            hosting.close()
        raise


def _assemble(config: RunConfig, run_dir: RunDir, tracker: Tracker, ready: Prepared, hosting: Hosting | None) -> Parts:
    assert ready.model is not None and ready.packer is not None
    policy = local_policy(config, ready.model, ready.objective) if hosting is None else hosting.policy(ready.model)
    for note in policy.notes:
        tracker.note(note)
    if ready.engine is None:
        pairs = Pairs(ready.packer, cast("Any", ready.environments), config.rollout.max_model_len)
        sampling: dict[str, Any] = {"rollouts": pairs}
    else:
        sampling = sampling_parts(config, run_dir, policy, ready.engine, ready.packer, ready, hosting)
    return Parts(
        config=config,
        run_dir=run_dir,
        tracker=tracker,
        objective=ready.objective,
        environments=ready.environments,
        sampler=ready.sampler,
        packer=ready.packer,
        policy=policy,
        **sampling,
        ledger=Ledger(run_dir.path / "ledger.jsonl"),
        fingerprints=ready.sampler.fingerprints(),
        hooks=ready.hooks,
        hosting=hosting,
        keepers=ready.keepers,
    )


def local_policy(config: RunConfig, model: str, objective: Objective) -> PolicyEnd:
    """The policy in this process."""
    from posttrain.policy.policy import Policy

    return Policy(config, model, objective)


def sampling_parts(
    config: RunConfig,
    run_dir: RunDir,
    policy: PolicyEnd,
    engine: Engine,
    packer: DataPacker,
    ready: Prepared,
    hosting: Hosting | None,
) -> dict[str, Any]:
    """The parts around the engines: how weights reach them, who scores, who drives them."""
    from posttrain.rollout.scoring import Scorer
    from posttrain.weights.canary import Canary
    from posttrain.weights.plane import WeightPlane

    canary = Canary(
        lambda probe: policy.score(probe, config.rollout.dtype),
        probe_prompts(packer, ready.environments, ready.sampler.sources, ready.held_out),
        config.weights,
        dtype=config.rollout.dtype,
    )
    generator: Generates = engine
    if hosting is not None:
        generator = replicas = hosting.rollouts(engine.spec)
        plane = WeightPlane(hosting.publisher(), replicas.lanes, config.weights, canary=canary)
    else:
        weights = functools.partial(cast("Policy", policy).named_weights, config.rl.master_dtype)
        plane = WeightPlane.local(engine, build_transport(config), config.weights, weights, canary=canary)
    scorer = Scorer(
        ready.environments,
        timeout_s=config.rollout.reward_timeout_s,
        workers=config.rollout.reward_workers,
        strict=config.rollout.strict_rewards,
        log_path=run_dir.logs / "rewards.log",
    )
    rollouts = Rollouts(generator, packer, ready.environments, scorer, config.rollout.max_model_len, config.seed)
    return {"engine": generator, "plane": plane, "scorer": scorer, "rollouts": rollouts}


def probe_prompts(
    packer: DataPacker, environments: Mapping[str, Environment], sources: Sequence[Source], held_out: Sequence[Draw]
) -> list[list[int]]:
    """What the canary scores: the first held-out prompts, cut short; where none are held out, the first that train.

    Random ids will not do: on them a half-precision kernel is only noise.
    """
    from posttrain.data.packer import engine_input

    prompts = []
    for source in sources:
        rows = [draw.task for draw in held_out if draw.env == source.env] or source.rows
        for position in range(min(4, len(rows))):
            ids = engine_input(packer, environments[source.env].format_prompt(rows[position]))["prompt_ids"]
            prompts.append(list(ids[:PROBE_TOKENS]))
    return [ids if len(ids) > 1 else ids * 2 for ids in prompts]  # a log-prob needs a token before it


def build_transport(config: RunConfig) -> Transport:
    name = config.weights.transport
    if name == "auto":
        name = "inproc" if config.rollout.engine in EMBEDDED else "shm"
    return plugins.build("transports", name, config.weights.options, where="weights.options")  # type: ignore[no-any-return]
