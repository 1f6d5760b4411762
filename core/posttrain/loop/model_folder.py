"""Where a run's model lives: the folder named by the config, or one that `model.factory` writes once and later runs reuse.

A factory is a function `(out: Path, **kwargs) -> None` that writes a Hugging Face folder: a tiny model made by code, weights
unpacked from a package. Its folder is named by the factory, its arguments and the version of its module's code, so a changed
factory makes a new one; it is written aside and renamed, so a killed run leaves no half model.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.config.schema import ModelConfig
from posttrain.errors import ConfigError, EngineStartError
from posttrain.plugins.resolution import import_target, target_of
from posttrain.tracking.run_dir import models_root
from posttrain.tracking.text import near


def model_folder(config: ModelConfig, root: Path, say: Callable[[str], None] = print) -> str:
    """The path (or hub name) of the model. Builds it under `models_root(root)` when `model.factory` is set."""
    if config.factory is None:
        return config.name_or_path
    build, out = _factory(config, root)
    if (out / "config.json").is_file():
        say(f"model: {near(out)} (made by {near(config.factory)} in an earlier run)")
        return str(out)
    say(f"model: making {near(out)} with {near(config.factory)}")
    aside = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        build(aside, **config.factory_kwargs, **_say(build, say))
        if not (aside / "config.json").is_file():
            raise EngineStartError(
                f"model.factory {config.factory} wrote no config.json into {aside}",
                fix="end it with model.save_pretrained(out) and tokenizer.save_pretrained(out)",
            )
        if not out.exists():
            aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return str(out)


def made_folder(config: ModelConfig, root: Path) -> str | None:
    """As `model_folder`, but nothing is made: None when the factory, which is checked, has not made its model yet."""
    if config.factory is None:
        return config.name_or_path
    _, out = _factory(config, root)
    return str(out) if (out / "config.json").is_file() else None


def _factory(config: ModelConfig, root: Path) -> tuple[Callable[..., Any], Path]:
    """The factory, its arguments checked, and the folder of the model that it makes."""
    assert config.factory is not None
    build = import_dotted(config.factory, "model.factory")
    _check_arguments(build, config)
    return build, models_root(root) / f"{build.__module__.rsplit('.', 1)[-1]}-{_fingerprint(build, config.factory_kwargs)}"


def _say(build: Callable[..., Any], say: Callable[[str], None]) -> dict[str, Any]:
    """A factory with a parameter `say` reports its progress through it."""
    return {"say": say} if "say" in inspect.signature(build).parameters else {}


def _check_arguments(build: Callable[..., Any], config: ModelConfig) -> None:
    try:
        inspect.signature(build).bind(Path(), **config.factory_kwargs)
    except TypeError as exc:
        raise ConfigError(
            f"model.factory {config.factory} refused its arguments {config.factory_kwargs}",
            cause=str(exc),
            fix="correct model.factory_kwargs; the function takes (out: Path, **kwargs)",
        ) from exc


def import_dotted(path: str, key: str) -> Callable[..., Any]:
    """Import `package.module:attribute` (or with a dot). Raises ConfigError naming the config key."""
    try:
        found = import_target(target_of(path))
    except (ImportError, AttributeError, OSError) as exc:
        raise ConfigError(
            f"{key}={path!r} cannot be imported",
            cause=f"{type(exc).__name__}: {exc}",
            fix="install the package that holds it, or correct the path (form: package.module:function)",
        ) from exc
    if not callable(found):
        raise ConfigError(f"{key}={path!r} is a {type(found).__name__}, not a function", fix="name a function")
    return found  # type: ignore[no-any-return]


def _fingerprint(build: Callable[..., Any], kwargs: dict[str, Any]) -> str:

    try:
        code = inspect.getsource(inspect.getmodule(build) or build)
    except (OSError, TypeError):
        code = ""
    text = json.dumps([build.__module__, getattr(build, "__qualname__", ""), kwargs, code], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
