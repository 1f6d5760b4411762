"""What must hold of a plug-in's class before an instance is made: how it is constructed, and its nested `Options`.

    class Words(Environment):
        @dataclass(frozen=True, kw_only=True)
        class Options:
            length: int = 5  # letters of a word

posttrain makes every plug-in itself, from checked options. So a constructor takes `options` (and what `Kind.init` names) and says
so: with `*args` or `**kwargs` a wrong option would be taken silently. Its methods take what those of the base class take. An
environment travels to the processes that compute rewards, so it must be picklable. Each check gives `(what is wrong, how to fix
it)`, or None.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import traceback
from collections.abc import Iterable
from typing import Any

from posttrain.plugins.kinds import Kind

DECORATE = "decorate it: @dataclass(frozen=True, kw_only=True)"
_DATACLASSES = dataclasses.__file__

Fault = tuple[str, str]


def constructor_fault(kind: Kind, cls: type) -> Fault | None:
    """A constructor that posttrain cannot call with the arguments of `kind`, by name."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # a class of an extension module
        return None
    wanted = f"define __init__(self{''.join(f', {name}' for name in kind.init)})"
    loose = [str(p).partition(":")[0] for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if loose:
        return f"takes {' and '.join(loose)}, so a wrong option would pass unnoticed", wanted
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    lacking = [name for name in kind.init if name not in names]
    if lacking:
        return f"has a constructor without {' and '.join(lacking)}", wanted
    extra = [p.name for p in parameters if p.default is p.empty and p.name not in kind.init]
    if extra:
        return f"has a constructor that needs {' and '.join(extra)}", f"make it an option: a field of its Options; {wanted}"
    return None


def method_fault(kind: Kind, cls: type) -> Fault | None:
    """A method that cannot be called as that of the base class is: it takes other arguments, or is not awaited."""
    for name, original in vars(kind.base_class).items():
        own = inspect.getattr_static(cls, name)
        if name.startswith("_") or own is original or not (inspect.isfunction(own) and inspect.isfunction(original)):
            continue
        given = list(inspect.signature(original).parameters.values())
        by_name = {p.name: None for p in given if p.kind is p.KEYWORD_ONLY}
        coroutine = inspect.iscoroutinefunction(original)
        fix = f"write {'async ' * coroutine}def {name}({_named(given)})"
        taken = inspect.signature(own)
        try:
            taken.bind(*[None] * (len(given) - len(by_name)), **by_name)
        except TypeError:
            return f"has {name}({_named(taken.parameters.values())}), which is called with ({_named(given[1:])})", fix
        if coroutine and not inspect.iscoroutinefunction(own):
            return f"has {name} as a plain function, which is awaited", fix
    return None


def options_fault(cls: type) -> Fault | None:
    """An `Options` whose fields posttrain cannot read and check."""
    options = getattr(cls, "Options", None)
    if options is None:
        return None
    if not isinstance(options, type):
        return f"has Options that are {_a(type(options).__name__)}, not a dataclass", "nest a dataclass called Options"
    if not dataclasses.is_dataclass(options):
        return "has Options that are not a dataclass", DECORATE
    known = {field.name for field in dataclasses.fields(options)}
    for owner in options.__mro__[:-1]:
        if not vars(owner).get("__dataclass_params__") and (added := _annotated(owner) - known):
            return f"has Options without a decorator, so {', '.join(sorted(added))} would be ignored", DECORATE
        typed = vars(owner).get("__annotations__", {})
        if bare := [name for name, value in vars(owner).items() if _plain(name, value) and name not in typed]:
            value = vars(owner)[bare[0]]
            fix = f"annotate it: {bare[0]}: {type(value).__name__} = {value!r}"
            return f"has an option without a type, which a dataclass does not see: {bare[0]}", fix
    from posttrain.config.walker import fields_of

    try:
        fields_of(options)
    except Exception as exc:
        return f"has Options whose types cannot be read: {type(exc).__name__}: {exc}", "import their names at the top of the file"
    return None


def dataclass_fault(exc: BaseException, target: str) -> Fault | None:
    """An import that raised because `@dataclass` refused a class called `Options`."""
    frames = traceback.extract_tb(exc.__traceback__)
    if not frames or frames[-1].filename != _DATACLASSES or not isinstance(exc, (TypeError, ValueError)):
        return None
    around = next((frame for frame in reversed(frames) if frame.filename != _DATACLASSES), None)
    if around is None or around.name != target.rpartition(":")[2].rpartition(".")[2]:  # the body of the plug-in's class
        return None
    if "mutable default" in str(exc):
        fix = "write field(default_factory=…) for that default"
    elif "non-frozen" in str(exc):
        fix = DECORATE
    else:
        fix = "add kw_only=True, or give that field a default" if "non-default" in str(exc) else DECORATE
    return f"has Options that cannot be a dataclass: {exc}", fix


def travel_fault(env: Any) -> Fault | None:
    """An environment with a blocking reward that cannot be sent to the process that computes it. Reads what it would send."""
    if inspect.iscoroutinefunction(env.compute_reward):
        return None
    problem = _unpicklable(env)
    if problem is None:
        return None
    own = getattr(env, "__dict__", {})
    culprit = next((name for name, value in own.items() if _unpicklable(value) is not None), None)
    held = f"its attribute {culprit} is {_a(type(own[culprit]).__name__)} ({problem})" if culprit else problem
    name = culprit or "what cannot be pickled"
    return f"cannot travel to a reward worker: {held}", f"make {name} when it is first used, or leave it out in __getstate__"


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


def _unpicklable(value: Any) -> str | None:
    import cloudpickle

    try:
        cloudpickle.Pickler(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return None


def _named(parameters: Iterable[inspect.Parameter]) -> str:
    """Parameters as they are written, without types and defaults."""
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    return str(inspect.Signature(bare))[1:-1]


def _annotated(owner: type) -> set[str]:
    return {name for name, hint in vars(owner).get("__annotations__", {}).items() if "ClassVar" not in str(hint)}


def _plain(name: str, value: Any) -> bool:
    """Whether a class attribute is a value that was meant as an option, and no constant."""
    return not name.startswith("_") and not name.isupper() and isinstance(value, (bool, int, float, str, list, dict, tuple, set))


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
