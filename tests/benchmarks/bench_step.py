"""A GRPO step of posttrain against one of TRL, same model, prompts, lengths, dtype and optimizer, in one run.

    python tests/benchmarks/bench_step.py                     # the tiny model, hf engine
    python tests/benchmarks/bench_step.py --model smollm2     # SmolLM2-135M, vllm engine (and hf); takes half an hour

64 completions (8 prompts x 8) of exactly 32 tokens, fp32, fused AdamW, one optimizer step per batch. TRL is run with
micro-batches of 8, 16 and 64, and the best counts. TRL is installed by `make bench` (requirements/bench.txt); without it only
our side is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from posttrain import Environment, EpisodeState

GROUP, TOKENS, LR = 8, 32, 1e-6
PROMPTS = [
    "Name a river and say where it flows.",
    "What do you need to bake bread?",
    "Why is the sky blue in the daytime?",
    "Give a short rule for sharing a cake.",
    "How would you describe snow to a child?",
    "Which planets are larger than the Earth?",
    "What is the difference between a lake and a sea?",
    "Tell me how a bicycle stays upright.",
]
PHASES = ("step_s", "generate_s", "rollout_s", "forward_backward_s", "optimizer_s", "train_s", "sync_s")
MODELS = {"tiny": "posttrain_experiments.tiny:build", "smollm2": "posttrain_experiments.smollm2_weights:build"}


class Alternating(Environment):
    """The prompts above; rewards 1, 0, 1, 0, …, so that every group is informative and scoring costs nothing."""

    def __init__(self, options: Any = None, *, chat: bool = True) -> None:
        super().__init__(options)
        self.chat = chat

    def dataset(self, split: str) -> list[dict[str, Any]]:
        return [{"id": str(number), "text": text} for number, text in enumerate(PROMPTS)]

    def format_prompt(self, task: Mapping[str, Any]) -> Any:
        return [{"role": "user", "content": task["text"]}]

    def compute_reward(self, state: EpisodeState) -> float:
        assert state.trajectory is not None
        return float(int(state.trajectory.sample_id.rsplit("/", 1)[1]) % 2)


def ours(model: str, engine: str, steps: int, threads: int, root: Path) -> dict[str, Any]:
    """Median seconds of a step and of its phases; the first step, which warms up, is left out."""
    from posttrain.config.load import load_config
    from posttrain.loop.run import train
    from posttrain.tracking.metrics import read_metrics

    done = train(
        load_config([
            f"model.factory={MODELS[model]}", "rl.objective.name=grpo", f"rl.steps={steps + 1}", "rl.group_size=8",
            "rl.batch_per_replica=64", f"rl.optimizer.lr={LR}", "rl.optimizer.impl=fused", "rl.micro_batch_tokens=1024",
            f"environments=[{{name: '{__file__}:Alternating'}}]", f"rollout.engine={engine}", f"rollout.max_tokens={TOKENS}",
            "rollout.ignore_eos=true", "rollout.max_model_len=256", "validation.prompts=0", "tracking.display=none",
            f"grid.threads={threads}",
        ]),
        run_dir=root,
    )
    rows = read_metrics(done.run)[1:]
    assert all(row["tokens/trained"] == 64 * TOKENS for row in rows), "a completion stopped early"
    medians = {name: statistics.median(row[f"time/{name}"] for row in rows) for name in PHASES}
    work = ("time/generate_s", "time/forward_backward_s", "time/optimizer_s")
    shares = [1 - sum(row[name] for name in work) / row["time/step_s"] for row in rows]
    return {**medians, "overhead_share": statistics.median(shares)}


def model_path(model: str, root: Path) -> str:
    from posttrain.config.schema import ModelConfig
    from posttrain.loop.model_folder import model_folder

    return model_folder(ModelConfig(name_or_path=model, factory=MODELS[model]), root)


def theirs(path: str, steps: int, threads: int) -> list[dict[str, Any]]:
    script = str(Path(__file__).with_name("trl_step.py"))
    command = [sys.executable, script, "--model", path, "--steps", str(steps), "--threads", str(threads), "--chat"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    if out.returncode:
        raise SystemExit(f"TRL failed:\n{out.stderr[-2000:]}")
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith('{"micro"')]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="tiny")
    parser.add_argument("--engines", nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=None, help="default: 20 for the tiny model, 5 for SmolLM2")
    parser.add_argument("--threads", type=int, nargs="+", default=None)
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    path = model_path(args.model, root)
    engines = args.engines or (["hf"] if args.model == "tiny" else ["vllm", "hf"])
    steps = args.steps or (20 if args.model == "tiny" else 5)
    mine, other = [], []
    for threads in args.threads or ([1, 2] if args.model == "tiny" else [2]):
        for engine in engines:
            got = ours(args.model, engine, steps, threads, root)
            mine.append(got["step_s"])
            print(f"posttrain {engine} threads={threads}: " + "  ".join(f"{k} {v:.3f}" for k, v in got.items()), flush=True)
        if find_spec("trl") is None:
            print("TRL is not installed (requirements/bench.txt): only our side was timed")
            continue
        for result in theirs(path, steps, threads):
            other.append(result["median_s"])
            print(f"TRL micro={result['micro']} threads={threads}: step_s {result['median_s']:.3f}", flush=True)
    if other:
        print(f"ratio of the best: {min(mine):.3f} s / {min(other):.3f} s = {min(mine) / min(other):.2f}")


if __name__ == "__main__":
    main()
