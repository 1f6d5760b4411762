"""`experiment=mixed_envs`: one model, two tasks; what it is taught, and what neither its warm-up nor its training sees."""

from __future__ import annotations

from pathlib import Path

from posttrain.config.entries import label_of
from posttrain.config.load import load_config
from posttrain.data.environment import episode
from posttrain.loop.prepare import build_environments
from posttrain.loop.run import train
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain_experiments import tiny
from posttrain_experiments.mixed import COUNTDOWN, EXPERIMENTS, SUMS
from posttrain_experiments.tiny_mixed import lessons


def test_the_model_is_taught_both_tasks_about_as_often_and_no_held_out_problem() -> None:
    environments = build_environments(load_config(["experiment=mixed_envs"]).config)
    assert list(environments) == ["sums", "countdown"]
    taught = lessons(SUMS, COUNTDOWN, 0)
    asked = {prompt for prompt, _, _ in taught}
    sums = sum(":" not in prompt for prompt, _, _ in taught)
    assert 0.8 < sums / (len(taught) - sums) < 1.25
    for env in environments.values():
        rows = env.dataset("test")
        assert not asked & {env.format_prompt(rows[i]) for i in range(len(rows))}


def test_right_lessons_are_right_and_careless_ones_are_not() -> None:
    environments = build_environments(load_config(["experiment=mixed_envs"]).config)
    answers = {prompt: (right, careless) for prompt, right, careless in lessons(SUMS, COUNTDOWN, 0)}
    tokenizer, limit = tiny.build_tokenizer(), EXPERIMENTS["mixed_envs"]["rollout"]
    for env in environments.values():
        rows = [row for row in list(env.dataset("train"))[:60] if env.format_prompt(row) in answers]
        assert len(rows) > 40
        for row in rows:
            prompt = str(env.format_prompt(row))
            right, careless = answers[prompt]
            assert [env.compute_reward(episode(env, row, text)).total for text in (right, careless)] == [1.0, 0.0]  # type: ignore[union-attr]
            assert len(tokenizer(right)["input_ids"]) < limit["max_tokens"]
            assert len(tokenizer(prompt)["input_ids"]) + limit["max_tokens"] <= limit["max_model_len"]


def test_it_runs_with_both_environments_in_every_part(tmp_path: Path) -> None:
    """Shrunken: a model that was hardly taught, two steps."""
    loaded = load_config([
        "experiment=mixed_envs", "model.factory_kwargs.steps=20", "model.factory_kwargs.slip_steps=5", "rl.steps=2",
        "rl.batch_per_replica=64", "validation.prompts=8", "validation.every=0", "tracking.display=none",
    ])  # fmt: skip
    labels = [label_of(entry) for entry in loaded.config.environments]
    run = train(loaded, run_dir=tmp_path).run
    for row in read_metrics(run):
        assert sum(row.get(f"rollout/{label}/count", 0) for label in labels) == 64
    assert all(f"validation/{label}/reward/mean" in read_validation(run)[0] for label in labels)
