"""What the suites of several kinds share: copies as other processes get them, and state, kept or not."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

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
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def survives_a_crash(original: T, work: Callable[[T], Any]) -> None:
    """Work, save the state, crash, load it into a fresh copy: both go on the same. Fails with what differs.

    original: as it is at the start of a run. work: uses it, with a result that can be compared; called more than once.
    """
    living, fresh = travelled(original), travelled(original)
    work(living)
    name = type(original).__name__
    saved: Any = living.state_dict()  # type: ignore[attr-defined]
    try:
        text = json.dumps(saved)
    except (TypeError, ValueError) as exc:
        problem = f"{name}.state_dict() is not plain JSON data ({exc}): checkpoints hold numbers, text, lists, dicts"
        raise AssertionError(problem) from exc
    before = pickle.dumps(saved)
    expected = work(living)
    assert pickle.dumps(saved) == before, f"{name}.state_dict() gives what the object goes on changing: return a copy"
    fresh.load_state_dict(json.loads(text))  # type: ignore[attr-defined]
    again: Any = fresh.state_dict()  # type: ignore[attr-defined]
    assert again == json.loads(text), f"{name}: what load_state_dict took is not what state_dict gives"
    assert work(fresh) == expected, (
        f"{name} goes on differently after a crash: state_dict() must hold everything that later results depend on, "
        "and load_state_dict() put it back"
    )
