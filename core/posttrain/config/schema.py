"""Every key of a run, as frozen dataclasses. This file is the reference; `docs/reference/config.md` is generated from it.

The comment behind a field is its help text. `MISSING` marks a key that has no default. Fields typed `Plugin` take a mapping
whose `name` selects a plug-in and whose other entries are that plug-in's own `Options`, checked as strictly as the rest.
Nothing here imports torch; rules that join several keys are in `config/rules.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MISSING: Any = "???"

NO_ENGINE = "none"
"""The `rollout.engine` of a run that samples nothing: its completions come with the data."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A plug-in by name with its options: `{name: grpo, clip_low: 0.2}`."""

    name: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    name_or_path: str = MISSING  # Hugging Face folder or name; made by `factory` when that is set
    factory: str | None = None  # dotted path of a function (out: Path, **kwargs) that writes a Hugging Face folder
    factory_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the factory
    chat_template: str | None = None  # a Jinja chat template, or the path of a file that holds one
    attn_implementation: str = "sdpa"  # attention of the policy's forward; another needs rl.shared_prefix=false
    trust_remote_code: bool = False  # run code that the model folder brings


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "adamw_master", "fusedadam"] = "adamw"  # adamw_master: fp32 master copy inside, for bf16 storage
    impl: Literal["auto", "fused", "foreach", "forloop"] = "auto"  # which torch kernel; auto takes fused where it exists
    lr: float = 1e-6  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # Adam's decay rates
    eps: float = 1e-8  # Adam's epsilon
    weight_decay: float = 0.0  # decoupled weight decay
    grad_clip: float | None = 1.0  # global gradient norm; null: no clipping (the norm is still measured)


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    name: Literal["none", "constant", "linear", "cosine"] = "constant"  # shape after the warm-up; none ignores the warm-up too
    warmup_steps: int = 0  # optimizer steps of linear warm-up
    min_lr_ratio: float = 0.0  # floor, as a share of lr


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    factory: str | None = None  # dotted path of a function(**factory_kwargs) returning a dataset; default: the environments' own
    factory_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the factory
    packer: str | None = None  # packer plug-in name or dotted path of a zero-argument factory; default: by model_type
    shuffle: bool = True  # a seeded permutation per epoch; false: file order
    drop_last: bool = False  # drop the short last batch of an epoch instead of filling it from the next
    max_bad_rows: int = 0  # rows that cannot be asked about and are passed over; one more ends the run


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    steps: int = MISSING  # batch steps to train
    objective: Plugin = field(default_factory=lambda: Plugin(name="grpo"))  # algorithm, options: {name: grpo, clip_low: 0.2}
    group_size: int = 8  # completions per prompt
    batch_per_replica: int = 64  # completions of one batch step, over all rollout replicas; whole groups for each
    mini_batch_per_replica: int | None = None  # completions per optimizer step; null: one step per batch
    micro_batch_per_replica: int | None = None  # completions per forward and backward; null: by micro_batch_tokens
    micro_batch_tokens: int = 4096  # token budget of a micro-batch when micro_batch_per_replica is null
    logprob_chunk_tokens: int = 1024  # trained positions whose logits exist at once
    shared_prefix: bool = True  # compute a group's prompt once
    gradient_checkpointing: bool = False  # recompute activations in backward
    master_dtype: Dtype = "float32"  # storage of the parameters and moments
    param_dtype: Dtype = "float32"  # compute of the model's body (log-probs are always fp32)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    discard_group_zero_advantage: bool = True  # leave groups whose rewards agree out of the batch
    max_uninformative_batches: int = 20  # consecutive batches with nothing to learn before the run stops
    min_informative_groups: int = 0  # dynamic sampling: informative groups a batch must have; 0: off
    min_informative_groups_frac: float | None = None  # the same as a share of the batch's groups
    dynamic_sampling_max_extra_rollouts: int = 0  # extra rounds beyond the base draw
    dynamic_sampling_on_budget_exhausted: Literal["raise", "proceed"] = "raise"  # abort, or fill with tied groups
    overlong_penalty_factor: float = 0.0  # most that the reward of an answer near or past rollout.max_tokens loses; 0: off
    overlong_buffer_tokens: int = 256  # tokens before rollout.max_tokens over which that loss grows from 0
    filter_overlong: bool = False  # answers cut by the token limit train nothing
    filter_gibberish: bool = False  # answers with a rare token where it was less likely than a uniform draw train nothing
    gibberish_logprob_offset: float = 2.0  # nats below -ln(vocabulary) that such a token lies
    gibberish_token_threshold: int | None = None  # larger ids are rare tokens; null: vocabulary * 100,000 / 151,936, as for Qwen
    filter_repetition: bool = False  # answers that repeat themselves train nothing
    repetition_compression_threshold: float = 10.0  # bytes per zlib-compressed byte above which an answer repeats itself
    routing_replay: Literal["off", "rollout"] = "off"  # pin MoE routing to the engine's
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    engine: str = "hf"  # engine plug-in: hf (in this process) or vllm; none: completions come with the data (preference pairs)
    options: dict[str, Any] = field(default_factory=dict)  # the engine's own options
    dtype: Dtype = "float32"  # storage and compute of the engine
    max_tokens: int = 256  # completion length
    max_model_len: int = 1024  # prompt plus completion
    max_num_seqs: int = 64  # sequences decoded together
    temperature: float = 1.0  # of sampling; the trainer divides its logits by the same
    top_p: float = 1.0  # refused in training unless 1
    top_k: int = 0  # refused in training unless 0
    min_p: float = 0.0  # refused in training unless 0
    stop: tuple[str, ...] = ()  # texts that end a turn of the model, beside its EOS ids; the turn keeps them
    enable_thinking: bool | None = None  # what the chat template reads under this name; null: its default
    thinking_prefix: str = ""  # text that begins every turn of the model in a chat, such as "<think>\n"; it is not sampled
    keep_history_verbatim: bool = False  # where the template rewrites earlier turns: true keeps the ids, false splits the row
    ignore_eos: bool = False  # generate exactly max_tokens (benchmarks)
    gpu_memory_utilization: float = 0.9  # share of the device that vLLM may take
    tensor_parallel_size: int = 1  # ranks of one engine
    base_port: int = 8100  # where agents ask, on loopback; replicas: consecutive; no environment with an agent: no port
    max_async_rollout: int = 0  # batch steps that rollouts may run ahead; 0: strictly on-policy
    max_off_policy_steps: int = 8  # arrival: versions that a trajectory may lag before it is aborted
    start_timeout_s: float = 300.0  # deadline of an engine's start
    generate_timeout_s: float = 1800.0  # deadline of the completions of a cohort (logical) or of one prompt (arrival)
    env_timeout_s: float = 120.0  # deadline of an environment's answer to one turn of the model
    reward_timeout_s: float = 30.0  # deadline of one reward
    reward_workers: int | None = None  # processes that score synchronous rewards; null: one per CPU core, at most 8
    strict_rewards: bool = False  # stop the run at a reward that fails, instead of leaving its sample out


@dataclass(frozen=True, kw_only=True)
class ShapesConfig:
    policy: tuple[int, int] | None = None  # [replicas, ranks]
    rollout: tuple[int, int] | None = None  # [replicas, ranks]


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    backend: Literal["local", "ray"] = "local"  # who hosts the roles
    shapes: ShapesConfig = field(default_factory=ShapesConfig)
    ranks: int = 1  # rank width when shapes are not given
    num_replicas: int = 1  # rollout replicas when shapes are not given
    grouping: Literal["auto", "single", "per_role"] = "auto"  # roles in one process (local), or each in its own (ray)
    gpu_placement: Literal["colocated", "disaggregated"] = "colocated"  # whether roles share devices
    dp_replicate: int = 1  # HSDP replicas inside the policy's ranks
    dp_shard: int = 1  # FSDP shards inside the policy's ranks
    threads: int = 0  # torch threads of a process; 0: the machine's cores under local, 1 for a role under ray
    start_timeout_s: float = 300.0  # deadline of placing a role, of building the policy, under ray
    heartbeat_timeout_s: float = 60.0  # how long a role may be silent under ray before it counts as dead


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    name: str = MISSING  # environment plug-in
    label: str | None = None  # what its draws, metrics and states are called, no two alike; default: the name, without folders
    weight: float = 1.0  # share of the prompts
    reward_range: tuple[float, float] | None = None  # its rewards from here to there are 0 to 1 in training; null: as they are
    options: dict[str, Any] = field(default_factory=dict)  # the environment's own options


@dataclass(frozen=True, kw_only=True)
class HookConfig:
    name: str = MISSING  # hook plug-in: tensorboard, wandb, trackio, or one of your own
    options: dict[str, Any] = field(default_factory=dict)  # the hook's own options
    on_error: Literal["warn", "disable", "fail"] = "warn"  # when a call fails: say and count it; call it no more; end the run
    timeout_s: float = 60.0  # deadline of one call; a hook that misses it is called no more


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    every: int = 0  # batch steps between held-out validations; 0: only before the first and after the last
    prompts: int = 64  # held-out prompts; 0: no validation
    samples: int = 1  # completions per prompt
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # share of the probability that is sampled from; 1: all
    top_k: int = 0  # tokens that are sampled from; 0: all
    min_p: float = 0.0  # least probability, as a share of the largest; 0: any
    max_tokens: int | None = None  # default: rollout.max_tokens


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    name: str = MISSING  # environment plug-in, or the label of an entry of environments
    label: str | None = None  # what its results are called, no two alike; default: the name, without folders
    options: dict[str, Any] | None = None  # the environment's own; null: those of the entry of environments of this name
    split: Literal["test", "train", "holdout"] = "test"  # test: of a file without a split, all; holdout: train rows kept out
    prompts: int = 0  # rows that are asked, from the first on; 0: all
    samples: int = 1  # completions per prompt
    k: tuple[int, ...] = ()  # estimate pass@k and pass^k for these, each below samples
    correct_part: str | None = None  # part of the reward that says whether it is correct; null: correct if there is one, else all
    correct_at: float = 1.0  # least value of it that is correct
    temperature: float | None = None  # 0: greedy; null: greedy for one sample, rollout.temperature for several
    top_p: float = 1.0  # share of the probability that is sampled from; 1: all
    top_k: int = 0  # tokens that are sampled from; 0: all
    min_p: float = 0.0  # least probability, as a share of the largest; 0: any
    max_tokens: int | None = None  # default: rollout.max_tokens
    every: int = 0  # batch steps between evals while training; 0: none there
    before: bool = True  # before the first batch step
    after: bool = True  # after the last


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    transport: str = "auto"  # inproc, shm, nixl; auto: nixl under ray, else inproc for embedded engines and shm for others
    options: dict[str, Any] = field(default_factory=dict)  # the transport's own options
    bucket_bytes: int = 64 * 2**20  # largest piece of a publication
    canary_every: int = 50  # publications between canaries after the first; 0: only the first
    canary_max_fp32: float = 1e-4  # nats
    canary_mean_bf16: float = 0.1  # nats
    canary_max_bf16: float = 0.5  # nats
    stage_timeout_s: float = 120.0  # deadline of pulling and verifying one publication
    apply_timeout_s: float = 120.0  # deadline of pause, apply, reset and resume
    abort_timeout_s: float = 10.0  # deadline of stopping all lanes after a failure
    rebuild_timeout_s: float = 600.0  # deadline of a new engine in place of one whose update failed
    max_concurrent_lanes: int | None = None  # lanes that pull at once; null: all
    on_failure: Literal["raise", "rebuild_and_retry", "drop_lane"] = "raise"  # after a failed update, or the death of a replica
    verify_weight_values: bool = False  # compare bytes after the copies


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    commit_order: Literal["auto", "logical", "arrival"] = "auto"  # of draws or of completion; auto: by engine
    train_timeout_s: float = 3600.0  # deadline of a batch's optimizer steps; under ray also of a save or a load
    shutdown_timeout_s: float = 60.0  # deadline of closing engines and workers


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 0  # batch steps between checkpoints; 0: only the last step
    keep_last: int | None = 2  # newest checkpoints to keep; null: all
    keep_every: int | None = None  # also keep every multiple of this step


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    rollouts_every: int = 1  # batch steps between rollout files; 0: none
    display: Literal["auto", "live", "lines", "none"] = "auto"  # auto: live on a terminal, lines elsewhere
    tags: dict[str, str] = field(default_factory=dict)  # free labels, written to provenance.json


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run."""

    name: str = "run"  # prefix of the run directory
    seed: int = 0  # names every random draw
    model_backend: Literal["hf"] = "hf"  # model builder and packer family
    model: ModelConfig = field(default_factory=ModelConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    environments: tuple[EnvironmentConfig, ...] = ()  # what to train on: [{name: arithmetic, weight: 1.0, options: {}}]
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    evals: tuple[EvalConfig, ...] = ()  # what to measure before, while and after: [{name: math, samples: 8, k: [1, 4]}]
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hooks: tuple[HookConfig, ...] = ()  # trackers and other code of your own: [{name: tensorboard}]
