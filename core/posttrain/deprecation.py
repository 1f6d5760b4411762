"""How something goes away: two minor versions with a warning, one in which it is an error unless allowed, then it is gone.

    def old_name(x):
        deprecated("posttrain.old_name", since="0.3", instead="posttrain.new_name")
        return new_name(x)

That warns in 0.3 and 0.4, raises in 0.5 unless `POSTTRAIN_ALLOW_DEPRECATED=1`, and must be out of the source before 0.6 is
released: from then on it raises in any case. docs/reference/stability.md says the same to users.
"""

from __future__ import annotations

import os
import re
import warnings

from posttrain.errors import ConfigError

ALLOW_VARIABLE = "POSTTRAIN_ALLOW_DEPRECATED"
WARNS, ENDS = 2, 3
"""Minor versions with a warning, and the minor version, counted from the first of them, in which it is gone."""


class PosttrainDeprecationWarning(FutureWarning):
    """Something that is going to go away is still used. Shown by default, for it concerns users, not only authors."""


def deprecated(what: str, *, since: str, instead: str, version: str | None = None, stacklevel: int = 3) -> None:
    """Say that `what` is going away; called by the thing itself. since: the first version that warns, as in "0.3".

    version: of posttrain, by default the installed one. Raises ConfigError (code `deprecated`) when its time is over.
    """
    first, now = _minor(since), _minor(version or _installed())
    if now - first < WARNS:
        message = f"{what} is deprecated since {since} and will be an error in {_spell(first + WARNS)}; use {instead}"
        warnings.warn(message, PosttrainDeprecationWarning, stacklevel=stacklevel)
    elif now - first >= ENDS:
        raise ConfigError(f"{what} is gone since {_spell(first + ENDS)}", fix=f"use {instead}", code="deprecated")
    elif os.environ.get(ALLOW_VARIABLE) != "1":
        raise ConfigError(
            f"{what} is deprecated since {since} and will be gone in {_spell(first + ENDS)}",
            fix=f"use {instead}; or, until then, set {ALLOW_VARIABLE}=1",
            code="deprecated",
            anchor="reference/stability.md#deprecations",
        )


def _minor(version: str) -> int:
    """0.3 and 0.3.1 are one minor version; a new major one counts as far away."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is no version")
    return 1000 * int(found[1]) + int(found[2])


def _spell(minor: int) -> str:
    return f"{minor // 1000}.{minor % 1000}"


def _installed() -> str:
    from importlib.metadata import version

    return version("posttrain")
