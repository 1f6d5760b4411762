"""What the parts of a run need of each other, and whether the selected ones fit together.

    class Browsing(Environment):
        needs = ("images",)             # of the DataPacker and of the engine: see CAPABILITIES
        provides = ("binary_rewards",)

A plug-in says it in three class variables, in addition to what its bases say: `needs`, `provides`, and `lacks` for what a base
provides and it does not. What depends on options is set on the object, in `__init__`. Some things are not said but seen: an
environment with an `env_response` of its own needs `multi_turn`. Names are those of `CAPABILITIES`; any other one is refused.

`misfits` compares all selected parts and `misfit` tells what it found as one table. The rule: a need is met when every part that
is asked for it provides it; a role without a part (a packer that is not chosen yet) is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from posttrain.errors import ConfigError, error
from posttrain.plugins.kinds import KINDS

if TYPE_CHECKING:
    from posttrain.config.walker import Problem

FIELDS = ("needs", "provides", "lacks")
_NAMES = (tuple, list, set, frozenset)

Fault: TypeAlias = tuple[str, str]
"""What is wrong, and how to mend it."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that parts need of each other.

    meaning   in a few words
    of        the roles that are asked for it, each with what to do when it does not provide it. A role is a kind of plug-in,
              `grid`, `run`: posttrain itself under this config, or `config`: a key that takes it away
    assumed   a part that says nothing provides it, and what it does is checked while it runs; only `lacks` is a no
    """

    name: str
    meaning: str
    of: Mapping[str, str]
    assumed: bool = False


_ENGINE = "choose an engine that provides it, or leave out what needs it"
CAPABILITIES: dict[str, Capability] = {
    one.name: one
    for one in (
        Capability(
            "pairs",
            "pairs of a chosen and a rejected completion: they come with the data, are shaped and learned from",
            {
                "envs": "use an environment of pairs (name: preference), or choose an engine such as rollout.engine=hf",
                "algorithms": "set rl.objective.name=dpo, or choose an engine such as rollout.engine=hf",
                "datapackers": "unset rl.data.packer, or subclass posttrain_datapackers.preference:PreferencePacker",
            },
        ),
        Capability(
            "no_sampling",
            "completions are those of the data, no others are sampled",
            {
                "engines": "set rollout.engine=none rl.objective.name=dpo rl.group_size=2, or use an environment that scores "
                "completions"
            },
        ),
        Capability("rollout_logprobs", "each sampled token comes with its log-prob", {"engines": _ENGINE}),
        Capability("partial_rollouts", "an aborted request gives back what it has sampled", {"engines": _ENGINE}),
        Capability("inflight_updates", "weights change while requests run; each token has its version", {"engines": _ENGINE}),
        Capability(
            "tensor_parallel",
            "an engine over several ranks",
            {
                "engines": "set rollout.tensor_parallel_size=1, or choose an engine that provides it",
                "grid": "set grid.backend=ray",
            },
        ),
        Capability(
            "images",
            "prompts with images",
            {"datapackers": "set rl.data.packer to one for vision models", "engines": _ENGINE},
        ),
        Capability(
            "multi_turn",
            "episodes of several turns",
            {"datapackers": "choose a packer that implements extend(ids, messages), or a single-turn environment"},
        ),
        Capability(
            "binary_rewards",
            "every reward is 0 or 1",
            {
                "envs": "use an environment whose rewards are 0 or 1, or an algorithm that takes any reward, such as grpo",
                "config": "set it to 0, or use an algorithm that takes any reward, such as grpo",
            },
            assumed=True,
        ),
        Capability("groups", "several completions of each prompt", {"run": "set rl.group_size to 2 or more"}),
        Capability("old_logprobs", "log-probs of the policy before the first of several optimizer steps", {"run": ""}),
        Capability("reference", "log-probs of the frozen model that the run began with", {"run": ""}),
        Capability(
            "between_processes",
            "weights travel to another process",
            {"transports": "set weights.transport=shm, nixl or auto"},
        ),
    )
}

SIGNS: dict[str, dict[str, tuple[str, str]]] = {
    "envs": {"env_response": ("needs", "multi_turn")},
    "datapackers": {"extend": ("provides", "multi_turn"), "get_preference_input": ("provides", "pairs")},
    "algorithms": {"needs_groups": ("needs", "groups")},
}
"""kind -> a method that is overridden, or a class variable that is True -> what that says."""


@dataclass(frozen=True, slots=True)
class Declared:
    """What a plug-in says, sorted. Its bases' words are among them."""

    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Iterable[tuple[str, str]]) -> Declared:
        """From `(field, name)` pairs; what it lacks it does not provide."""
        said = set(words)
        lacks = {name for field, name in said if field == "lacks"}
        named = {field: {name for f, name in said if f == field} for field in FIELDS}
        return cls(*(tuple(sorted(named[field] - (lacks if field == "provides" else set()))) for field in FIELDS))


@dataclass(frozen=True, slots=True)
class Part:
    """One selected part of a run. role: see `Capability.of`; `config` also for a key that needs something.

    name      as in a table: the plug-in's name, or the key and its value
    owner     distribution and version, "" when it has none
    where     the config key that selects it
    """

    role: str
    name: str
    owner: str
    where: str
    declared: Declared = Declared()

    def __str__(self) -> str:
        named = f"{KINDS[self.role].noun} {self.name!r}" if self.role in KINDS else self.name
        return named + (f" ({self.owner})" if self.owner else "")

    def can(self, need: str) -> bool:
        """Whether it provides `need`."""
        assumed = CAPABILITIES[need].assumed and need not in self.declared.lacks
        return assumed or need in self.declared.provides


@dataclass(frozen=True, slots=True)
class Misfit:
    """A need that a part does not meet."""

    need: str
    by: Part
    of: Part

    @property
    def fix(self) -> str:
        """What to do, behind the key where it is done."""
        return CAPABILITIES[self.need].of[self.of.role]

    @property
    def where(self) -> str:
        """The key of the part that is asked, or of the one that asks when it is posttrain itself that cannot."""
        return self.of.where or self.by.where


def misfits(parts: Iterable[Part]) -> list[Misfit]:
    """Every need of a part and every part that is asked for it and does not provide it, sorted; empty when all fit."""
    selected = list(dict.fromkeys(parts))
    found = [
        Misfit(need, by, of)
        for by in selected
        for need in by.declared.needs
        for of in selected
        if of.role in CAPABILITIES[need].of and not of.can(need)
    ]
    return sorted(found, key=lambda one: (one.need, str(one.by), one.by.where, str(one.of), one.of.where))


Offers = Callable[[str], Iterable[Part]]
"""role -> the installed parts of that role."""


def misfit(found: Sequence[Misfit], offers: Offers = lambda role: ()) -> ConfigError:
    """One error for all of `found`, a table; its `problems` are one for each.

    offers: what else is installed, to name what would do.
    """
    needs = "1 need is" if len(found) == 1 else f"{len(found)} needs are"
    made = error("misfit", needs=needs, table=f"\n{' ' * 9}".join(_table(found, offers)))
    assert isinstance(made, ConfigError)
    made.problems = [_problem(one) for one in found]
    return made


def _table(found: Sequence[Misfit], offers: Offers) -> list[str]:
    """A line for each misfit under a header, in columns, and what to do in a line of its own."""
    rows = [("need", "needed by", "not provided by", "provided by")]
    rows += [(one.need, str(one.by), str(one.of), _others(one, offers)) for one in found]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    header, *lines = ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, [*widths, 0], strict=True)) for row in rows]
    told = (text for line, one in zip(lines, found, strict=True) for text in (line, f"  fix: {one.where}: {one.fix}"))
    return [header, *told]


def _problem(one: Misfit) -> Problem:
    from posttrain.config.walker import Problem

    meaning = CAPABILITIES[one.need].meaning
    return Problem(one.where, f"{one.by} needs {one.need} ({meaning}), and {one.of} does not provide it", one.fix)


def _others(one: Misfit, offers: Offers) -> str:
    names = sorted({part.name for part in offers(one.of.role) if one.need in part.declared.provides})
    return ", ".join(names) or "nothing installed"


def declared(kind: str, plugin: Any) -> Declared:
    """What a class says, or an object, which may add to its class. The names are not checked: see `fault`."""
    cls = plugin if isinstance(plugin, type) else type(plugin)
    said = {(field, name) for one in cls.__mro__ for field in FIELDS for name in _names(vars(one).get(field, ()))}
    if cls is not plugin:
        said |= {(field, name) for field in FIELDS for name in _names(getattr(plugin, "__dict__", {}).get(field, ()))}
    base = KINDS[kind].base_class
    for sign, word in SIGNS.get(kind, {}).items():
        value = getattr(cls, sign, None)
        if value is True or (callable(value) and value is not getattr(base, sign, None)):
            said.add(word)
    return Declared.of(said)


def added(one: Declared, field: str, *names: str) -> Declared:
    """The same with more names in a field."""
    return replace(one, **{field: tuple(sorted({*getattr(one, field), *names}))})


def capability_fault(kind: str, plugin: Any) -> Fault | None:
    """What is wrong with `needs`, `provides` or `lacks` of a class or an object, and how to mend it."""
    for owner in plugin.__mro__ if isinstance(plugin, type) else (plugin,):
        for field in FIELDS:
            value = getattr(owner, "__dict__", {}).get(field, ())
            if not isinstance(value, _NAMES) or not all(isinstance(name, str) for name in value):
                return f"has {field} = {value!r:.60}, not a tuple of names", f'write a tuple: {field} = ("images",)'
    return name_fault(kind, declared(kind, plugin))


def name_fault(kind: str, said: Declared) -> Fault | None:
    """A name that is no capability, or that nobody asks of this kind: what is wrong, and how to mend it."""
    from posttrain.plugins.problems import nearest

    for field, name in ((where, name) for where in FIELDS for name in getattr(said, where)):
        if name not in CAPABILITIES:
            near = nearest(name, CAPABILITIES)
            meant = f"; did you mean {near!r}?" if near else ""
            return f"{field} {name!r}, which is no capability{meant}", f"choose of {', '.join(sorted(CAPABILITIES))}"
        asked = CAPABILITIES[name].of
        if field != "needs" and kind not in asked:
            nouns = " and ".join(KINDS[role].noun if role in KINDS else f"the {role}" for role in asked)
            return f"{field} {name!r}, which is asked of the {nouns.removeprefix('the ')}", f"remove it from {field}"
    return None


def _names(value: Any) -> Iterable[str]:
    return value if isinstance(value, _NAMES) else ()
