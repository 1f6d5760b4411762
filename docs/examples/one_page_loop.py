"""GRPO on one page: the library's parts as plain functions, in a loop that you can read from top to bottom and change.

    python docs/examples/one_page_loop.py                 # a tiny model learns sums in a minute or two on a CPU
    python docs/examples/one_page_loop.py --steps 3       # just to see it run

What `posttrain train` adds to this: configuration, run directory, checkpoints and resume, reward deadlines, validation and
vLLM. What it does not add is another algorithm: these are the same parts.

Shapes: N completions of a step, L tokens of a row, T trained tokens of a micro-batch, S sequences of it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import torch

import posttrain
from posttrain.data.dataset import PromptSampler, Source
from posttrain.data.environment import episode
from posttrain.data.packer import eos_token_ids
from posttrain.data.seeds import derive_seed
from posttrain.objective.groups import informative_rows
from posttrain.objective.objective import TokenInputs
from posttrain.policy.load import load_causal_lm
from posttrain.policy.module import PolicyModule
from posttrain.policy.rows import Row
from posttrain.rollout.engine import EngineSpec
from posttrain.types import Completion, Request, Sampling
from posttrain.weights.plane import WeightPlane
from posttrain_experiments import tiny

GROUP, PROMPTS, MAX_TOKENS, LR, SEED = 8, 32, 6, 3e-4, 0
PROBLEMS = {"largest": 19, "test_size": 80}  # sums of 0 to 19


async def main(steps: int, folder: Path | None = None) -> list[float]:
    """Train the model in `folder` (default: make one) for `steps` batch steps; returns the mean reward of each."""
    if folder is None:
        folder = Path(tempfile.mkdtemp()) / "model"
        tiny.build(folder, environment=PROBLEMS, seed=SEED)

    # The parts. Any of them could be yours: an environment, a packer, an algorithm, an engine.
    env = posttrain.load("envs", "arithmetic", **PROBLEMS)
    packer = posttrain.init_data_packer(str(folder))
    objective = posttrain.build_objective("grpo", group_size=GROUP)
    policy = PolicyModule(load_causal_lm(str(folder), torch.float32), shared_prefix=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR)
    sampler = PromptSampler([Source("arithmetic", env.dataset("train"))], seed=SEED)

    # An engine has no weights of its own: it serves what the plane published, and stamps every token with the version.
    spec = EngineSpec(str(folder), "float32", max_model_len=32, max_num_seqs=256, eos_token_ids=eos_token_ids(str(folder)))
    engine = posttrain.load("engines", "hf", spec=spec)
    await engine.start()
    config = posttrain.config.schema.WeightsConfig()
    plane = WeightPlane.local(engine, posttrain.load("transports", "inproc"), config, policy_weights(policy))
    await plane.sync(0)

    rewards_of_steps = []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        # 1. Rollouts: GROUP completions of each prompt, token ids in and out.
        draws = {draw.group_id: draw for draw in sampler.draw(PROMPTS)}
        prompts = {g: packer.get_rollout_input(env.format_prompt(draw.task))["prompt_ids"] for g, draw in draws.items()}
        requests = [
            Request(g, ids, GROUP, derive_seed(SEED, "sample", draws[g].index), Sampling(MAX_TOKENS))
            for g, ids in prompts.items()
        ]
        done = [completion async for completion in engine.generate(requests)]

        # 2. Rewards [N] and advantages [N]. Groups whose rewards agree teach nothing and are left out.
        rewards = [env.compute_reward(episode(env, draws[c.request_id].task, packer.decode(c.token_ids))).total for c in done]
        groups = [c.request_id for c in done]
        keep = informative_rows(rewards, groups, [True] * len(done))
        advantages = objective.advantages(rewards, groups, list(keep))

        # 3. One optimizer step over the rows that are left.
        rows = [make_row(prompts[c.request_id], c, float(a)) for c, a, used in zip(done, advantages, keep, strict=True) if used]
        if rows:
            loss, _ = objective.score(policy, token_inputs(policy, rows))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        # 4. The engine gets version `step`: staged, verified, applied.
        await plane.sync(step)
        rewards_of_steps.append(sum(rewards) / len(rewards))
        print(
            f"step {step:3d}  reward {rewards_of_steps[-1]:.3f}  rows {len(rows):3d}  {time.perf_counter() - began:.2f} s",
            flush=True,
        )
    await engine.close()
    await plane.close()
    return rewards_of_steps


def policy_weights(policy: PolicyModule):
    """What the plane publishes: every parameter once, under its Hugging Face name."""
    return lambda: ((name, parameter.detach()) for name, parameter in policy.model.named_parameters())


def make_row(prompt_ids: list[int], completion: Completion, advantage: float) -> Row:
    """One training row `[L]`: the prompt is context, every sampled token trains. `mask[t]` is about token `t` itself."""
    context = [0.0] * len(prompt_ids)
    return Row(
        input_ids=[*prompt_ids, *completion.token_ids],
        mask=[False] * len(prompt_ids) + [True] * len(completion.token_ids),
        rollout_logprobs=[*context, *completion.logprobs],
        advantage=advantage,
        group=completion.request_id,
        prefix=len(prompt_ids),
    )


def token_inputs(policy: PolicyModule, rows: list[Row]) -> TokenInputs:
    """All rows as one micro-batch. The totals are those of the whole optimizer step; here the two are the same."""
    lengths = torch.tensor([sum(row.mask) for row in rows])  # [S]
    sequence = torch.arange(len(rows)).repeat_interleave(lengths)  # [T]
    advantages = torch.tensor([row.advantage for row in rows])  # [S]
    rollout = [value for row in rows for value, trained in zip(row.rollout_logprobs, row.mask, strict=True) if trained]
    return TokenInputs(
        rows=policy.pack(rows),
        mask=torch.ones(len(sequence), dtype=torch.bool),
        sequence=sequence,
        advantages=advantages[sequence],
        rewards=torch.zeros(len(rows)),
        baselines=torch.zeros(len(rows)),
        rollout_logprobs=torch.tensor(rollout),
        total_tokens=float(lengths.sum()),
        total_sequences=float(len(rows)),
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=40)
    torch.set_num_threads(1)  # a model this small gains nothing from a second one
    torch.manual_seed(SEED)
    asyncio.run(main(arguments.parse_args().steps))
