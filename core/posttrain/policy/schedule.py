"""The learning rate as a pure function of the update's number: nothing to save, so a resumed run continues the same curve.

    lr = config.rl.optimizer.lr * lr_factor(config.rl.lr_scheduler, update, total_updates)
"""

from __future__ import annotations

import math

from posttrain.config.schema import LRSchedulerConfig


def lr_factor(config: LRSchedulerConfig, update: int, total_updates: int) -> float:
    """The share of the peak learning rate that optimizer step `update` takes.

    update: optimizer steps done before this one, 0 for the first; skipped steps count.   total_updates: of the whole run.
    With W warm-up steps, floor ρ and p = min((update - W) / max(total_updates - W, 1), 1):
    `none` 1 throughout; the others (update + 1) / W during the warm-up, so that its first step moves and its last one is at
    the peak, then `constant` 1, `linear` 1 - (1 - ρ) p, `cosine` ρ + (1 - ρ)(1 + cos πp) / 2. Past the end it stays put.
    """
    if config.name == "none":
        return 1.0
    warmup, floor = config.warmup_steps, config.min_lr_ratio
    if update < warmup:
        return (update + 1) / warmup
    progress = min((update - warmup) / max(total_updates - warmup, 1), 1.0)
    if config.name == "linear":
        return 1.0 - (1.0 - floor) * progress
    if config.name == "cosine":
        return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0
    return 1.0
