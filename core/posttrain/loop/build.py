"""Builds the parts of a run: what `prepare` made ready first, then the policy, then what stands around the engine."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, cast

from posttrain import plugins
from posttrain.config.rules import commit_order
from posttrain.data.agent_environment import AgentEnvironment
from posttrain.loop.cluster import Hosting, open_cluster
from posttrain.loop.ledger import Ledger
from posttrain.loop.pairs import Pairs
from posttrain.loop.parts import Parts, PolicyEnd
from posttrain.loop.prepare import Prepared, prepare
from posttrain.loop.rollouts import Rollouts
from posttrain.placement.grid import transport_of
from posttrain.tracking.run_dir import output_root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw, Source
    from posttrain.data.environment import Environment
    from posttrain.data.packer import DataPacker
    from posttrain.loop.agents import Agents
    from posttrain.objective.objective import Objective
    from posttrain.policy.policy import Policy
    from posttrain.rollout.engine import Engine, Generates
    from posttrain.rollout.scoring import Scorer
    from posttrain.tracking.run_dir import RunDir
    from posttrain.tracking.tracker import Tracker
    from posttrain.weights.publisher import LocalPublisher
    from posttrain.weights.transport import Transport

PROBE_TOKENS, PROBE_ROWS = 64, 1000
"""Of a prompt that the canary scores at most, and rows that are looked at for four of them."""


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
        evals=ready.evals,
        origins=ready.origins,
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
        cast("Policy", policy).before_change = cast("LocalPublisher", plane.publisher).pool.settle
    environments = ready.environments | {one.key: one.env for one in ready.evals}
    scorer, rollouts = build_rollouts(config, generator, packer, environments, run_dir.logs)
    return {"engine": generator, "plane": plane, "scorer": scorer, "rollouts": rollouts}


def build_rollouts(
    config: RunConfig, engine: Generates, packer: DataPacker, environments: Mapping[str, Environment], logs: Path
) -> tuple[Scorer, Rollouts]:
    """Who scores the episodes of some environments, not started, and who drives them."""
    from posttrain.rollout.scoring import Scorer

    scorer = Scorer(
        environments,
        timeout_s=config.rollout.reward_timeout_s,
        env_timeout_s=config.rollout.env_timeout_s,
        workers=config.rollout.reward_workers,
        strict=config.rollout.strict_rewards,
        log_path=logs / "rewards.log",
    )
    rollouts = Rollouts(
        engine, packer, environments, scorer, config.rollout.max_model_len, config.seed,
        verbatim=config.rollout.keep_history_verbatim, in_step=commit_order(config) == "logical",
        agents=_agents(config, engine, packer, environments),
    )  # fmt: skip
    return scorer, rollouts


def _agents(
    config: RunConfig, engine: Generates, packer: DataPacker, environments: Mapping[str, Environment]
) -> Agents | None:
    """The endpoints for environments that bring an agent, not started; None where there is none."""
    if not any(isinstance(env, AgentEnvironment) for env in environments.values()):
        return None
    from posttrain.loop.agents import Agents
    from posttrain.rollout.replicas import Replicas

    r = config.rollout
    return Agents(
        engine.each() if isinstance(engine, Replicas) else [engine], packer, max_model_len=r.max_model_len, port=r.base_port,
        verbatim=r.keep_history_verbatim, one_by_one=r.engine == "hf",
    )  # fmt: skip


def probe_prompts(
    packer: DataPacker, environments: Mapping[str, Environment], sources: Sequence[Source], held_out: Sequence[Draw]
) -> list[list[int]]:
    """What the canary scores: the first held-out prompts, cut short; where none are held out, the first that train.

    Random ids will not do: on them a half-precision kernel is only noise.
    """
    from posttrain.data.packer import engine_input

    prompts: list[list[int]] = []
    for source in sources:
        rows = [draw.task for draw in held_out if draw.env == source.env] or source.rows
        own: list[list[int]] = []
        for position in range(min(PROBE_ROWS, len(rows))):
            with contextlib.suppress(Exception):  # a row that cannot be asked about is told when it is drawn
                ids = engine_input(packer, environments[source.env].format_prompt(rows[position]))["prompt_ids"]
                own.append(list(ids[:PROBE_TOKENS]))
            if len(own) == 4:
                break
        prompts += own
    return [ids if len(ids) > 1 else ids * 2 for ids in prompts]  # a log-prob needs a token before it


def build_transport(config: RunConfig) -> Transport:
    return plugins.build("transports", transport_of(config), config.weights.options, where="weights.options")  # type: ignore[no-any-return]
