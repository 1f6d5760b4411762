"""Objects of this Python process that a config names: a function of a notebook, rows in memory, an environment.

A config is text. `References.of` gives the text that names an object:

    package.module:name     of a package, when importing that gives the same object
    /folder/file.py:name    of a single file, with its absolute path
    object:NAME             everything else (`__main__`, notebooks, lambdas, rows, and what is defined in a module that is still
                            being imported, such as a script that trains): only this process can resolve it

`held` is the way back from `object:NAME`; `resolution.import_target` is the way back from all three.
"""

from __future__ import annotations

import copyreg
import dataclasses
import inspect
import re
import sys
import sysconfig
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.errors import ConfigError

PREFIX = "object:"

_held: dict[str, Any] = {}

# A class that travels as it is and comes back is the same class, with what its copy brought: the mark of a field without a
# default must be the same one, too, or the dataclass (the Options of a plug-in in a file) can no longer be read here.
copyreg.pickle(type(dataclasses.MISSING), lambda mark: "MISSING")


class References:
    """Texts for the objects of one config: two different objects never get the same one.

    A later config may give a name to another object, as when a cell of a notebook is run again.
    """

    def __init__(self) -> None:
        self._given: dict[str, Any] = {}

    def of(self, value: Any, name: str = "") -> str:
        """The text that names `value`. `name`: what to call it when it has no name of its own."""
        path = import_path(value)
        if path is not None:
            return path
        _travel_by_value(value)
        own = getattr(value, "__name__", "") or name or type(value).__name__
        stem = re.sub(r"[^\w.-]+", "", name if own == "<lambda>" and name else own) or "object"
        label, number = stem, 2
        while self._given.get(label, value) is not value:
            label, number = f"{stem}-{number}", number + 1
        self._given[label] = _held[label] = value
        return PREFIX + label


def held(ref: str) -> Any:
    """The object that `object:NAME` names in this process. Raises ConfigError when it is another process's."""
    name = ref.removeprefix(PREFIX)
    if name not in _held:
        raise ConfigError(
            f"{ref!r} is an object of the Python process that wrote this config, and is not here",
            cause="it was given to posttrain.train(...) from a script or a notebook, and cannot be imported",
            fix="give the same object again from Python, as posttrain.train(resume=RUN, reward=the_function); "
            "a function in a file, reward=file.py:function, can be resumed from anywhere",
            code="object-not-here",
            anchor="howto/custom-reward.md#from-python",
        )
    return _held[name]


def import_path(value: Any) -> str | None:
    """`module:qualname` or `/file.py:qualname` of a function or class, if importing that gives the same object; else None."""
    if not (inspect.isroutine(value) or isinstance(value, type)):
        return None
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    qualname = getattr(value, "__qualname__", "<")
    if module is None or "<" in qualname or module.__name__ in ("__main__", "__mp_main__") or _unfinished(module):
        return None
    try:
        if reduce(getattr, qualname.split("."), module) is not value:
            return None
    except AttributeError:
        return None
    file = getattr(module, "__file__", None)
    if file and file.endswith(".py") and "." not in module.__name__ and not _installed(Path(file)):
        return f"{Path(file).absolute()}:{qualname}"
    return f"{module.__name__}:{qualname}" if _findable(module) else None


def _findable(module: ModuleType) -> bool:
    """Whether another process with the same `sys.path` would import this very module by its name."""
    path, spec, known = None, None, ""
    for part in module.__name__.split("."):
        known = f"{known}.{part}" if known else part
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
        spec = next((s for find in finders if find and (s := find(known, path)) is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return spec is not None and spec.origin == getattr(getattr(module, "__spec__", None), "origin", None)


def _unfinished(module: ModuleType) -> bool:
    """Whether the module is being imported: another process that imported it would do what it is doing now."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _installed(file: Path) -> bool:
    paths = sysconfig.get_paths()
    return any(file.is_relative_to(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _travel_by_value(value: Any) -> None:
    """Another process cannot import the module of this object, so what it defines must be sent as it is."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is not None and module.__name__ != "__main__" and (_unfinished(module) or not _findable(module)):
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)
