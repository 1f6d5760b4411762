"""Secrets never leave the process: not in a printed config, not in a saved one, not in a repr.

A secret is the value of an environment variable whose name says so (`HF_TOKEN`, `WANDB_API_KEY`, …), wherever it ended up, and
the value of a config key whose name says so. The first is written as `${oc.env:NAME}`, so that a saved config can be run
again; the second as `***`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY)(_|$)", re.IGNORECASE)
_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|access_key|private_key|secret(_key)?|password|passwd|credentials?|(auth|access|api|hf|bearer)_token)$|^token$",
    re.IGNORECASE,
)
_SHORTEST = 6  # shorter values are words that would be found everywhere


class Secret(str):
    """Text that works as itself and whose repr does not show it."""

    def __repr__(self) -> str:
        return repr(HIDDEN)


def is_secret(variable: str) -> bool:
    """Whether the name of an environment variable says that its value is a secret."""
    return _SECRET_VARIABLE.search(variable) is not None


def secret_variables() -> dict[str, str]:
    """Environment variables that hold secrets, by value, the longest first."""
    found = {
        value: name for name, value in sorted(os.environ.items()) if is_secret(name) and len(value) >= _SHORTEST
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def conceal(tree: Any, *, key: str = "", variables: Mapping[str, str] | None = None) -> Any:
    """A copy of a plain tree that may be printed and saved. Text that OmegaConf would read as an interpolation is escaped."""
    variables = secret_variables() if variables is None else variables
    if isinstance(tree, Mapping):
        return {name: conceal(value, key=str(name), variables=variables) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [conceal(value, key=key, variables=variables) for value in tree]
    if not isinstance(tree, str):
        return tree
    escaped = tree.replace("${", "\\${")
    text = conceal_text(escaped, variables)
    return HIDDEN if text == escaped and tree and _SECRET_KEY.search(key) else text


def conceal_text(text: str, variables: Mapping[str, str] | None = None) -> str:
    """Text in which values of secret variables are replaced by `${oc.env:NAME}`: for logs and command lines."""
    for value, name in (secret_variables() if variables is None else variables).items():
        text = text.replace(value, f"${{oc.env:{name}}}")
    return text


def guard(tree: Any, *, key: str = "", variables: Mapping[str, str] | None = None) -> Any:
    """A copy of a tree whose secret texts are `Secret`s."""
    variables = secret_variables() if variables is None else variables
    if isinstance(tree, Mapping):
        return {name: guard(value, key=str(name), variables=variables) for name, value in tree.items()}
    if isinstance(tree, list):
        return [guard(value, key=key, variables=variables) for value in tree]
    if isinstance(tree, str) and tree and (_SECRET_KEY.search(key) or any(value in tree for value in variables)):
        return Secret(tree)
    return tree
