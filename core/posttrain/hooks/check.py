"""What is wrong with a hook, told when it is made: methods that are no hooks, arguments that their hook does not have."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.errors import PluginError
from posttrain.hooks.hook import Hook
from posttrain.hooks.specs import EVENTS, PROJECT

ANCHOR = "howto/trackers.md#your-own-hook"
_UNFIT = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_hook(hook: Hook | type[Hook], owner: str, where: str = "") -> None:
    """Raise PluginError naming everything that does not fit the specs, with its file and line. owner: as in a message."""
    cls = hook if isinstance(hook, type) else type(hook)
    methods = public_methods(cls)
    found = [(problem, fix, _line(function)) for name, function in methods for problem, fix in _problems(name, function)]
    if not methods:
        found.append(("has no hook at all", f"give it one of {', '.join(EVENTS)}", _line(cls)))
    if found:
        first = found[0]
        rest = "".join(f"\n  and {problem} ({line}): {fix}" for problem, fix, line in found[1:])
        raise PluginError(
            f"{owner} {first[0]}" + rest, cause=first[2], fix=first[1], where=where, code="plugin-hook", anchor=ANCHOR
        )


def label_and_owner(ref: str, hook: Hook | type[Hook]) -> tuple[str, str]:
    """What an installed hook is called and whose it is; of any other its class and its file."""
    from posttrain.plugins.resolution import find

    info = find("hooks", ref)
    if info is not None:
        return info.name, info.owner
    cls = hook if isinstance(hook, type) else type(hook)
    try:
        return cls.__name__, inspect.getsourcefile(cls) or "defined here"
    except (TypeError, OSError):
        return cls.__name__, "defined here"


def public_methods(cls: type) -> list[tuple[str, Callable[..., Any]]]:
    """The methods that a hook class adds to its base; those of the last class that defines each."""
    found: dict[str, Callable[..., Any]] = {}
    for base in reversed([c for c in cls.__mro__ if c not in Hook.__mro__]):
        found |= {name: f for name, f in vars(base).items() if inspect.isfunction(f) and not name.startswith("_")}
    return [(name, f) for name, f in found.items() if not hasattr(Hook, name)]


def _problems(name: str, function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    if name not in EVENTS:
        near = difflib.get_close_matches(name, EVENTS, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        yield f"has a method {name!r}, which is no hook{meant}", f"hooks are {', '.join(EVENTS)}; a helper begins with _"
        return
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        what = "a generator" if inspect.isgeneratorfunction(function) else "async"
        yield f"has {name} as {what}", "make it a plain function: it runs in a thread of its own and may wait"
    if _is_wrapper(function):
        yield f"has {name} as a wrapper", "make it a plain function: hooks of a run do not wrap one another"
    allowed = EVENTS[name]
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        near = difflib.get_close_matches(parameter.name, allowed, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        if parameter.kind in _UNFIT:
            yield f"has {name} with {parameter}, which names nothing", f"name what it takes, of: {', '.join(allowed)}"
        elif parameter.name not in allowed:
            yield f"has {name} with {parameter.name!r}, which it is not given{meant}", f"it may take: {', '.join(allowed)}"
        elif parameter.default is not parameter.empty:
            yield f"has {name} with a default for {parameter.name!r}", f"write {parameter.name}: it is always given"


def _is_wrapper(function: Callable[..., Any]) -> bool:
    marks = getattr(function, f"{PROJECT}_impl", None) or {}
    return bool(marks.get("wrapper") or marks.get("hookwrapper"))


def _line(thing: Any) -> str:
    try:
        return f"{inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}"
    except (TypeError, OSError):
        return ""
