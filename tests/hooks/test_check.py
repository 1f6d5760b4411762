"""A hook that does not fit the specs is refused when it is made, with its owner, file and line, and what was meant."""

from __future__ import annotations

import inspect

import pluggy
import pytest

from posttrain.config.schema import HookConfig
from posttrain.errors import PluginError
from posttrain.hooks import EVENTS, Hook, HookSpecs, build_hooks, hookimpl
from posttrain.hooks.check import check_hook


class Typo(Hook):
    def step_ended(self, step):
        """No such hook."""


class WrongArgument(Hook):
    def step_end(self, step, metric):
        """No such argument."""


class Everything(Hook):
    def step_end(self, **everything):
        """Names nothing."""


class Default(Hook):
    def step_end(self, step, metrics=None):
        """pluggy would never give it."""


class Async(Hook):
    async def run_end(self, outcome):
        """Would only make a coroutine."""


class Generator(Hook):
    def run_end(self, outcome):
        yield outcome


class Wrapper(Hook):
    @hookimpl(wrapper=True)
    def step_end(self, step):
        return (yield)


class Empty(Hook):
    def _helper(self):
        """Not a hook."""


REFUSED = {
    Typo: ("has a method 'step_ended', which is no hook; did you mean 'step_end'?", "a helper begins with _"),
    WrongArgument: (
        "has step_end with 'metric', which it is not given; did you mean 'metrics'?",
        "it may take: step, metrics, groups, advantages",
    ),
    Everything: ("has step_end with **everything, which names nothing", "name what it takes"),
    Default: ("has step_end with a default for 'metrics'", "write metrics: it is always given"),
    Async: ("has run_end as async", "make it a plain function"),
    Generator: ("has run_end as a generator", "make it a plain function"),
    Wrapper: ("has step_end as a", "make it a plain function"),
    Empty: ("has no hook at all", "give it one of run_start, "),
}


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_what_does_not_fit(cls: type[Hook]) -> None:
    with pytest.raises(PluginError) as caught:
        check_hook(cls(), "hook 'mine' (rl-mine 0.1)", "hooks[0]")
    message, fix = REFUSED[cls]
    error = caught.value
    assert error.message.startswith("hook 'mine' (rl-mine 0.1) " + message)
    assert fix in error.fix and error.where == "hooks[0]" and error.code == "plugin-hook" and error.exit_code == 2
    methods = [f for name, f in vars(cls).items() if inspect.isfunction(f) and not name.startswith("_")]
    assert error.cause == f"{__file__}:{inspect.getsourcelines(methods[0] if methods else cls)[1]}"


def test_all_that_does_not_fit_is_told_together() -> None:
    class Two(Hook):
        def step_ended(self, step): ...

        def run_end(self, result): ...

    with pytest.raises(PluginError, match=r"(?s)step_ended.*\n  and has run_end with 'result'"):
        check_hook(Two(), "hook 'two'")


def test_every_subset_of_the_arguments_fits_and_helpers_state_and_inheritance_do() -> None:
    for name, arguments in EVENTS.items():
        for taken in (arguments, arguments[:1], ()):
            namespace: dict[str, object] = {}
            exec(f"def {name}(self, {', '.join(taken)}): pass", namespace)
            check_hook(type("Fits", (Hook,), {name: namespace[name]})(), "hook 'fits'")

    class Base(Hook):
        def step_end(self, step): ...

    class Child(Base):
        def _helper(self): ...

        def state_dict(self): ...

    check_hook(Child(), "hook 'child'")


def test_the_specs_are_pluggys_typed_and_documented() -> None:
    manager = pluggy.PluginManager("posttrain")
    manager.add_hookspecs(HookSpecs)
    for name, arguments in EVENTS.items():
        spec = getattr(manager.hook, name).spec
        assert spec is not None and tuple(spec.argnames) == arguments
        assert inspect.getdoc(getattr(HookSpecs, name))
        assert set(inspect.signature(getattr(HookSpecs, name)).parameters) - {"self"} <= set(spec.function.__annotations__)


def test_a_plugin_of_another_distribution_is_named_in_the_refusal(fake_distribution) -> None:
    text = '"""Bad."""\nfrom posttrain.hooks import Hook\n\nclass Bad(Hook):\n    def checkpoint_save(self, path): pass\n'
    site = fake_distribution(
        "rl-hooks", version="0.2", points={"posttrain.hooks": {"bad": "rl_hooks_bad:Bad"}}, files={"rl_hooks_bad.py": text}
    )
    with pytest.raises(PluginError) as caught:
        build_hooks([HookConfig(name="bad")])
    assert caught.value.message == (
        "hook 'bad' (rl-hooks 0.2) has a method 'checkpoint_save', which is no hook; did you mean 'checkpoint_saved'?"
    )
    assert caught.value.cause == f"{site}/rl_hooks_bad.py:5"


def test_a_class_that_is_no_hook_is_of_the_wrong_type() -> None:
    from posttrain.plugins import resolve

    with pytest.raises(PluginError, match="not a subclass of Hook"):
        resolve("hooks", int)
