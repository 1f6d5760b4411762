"""The keywords of a call from Python as one layer of a config: `posttrain.train(model="…", reward=score, rl={"steps": 20})`.

    model, data, reward, env     what they say; `data` and `reward` are options of the environment
    rl={…}, **{"rl.steps": 20}   keys of the config, nested or dotted
    hooks=[MyHook(), "wandb"]    hooks by name, class or object, or `{"name": …, "options": {…}}`
    prompt_column="question"     any option of the environment

A config is text: functions, classes, rows and environments become references (see `plugins.objects`).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.config.layers import segments
from posttrain.config.schema import RunConfig
from posttrain.config.walker import fields_of
from posttrain.errors import ConfigError
from posttrain.plugins.objects import References

FUNCTION = "function"
"""The environment that `reward` and `data` belong to when no other is named."""

_KEYS = [field.name for field in dataclasses.fields(RunConfig)]
_ROWS = ("data", "test_data")


def call_values(
    *, model: Any = None, data: Any = None, reward: Any = None, env: Any = None, settings: Mapping[str, Any] | None = None,
    environments: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Config values by dotted path, as `load_config(values=…)` takes them.

    environments: those of the experiment, file or run that the call starts from; options go to the first of them unless the
    call names another environment. Raises ConfigError.
    """  # fmt: skip
    refs = References()
    given = {key: value for key, value in {"data": data, "reward": reward}.items() if value is not None}
    values, loose = _model(model), {}
    for key, value in (settings or {}).items():
        if key == "hooks" and isinstance(value, (list, tuple)):
            values[key] = [_hook(entry, refs) for entry in value]
        elif segments(key)[:1] and segments(key)[0] in _KEYS:
            values[key] = value
        else:
            loose[key] = value
    base = str(environments[0].get("name", "")) if environments else ""
    kept = env is None and base != "" and (reward is None or base == FUNCTION)
    name, options = _environment(env, refs) if env is not None else (base if kept else FUNCTION, {})
    for key, value in loose.items():
        (options if _is_option(key, name) else values)[key] = value
    options = {**options, **given}
    if options and "environments" in values:
        raise ConfigError(
            f"environments is given, and {', '.join(options)} too", cause="these are options of an environment",
            fix='write them in its options: environments=[{"name": …, "options": {…}}]', where="environments (call)",
        )  # fmt: skip
    if options and kept:
        values |= {f"environments.0.options.{key}": value for key, value in options.items()}
    elif options or env is not None:
        values["environments"] = [{"name": name, "options": options}]
    return {key: plain(value, segments(key)[-1], refs) for key, value in values.items()}


def plain(value: Any, key: str, refs: References) -> Any:
    """`value` as a tree of plain values: objects become references, text is literal (`${` means nothing)."""
    if key in _ROWS and not isinstance(value, (str, os.PathLike, type(None))):
        return refs.of(value, key)
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) is dict:
        return {str(name): plain(item, str(name), refs) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, key, refs) for item in value]
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    return refs.of(value, key)


def keyword(path: str, typed: str) -> str:
    """How a missing value is given in a call. `typed`: how on the command line, as `rl.steps=N`."""
    keys = segments(path)
    example = {"N": "20", "X": "0.5", "true": "True"}.get(typed.rpartition("=")[2], '"…"')
    if keys[:1] == ["environments"] and len(keys) == 4 and keys[2] == "options":
        return f"{keys[3]}={example}"
    if path == "model.name_or_path":
        return 'model="folder or Hugging Face name"'
    text = example
    for key in reversed(keys[1:]):
        text = f'{{"{key}": {text}}}'
    return f"{keys[0]}={text}"


def _model(model: Any) -> dict[str, Any]:
    if model is None:
        return {}
    if isinstance(model, Mapping):
        return {"model": dict(model)}
    if isinstance(model, (str, os.PathLike)):
        return {"model.name_or_path": os.fspath(model)}
    raise ConfigError(
        f"model is a {type(model).__name__}", cause="a run loads its model from a Hugging Face folder or name",
        fix='model.save_pretrained("folder"); tokenizer.save_pretrained("folder"); then model="folder"', where="model (call)",
    )  # fmt: skip


def _environment(env: Any, refs: References) -> tuple[str, dict[str, Any]]:
    """`env` as a name and options: a name, a class, an object, or `{"name": …, "options": {…}}`."""
    options: dict[str, Any] = {}
    if isinstance(env, Mapping):
        unknown = [key for key in env if key not in ("name", "options")]
        if unknown or "name" not in env:
            fix = 'write env={"name": "countdown", "options": {…}}'
            raise ConfigError(f"env has {', '.join(map(repr, unknown)) or 'no name'}", fix=fix, where="env (call)")
        env, options = env["name"], dict(env.get("options") or {})
    return env if isinstance(env, str) else refs.of(env, type(env).__name__), options


def _hook(hook: Any, refs: References) -> dict[str, Any]:
    """An entry of `hooks` as the config has it; the other keys of a mapping are left as they are."""
    entry = dict(hook) if isinstance(hook, Mapping) else {"name": hook}
    named = entry.get("name")
    if named is not None and not isinstance(named, str):
        entry["name"] = refs.of(named, type(named).__name__)
    return entry


def _is_option(key: str, environment: str) -> bool:
    """Whether a keyword is meant for the environment: one of its options, or nearer to one than to any key of the config."""
    from posttrain.config.flat_keys import renamed
    from posttrain.plugins.resolution import resolve

    try:
        cls = resolve("envs", environment)
        known = [field.name for field in fields_of(cls.Options)] if isinstance(cls, type) else []  # type: ignore[attr-defined]
    except Exception:
        return False  # the check of the config tells what is wrong with the environment
    if key in known or "." in key or renamed(key):
        return key in known
    near = difflib.get_close_matches(key, [*known, *_KEYS], n=1)
    return bool(near) and near[0] in known

