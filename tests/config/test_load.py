"""Layers, origins, strictness, and the whole of what is wrong at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from posttrain.config import LoadedConfig, load_config, resolved_yaml
from posttrain.errors import ConfigError, PluginError

TOY = "experiment=toy_grpo"


def refused(*overrides: str, **kwargs: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(list(overrides), **kwargs)
    return str(caught.value)


def test_defaults_experiment_file_command_line_in_this_order(tmp_path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("seed: 7\nrl:\n  steps: 6\n  optimizer:\n    lr: 1e-5\n")
    loaded = load_config([TOY, "rl.optimizer.lr=2e-5"], config_file=path)
    config = loaded.config
    assert (config.rl.steps, config.seed, config.rl.optimizer.lr, config.rl.group_size) == (6, 7, 2e-5, 4)
    assert config.rl.optimizer.eps == 1e-8
    assert loaded.origins["rl.steps"] == "my.yaml:3"
    assert loaded.origins["rl.optimizer.lr"] == "command line"
    assert loaded.origins["rl.group_size"] == "experiment toy_grpo"
    assert loaded.origins["rl.objective.clip_low"] == "experiment toy_grpo"
    assert "rl.optimizer.eps" not in loaded.origins
    assert loaded.experiment == "toy_grpo"


def test_the_options_of_a_transport_are_checked_without_importing_it() -> None:
    nixl = [TOY, "weights.transport=nixl"]
    loaded = load_config([*nixl, "weights.options.timeout_s=7", "weights.options.device=cuda:0"])
    assert loaded.config.weights.options == {"timeout_s": 7.0, "device": "cuda:0"}
    assert load_config(nixl).config.weights.options == {}
    assert "did you mean weights.options.timeout_s?" in refused(*nixl, "weights.options.timeout=7")
    assert "weights.options.timeout_s" in refused(*nixl, "weights.options.timeout_s=soon")
    assert "weights.transport is auto" in refused(TOY, "weights.options.timeout_s=7")
    assert "weights.options" in refused(TOY, "weights.transport=shm", "weights.options.timeout_s=7")


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_plus_signs_mean_nothing(prefix) -> None:
    assert load_config([TOY, f"{prefix}rl.steps=9"]).config.rl.steps == 9
    text = refused(TOY, f"{prefix}rl.stepz=9")
    assert "rl.stepz: unknown key  (command line)" in text and "did you mean rl.steps?" in text


def test_an_experiment_may_be_named_in_the_file_and_inherit(tmp_path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("experiment: toy_long\n")
    loaded = load_config([], config_file=path)
    assert (loaded.config.rl.steps, loaded.config.rl.group_size) == (50, 4)
    assert loaded.origins["rl.steps"] == "experiment toy_long"
    assert load_config(experiment="toy_grpo").config.rl.steps == 5


def test_everything_wrong_is_told_at_once(tmp_path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("rl:\n  optimizer:\n    lr: fast\n  master_dtype: float16\nrollout:\n  temperature: 0\n")
    text = refused(
        TOY,
        "rl.group_sise=4",
        "rl.steps=ten",
        "rl.batch_per_replica=15",
        "rl.shared_prefix=1",
        "environments.0.options.sizes=2",
        "rl.objective.clip_lo=1",
        "rollout.base_port=true",
        "rollout.top_p=0.9",
        "rl.routing_replay=rollout",
        config_file=path,
    )
    assert (
        text
        == """\
the configuration cannot work: 12 problems
  - rl.group_sise: unknown key  (command line)
      fix: did you mean rl.group_size?
  - rl.steps: must be an integer, not 'ten'  (command line)
  - rl.shared_prefix: must be true or false, not 1  (command line)
      fix: write rl.shared_prefix=true or rl.shared_prefix=false
  - rl.master_dtype: must be float32 | bfloat16, not 'float16'  (bad.yaml:4)
      fix: did you mean bfloat16?
  - rl.optimizer.lr: must be a number, not 'fast'  (bad.yaml:3)
  - rollout.base_port: must be an integer, not true  (command line)
      fix: write a number: rollout.base_port=1
  - rl.objective.clip_lo: unknown key  (command line)
      fix: did you mean rl.objective.clip_low?
  - environments[0].options.sizes: unknown key  (command line)
      fix: did you mean environments[0].options.size?
  - rollout.temperature: 0.0 is greedy: a group's completions are equal  (bad.yaml:6)
      fix: use a value above 0
  - rollout.top_p: 0.9 samples from a cut distribution whose log-probs the trainer cannot recompute  (command line)
      fix: set rollout.top_p=1.0 (evals may use it: validation.top_p)
  - rl.batch_per_replica: 15 is not whole groups of 4  (command line)
      fix: legal: multiples of 4, here 12 or 16
  - rl.routing_replay: not available yet: no engine returns the experts that it chose: \
hf does not record them, and vLLM does in its Model Runner V2 only, which requires Triton, so not on a CPU; \
on a GPU posttrain does not ask for them yet  (command line)
      fix: set rl.routing_replay=off"""
    )


def test_missing_values_are_named_with_what_to_type() -> None:
    text = refused("environments=[{name: toy}]")
    for key in ("model.name_or_path=", "rl.steps=N"):
        assert f"give it: {key}" in text
    assert text.startswith("the configuration cannot work: 2 problems")


def test_the_objective_is_grpo_unless_another_is_named() -> None:
    given = ["environments=[{name: toy}]", "model.name_or_path=m", "rl.steps=1"]
    loaded = load_config(given)
    assert loaded.config.rl.objective.name == "grpo" and "rl.objective.name" not in loaded.origins
    assert load_config([*given, "rl.objective.clip_low=0.1"]).config.rl.objective.options["clip_low"] == 0.1
    assert load_config([*given, "rl.objective.name=dpo"]).config.rl.objective.name == "dpo"


def test_no_environment_shows_how_to_give_one() -> None:
    assert "environments=[{name: arithmetic}]" in refused(TOY, "environments=[]")


def test_a_model_factory_stands_in_for_the_path() -> None:
    loaded = load_config(["model.factory=my.models:tiny", "rl.steps=1", "rl.objective.name=grpo", "environments=[{name: toy}]"])
    assert loaded.config.model.factory == "my.models:tiny"


def test_the_objectives_own_rules_join_the_list() -> None:
    text = refused(
        TOY,
        "rl.objective.use_tis=true",
        "rl.objective.ppo_clip_ref_logprobs=rollout",
        "rl.objective.clip_ratio_c=0.5",
        "rl.steps=0",
    )
    assert "it counts twice" in text and "the dual clip must exceed 1" in text and "rl.steps: is 0, must be at least 1" in text


def test_auto_is_resolved_and_the_constant_follows_max_tokens() -> None:
    options = load_config([TOY]).config.rl.objective.options
    assert options["ppo_clip_ref_logprobs"] == "old" and options["clip_low"] == 0.1 and options["clip_high"] == 0.28
    assert "max_tokens" not in options


def test_an_environments_own_check_is_a_problem_of_its_path() -> None:
    assert "environments[0].options: size must be at least 1" in refused(
        TOY, "environments=[{name: toy, options: {size: 0}}]", "seed=-1"
    )


def test_engine_options_are_checked_without_starting_the_engine() -> None:
    loaded = load_config([TOY, "rollout.engine=vllm", "rollout.options.enforce_eager=true"])
    assert loaded.config.rollout.options == {"enforce_eager": True}
    assert "did you mean rollout.options.enforce_eager?" in refused(
        TOY, "rollout.engine=vllm", "rollout.options.enforce_eagr=true"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Engine:\n    api = 2\n", "engine 'mine' (engines 1.0) is written for api 2, this posttrain speaks 1"),
        (
            "import not_there\nclass Engine: pass\n",
            "engine 'mine' (engines 1.0) is installed but needs 'not_there', which is missing",
        ),
    ],
)
def test_an_engine_that_cannot_work_ends_in_the_check(fake_distribution, text, message) -> None:
    fake_distribution("engines", points={"posttrain.engines": {"mine": "cfg_engines:Engine"}}, files={"cfg_engines.py": text})
    sys.modules.pop("cfg_engines", None)
    with pytest.raises(PluginError) as caught:
        load_config([TOY, "rollout.engine=mine"])
    assert caught.value.message == message


def test_one_plugin_problem_alone_is_raised_as_itself() -> None:
    with pytest.raises(PluginError, match="did you mean 'toy'") as caught:
        load_config([TOY, "environments=[{name: toyy}]"])
    assert caught.value.where == "environments[0].name (command line)"


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["rollout.tensor_parallel_size=2"], "E4", "per-replica rendezvous not run (need ranks=TP>1 on GPU)"),
        (["grid.shapes.rollout=[1,1]"], "E3", "grid.shapes requires grid.backend='ray'"),
        (["grid.ranks=2"], "E1", "ROLLOUT_RANKS=2 must equal rollout.tensor_parallel_size=1"),
    ],
)
def test_documented_placement_messages(overrides, code, message) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([TOY, *overrides])
    assert (caught.value.code, caught.value.message) == (code, message)
    assert caught.value.anchor and caught.value.fix


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("dpo", "rl.objective.name=dpo: dropped the inherited clip_low=0.1, use_ppo_clip=true, which it does not have"),
        ("cispo", "rl.objective.name=cispo: dropped the inherited use_ppo_clip=true, which it does not have; kept clip_low=0.1"),
        ("grpo", None),
        ("rloo", None),
    ],
)
def test_another_objective_drops_inherited_options_in_one_line(name, note) -> None:
    loaded = load_config([TOY, f"rl.objective.name={name}"])
    assert [line for line in loaded.notes if line.startswith("rl.")] == ([note] if note else [])
    assert loaded.config.rl.objective.name == name


def test_options_typed_for_another_objective_are_refused() -> None:
    assert "rl.objective.clip_low: unknown key  (command line)" in refused(
        TOY, "rl.objective.name=dpo", "rl.objective.clip_low=0.3"
    )


def test_a_known_last_part_elsewhere_is_suggested() -> None:
    assert "did you mean rollout.gpu_memory_utilization?" in refused(TOY, "rl.gpu_memory_utilization=0.5")


def test_the_resolved_yaml_is_the_same_config_again(tmp_path) -> None:
    loaded = load_config([TOY, "rl.optimizer.lr=3e-7", "tracking.tags={a: plain, off: 'off'}", "rl.optimizer.betas=[0.8,0.9]"])
    path = tmp_path / "resolved.yaml"
    path.write_text(loaded.yaml())
    again = load_config([], config_file=path)
    assert again.config == loaded.config and again.tree == loaded.tree
    path.write_text(yaml.safe_dump(loaded.tree))
    assert load_config([], config_file=path).config == loaded.config


def test_text_with_a_dollar_survives_the_round_trip(tmp_path) -> None:
    path = tmp_path / "dollar.yaml"
    path.write_text('model: {chat_template: "a \\\\${b} {{ c }}"}\n')
    loaded = load_config([TOY], config_file=path)
    assert loaded.config.model.chat_template == "a ${b} {{ c }}"
    path.write_text(resolved_yaml(loaded.config))
    assert load_config([], config_file=path).config == loaded.config


def test_interpolations_are_resolved_and_bad_ones_told() -> None:
    assert load_config([TOY, "seed=${rl.steps}"]).config.seed == 5
    assert "rl.stepz" in refused(TOY, "seed=${rl.stepz}")


def test_defaults_and_hydra_keys_mean_nothing_in_a_file(tmp_path) -> None:
    path = tmp_path / "h.yaml"
    path.write_text("defaults: [toy_grpo]\nhydra: {}\n")
    text = refused(TOY, config_file=path)
    assert "experiment: NAME" in text and "--multirun" in text


def test_keys_can_be_taken_away() -> None:
    assert load_config([TOY, "~rl.objective.clip_low"]).config.rl.objective.options["clip_low"] == 0.2


def test_values_are_not_coerced() -> None:
    assert load_config([TOY, "name=123"]).config.name == "123"
    assert "write rl.steps=1000" in refused(TOY, "rl.steps=1e3")
    assert "must be text, not 1.5" in refused(TOY, "name=1.5")
    assert load_config([TOY, "rl.routing_replay=false"]).config.rl.routing_replay == "off"  # a bare `off` of YAML


def test_the_check_loads_neither_torch_nor_engines() -> None:
    code = (
        "import sys; from posttrain.config import load_config\n"
        "load_config(['model.name_or_path=x', 'rl.steps=1', 'rl.objective.name=grpo', 'environments=[{name: toy}]',"
        "'rollout.engine=vllm'])\n"
        "print({'torch', 'vllm', 'ray', 'transformers', 'datasets'} & set(sys.modules))"
    )
    paths = [p for p in sys.path if "site-toys" in p]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_loaded_config_is_frozen() -> None:
    loaded = load_config([TOY])
    assert isinstance(loaded, LoadedConfig)
    with pytest.raises(AttributeError):
        loaded.config.seed = 1  # type: ignore[misc]


def test_an_entry_of_a_list_may_be_the_name_alone() -> None:
    config = load_config([TOY, "environments=[arithmetic]", "hooks=[tensorboard, {name: wandb, on_error: fail}]"]).config
    assert [e.name for e in config.environments] == ["arithmetic"]
    assert [(h.name, h.on_error) for h in config.hooks] == [("tensorboard", "warn"), ("wandb", "fail")]
