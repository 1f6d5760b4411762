"""`posttrain.train`: a run from Python, by keywords, with the checks and the messages of the command line.

    def score(completion, row):
        return float(completion.strip() == row["answer"])

    result = posttrain.train(model="Qwen/Qwen2.5-0.5B-Instruct", data="my.jsonl", reward=score,
                             prompt_column="question", answer_column="answer", rl={"steps": 20, "group_size": 8})
    print(result.metrics()[-1]["reward/mean"], result.run)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.config.load import LoadedConfig
    from posttrain.loop.result import RunResult


def train(
    loaded: LoadedConfig | None = None,
    /,
    *,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    env: Any = None,
    experiment: str | None = None,
    config: str | Path | None = None,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    **settings: Any,
) -> RunResult:
    """Train, show the progress, and return the run.

    model        a Hugging Face folder or name, or a mapping of `model.*`
    data         rows: a file, a folder, a hub name, a list of dicts, a `datasets.Dataset`, or a function that returns one
    reward       a function `(completion, row)` (sync or async), a list of them, `{name: function}`, `{name: (function, weight)}`
    env          an environment of your own instead: its name, class or object, or `{"name": …, "options": {…}}`
    experiment   what to start from, as `experiment=` on the command line; config: a YAML file, as `--config`
    run_dir      the folder for new runs, as `--run`; resume: a run to go on with, as `--resume`
    settings     keys of the config (`rl={"steps": 20}`, `**{"rl.steps": 20}`) and options of the environment
                 (`prompt_column="question"`)

    Order: defaults < experiment < config < these keywords. A config that was loaded already may be given alone:
    `train(load_config(["experiment=arithmetic_grpo"]))`. Works in a notebook. Raises PosttrainError; the run directory, its
    metrics and its last checkpoint are then as they were at the last step.
    """
    from posttrain.loop.run import train as run

    if resume is not None and run_dir is not None:
        raise ConfigError("a resumed run stays in its directory", fix="leave run_dir out", code="usage")
    call = {"model": model, "data": data, "reward": reward, "env": env, "experiment": experiment, "config": config}
    call = {key: value for key, value in call.items() if value is not None} | settings
    if loaded is None:
        loaded = load_call(call, resume=resume)
    elif call:
        raise ConfigError(
            f"posttrain.train got a loaded config, and {', '.join(call)} too",
            fix="leave the config out and give all as keywords, or all to load_config([...])",
            code="usage",
        )
    return run(loaded, run_dir=run_dir, resume=resume)


def load_call(call: dict[str, Any], *, resume: str | Path | None = None) -> LoadedConfig:
    """The checked config of a call with these keywords. Raises ConfigError, PluginError, DataError."""
    from posttrain.config.call import call_values
    from posttrain.config.compose import compose
    from posttrain.config.load import load_config
    from posttrain.tracking.run_dir import find_run

    call = dict(call)
    experiment, file = call.pop("experiment", None), call.pop("config", None)
    if resume is not None:
        if experiment is not None or file is not None:
            raise ConfigError("a resumed run keeps its config", fix="leave experiment and config out", code="usage")
        file = find_run(resume) / "config.yaml"
    environments: Sequence[Any] = ()
    if experiment is not None or file is not None:
        environments = compose((), experiment=experiment, config_file=file).tree.get("environments", ())
        environments = [{"name": entry} if isinstance(entry, str) else entry for entry in environments]
    parts = {name: call.pop(name, None) for name in ("model", "data", "reward", "env")}
    values = call_values(**parts, settings=call, environments=environments)
    return load_config((), experiment=experiment, config_file=file, values=values)
