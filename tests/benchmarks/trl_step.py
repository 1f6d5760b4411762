"""One GRPO step of TRL's `GRPOTrainer`: prints one JSON line per micro-batch size. Started by bench_step.py.

The work is that of `bench_step.py`: 8 prompts x 8 completions of exactly 32 tokens, fp32, fused AdamW, token-mean clipped loss
without KL, one optimizer step per batch, no gradient checkpointing. Rewards are a fixed pattern that makes every group
informative. A step is measured from one optimizer step's end to the next one's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from bench_step import GROUP, LR, PROMPTS, TOKENS
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Seconds between the ends of consecutive optimizer steps; the first interval holds the start-up and is not one."""

    def __init__(self) -> None:
        self.last: float | None = None
        self.seconds: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
        self.last = now


def rewards(completions: list[Any], **_: Any) -> list[float]:
    """1, 0, 1, 0, …: every group of 8 disagrees."""
    return [float(index % 2) for index in range(len(completions))]


def measure(model_path: str, micro: int, steps: int, chat: bool) -> dict[str, Any]:
    batch = GROUP * len(PROMPTS)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", per_device_train_batch_size=micro, gradient_accumulation_steps=batch // micro, max_steps=steps + 1,
        num_generations=GROUP, max_completion_length=TOKENS, generation_kwargs={"min_new_tokens": TOKENS}, temperature=1.0,
        beta=0.0, num_iterations=1, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, learning_rate=LR, max_grad_norm=1.0,
        lr_scheduler_type="constant", optim="adamw_torch_fused", disable_tqdm=True, logging_steps=1, seed=0,
    )  # fmt: skip
    clock = StepClock()
    prompts = [[{"role": "user", "content": text}] if chat else text for text in PROMPTS]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32),
        args=config,
        reward_funcs=rewards,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model_path),
        callbacks=[clock],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    assert all(entry["completions/mean_length"] == TOKENS for entry in logs), "a completion stopped early"
    assert all(entry["frac_reward_zero_std"] == 0 for entry in logs), "a group was uninformative"
    return {"micro": micro, "median_s": statistics.median(clock.seconds), "seconds": clock.seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--micro", type=int, nargs="+", default=[8, 16, 64])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for size in arguments.micro:
        print(json.dumps(measure(arguments.model, size, arguments.steps, arguments.chat)), flush=True)
