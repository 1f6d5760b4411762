"""Keys of other trainers are answered, every one: with the path here, or with why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.config import RunConfig, load_config
from posttrain.config.flat_keys import ABSENT, ENTRY_KEYS, FAMILIES, FLAT_KEYS, renamed
from posttrain.config.walker import paths_of
from posttrain.errors import ConfigError

KEYS = (Path(__file__).parents[1] / "data" / "telescope_keys.txt").read_text().split()
"""Every top-level key that Telescope's configuration has and this one lacks."""

TOY = "experiment=toy_grpo"


def answer(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, config_file=file)
    return str(caught.value)


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_answered(key: str) -> None:
    hint = renamed(key)
    assert hint.startswith(("the path here is ", "leave it out: ")) and hint == renamed(key.replace("_", "-"))


def test_paths_lead_to_keys_that_exist_and_reasons_do_not_hide_them() -> None:
    known = set(paths_of(RunConfig))
    for key, hint in FLAT_KEYS.items():
        path = hint.partition(" (")[0]
        assert path in known or path.startswith(("rl.objective.", "rollout.options.engine_args.")), (key, path)
    ours = {path for path in known if "." not in path}
    for key in (*FLAT_KEYS, *ABSENT):
        assert key not in ours, f"{key} is a key of ours"
    assert not set(FLAT_KEYS) & set(ABSENT)
    assert not [name for name in ours if name.startswith(tuple(FAMILIES))]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("ray_placement_timeout_s", "grid.start_timeout_s"),
        ("ray_namespace", "grid.backend=ray hosts the roles in Ray"),
        ("inference_host", "under Ray neither"),
        ("weight_broadcast_free_grad_buffers", "gradients are always freed before a publication"),
    ],
)
def test_what_is_said_of_a_cluster_is_true(key: str, said: str) -> None:
    assert said in renamed(key)


def test_all_keys_of_a_file_are_answered_at_once_each_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "flat.yaml"
    file.write_text("".join(f"{key}: 1\n" for key in KEYS))
    text = answer(TOY, file=file)
    assert f"{len(KEYS)} problems" in text
    for line, key in enumerate(KEYS, start=1):
        assert f"- {key}: unknown key  (flat.yaml:{line})\n      fix: {renamed(key, '1')}" in text


def test_and_on_the_command_line() -> None:
    text = answer(TOY, *(f"{key}=1" for key in KEYS))
    for key in KEYS:
        assert f"- {key}: unknown key  (command line)\n      fix: {renamed(key, '1')}" in text


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("use_ppo_clip=true", "rl.objective.use_ppo_clip=true"),
        ("max_async_rollout=2", "rollout.max_async_rollout=2"),
        ("learning_rate=1e-5", "rl.optimizer.lr=1e-05"),
        ("number_of_minibatches=2", "rl.mini_batch_per_replica (completions per optimizer step"),
        ("inference_num_workers=2", "grid.shapes.rollout (a list: [replicas, ranks])"),
    ],
)
def test_the_value_is_kept_where_it_means_the_same(typed: str, path: str) -> None:
    assert f"fix: the path here is {path}" in answer(TOY, typed)


@pytest.mark.parametrize("flags", [["--use-ppo-clip", "true"], ["--use_ppo_clip=true"]])
def test_as_flags_too(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "experiment=toy_grpo", *flags]) == 2
    assert "the path here is rl.objective.use_ppo_clip=true; values are given as key=value" in capsys.readouterr().err


def test_several_flags_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--lr", "1e-5", "--ray_namespace=x", "--what"]) == 2
    err = capsys.readouterr().err
    assert "no flag --lr, --ray_namespace, --what" in err
    assert "--lr: the path here is rl.optimizer.lr=1e-5" in err and "--ray_namespace: leave it out" in err


@pytest.mark.parametrize("key", ENTRY_KEYS)
def test_keys_of_an_environment(key: str) -> None:
    assert f"environments[0].{key}: unknown key" in (text := answer(TOY, f"environments.0.{key}=1")) and ENTRY_KEYS[key] in text


def test_a_model_by_name_alone_is_told_where_it_goes(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("model: Qwen/Qwen3-4B\n")
    assert "fix: write model.name_or_path=Qwen/Qwen3-4B" in answer(TOY, file=file)
