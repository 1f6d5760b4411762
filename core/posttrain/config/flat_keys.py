"""Flat keys that users of other trainers know, and what answers each here: hints for unknown keys, never aliases.

`FLAT_KEYS` leads to a path of ours; `ABSENT` and `FAMILIES` say why there is none and what to do instead.
"""

from __future__ import annotations

import re

_OBJECTIVE = (
    "use_ppo_clip",
    "clip_low",
    "clip_high",
    "clip_ratio_c",
    "use_tis",
    "tis_mode",
    "tis_cap",
    "tis_floor",
    "seq_is_masking",
    "seq_is_mask_low",
    "seq_is_mask_high",
    "advantage_norm",
    "kl_estimator",
    "entropy_coef",
    "kl_coef",
    "sapo_tau_pos",
    "sapo_tau_neg",
    "loss_aggregation",
    "beta",
    "label_smoothing",
    "loss_type",
    "nft_weight",
    "nft_eps",
)

FLAT_KEYS: dict[str, str] = {
    **{key: f"rl.objective.{key}" for key in _OBJECTIVE},
    "algorithm": "rl.objective.name",
    "objective": "rl.objective.name",
    "ppo_clip_ref_logprobs": "rl.objective.ppo_clip_ref_logprobs (old, rollout or auto: what is called batch elsewhere is old)",
    "kl_penalty_tau": "rl.objective.kl_coef (towards the frozen start of the run, not towards the rollout policy)",
    "dr_grpo_loss_agg_mode": "rl.objective.loss_aggregation (token for token_mean, constant for token_sum_norm)",
    "dr_grpo_aggregation": "rl.objective.loss_aggregation (token for token_mean, constant for token_sum_norm)",
    "entropy_chunk_size": "rl.logprob_chunk_tokens",
    "model_name": "model.name_or_path",
    "model_dtype": "rl.master_dtype",
    "master_dtype": "rl.master_dtype",
    "mixed_precision_dtype": "rl.param_dtype",
    "chat_template": "model.chat_template",
    "trust_remote_code": "model.trust_remote_code",
    "gradient_checkpointing": "rl.gradient_checkpointing",
    "megatron_gradient_checkpointing": "rl.gradient_checkpointing",
    "group_size": "rl.group_size",
    "number_of_steps": "rl.steps",
    "steps": "rl.steps",
    "number_of_minibatches": "rl.mini_batch_per_replica (completions per optimizer step: the batch divided by the number)",
    "prompts_batch_size_for_trainer": "rl.batch_per_replica (completions, not prompts: prompts times rl.group_size)",
    "megatron_global_batch_size": "rl.batch_per_replica (completions, not prompts)",
    "discard_group_zero_advantage": "rl.discard_group_zero_advantage",
    "filter_overlong": "rl.filter_overlong",
    "overlong_penalty_factor": "rl.overlong_penalty_factor (of a whole episode, and never more than the factor)",
    "overlong_buffer_tokens": "rl.overlong_buffer_tokens",
    "filter_gibberish": "rl.filter_gibberish",
    "gibberish_token_threshold": "rl.gibberish_token_threshold (null: by the size of the vocabulary)",
    "gibberish_logprob_offset": "rl.gibberish_logprob_offset (below -ln of the model's own vocabulary, not below -11.5)",
    "filter_repetition": "rl.filter_repetition",
    "repetition_compression_threshold": "rl.repetition_compression_threshold",
    "seq_len": "rollout.max_model_len (rows are never cut) and rl.micro_batch_tokens",
    "learning_rate": "rl.optimizer.lr",
    "lr": "rl.optimizer.lr",
    "weight_decay": "rl.optimizer.weight_decay",
    "grad_clip": "rl.optimizer.grad_clip (null, not 0, for no clipping)",
    "lr_scheduler": "rl.lr_scheduler.name",
    "warmup_steps": "rl.lr_scheduler.warmup_steps",
    "min_lr_ratio": "rl.lr_scheduler.min_lr_ratio",
    "max_async_rollout": "rollout.max_async_rollout",
    "max_off_policy_steps": "rollout.max_off_policy_steps",
    "temperature": "rollout.temperature",
    "enable_thinking": "rollout.enable_thinking",
    "top_p": "validation.top_p (training samples from the whole distribution)",
    "max_tokens": "rollout.max_tokens",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_concurrent_prompts_per_server": "rollout.max_num_seqs (completions decoded together, not prompts)",
    "max_num_batched_tokens": "rollout.options.engine_args.max_num_batched_tokens",
    "vllm_scheduling_policy": "rollout.options.engine_args.scheduling_policy",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "inference_tensor_parallel_size": "rollout.tensor_parallel_size",
    "inference_base_port": "rollout.base_port",
    "inference_num_workers": "grid.shapes.rollout (a list: [replicas, ranks])",
    "trainer_num_workers": "grid.shapes.policy (a list: [replicas, ranks])",
    "weight_broadcast_bucket_mb": "weights.bucket_bytes (bytes, not MB)",
    "weight_broadcast_mode": "weights.transport",
    "checkpoint_every": "checkpoint.every (a number of steps; 0: only the last)",
    "checkpoint_keep_last": "checkpoint.keep_last",
    "checkpoint_keep_every": "checkpoint.keep_every",
    "eval_every": "evals (the key every of an entry), or validation.every",
    "eval_before_training": "evals (the key before of an entry, true unless it says otherwise)",
    "eval_after_training": "evals (the key after of an entry, true unless it says otherwise)",
    "rollout_block_size": "tracking.rollouts_every (steps between rollout files)",
    "use_wandb": "hooks (a list of trackers: [{name: wandb}])",
    "wandb_project": "hooks (an option of the entry: [{name: wandb, options: {project: NAME}}])",
    "wandb_run_name": "name",
    "wandb_tags": "tracking.tags (a mapping, written to provenance.json)",
    "env_worker_pool_size": "rollout.reward_workers",
    "ray_placement_timeout_s": "grid.start_timeout_s",
    "ray_broadcast_init_timeout_s": "weights.stage_timeout_s",
    "train_backend": "model_backend (hf, the only one)",
    "backend": "grid.backend",
}
"""Flat key → path here, with a note in parentheses where the meaning or the unit differs."""

_SLOTS = "a slot is one sample, always: rollout.max_num_seqs decode together, and loop.commit_order=arrival fills them"

ABSENT: dict[str, str] = {
    "debug": "there is no debug mode; --dry-run checks a config without training, --traceback shows where an error came from",
    "tis_logprob_clamp": "log-ratios are always clamped to ±20",
    "pad_to_multiple_of": "rows are sorted by length and padded to the longest of their micro-batch only",
    "fsdp_context_parallel_size": "a sequence lies on one rank; there is no context parallelism",
    "enable_prompt_prefetch": "prompts are read and formatted by a loop of their own, with nothing to set",
    "prompt_prefetch_buffer_size": "prompts are read and formatted by a loop of their own, with nothing to set",
    "enable_individual_sample_lanes": _SLOTS,
    "free_lane_after_generation": f"scoring never holds an engine's slot; {_SLOTS}",
    "eager_prepare_resources": "an environment prepares what it needs when it is built",
    "interleaved_rollouts": "token ids are kept from turn to turn always; rollout.keep_history_verbatim says what becomes of a "
    "history that the template rewrites",
    "inference_host": "engines listen on no address, under Ray neither, which places them; agents ask on loopback, from "
    "rollout.base_port on",
    "weight_broadcast_free_grad_buffers": "gradients are always freed before a publication, so there is nothing to set",
    "checkpoint_save_training_state": "a checkpoint always holds the whole state of the training",
    "resume_from_checkpoint": "it is a flag: posttrain train --resume RUN",
    "checkpoint_dir": "checkpoints lie in RUN/checkpoints; the folder for runs is a flag: --run FOLDER",
    "log_dir": "logs lie in the run directory, RUN/logs; the folder for runs is a flag: --run FOLDER",
    **dict.fromkeys(
        ("enable_sleep_mode", "enable_cpu_offload", "enable_layerwise_offload", "custom_pipeline_args"),
        "an engine that takes weight updates keeps its weights in place",
    ),
    "track_gpu_events": "what each role did when is always recorded, in the run's events.jsonl",
    "enable_vllm_tracing": "the engine's requests are not traced",
    "otlp_receiver_port": "the engine's requests are not traced",
}
"""Flat key → why no path answers it, and what does."""

FAMILIES: dict[str, str] = {
    "megatron_": "the policy is a Hugging Face model under FSDP2 (grid.dp_shard, grid.dp_replicate), not Megatron",
    "ray_": "grid.backend=ray hosts the roles in Ray, with what is under grid; the cluster is the one of RAY_ADDRESS, or one "
    "that posttrain launch ray starts",
    "wandb_": "what the hook wandb can be told is in its options, as hooks=[{name: wandb, options: {project: NAME}}]",
    "weight_broadcast_": "engines pull weights as snapshots; what can be set is under weights",
    "eval_": "evals run on the run's own engines, behind what trains; what can be set is in the entries of evals",
    "event_": "events.jsonl is written as things happen, with nothing to set",
    "system_metrics_": "the machine's load is not recorded; metrics.jsonl has the times of each step",
    "torch_memory_": "memory is not sampled; metrics.jsonl has the times of each step",
    "metrics_logger_": "metrics.jsonl has one line for each batch step",
}
"""The same for keys by their first letters."""

ENTRY_KEYS: dict[str, str] = {
    "kwargs": "the key here is options",
    "reward_min": "the key here is reward_range=[MIN,MAX]: rewards in it are 0 to 1 in training",
    "reward_max": "the key here is reward_range=[MIN,MAX]: rewards in it are 0 to 1 in training",
    "eval_every": "it is a key of the entries of evals: every",
    "num_samples": "it is a key of the entries of evals: prompts (rows that are asked)",
    "pass_k": "it is a key of the entries of evals: k (a list, each below samples)",
    "separate_eval_samples": "write an entry of evals with split=holdout: its prompts are kept out of training",
}
"""Keys of an entry of a list of environments, with the whole hint."""

EVAL_KEYS: dict[str, str] = {
    "eval_every": "the key here is every",
    "num_samples": "the key here is prompts (rows that are asked); samples are the completions of each",
    "n": "the key here is samples",
    "pass_k": "the key here is k (a list, each below samples)",
    "pass_at_k": "the key here is k (a list, each below samples): it gives pass@k and pass^k",
    "separate_eval_samples": "write split=holdout and prompts=N: these rows are kept out of training",
    "eval_before_training": "the key here is before",
    "eval_after_training": "the key here is after",
    "holdout": "write split=holdout and prompts=N: these rows are kept out of training",
    "weight": "leave it out: an eval asks each of its prompts",
    "reward_range": "leave it out: an eval tells rewards as the environment gives them",
    "reward_min": "leave it out: an eval tells rewards as the environment gives them",
    "reward_max": "leave it out: an eval tells rewards as the environment gives them",
}
"""The same for an entry of `evals`, before those."""


def renamed(key: str, value: str = "") -> str:
    """The hint for an unknown top-level key, with the value as typed where the unit is the same; empty for other keys."""
    key = key.replace("-", "_")
    path = FLAT_KEYS.get(key)
    if path is not None:
        return f"the path here is {path}" + (f"={value}" if value and "(" not in path and " and " not in path else "")
    reason = ABSENT.get(key) or next((text for prefix, text in FAMILIES.items() if key.startswith(prefix)), "")
    return f"leave it out: {reason}" if reason else ""


def renamed_entry(path: str) -> str:
    """The hint for an unknown key of an entry of `environments` or `evals`; empty for other paths."""
    match = re.fullmatch(r"(environments|evals)\[\d+\]\.(\w+)", path)
    if not match:
        return ""
    known = ENTRY_KEYS | EVAL_KEYS if match[1] == "evals" else ENTRY_KEYS
    return known.get(match[2], "")
