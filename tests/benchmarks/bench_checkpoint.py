"""What a checkpoint costs the loop: the copy that training waits for, and the writing that it does not.

    python tests/benchmarks/bench_checkpoint.py               # a random model of SmolLM2-135M's shapes, fp32 with AdamW moments
    python tests/benchmarks/bench_checkpoint.py --layers 4 --rounds 2

Each round trains a step alone, takes a snapshot, and trains while a thread writes it (fsynced and renamed, as the loop does);
then it takes another and writes that with nothing beside it. Medians count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from posttrain.config.schema import ModelConfig, OptimizerConfig, RLConfig, RunConfig
from posttrain.loop import checkpoint
from posttrain.loop.prepare import build_run_objective
from posttrain.policy.policy import Policy
from posttrain.policy.rows import Row

LENGTH, GROUP = 128, 8


def make_policy(layers: int, folder: Path) -> Policy:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    rl = RLConfig(
        steps=1000, group_size=GROUP, batch_per_replica=GROUP, master_dtype="float32", param_dtype="float32",
        optimizer=OptimizerConfig(lr=1e-6),
    )  # fmt: skip
    config = RunConfig(model=ModelConfig(name_or_path=str(folder)), rl=rl)
    return Policy(config, str(folder), build_run_objective(config))


def make_rows() -> list[Row]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 49152, (GROUP, LENGTH), generator=draw).tolist()
    mask, logprobs = [False] * 16 + [True] * (LENGTH - 16), [0.0] * 16 + [-10.0] * (LENGTH - 16)
    return [
        Row(input_ids=row, mask=mask, rollout_logprobs=logprobs, advantage=(-1.0) ** number, group="g", id=f"g/{number}")
        for number, row in enumerate(ids)
    ]


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    measured: dict[str, list[float]] = {name: [] for name in ("step", "snapshot", "step beside", "write beside", "write")}
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as root:
        policy, rows = make_policy(asked.layers, Path(root) / "model"), make_rows()
        policy.train_step(rows)  # makes the moments
        for number in range(asked.rounds):
            measured["step"].append(seconds(lambda: policy.train_step(rows)))
            began = time.perf_counter()
            snapshot = policy.snapshot()
            measured["snapshot"].append(time.perf_counter() - began)

            def write(snapshot: Callable[[Path], None] = snapshot, number: int = number) -> None:
                measured["write beside"].append(seconds(lambda: checkpoint.write(Path(root) / "beside", number, snapshot, {})))

            writing = threading.Thread(target=write)
            del snapshot
            writing.start()
            measured["step beside"].append(seconds(lambda: policy.train_step(rows)))
            writing.join()
            del write
            alone = policy.snapshot()
            measured["write"].append(
                seconds(lambda alone=alone, number=number: checkpoint.write(Path(root) / "alone", number, alone, {}))  # type: ignore[misc]
            )
            for name in ("beside", "alone"):
                checkpoint.prune(Path(root) / name, keep_last=1, keep_every=None)
        newest = checkpoint.find(Path(root) / "alone")[-1]
        size = sum(path.stat().st_size for path in newest.policy.iterdir())
    print(f"{sum(p.numel() for p in policy.shards) / 1e6:.1f} M parameters, {size / 2**20:,.0f} MiB, {asked.rounds} rounds")
    for name, values in measured.items():
        print(f"{name:13} {statistics.median(values):7.2f} s   ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
