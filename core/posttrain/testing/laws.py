"""What the suites of several kinds share: copies as other processes get them, and state, kept or not."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from posttrain.plugins.state import Stateful, plain

T = TypeVar("T")


def by_value(value: Any) -> None:
    """Let a class that other processes cannot import, as of a test file, travel to them as it is."""
    from posttrain.plugins.objects import References

    References().of(type(value))


def travelled(value: T) -> T:
    """The copy that another process works with. Fails when there is none."""
    import cloudpickle
    import pytest

    by_value(value)
    try:
        return cloudpickle.loads(cloudpickle.dumps(value))  # type: ignore[no-any-return]
    except Exception as exc:
        pytest.fail(
            f"{type(value).__name__} cannot be sent to another process: {type(exc).__name__}: {exc}. "
            "Open files, clients and locks when they are first used, and leave them out in __getstate__"
        )


def kept(value: Any) -> dict[str, bytes]:
    """What an object keeps, as it would travel, by attribute where it can be told. Fails when it cannot travel."""
    import cloudpickle

    reduced = travelled(value) and value.__reduce_ex__(4)
    arguments = [part for part in reduced[1] if not isinstance(part, type)]
    state = reduced[2] if len(reduced) > 2 else None
    named = state if isinstance(state, dict) else {"": state}
    return {"its arguments": cloudpickle.dumps(arguments)} | {name: cloudpickle.dumps(part) for name, part in named.items()}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """The attributes that differ between two `kept`."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def has_state(value: Any) -> bool:
    """Whether an object can put its state into a checkpoint and take it back."""
    return isinstance(value, Stateful)


def state_of(value: Any) -> Any:
    """The state of an object as a checkpoint gives it back. Fails when a checkpoint cannot hold it."""
    try:
        return json.loads(json.dumps(plain(value.state_dict())))
    except TypeError as exc:
        problem = f"{type(value).__name__}: {exc}: it is not plain JSON data, which is all that a checkpoint holds"
        raise AssertionError(problem) from exc


def survives_a_crash(original: T, work: Callable[[T], Any]) -> None:
    """Work, save the state, crash, load it into a fresh copy: both go on the same. Fails with what differs.

    original: as it is at the start of a run. work: uses it, with a result that can be compared; called more than once.
    """
    living, fresh = travelled(original), travelled(original)
    work(living)
    name = type(original).__name__
    stored = state_of(living)
    saved: Any = living.state_dict()  # type: ignore[attr-defined]
    before = pickle.dumps(saved)
    expected = work(living)
    assert pickle.dumps(saved) == before, f"{name}.state_dict() gives what the object goes on changing: return a copy"
    fresh.load_state_dict(copy.deepcopy(stored))  # type: ignore[attr-defined]
    assert state_of(fresh) == stored, f"{name}: what load_state_dict took is not what state_dict gives"
    assert work(fresh) == expected, (
        f"{name} goes on differently after a crash: state_dict() must hold everything that later results depend on, "
        "and load_state_dict() put it back"
    )
