"""A config that means the same in every directory: files that it names, made absolute where they are.

    environments: [{name: my_env.py:Mine}]    →    environments: [{name: /folder/my_env.py:Mine}]

So a run resumes from anywhere. Options of a plug-in are its own: their class keeps them as it wants them.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from posttrain.config.schema import RunConfig
from posttrain.plugins.functions import absolute


def absolute_files(config: RunConfig) -> RunConfig:
    """The config with every `file.py:name` and every existing path outside the options of plug-ins made absolute."""
    model, rl, data = config.model, config.rl, config.rl.data
    template = model.chat_template
    return replace(
        config,
        model=replace(
            model,
            name_or_path=_existing(model.name_or_path),
            factory=_reference(model.factory),
            factory_kwargs=_arguments(model.factory_kwargs),
            chat_template=template if template is None or set(template) & {"{", "\n"} else _existing(template),
        ),
        rl=replace(
            rl,
            objective=replace(rl.objective, name=absolute(rl.objective.name)),
            data=replace(
                data,
                factory=_reference(data.factory),
                factory_kwargs=_arguments(data.factory_kwargs),
                packer=_reference(data.packer),
            ),
        ),
        rollout=replace(config.rollout, engine=absolute(config.rollout.engine)),
        weights=replace(config.weights, transport=absolute(config.weights.transport)),
        environments=tuple(replace(one, name=absolute(one.name)) for one in config.environments),
        evals=tuple(replace(one, name=absolute(one.name)) for one in config.evals),
        hooks=tuple(replace(one, name=absolute(one.name)) for one in config.hooks),
    )


def _reference(ref: str | None) -> str | None:
    return None if ref is None else absolute(ref)


def _arguments(given: Any, key: str = "") -> Any:
    """The arguments of a factory: their texts that name a file by `file.py:name`, or a file or folder by its path."""
    if isinstance(given, Mapping):
        return {name: _arguments(value, name) for name, value in given.items()}
    if isinstance(given, (list, tuple)):
        return [_arguments(value) for value in given]
    if not isinstance(given, str):
        return given
    if ".py:" in given:
        return absolute(given)
    # `train` and `.` are words, also where a folder has that name; as data they are folders
    looks_like_path = bool(set(given) & {"/", "."}) and any(letter.isalnum() for letter in given)
    return _existing(given) if looks_like_path or key in ("data", "test_data") else given


def _existing(text: str) -> str:
    """The absolute path where `text` names a file or folder, or files by wildcards; else the text as it is."""
    if not text.strip():
        return text
    path = os.path.expanduser(text)
    try:
        found = os.path.exists(path) or any(glob.iglob(path, recursive=True))
    except (OSError, ValueError):  # no path at all
        return text
    return os.path.abspath(path) if found else text
