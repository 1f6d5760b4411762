"""A person's own function by reference: `file.py:function`, `package.module:function`, a dotted path, or `object:NAME`.

`function_of` says what is wrong with a reference as one would say it to the person who typed it. `absolute` makes a file's path
independent of the current directory, so that a saved config means the same elsewhere.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from posttrain.errors import ConfigError
from posttrain.plugins.objects import PREFIX
from posttrain.plugins.problems import install_command, location, missing_dependency
from posttrain.plugins.resolution import import_target, target_of


def absolute(ref: str) -> str:
    """The reference with the path of its file made absolute; any other reference as it is."""
    file, colon, name = ref.rpartition(":") if ":" in ref else (ref, "", "")
    if not file.endswith(".py"):
        return ref
    return f"{os.path.abspath(os.path.expanduser(file))}{colon}{name}"


def without_folders(ref: str) -> str:
    """The reference as it is in the folder of its file: what it is called, and what may be shown elsewhere."""
    file, colon, name = ref.rpartition(":") if ":" in ref else (ref, "", "")
    return f"{Path(file).name}{colon}{name}" if file.endswith(".py") else ref


def function_of(ref: str, what: str) -> Callable[..., Any]:
    """The callable that `ref` names. `what`: what it is for, as in "reward".

    Raises ConfigError for a file, module or name that is not there (with near ones), for code that cannot be imported, and for
    something that cannot be called.
    """
    target = target_of(ref) if not ref.endswith(".py") else f"{ref}:"
    file, _, name = target.rpartition(":")
    if not target.startswith(PREFIX):
        _check_form(ref, what, file, name)
    try:
        found = import_target(target)
    except ConfigError:
        raise
    except AttributeError as exc:
        raise _no_such_name(ref, what, file, name, exc) from exc
    except (Exception, SystemExit) as exc:
        raise _not_importable(ref, what, target, exc) from exc
    if not callable(found):
        raise ConfigError(
            f"{what} {ref!r} is a {type(found).__name__}, not a function",
            fix=f"name a function: {_example(file, _functions(file))}",
            code="function",
        )
    return found  # type: ignore[no-any-return]


def _check_form(ref: str, what: str, file: str, name: str) -> None:
    """What can be said without an import."""
    if file.endswith(".py"):
        path = Path(file).expanduser()
        if not path.is_file():
            near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
            raise ConfigError(
                f"{what} {ref!r}: there is no file {file}",
                cause="" if path.is_absolute() else f"the path starts from {Path.cwd()}",
                fix=f"did you mean {path.with_name(near[0])}:{name}?" if near else "correct the path (form: file.py:function)",
                code="function",
            )
        if not name:
            fix = f"name it: {_example(file, _functions(file))}"
            raise ConfigError(f"{what} {ref!r} names a file and no function in it", fix=fix, code="function")
    elif not file or not name or not all(part.isidentifier() for part in file.split(".")):
        raise ConfigError(
            f"{what} {ref!r} names no function",
            cause="the form is file.py:function or package.module:function",
            fix=f"{what}=my_file.py:{ref}" if ref.isidentifier() else "",
            code="function",
        )


def _no_such_name(ref: str, what: str, file: str, name: str, exc: AttributeError) -> ConfigError:
    known = _functions(file)
    near = difflib.get_close_matches(name, known, n=1)
    if known and name in known:  # the module was found; something inside it failed with an AttributeError
        return _not_importable(ref, what, f"{file}:{name}", exc)
    return ConfigError(
        f"{what} {ref!r}: {file} has no {name!r}",
        cause=f"it defines {', '.join(known[:12])}" if known else "",
        fix=f"did you mean {file}:{near[0]}?" if near else _example(file, known),
        code="function",
    )


def _not_importable(ref: str, what: str, target: str, exc: BaseException) -> ConfigError:
    module = target.rpartition(":")[0]
    missing = missing_dependency(exc, target)
    at = location(exc, module)
    if isinstance(exc, SyntaxError):
        return ConfigError(f"{what} {ref!r}: {at} is not valid Python: {exc.msg}", fix="correct that line", code="function")
    if missing:
        return ConfigError(
            f"{what} {ref!r} needs {missing!r}, which is missing",
            cause=f"{at}: {exc}", fix=install_command(missing, None), code="function",
        )
    file = Path(module.replace(".", "/")).with_suffix(".py")
    if isinstance(exc, ModuleNotFoundError):
        fix = f"{what}={file}:{target.rpartition(':')[2]}" if file.is_file() else "form: file.py:function; or set PYTHONPATH"
        return ConfigError(f"{what} {ref!r}: there is no module {exc.name!r}", fix=fix, code="function")
    return ConfigError(
        f"{what} {ref!r} cannot be imported: {type(exc).__name__}: {exc}", cause=at, fix="correct that line", code="function"
    )


def _functions(file: str) -> list[str]:
    """The names that a file defines at its top, read without running it; none for modules."""
    try:
        tree = ast.parse(Path(file).expanduser().read_text(encoding="utf-8")) if file.endswith(".py") else None
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")] if tree else []


def _example(file: str, known: Iterable[str]) -> str:
    return " or ".join(f"{file}:{name}" for name in list(known)[:3]) or f"{file}:function"
