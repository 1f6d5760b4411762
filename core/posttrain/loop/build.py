"""Builds the parts of a run. One function per part; `build` puts them together in the order of their cost.

What cannot work ends before a model loads: the objective first, then the optimizer's dependencies, the environments and
their data, the tokenizer, what the engine would refuse to start with, and only then the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from posttrain import plugins
from posttrain.config.schema import NO_ENGINE
from posttrain.errors import ConfigError
from posttrain.loop.ledger import Ledger
from posttrain.loop.model_folder import model_folder
from posttrain.loop.pairs import Pairs, check_pairs
from posttrain.loop.parts import Parts
from posttrain.loop.rollouts import Rollouts
from posttrain.loop.validation import held_out_draws, refuse_held_out
from posttrain.tracking.run_dir import output_root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw, Source
    from posttrain.data.environment import Environment
    from posttrain.data.packer import DataPacker
    from posttrain.objective.objective import Objective
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
    from posttrain.data.dataset import build_sampler
    from posttrain.policy.optimizer import check_optimizer
    from posttrain.policy.policy import Policy

    objective = build_run_objective(config)
    for note in [*objective.notes, *check_optimizer(config.rl)]:
        tracker.note(note)
    environments = build_environments(config)
    sampler = build_sampler(config, environments)
    offline = config.rollout.engine == NO_ENGINE
    held_out = held_out_draws(sampler.sources, environments, config.validation.prompts)
    sampler.watch(None if offline else refuse_held_out(held_out, environments))
    for source in sampler.sources:
        for note in getattr(source.rows, "notes", ()):
            tracker.note(f"{source.env}: {note}")
    if offline:
        for note in check_pairs(sampler.sources, held_out, cast("Any", environments)):
            tracker.note(note)
    path = model_folder(config.model, output_root(run_dir.path.parent), tracker.note)
    packer = build_packer(config, path)
    tracker.decode = packer.decode
    engine = None if offline else build_engine(config, path, run_dir)
    policy = Policy(config, path, objective)
    for note in policy.notes:
        tracker.note(note)
    if engine is None:
        sampling: dict[str, Any] = {"rollouts": Pairs(packer, cast("Any", environments), config.rollout.max_model_len)}
    else:
        sampling = sampling_parts(config, run_dir, engine, policy, packer, environments, sampler.sources, held_out)
    return Parts(
        config=config,
        run_dir=run_dir,
        tracker=tracker,
        objective=objective,
        environments=environments,
        sampler=sampler,
        packer=packer,
        policy=policy,
        **sampling,
        ledger=Ledger(run_dir.path / "ledger.jsonl"),
        fingerprints=sampler.fingerprints(),
    )


def sampling_parts(
    config: RunConfig, run_dir: RunDir, engine: Engine, policy: Policy, packer: DataPacker,
    environments: dict[str, Environment], sources: Sequence[Source], held_out: Sequence[Draw],
) -> dict[str, Any]:
    """The parts around an engine: how weights reach it, who scores, who drives it."""
    from posttrain.rollout.scoring import Scorer
    from posttrain.weights.canary import Canary
    from posttrain.weights.plane import WeightPlane

    plane = WeightPlane(
        engine,
        build_transport(config),
        config.weights,
        lambda: policy.named_weights(config.rl.master_dtype),
        canary=Canary(
            lambda probe: policy.score(probe, config.rollout.dtype),
            probe_prompts(packer, environments, sources, held_out),
            config.weights,
            dtype=config.rollout.dtype,
        ),
    )
    scorer = Scorer(
        environments,
        timeout_s=config.rollout.reward_timeout_s,
        workers=config.rollout.reward_workers,
        log_path=run_dir.logs / "rewards.log",
    )
    rollouts = Rollouts(engine, packer, environments, scorer, config.rollout.max_model_len, config.seed)
    return {"engine": engine, "plane": plane, "scorer": scorer, "rollouts": rollouts}


def build_run_objective(config: RunConfig) -> Objective:
    """The objective with what it must know of the run; `max_tokens` is the run's where the algorithm takes one."""
    from posttrain.objective.build import resolve_algorithm
    from posttrain.objective.objective import build_objective

    rl = config.rl
    _, cls = resolve_algorithm(rl.objective.name)
    options = dict(rl.objective.options)
    known = {f for f in getattr(cls.Options, "__dataclass_fields__", {})}
    if "max_tokens" in known:
        options.setdefault("max_tokens", config.rollout.max_tokens)
    if "ppo_clip_ref_logprobs" in known:
        options.setdefault("ppo_clip_ref_logprobs", "auto")
    return build_objective(
        rl.objective.name,
        group_size=rl.group_size,
        n_mini=rl.batch_per_replica // (rl.mini_batch_per_replica or rl.batch_per_replica),
        temperature=config.rollout.temperature,
        asynchronous=config.rollout.max_async_rollout > 0,
        **options,
    )


def build_environments(config: RunConfig) -> dict[str, Environment]:
    """The environments by name; a second of the same name is called `name#2`. Raises ConfigError for several turns."""
    from posttrain.data.environment import Environment

    out: dict[str, Environment] = {}
    for position, entry in enumerate(config.environments):
        name, number = entry.name, 2
        while name in out:
            name, number = f"{entry.name}#{number}", number + 1
        env = out[name] = plugins.build("envs", entry.name, entry.options, where=f"environments[{position}]")
        if type(env).env_response is not Environment.env_response:
            raise ConfigError(
                f"environment {entry.name!r} answers the model: multi-turn episodes are not driven yet",
                cause=f"{type(env).__name__} overrides env_response, and a run would train on the first turn alone",
                fix="choose a single-turn environment, or remove env_response and score one turn",
                where=f"environments[{position}].name",
            )
    return out


def build_packer(config: RunConfig, path: str) -> DataPacker:
    """The packer that `rl.data.packer` names, else the one of the model's type; set up for the model."""
    from posttrain.data.packer import PAIR_PACKER, TEXT_PACKER, init_data_packer, load_packer

    template, remote = config.model.chat_template, config.model.trust_remote_code
    if config.rl.data.packer is None:
        default = PAIR_PACKER if config.rollout.engine == NO_ENGINE else TEXT_PACKER
        return init_data_packer(path, chat_template=template, trust_remote_code=remote, default=default)
    return load_packer(config.rl.data.packer).setup(path, chat_template=template, trust_remote_code=remote)


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


def build_engine(config: RunConfig, path: str, run_dir: RunDir) -> Engine:
    """The engine of this process's rollout body, not started. Raises what can be told without a start: `Engine.preflight`."""
    from posttrain.data.packer import eos_token_ids
    from posttrain.rollout.engine import EngineSpec

    r = config.rollout
    spec = EngineSpec(
        model_path=path,
        dtype=r.dtype,
        max_model_len=r.max_model_len,
        max_num_seqs=r.max_num_seqs,
        eos_token_ids=eos_token_ids(path),
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
        tensor_parallel_size=r.tensor_parallel_size,
        gpu_memory_utilization=r.gpu_memory_utilization,
        base_port=r.base_port,
        start_timeout_s=r.start_timeout_s,
        log_dir=run_dir.logs,
    )
    engine: Engine = plugins.build("engines", r.engine, r.options, where="rollout.options", spec=spec)
    engine.preflight(spec, engine.options)
    return engine


def build_transport(config: RunConfig) -> Transport:
    name = config.weights.transport
    if name == "auto":
        name = "inproc" if config.rollout.engine in EMBEDDED else "shm"
    return plugins.build("transports", name, where="weights.transport")  # type: ignore[no-any-return]
