"""Builds the parts of a run: what `prepare` made ready first, then the policy, then what stands around the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from posttrain import plugins
from posttrain.loop.ledger import Ledger
from posttrain.loop.pairs import Pairs
from posttrain.loop.parts import Parts
from posttrain.loop.prepare import Prepared, prepare
from posttrain.loop.rollouts import Rollouts
from posttrain.tracking.run_dir import output_root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw, Source
    from posttrain.data.environment import Environment
    from posttrain.data.packer import DataPacker
    from posttrain.policy.policy import Policy
    from posttrain.rollout.engine import Engine
    from posttrain.tracking.run_dir import RunDir
    from posttrain.tracking.tracker import Tracker
    from posttrain.weights.transport import Transport

PROBE_TOKENS = 64

EMBEDDED = ("hf",)
"""Engines that live in this process: weights reach them by a copy."""


def build(config: RunConfig, run_dir: RunDir, tracker: Tracker) -> Parts:
    """Every part, nothing started. Raises the documented errors of each part, the cheap ones first."""
    from posttrain.policy.policy import Policy

    ready = prepare(config, root=output_root(run_dir.path.parent), logs=run_dir.logs, say=tracker.note)
    assert ready.model is not None and ready.packer is not None
    tracker.decode = ready.packer.decode
    policy = Policy(config, ready.model, ready.objective)
    for note in policy.notes:
        tracker.note(note)
    if ready.engine is None:
        pairs = Pairs(ready.packer, cast("Any", ready.environments), config.rollout.max_model_len)
        sampling: dict[str, Any] = {"rollouts": pairs}
    else:
        sampling = sampling_parts(config, run_dir, policy, ready.engine, ready.packer, ready)
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
        keepers=ready.keepers,
    )


def sampling_parts(
    config: RunConfig, run_dir: RunDir, policy: Policy, engine: Engine, packer: DataPacker, ready: Prepared
) -> dict[str, Any]:
    """The parts around an engine: how weights reach it, who scores, who drives it."""
    from posttrain.rollout.scoring import Scorer
    from posttrain.weights.canary import Canary
    from posttrain.weights.plane import WeightPlane

    plane = WeightPlane.local(
        engine,
        build_transport(config),
        config.weights,
        lambda: policy.named_weights(config.rl.master_dtype),
        canary=Canary(
            lambda probe: policy.score(probe, config.rollout.dtype),
            probe_prompts(packer, ready.environments, ready.sampler.sources, ready.held_out),
            config.weights,
            dtype=config.rollout.dtype,
        ),
    )
    scorer = Scorer(
        ready.environments,
        timeout_s=config.rollout.reward_timeout_s,
        workers=config.rollout.reward_workers,
        log_path=run_dir.logs / "rewards.log",
    )
    rollouts = Rollouts(engine, packer, ready.environments, scorer, config.rollout.max_model_len, config.seed)
    return {"engine": engine, "plane": plane, "scorer": scorer, "rollouts": rollouts}


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
    return plugins.build("transports", name, where="weights.transport")  # type: ignore[no-any-return]
