"""What is made ready and checked before a model loads; a dry run is this and no more.

In the order of its cost: the objective first, then the optimizer's dependencies, the environments, what the transport of the
weights needs, the data, the tokenizer, and what the engine would refuse to start with. Nothing is started, no weights are read.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from posttrain import plugins
from posttrain.config.entries import label_of
from posttrain.config.fit import refuse_misfits
from posttrain.config.schema import NO_ENGINE
from posttrain.evals.build import build_evals
from posttrain.evals.heldout import refuse_eval_rows
from posttrain.loop.model_folder import made_folder, model_folder
from posttrain.loop.pairs import check_pairs
from posttrain.loop.states import origins, training_keepers
from posttrain.loop.validation import held_out_draws, refuse_held_out
from posttrain.placement.grid import transport_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Draw, PromptSampler, Source
    from posttrain.data.environment import Environment
    from posttrain.data.packer import DataPacker
    from posttrain.evals.build import Eval
    from posttrain.hooks import RunHooks
    from posttrain.objective.objective import Objective
    from posttrain.plugins.origin import Origin
    from posttrain.plugins.state import Keeper
    from posttrain.rollout.engine import Engine


@dataclass(frozen=True, slots=True)
class Prepared:
    """The parts of a run that need no weights.

    model, packer   None when `model.factory` has not made the model yet and was not to
    engine          not started; None without a model, and where completions come with the data
    keepers         what training depends on and keeps a state
    evals           with their rows, none of which trains
    origins         where the plug-ins come from
    """

    objective: Objective
    environments: dict[str, Environment]
    sampler: PromptSampler
    held_out: list[Draw]
    model: str | None
    packer: DataPacker | None
    engine: Engine | None
    hooks: RunHooks
    keepers: list[Keeper]
    evals: list[Eval] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)


def prepare(
    config: RunConfig, *, root: Path, logs: Path, say: Callable[[str], None], make_model: bool = True
) -> Prepared:
    """Everything up to the policy. root: folder for runs. logs: of the engine. Raises the documented errors of each part.

    make_model: let `model.factory` make its model when no earlier run did.
    """
    from posttrain.data.dataset import build_sampler
    from posttrain.hooks import build_hooks
    from posttrain.policy.optimizer import check_optimizer

    objective = build_run_objective(config)
    for note in [*objective.notes, *check_optimizer(config.rl)]:
        say(note)
    hooks = build_hooks(config.hooks)
    environments = build_environments(config)
    made: dict[str, Any] = {"rl.objective.name": objective.algorithm}
    made |= {f"environments[{i}].name": env for i, env in enumerate(environments.values())}
    refuse_misfits(config, made)  # before data is read
    check_transport(config)
    sampler = build_sampler(config, environments)
    offline = config.rollout.engine == NO_ENGINE
    held_out = held_out_draws(sampler.sources, environments, config.validation.prompts)
    evals = build_evals(config, environments, sampler.sources)
    bad_rows = config.rl.data.max_bad_rows > 0
    refuse = refuse_eval_rows(evals, config, environments, refuse_held_out(held_out, environments, bad_rows=bad_rows))
    sampler.watch(None if offline else refuse)
    for source in sampler.sources:
        for note in getattr(source.rows, "notes", ()):
            say(f"{source.env}: {note}")
    if offline:
        for note in check_pairs(sampler.sources, held_out, cast("Any", environments)):
            say(note)
    path = model_folder(config.model, root, say) if make_model else made_folder(config.model, root)
    packer = None if path is None else build_packer(config, path)
    for note in asked_as_text(packer, environments, sampler.sources):
        say(note)
    engine = None if offline or path is None or packer is None else build_engine(config, path, packer, logs)
    refuse_misfits(config, made | {"rl.data.packer": packer, "rollout.engine": engine})
    keepers = training_keepers(config, objective, environments, packer)
    for keeper in keepers:
        keeper.save()  # a state that no checkpoint can hold is told now, not after the first hours
    came = origins(config, objective, environments, packer, engine, hooks, evals)  # now: their files may be edited during the run
    return Prepared(objective, environments, sampler, held_out, path, packer, engine, hooks, keepers, evals, came)


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


def check_transport(config: RunConfig) -> None:
    """Raise what can be told of the transport without a start: `Transport.preflight`. It is built where the weights are."""
    if config.rollout.engine != NO_ENGINE:
        chosen = plugins.resolve("transports", transport_of(config), where="weights.transport")
        getattr(chosen, "preflight", lambda: None)()  # a factory has none


def build_environments(config: RunConfig) -> dict[str, Environment]:
    """The environments by label, in the order of the config."""
    return {
        label_of(entry): plugins.build("envs", entry.name, entry.options, where=f"environments[{position}]")
        for position, entry in enumerate(config.environments)
    }


def build_packer(config: RunConfig, path: str) -> DataPacker:
    """The packer that `rl.data.packer` names, else the one of the model's type; set up for the model and for `rollout`."""
    packer = _chosen_packer(config, path)
    thinking = config.rollout.enable_thinking
    packer.template_variables = {} if thinking is None else {"enable_thinking": thinking}
    packer.thinking_prefix = config.rollout.thinking_prefix
    return packer


def _chosen_packer(config: RunConfig, path: str) -> DataPacker:
    from posttrain.data.packer import PAIR_PACKER, TEXT_PACKER, init_data_packer, load_packer

    template, remote = config.model.chat_template, config.model.trust_remote_code
    if config.rl.data.packer is None:
        default = PAIR_PACKER if config.rollout.engine == NO_ENGINE else TEXT_PACKER
        return init_data_packer(path, chat_template=template, trust_remote_code=remote, default=default)
    return load_packer(config.rl.data.packer).setup(path, chat_template=template, trust_remote_code=remote)


def asked_as_text(packer: DataPacker | None, environments: Mapping[str, Environment], sources: Sequence[Source]) -> list[str]:
    """A line for each environment that would ask chat messages and asks plain text, as the model has no chat template."""
    from posttrain.data.environment import ChatOrText

    if packer is None or packer.chats:
        return []
    prompts: dict[str, Any] = {}
    for source in sources:
        with contextlib.suppress(Exception):  # a row that cannot be asked about is told when it is drawn
            prompts[source.env] = environments[source.env].format_prompt(source.rows[0])
    return [
        f"{env}: prompts are plain text, as the model has no chat template (style=text says so; model.chat_template gives it one)"
        for env, prompt in prompts.items() if isinstance(prompt, ChatOrText)
    ]  # fmt: skip


def build_engine(config: RunConfig, path: str, packer: DataPacker, logs: Path) -> Engine:
    """The engine of this process's rollout body, not started. Raises what can be told without a start: `Engine.preflight`."""
    from posttrain.data.packer import eos_token_ids, stop_token_ids
    from posttrain.rollout.engine import EngineSpec

    r = config.rollout
    spec = EngineSpec(
        model_path=path,
        dtype=r.dtype,
        max_model_len=r.max_model_len,
        max_num_seqs=r.max_num_seqs,
        eos_token_ids=(eos_token_ids if r.ignore_eos else stop_token_ids)(path, packer.tokenizer),
        trust_remote_code=config.model.trust_remote_code,
        stop_strings=bool(r.stop),
        seed=config.seed,
        tensor_parallel_size=r.tensor_parallel_size,
        gpu_memory_utilization=r.gpu_memory_utilization,
        base_port=r.base_port,
        start_timeout_s=r.start_timeout_s,
        log_dir=logs,
    )
    engine: Engine = plugins.build("engines", r.engine, r.options, where="rollout.options", spec=spec)
    engine.preflight(spec, engine.options)
    return engine
