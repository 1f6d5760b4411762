"""Options that would do nothing, for environments whose rows come from `data` or are made from a seed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, fields

from posttrain.data.source import DataOptions
from posttrain.errors import ConfigError


def refuse_idle(options: DataOptions, *, made: Collection[str], what: str) -> None:
    """Raise ConfigError for options that do nothing: of rows without `data`, of what is made beside it.

    made: the options of rows that are made.   what: what they are, in the plural.
    """
    of_rows = {field.name for field in fields(DataOptions)} - {"data", "test_size"}
    idle = of_rows if options.data is None else made
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(options)}
    values = {name: getattr(options, name) for name in defaults}
    found = [n for n, v in values.items() if n in idle and (tuple(v) if isinstance(v, list) else v) != defaults[n]]
    if found:
        cause = f"{what} are made from a seed: there is no data" if options.data is None else f"the {what} are those of data"
        raise ConfigError(f"{', '.join(found)} would do nothing", cause=cause,
                          fix="set data, or leave them out" if options.data is None else "leave them out, or leave data out")
