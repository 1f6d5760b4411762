"""A person's reward functions: how they are named in options, what they are called with, and how several make one reward.

    score(completion)                the text of the model's answer
    score(completion, row)           and the row of the data, a dict
    score(completion, row, state)    and the whole episode (`EpisodeState`), by the name `state`

A function returns a number, a `Reward`, or None when it cannot judge. Of a list, the total is the sum of weight times value,
and every value is a part under its name. One value that is missing makes the whole reward unscorable: a sum without it would be
compared, in the group's baseline, with sums that have it. A function of weight 0 is only measured, and may be missing.
`min`, `max` and `better` (`higher`, `lower`) of an entry say how its value is shown (`posttrain.data.reward_range`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.environment import EpisodeState
from posttrain.data.reward_range import Range
from posttrain.errors import ConfigError
from posttrain.plugins.functions import absolute, function_of
from posttrain.plugins.objects import PREFIX, References
from posttrain.rollout.rewards import as_reward, unscorable
from posttrain.types import Reward

_RANGE = ("min", "max", "better")
_FORMS = "file.py:function, or a list of {name: …, reward: file.py:function, weight: 1.0}"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a call: completion, row or state, for the parameter `name`."""

    what: str
    name: str = ""
    by_name: bool = False


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One function with its reference, its name, its weight, and what it is called with."""

    ref: str
    name: str
    weight: float
    function: Callable[..., Any]
    takes: tuple[Argument, ...]
    shown: Range = field(default_factory=Range)

    @property
    def waits(self) -> bool:
        """Whether it is a coroutine function, which runs on the event loop."""
        inner = self.function.func if isinstance(self.function, functools.partial) else self.function
        return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004

    def __call__(self, state: EpisodeState) -> Any:
        given = {"completion": state.completion, "row": dict(state.task), "state": state}
        positional = [given[one.what] for one in self.takes if not one.by_name]
        return self.function(*positional, **{one.name: given[one.what] for one in self.takes if one.by_name})

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raise ConfigError when the parameter that gets the whole row is named like a column."""
        named = next((one.name for one in self.takes if one.what == "row"), "")
        if named != "row" and named in columns:
            raise _refused(self.function, self.ref, f"its parameter {named!r} gets the whole row, not its column")


def canonical(reward: Any) -> str | list[dict[str, Any]]:
    """`reward` as options hold it: one reference, or a list of `{name, reward, weight}`. Files become absolute.

    Also taken: a function itself, a list of any of these, `{name: function}` and `{name: [function, weight]}`.
    Raises ConfigError for another form, a repeated name, and a weight that is no finite number.
    """
    refs = References()
    if reward is None:
        raise ConfigError("reward is missing", cause="nothing says what an answer is worth", fix=f"reward={_FORMS}")
    if isinstance(reward, str) or callable(reward):
        return _ref(reward, "reward", refs)
    if isinstance(reward, Mapping):
        items = [reward] if "reward" in reward and set(reward) <= {"name", "reward", "weight", *_RANGE} else list(reward.items())
    else:
        items = list(reward) if isinstance(reward, Sequence) else []
    if not items:
        raise ConfigError(f"reward is {'empty' if reward in ([], {}) else f'a {type(reward).__name__}'}", fix=f"give {_FORMS}")
    entries = [_entry(item, refs) for item in items]
    names = [entry["name"] for entry in entries]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(f"two reward functions are named {repeated!r}", fix="give each its own name: {name: …, reward: …}")
    if not any(entry["weight"] for entry in entries):
        raise ConfigError("every reward function has weight 0", fix="give one of them a weight")
    return entries


def load_functions(
    reward: str | Sequence[Mapping[str, Any]], travelled: Mapping[str, RewardFunction] | None = None
) -> list[RewardFunction]:
    """The functions of a canonical `reward`; one alone has no name. Raises ConfigError for what cannot be called as one.

    travelled: in a reward process, the functions that came with the environment. A coroutine function that cannot be imported
    stays behind: it is never called there.
    """
    alone = [{"name": "", "reward": reward, "weight": 1.0}]
    entries: Sequence[Mapping[str, Any]] = alone if isinstance(reward, str) else reward
    loaded = []
    for entry in entries:
        ref, name, weight = str(entry["reward"]), str(entry["name"]), float(entry["weight"])
        if travelled is not None and ref.startswith(PREFIX):
            loaded.append(travelled.get(ref) or RewardFunction(ref, name, weight, _stayed_behind, ()))
        else:
            loaded.append(_load(ref, name, weight, _range(entry)))
    return loaded


async def _stayed_behind() -> None:
    raise RuntimeError("a coroutine function is called in the process that made it")


def combine(values: Mapping[str, tuple[float, Any]], base: Reward | None = None) -> Reward:
    """One Reward of `{name: (weight, value)}`; `base`: what other functions gave already."""
    total, parts, info = (base.total or 0.0, dict(base.parts), dict(base.info)) if base else (0.0, {}, {})
    for name, (weight, value) in values.items():
        one = as_reward(value)
        if one.total is None:
            if weight:
                cause, why = one.info.get("cause", "unscorable"), one.info.get("error", "")
                return unscorable(str(cause), f"reward {name!r}: {why}" if why else f"reward {name!r}")
            continue
        total += weight * one.total
        parts |= {name: one.total, **{f"{name}/{part}": number for part, number in one.parts.items()}}
        info |= {name: dict(one.info)} if one.info else {}
    return Reward(total, parts, info)


def _entry(item: Any, refs: References) -> dict[str, Any]:
    """One of the list: a mapping, `(name, function)`, `(name, (function, weight))`, `(function, weight)`, or a function."""
    name, reward, weight = "", item, 1.0
    shown: dict[str, Any] = {}
    if isinstance(item, Mapping):
        unknown = [str(key) for key in item if key not in ("name", "reward", "weight", *_RANGE)]
        if unknown or "reward" not in item:
            raise ConfigError(
                f"a reward function has {f'the unknown key {unknown[0]!r}' if unknown else 'no key reward'}",
                fix="write {name: format, reward: file.py:function, weight: 0.2}",
            )
        name, reward, weight = str(item.get("name") or ""), item["reward"], item.get("weight", 1.0)
        shown = {key: item[key] for key in _RANGE if item.get(key) is not None}
    elif isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
        first, second = item
        if _is_number(second):
            reward, weight = first, second
        else:
            name, reward = str(first), second
            if isinstance(second, Mapping):
                return _entry({"name": name, **second}, refs)
            if isinstance(second, Sequence) and not isinstance(second, str) and len(second) == 2:
                reward, weight = second
    if not (isinstance(reward, str) or callable(reward)):
        raise ConfigError(f"{reward!r} is no reward function", fix=f"give {_FORMS}")
    if not _is_number(weight) or not abs(weight) <= sys.float_info.max:  # so, not >: NaN compares with nothing
        said = f"weight={weight!r:.20} of the reward function {name or reward!r} is no finite number"
        raise ConfigError(said, fix="write weight: 1.0")
    ref = _ref(reward, name or "reward", refs)
    entry = {"name": name or ref.rpartition(":")[2].rpartition(".")[2], "reward": ref, "weight": float(weight), **shown}
    _range(entry)
    return entry


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _ref(reward: Any, name: str, refs: References) -> str:
    return absolute(reward) if isinstance(reward, str) else refs.of(reward, name)


def _range(entry: Mapping[str, Any]) -> Range:
    """What an entry says of how it is shown. Raises ConfigError."""
    return Range(**{key: entry[key] for key in _RANGE if entry.get(key) is not None}, weight=float(entry["weight"]))


def _load(ref: str, name: str, weight: float, shown: Range) -> RewardFunction:
    function = function_of(ref, "reward")
    made = RewardFunction(ref, name, weight, function, _takes(function, ref), shown)
    if ref.startswith(PREFIX) and not made.waits:
        _check_travels(function, ref)
    return made


def _check_travels(function: Callable[..., Any], ref: str) -> None:
    """A function that cannot be imported elsewhere is sent to the reward processes with all that it refers to."""
    import cloudpickle

    try:
        cloudpickle.dumps(function)
    except Exception as exc:
        raise ConfigError(
            f"reward {ref!r} cannot be sent to the processes that score: {exc}",
            cause="it refers to something that lives in this process only, such as a lock, a client or an open file",
            fix="make that inside the function, put the function into a file (reward=my_rewards.py:score), or write async def",
            code="function",
        ) from exc


def _takes(function: Callable[..., Any], ref: str) -> tuple[Argument, ...]:
    """What the function is called with. Raises ConfigError when it asks for something else."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some built-in functions do not tell
        return Argument("completion"), Argument("row")
    left = [what for what in ("completion", "row") if what not in {p.name for p in parameters}]
    takes: list[Argument] = []
    for p in parameters:
        if p.name in ("completions", "prompts"):
            raise _refused(function, ref, f"its parameter {p.name!r} asks for a batch, and a reward scores one completion")
        if p.kind is p.VAR_POSITIONAL:
            takes += [Argument(what) for what in left]
            left = []
        elif p.kind is not p.VAR_KEYWORD and (p.name in ("completion", "row", "state") or p.default is p.empty):
            own = p.name in ("completion", "row", "state")
            what = p.name if own else left.pop(0) if left and p.kind is not p.KEYWORD_ONLY else ""
            if not what:
                raise _refused(function, ref, f"nothing is given for its parameter {p.name!r}")
            takes.append(Argument(what, p.name, p.kind is p.KEYWORD_ONLY or len(takes) < parameters.index(p)))
    if not takes:
        raise _refused(function, ref, "it takes no argument")
    return tuple(takes)


def _refused(function: Callable[..., Any], ref: str, why: str) -> ConfigError:
    return ConfigError(
        f"reward {ref!r} cannot be called as a reward: {why}",
        cause=f"it is {getattr(function, '__name__', 'a function')}{inspect.signature(function)}",
        fix="write def score(completion, row) -> float; row is the row of the data; a third parameter named state is the episode",
        code="function",
        anchor="howto/custom-reward.md#what-a-function-gets",
    )
