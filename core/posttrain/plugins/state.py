"""The state contract: what a plug-in keeps from step to step, and how a checkpoint carries it.

    class Running(PolicyGradient):
        "REINFORCE against the mean reward of the run so far."

        def state_dict(self):
            return {"sum": self.sum, "count": self.count}

        def load_state_dict(self, state):
            self.sum, self.count = state["sum"], state["count"]

Both methods are optional, and come together. A plug-in without them keeps nothing and writes nothing. Of every other one a
checkpoint has a `SavedState`: the state as plain JSON with its digest, and whose it was. `loop.states` compares them on resume.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from posttrain.errors import PluginError
from posttrain.plugins.kinds import kind_of
from posttrain.plugins.resolution import find

ANCHOR = "reference/checkpoint.md#the-state-of-plug-ins"
_NOT_ITS_OWN = ("posttrain", "builtins", "abc", "typing")


@runtime_checkable
class Stateful(Protocol):
    """A plug-in that keeps something from step to step."""

    def state_dict(self) -> Mapping[str, Any]:
        """A copy of everything that later results depend on: text, numbers, lists and mappings with text as keys."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the object did that gave `state`. Called once, before anything is trained or asked."""


def plain(state: Any, at: str = "state_dict()") -> Any:
    """A copy of `state` as JSON gives it back. Raises TypeError that says which part of it JSON cannot hold."""
    if state is None or isinstance(state, (bool, str)):
        return state
    if isinstance(state, (int, float)):
        return int(state) if isinstance(state, int) else float(state)
    if isinstance(state, (list, tuple)):
        return [plain(value, f"{at}[{number}]") for number, value in enumerate(state)]
    if isinstance(state, Mapping):
        odd = next((key for key in state if not isinstance(key, str)), None)
        if odd is not None:
            raise TypeError(f"{at} has the key {odd!r}, which would come back as text: use str(key), and convert it on load")
        return {key: plain(value, f"{at}[{key!r}]") for key, value in state.items()}
    hint = "; use .tolist()" if hasattr(state, "tolist") else ""
    raise TypeError(f"{at} is a {type(state).__name__}, not text, a number, a list or a dict{hint}")


def digest(state: Any) -> str:
    """SHA-256 of a plain state; does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(state, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Identity:
    """Which plug-in it is, and from whom, as a checkpoint says it.

    kind, name              the plug-in, as in "envs" and "countdown"; of environments and hooks the label
    distribution, version   what brought it; "" for a file or an object
    class_name              `module:Class`
    source                  SHA-256 of the files that define the class and its bases; "" when there are none
    """

    kind: str
    name: str
    distribution: str
    version: str
    class_name: str
    source: str

    @property
    def whose(self) -> str:
        """Who it is from."""
        return f"{self.distribution} {self.version}" if self.distribution else self.class_name

    @property
    def subject(self) -> str:
        """The plug-in and who it is from, as in a sentence."""
        return subject(self.kind, self.name, self.whose)


@dataclass(frozen=True, slots=True)
class SavedState(Identity):
    """The state of one plug-in in a checkpoint, and whose it was. digest: SHA-256 of the state."""

    digest: str
    state: Any

    @property
    def intact(self) -> bool:
        return self.digest == digest(self.state)


class Keeper:
    """A plug-in of this run, as one that may keep a state.

    value: the object, or its class where this process has none of it. ref: what the config selects it by; "" where it does not.
    where: the config path to name in errors.
    """

    def __init__(self, kind: str, name: str, value: Any, *, ref: str = "", where: str = "") -> None:
        self.kind, self.name, self.value, self.ref, self.where = kind, name, value, ref, where

    @cached_property
    def stateful(self) -> bool:
        """Whether it keeps a state. Raises PluginError when it has one method of the two."""
        given = [callable(getattr(self.value, name, None)) for name in ("state_dict", "load_state_dict")]
        if any(given) and not all(given):
            has, lacks = ("state_dict", "load_state_dict") if given[0] else ("load_state_dict", "state_dict")
            raise PluginError(
                f"{self.subject} has {has} and no {lacks}", cause="a state that is saved has to be taken back, too",
                fix=f"define {lacks}, or remove {has}", where=self.where, code="plugin-state", anchor=ANCHOR,
            )  # fmt: skip
        if self.kind == "hooks":  # the base class has both, for hooks that keep nothing
            from posttrain.hooks.hook import Hook

            return type(self.value).state_dict is not Hook.state_dict
        return all(given)

    @cached_property
    def owner(self) -> tuple[str, str]:
        """Distribution and version; "" and "" of a file or an object."""
        info = find(self.kind, self.ref) if self.ref else None
        return (info.distribution, info.version) if info else ("", "")

    @property
    def cls(self) -> type:
        """Its class."""
        return self.value if isinstance(self.value, type) else type(self.value)

    @property
    def class_name(self) -> str:
        """`module:Class`; of a class in a file of its own `file.py:Class`, wherever that lies."""
        cls = self.cls
        module = cls.__module__
        if module.startswith("posttrain_file_"):
            module = Path(inspect.getsourcefile(cls) or module).name
        return f"{module}:{cls.__qualname__}"

    @property
    def subject(self) -> str:
        """The plug-in and who it is from, as in a sentence."""
        return subject(self.kind, self.name, " ".join(self.owner) if self.owner[0] else self.class_name)

    def save(self) -> SavedState:
        """Its state now. Raises PluginError naming it when it gives none, or one that a checkpoint cannot hold."""
        try:
            state = plain(_mapping(self.value.state_dict()))
        except Exception as exc:
            raise PluginError(
                f"the state of {self.subject} cannot be saved", cause=f"{self.raised_in(exc)}{type(exc).__name__}: {exc}",
                fix="give plain JSON data in state_dict(); the checkpoints before are intact",
                where=self.where, code="plugin-state", anchor=ANCHOR,
            ) from exc  # fmt: skip
        return self.saved(state)

    def saved(self, state: Any) -> SavedState:
        """A plain state of this plug-in, as a checkpoint holds it."""
        source = source_digest(self.cls)
        return SavedState(self.kind, self.name, *self.owner, self.class_name, source, digest(state), state)

    def raised_in(self, exc: BaseException) -> str:
        """`file.py:12: ` where the plug-in's own file raised `exc`; "" when it did not."""
        own = _file(type(self.value))
        frames = [frame for frame in traceback.extract_tb(exc.__traceback__) if own and frame.filename == str(own)]
        return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


@lru_cache(maxsize=256)
def source_digest(cls: type) -> str:
    """SHA-256 of the `source_files` of a class, as they were when it was first asked for: what runs; "" for none."""
    files = source_files(cls)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""


def source_files(cls: type) -> list[Path]:
    """The files that define a class and its bases; of those bases that are of posttrain's core or of Python none."""
    own = [cls, *(one for one in cls.__mro__[1:] if one.__module__.partition(".")[0] not in _NOT_ITS_OWN)]
    return [file for file in dict.fromkeys(map(_file, own)) if file is not None and file.is_file()]


def _file(cls: type) -> Path | None:
    try:
        return Path(inspect.getsourcefile(cls) or "")
    except (TypeError, OSError):  # a class of an interactive session, or of an extension module
        return None


def _mapping(state: Any) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict() is a {type(state).__name__}, not a dict")
    return state


def subject(kind: str, name: str, owner: str) -> str:
    """A plug-in and who it is from, as in a sentence."""
    return f"{kind_of(kind).noun} {name!r} ({owner})"
