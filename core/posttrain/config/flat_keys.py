"""Flat keys that users of other trainers know, and their paths here: hints for unknown keys, never aliases."""

from __future__ import annotations

_OBJECTIVE = (
    "use_ppo_clip",
    "clip_low",
    "clip_high",
    "clip_ratio_c",
    "ppo_clip_ref_logprobs",
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
    "kl_penalty_tau": "rl.objective.kl_coef",
    "dr_grpo_aggregation": "rl.objective.loss_aggregation",
    "model_name": "model.name_or_path",
    "chat_template": "model.chat_template",
    "group_size": "rl.group_size",
    "number_of_steps": "rl.steps",
    "steps": "rl.steps",
    "number_of_minibatches": "rl.mini_batch_per_replica (completions per optimizer step: the batch divided by the number)",
    "prompts_batch_size_for_trainer": "rl.batch_per_replica (completions, not prompts: prompts times rl.group_size)",
    "discard_group_zero_advantage": "rl.discard_group_zero_advantage",
    "seq_len": "rollout.max_model_len (rows are never cut) and rl.micro_batch_tokens",
    "learning_rate": "rl.optimizer.lr",
    "lr": "rl.optimizer.lr",
    "weight_decay": "rl.optimizer.weight_decay",
    "grad_clip": "rl.optimizer.grad_clip",
    "lr_scheduler": "rl.lr_scheduler.name",
    "warmup_steps": "rl.lr_scheduler.warmup_steps",
    "min_lr_ratio": "rl.lr_scheduler.min_lr_ratio",
    "master_dtype": "rl.master_dtype",
    "mixed_precision_dtype": "rl.param_dtype",
    "gradient_checkpointing": "rl.gradient_checkpointing",
    "max_async_rollout": "rollout.max_async_rollout",
    "max_off_policy_steps": "rollout.max_off_policy_steps",
    "temperature": "rollout.temperature",
    "top_p": "validation.top_p (training samples from the whole distribution)",
    "max_tokens": "rollout.max_tokens",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "inference_tensor_parallel_size": "rollout.tensor_parallel_size",
    "inference_base_port": "rollout.base_port",
    "inference_num_workers": "grid.shapes.rollout",
    "trainer_num_workers": "grid.shapes.policy",
    "weight_broadcast_bucket_mb": "weights.bucket_bytes (bytes, not MB)",
    "checkpoint_every": "checkpoint.every",
    "checkpoint_keep_last": "checkpoint.keep_last",
    "checkpoint_keep_every": "checkpoint.keep_every",
    "eval_every": "validation.every",
    "env_worker_pool_size": "rollout.reward_workers",
    "backend": "grid.backend",
}
"""Flat key → path here, with a note in parentheses where the unit differs."""


def renamed(key: str, value: str = "") -> str:
    """The hint for an unknown top-level key, with the value as typed where the unit is the same; empty for other keys."""
    path = FLAT_KEYS.get(key.replace("-", "_"))
    if path is None:
        return ""
    return f"the path here is {path}" + (f"={value}" if value and "(" not in path else "")
