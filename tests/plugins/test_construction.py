"""Constructors that say what they take, `Options` that can be read, environments that can travel, and two api versions."""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from posttrain.data.environment import Environment
from posttrain.deprecation import PosttrainDeprecationWarning
from posttrain.errors import PluginError
from posttrain.plugins import kinds, load, resolve
from posttrain.plugins.discovery import discover
from posttrain.plugins.doctor import quarantined

if TYPE_CHECKING:
    from decimal import Decimal


class Base(Environment):
    """A whole environment, to be spoiled."""

    def dataset(self, split: Any) -> Any:
        return [{"id": "0", "prompt": "?"}]

    def compute_reward(self, state: Any) -> float:
        return 1.0


class Loose(Base):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Words(Base):
    def __init__(self, **words: Any) -> None:
        super().__init__()


class Bare(Base):
    def __init__(self) -> None:
        super().__init__()


class Needy(Base):
    def __init__(self, path: str, options: Any = None) -> None:
        super().__init__(options)


class Fine(Base):
    def __init__(self, options: Any = None, *, cache: int = 3) -> None:
        super().__init__(options)


@pytest.mark.parametrize(
    ("cls", "message", "fix"),
    [
        (Loose, "takes *args and **kwargs, so a wrong option would pass unnoticed", "define __init__(self, options)"),
        (Words, "takes **words, so a wrong option would pass unnoticed", "define __init__(self, options)"),
        (Bare, "has a constructor without options", "define __init__(self, options)"),
        (Needy, "has a constructor that needs path", "make it an option: a field of its Options; define __init__(self, options)"),
    ],
)
def test_a_constructor_says_what_it_takes(cls: type, message: str, fix: str) -> None:
    with pytest.raises(PluginError) as caught:
        resolve("envs", cls)
    assert (caught.value.message, caught.value.fix) == (f"environment '{cls.__name__}' {message}", fix)
    assert caught.value.code == "plugin-type" and "test_construction.py:" in caught.value.cause


def test_other_arguments_may_have_defaults() -> None:
    assert resolve("envs", Fine) is Fine


def test_each_kind_has_its_own_arguments() -> None:
    from posttrain.rollout.engine import Engine

    whole: dict[str, Any] = {name: FunctionType(vars(Engine)[name].__code__, {}) for name in Engine.__abstractmethods__}
    assert resolve("engines", type("Silent", (Engine,), whole))
    blind = type("Blind", (Engine,), {**whole, "__init__": lambda self, options=None: None})
    with pytest.raises(PluginError, match="has a constructor without spec") as caught:
        resolve("engines", blind)
    assert caught.value.fix == "define __init__(self, spec, options)"


class NoSplit(Base):
    def dataset(self) -> Any:  # type: ignore[override]
        return []


class MoreState(Base):
    def compute_reward(self, state: Any, tokens: int, /) -> float:  # type: ignore[override]
        return 1.0


class NotAwaited(Base):
    def finish_reward(self, state: Any, reward: Any) -> Any:
        return reward


@pytest.mark.parametrize(
    ("cls", "message", "fix"),
    [
        (NoSplit, "has dataset(self), which is called with (split)", "write def dataset(self, split)"),
        (
            MoreState,
            "has compute_reward(self, state, tokens, /), which is called with (state)",
            "write def compute_reward(self, state)",
        ),
        (
            NotAwaited,
            "has finish_reward as a plain function, which is awaited",
            "write async def finish_reward(self, state, reward)",
        ),
    ],
)
def test_a_method_takes_what_that_of_its_base_takes(cls: type, message: str, fix: str) -> None:
    with pytest.raises(PluginError) as caught:
        resolve("envs", cls)
    assert (caught.value.message, caught.value.fix) == (f"environment '{cls.__name__}' {message}", fix)
    assert caught.value.code == "plugin-type"


def test_a_method_may_take_more_with_a_default_be_static_or_a_coroutine() -> None:
    class Wide(Base):
        def dataset(self, split: Any, shuffled: bool = False) -> Any:
            return []

        def format_prompt(self, *tasks: Any) -> Any:  # type: ignore[override]
            return ""

        @staticmethod
        def env_response(state: Any) -> Any:  # type: ignore[override]
            return None

        async def compute_reward(self, state: Any) -> float:
            return 1.0

    assert resolve("envs", Wide) is Wide


def test_arguments_by_name_are_named() -> None:
    from posttrain_datapackers.preference import PreferencePacker

    class Short(PreferencePacker):
        def get_preference_input(self, pair: Any, max_len: int) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(PluginError, match=r"\(self, pair, max_len\), which is called with \(pair, \*, max_len"):
        resolve("datapackers", Short)


def test_every_built_in_passes() -> None:
    for kind in ("algorithms", "datapackers", "envs", "transports"):
        for info in discover(kind):
            if info.builtin and info.name != "verifiers":  # which needs an environment of its own: tests/adapters
                resolve(kind, info.full_name)


class Undecorated:
    size: int = 3


@dataclass(frozen=True)
class Parent:
    size: int = 3


class Heir(Parent):
    words: int = 4


@dataclass
class Typeless:
    size: int = 3
    depth = 2


@dataclass(frozen=True)
class Override(Parent):
    size = 5


@dataclass(frozen=True)
class Unknown:
    amount: Decimal | None = None


@dataclass(frozen=True)
class Whole(Parent):
    LIMIT = 9
    _inner = 1
    many: ClassVar[int] = 2
    words: int = 4


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        (3, "has Options that are an int, not a dataclass", "nest a dataclass called Options"),
        (Undecorated, "has Options that are not a dataclass", "decorate it: @dataclass(frozen="),
        (Heir, "has Options without a decorator, so words would be ignored", "decorate it: @dataclass(frozen="),
        (Typeless, "has an option without a type, which a dataclass does not see: depth", "annotate it: depth: int = 2"),
        (Override, "has an option without a type, which a dataclass does not see: size", "annotate it: size: int = 5"),
        (Unknown, "has Options whose types cannot be read: NameError: name 'Decimal' is not defined", "import their names"),
    ],
)
def test_options_that_cannot_be_read(options: Any, message: str, fix: str) -> None:
    with pytest.raises(PluginError) as caught:
        resolve("envs", type("Env", (Base,), {"Options": options}))
    assert caught.value.message == f"environment 'Env' {message}" and caught.value.code == "plugin-options"
    assert caught.value.fix.startswith(fix)


def test_options_with_constants_and_inherited_fields_are_fine() -> None:
    cls = type("Env", (Base,), {"Options": Whole})
    assert resolve("envs", cls) is cls


@pytest.mark.parametrize(
    ("body", "message", "fix"),
    [
        ("words: list = []", "mutable default", "default_factory"),
        ("a: int = 1\n        b: str", "non-default argument 'b' follows default argument", "kw_only=True"),
    ],
)
def test_what_the_decorator_refuses_is_told_as_options_not_as_an_import(fake_distribution, body, message, fix) -> None:
    text = (
        "from dataclasses import dataclass\nfrom posttrain.data.environment import Environment\n"
        f"class Env(Environment):\n    @dataclass(frozen=True)\n    class Options:\n        {body}\n"
    )
    fake_distribution("rl-bad", points={"posttrain.envs": {"bad": "rl_bad_options:Env"}}, files={"rl_bad_options.py": text})
    sys.modules.pop("rl_bad_options", None)
    with pytest.raises(PluginError, match=message) as caught:
        resolve("envs", "bad")
    assert caught.value.code == "plugin-options" and fix in caught.value.fix and "rl_bad_options.py:4" in caught.value.cause
    assert isinstance(caught.value.__cause__, (ValueError, TypeError))


class Locked(Base):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.lock = threading.Lock()


def test_an_environment_that_cannot_travel_is_told_when_it_is_made() -> None:
    with pytest.raises(PluginError) as caught:
        load("envs", Locked)
    exc = caught.value
    assert "environment 'Locked' cannot travel to a reward worker: its attribute lock is a lock (TypeError:" in exc.message
    assert exc.fix == "make lock when it is first used, or leave it out in __getstate__" and exc.code == "plugin-pickle"
    with pytest.raises(PluginError, match="its attribute lock is a lock"):
        load("envs", Locked())


def test_an_environment_whose_reward_runs_here_need_not_travel() -> None:
    class Remote(Locked):
        async def compute_reward(self, state: Any) -> float:  # type: ignore[override]
            return 1.0

    assert load("envs", Remote)


SOURCE = """from posttrain.data.environment import Environment
class Env(Environment):
    {api}
    def dataset(self, split): return []
    def compute_reward(self, state): return 1.0
"""


@pytest.mark.parametrize(
    ("line", "outcome"),
    [("api = 4", "new"), ("api = 3", ""), ("api = 2", "previous"), ("api = 1", "old"), ("pass", "old"), ("api = True", "old")],
)
def test_the_current_and_the_previous_api_are_accepted(line, outcome, fake_distribution, monkeypatch) -> None:
    monkeypatch.setattr(kinds, "API", 3)
    name = f"rl_api_{abs(hash(line))}"
    text = "raise RuntimeError('imported')\n" if outcome in ("new", "old") else ""
    files = {f"{name}.py": SOURCE.format(api=line) + text}
    fake_distribution("rl-api", points={"posttrain.envs": {"mine": f"{name}:Env"}}, files=files)
    (told,) = [str(f) for f in quarantined()] or [""]
    if outcome in ("new", "old"):
        with pytest.raises(PluginError, match="this posttrain speaks 2 and 3") as caught:
            resolve("envs", "mine")
        assert f"too {outcome}" in caught.value.cause and "is written for api" in told
    elif outcome == "previous":
        with pytest.warns(PosttrainDeprecationWarning, match="'mine' .* is written for api 2, which goes away with api 4"):
            resolve("envs", "mine")
        assert told == ""
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resolve("envs", "mine")


def test_only_one_api_is_spoken_today() -> None:
    assert kinds.supported_apis() == (1,)
    assert not any(map(kinds.speaks, (0, 2, "1", None, True, 1.5)))
