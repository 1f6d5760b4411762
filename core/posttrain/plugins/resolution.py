"""From what a config or a person wrote to a checked class: one validator behind all routes.

A reference is a bare name (when unique), `distribution/name`, `module:attr`, a dotted path, `path.py:attr`, or from Python the
object itself, which a config writes as `object:NAME` (see `objects`). Workers resolve the same references with the same code.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import warnings
from functools import reduce
from pathlib import Path
from typing import Any

from posttrain.deprecation import PosttrainDeprecationWarning
from posttrain.errors import error
from posttrain.plugins import kinds, problems
from posttrain.plugins.capabilities import capability_fault
from posttrain.plugins.construction import constructor_fault, dataclass_fault, method_fault, options_fault
from posttrain.plugins.discovery import PluginInfo, discover, normalised
from posttrain.plugins.kinds import Kind, kind_of, speaks
from posttrain.plugins.objects import PREFIX, held


def resolve(kind: str, ref: Any, *, where: str = "") -> Any:
    """The plug-in's class (for kinds that take factories, or the factory), imported and checked.

    ref: see the module's docstring. where: the config path to name in errors.
    Raises PluginError in one of five ways (see `problems`); for a DataPacker's own path E9 (PackerError).
    """
    spec = kind_of(kind)
    if not isinstance(ref, str):
        return validate(spec, getattr(ref, "__name__", repr(ref)), None, ref, where)
    info = find(kind, ref, where=where)
    if info is not None:
        card = info.card
        if not speaks(card.api):
            raise problems.wrong_api(spec, ref, info, card.api, f"{card.file}:{card.line}", where)
    target = info.value if info else target_of(ref)
    if target.startswith(PREFIX):
        return validate(spec, ref, None, held(target), where)
    try:
        loaded = import_target(target)
    except (Exception, SystemExit) as exc:
        if info is None and spec.name == "datapackers":
            raise error("E9", path=ref, reason=f"{type(exc).__name__}: {exc}") from exc
        if fault := dataclass_fault(exc, target):
            raise problems.bad_options(spec, ref, info, fault, problems.location(exc, target), where) from exc
        raise problems.import_failed(spec, ref, target, info, exc, where) from exc
    return validate(spec, ref, info, loaded, where)


def find(kind: str, ref: str, *, where: str = "") -> PluginInfo | None:
    """The installed plug-in that `ref` names; None when it is a path. Raises PluginError when absent or ambiguous."""
    spec = kind_of(kind)
    known = discover(kind)
    distribution, slash, name = ref.partition("/")
    if slash and ":" not in ref:
        matches = [info for info in known if info.name == name and normalised(info.distribution) == normalised(distribution)]
    else:
        matches = [info for info in known if info.name == ref]
    if len(matches) > 1:
        raise problems.ambiguous(spec, ref, matches, where)
    if matches:
        return matches[0]
    if ":" in ref or ("." in ref and not slash):
        return None
    raise problems.not_installed(spec, ref, where)


def target_of(ref: str) -> str:
    """A path in the form `module:attr` or `file.py:attr`."""
    if ":" in ref:
        return ref
    module, _, attr = ref.rpartition(".")
    return f"{module}:{attr}"


def import_target(target: str) -> Any:
    """The object at `module:attr` or `path.py:attr`; imports what it must. Raises whatever the import raises.

    Also `object:NAME`, an object that this process holds; ConfigError when it does not.
    """
    if target.startswith(PREFIX):
        return held(target)
    module, _, attr = target.rpartition(":") if ":" in target else (target, "", "")
    loaded = _import_file(Path(module)) if module.endswith(".py") else _import_module(module)
    return reduce(getattr, attr.split("."), loaded) if attr else loaded


def validate(kind: Kind, ref: str, info: PluginInfo | None, loaded: Any, where: str = "") -> Any:
    """`loaded` itself when it is what the kind asks for: a concrete subclass, or a factory. Raises PluginError."""
    file = _file_of(loaded)
    base = kind.base_class
    if not isinstance(loaded, type):
        if (kind.factory and callable(loaded)) or (info is None and kind.instance and isinstance(loaded, base)):
            return loaded
        raise problems.wrong_type(kind, ref, info, f"is {_describe(loaded)}", file, where)
    if not issubclass(loaded, base):
        if kind.factory and info is None:
            raise error("E10", path=ref, got=f"a {loaded.__qualname__}")
        got = f"is class {loaded.__qualname__}, not a subclass of {base.__name__}"
        raise problems.wrong_type(kind, ref, info, got, file, where)
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        raise problems.wrong_type(kind, ref, info, f"leaves methods undefined: {missing}", file, where)
    api = _declared_api(loaded, base)
    if not speaks(api):
        raise problems.wrong_api(kind, ref, info, api, file, where)
    if api < kinds.API:
        _say_previous(kind, ref, info, api)
    if fault := constructor_fault(kind, loaded) or method_fault(kind, loaded):
        raise problems.wrong_type(kind, ref, info, fault[0], file, where, fix=fault[1])
    if fault := options_fault(loaded):
        raise problems.bad_options(kind, ref, info, fault, file, where)
    if fault := capability_fault(kind.name, loaded):
        raise problems.bad_capability(kind, ref, info, fault, file, where)
    return loaded


def _say_previous(kind: Kind, ref: str, info: PluginInfo | None, api: int) -> None:
    name = problems.subject(kind, ref, info)
    message = f"{name} is written for api {api}, which goes away with api {kinds.API + 1}; the current one is {kinds.API}"
    warnings.warn(message, PosttrainDeprecationWarning, stacklevel=4)


def _declared_api(cls: type, base: type) -> Any:
    """The `api` of the plug-in's own classes, those that are not posttrain's; 1 when they name none."""
    own = (vars(one)["api"] for one in cls.__mro__[: cls.__mro__.index(base)] if "api" in vars(one))
    return next(own, 1)


def _import_module(name: str) -> Any:
    if not name:
        raise ImportError("the path names no module")
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    """Load a file as a module of its own name, once (an edited file again); it may import other files of its folder.

    What is defined in it travels to other processes by value. A module that a person imported from this file is taken as it is.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    digest = hashlib.sha1(str(path).encode() + path.read_bytes()).hexdigest()[:8]
    name = f"posttrain_file_{path.stem}_{digest}"
    known = sys.modules.get(name) or _imported_from(path)
    if known is not None:
        return known
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    return module


def _imported_from(path: Path) -> Any:
    """The module that an ordinary import made of this file, None when there is none."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(path.name) or name.startswith(("posttrain_file_", "__m")):
            continue
        if Path(file).resolve() == path:
            return module
    return None


def _file_of(loaded: Any) -> str:
    try:
        return f"{inspect.getsourcefile(loaded)}:{inspect.getsourcelines(loaded)[1]}"
    except (TypeError, OSError):
        return ""


def _describe(loaded: Any) -> str:
    if inspect.ismodule(loaded):
        return f"module {loaded.__name__}"
    return f"a {type(loaded).__name__}" + (f" {loaded.__name__}" if hasattr(loaded, "__name__") else "")
