"""The laws of a hook as tests: subclass, name the plug-in or give one fixture.

    class TestMine(HookContract):
        plugin = MyHook                           # a name, `file.py:Class` or the class
        options = {"tokens": 100}

or, for full control, a fixture `hook` that returns the object. The hook goes through a run of three batch steps as the loop
calls it: in its own thread, with a deadline. Nothing is trained, and a call that raises breaks the law.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from posttrain.errors import PluginError
from posttrain.hooks import Hook, RunHooks
from posttrain.hooks.active import ActiveHook
from posttrain.hooks.check import check_hook
from posttrain.testing.laws import survives_a_crash
from posttrain.types import Group, Trajectory

CONFIG = {"name": "contract", "rl": {"steps": 3, "objective": {"name": "grpo"}}, "environments": [{"name": "arithmetic"}]}


class Stopped(Exception):
    """What ends a run here that does not come to its end."""


class HookContract:
    """What every hook does. `timeout_s`: within which each of its calls must come back."""

    plugin: ClassVar[Any] = None
    options: ClassVar[Mapping[str, Any]] = {}
    timeout_s = 30.0

    @pytest.fixture
    def hook(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hook:
        if self.plugin is None:
            raise NotImplementedError("give the contract a hook: the class variable `plugin`, or a fixture `hook`")
        from posttrain.plugins import load

        monkeypatch.chdir(tmp_path)
        return load("hooks", self.plugin, **self.options)  # type: ignore[no-any-return]

    # --- the object ---------------------------------------------------------------------------------------------------

    def test_its_methods_are_hooks_and_name_what_they_take(self, hook: Hook) -> None:
        try:
            check_hook(hook, "the hook")
        except PluginError as exc:
            pytest.fail(str(exc))

    def test_it_names_a_contract_version(self, hook: Hook) -> None:
        assert type(hook).api == 1, f"api = {type(hook).api}: this contract is version 1"
        assert (type(hook).__doc__ or "").strip(), "give the class a docstring: its first line is what `plugins list` says"

    def test_nothing_happens_before_a_run_starts(self, hook: Hook, tmp_path: Path) -> None:
        """A dry run, and a config check, make the object too."""
        written = [path.name for path in tmp_path.iterdir()]
        assert not written, f"making the hook wrote {written[0]!r}: open files and connections in run_start"

    # --- a run --------------------------------------------------------------------------------------------------------

    def test_it_gets_through_a_run(self, hook: Hook, tmp_path: Path) -> None:
        """Its numbers are finite or None, rewards may be missing, a group may be small: as in any run."""
        problem = self.run(hook, tmp_path)
        assert not problem, problem

    def test_it_ends_with_a_run_that_fails(self, hook: Hook, tmp_path: Path) -> None:
        for steps in (0, 1):
            problem = self.run(copy.copy(hook), tmp_path, steps=steps, fails=True)
            assert not problem, f"a run that stopped after {steps} steps: {problem}"

    def test_it_goes_on_with_a_run(self, hook: Hook, tmp_path: Path) -> None:
        """A resumed run does not start with step 1."""
        problem = self.run(hook, tmp_path, first=3)
        assert not problem, problem

    def test_what_it_gets_is_not_changed(self, hook: Hook, tmp_path: Path) -> None:
        given = {step: step_of(step) for step in (1, 2, 3)}
        before = copy.deepcopy(given)
        self.run(hook, tmp_path, given=given)
        assert given == before, "the hook changes what it is given, which belongs to the run: copy it first"

    def test_state_survives_a_crash(self, hook: Hook, tmp_path: Path) -> None:
        if type(hook).state_dict is Hook.state_dict:
            pytest.skip("has no state_dict")

        def work(made: Hook) -> dict[str, Any]:
            problem = self.run(made, tmp_path)
            assert not problem, problem
            return made.state_dict()

        survives_a_crash(hook, work)

    # --- how ----------------------------------------------------------------------------------------------------------

    def run(
        self, hook: Hook, path: Path, *, first: int = 1, steps: int = 3, fails: bool = False, given: Any = None
    ) -> str:
        """Take the hook through a run of `steps` batch steps; what it did wrong, "" for nothing."""
        from posttrain.config.schema import HookConfig

        config = HookConfig(name="hook", timeout_s=self.timeout_s)
        entry = ActiveHook(hook, config, label="hook", owner=inspect.getsourcefile(type(hook)) or "", where="")
        told, hooks = _Told(), RunHooks([entry])

        async def whole() -> None:
            async with hooks.running(told, path=path, config=copy.deepcopy(CONFIG), step=first - 1, steps=first + 2):
                if first == 1:
                    await hooks.call("validation_end", step=0, metrics={"validation/reward/mean": 0.25}, groups=[])
                for step in range(first, first + steps):
                    await _step(hooks, step, path, *(given or {}).get(step, step_of(step)))
                if fails:
                    raise Stopped

        with suppress(Stopped):
            asyncio.run(whole())
        return told.first


async def _step(hooks: RunHooks, step: int, path: Path, metrics: dict[str, Any], groups: list[Group]) -> None:
    """The events of a batch step, in their order."""
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        await hooks.call("trajectory_scored", step=step, trajectory=trajectory)
    await hooks.call("before_publish", version=step)
    await hooks.call("after_publish", version=step, metrics={"time/sync_s": 0.01})
    more = await hooks.metrics(step, groups)
    advantages = {t.sample_id: float(n % 2) for group in groups for n, t in enumerate(group.trajectories)}
    await hooks.step_end(step, metrics={**metrics, **more}, groups=groups, advantages=advantages)
    await hooks.call("validation_end", step=step, metrics={"validation/reward/mean": 0.5}, groups=groups)
    await hooks.state_dict()
    await hooks.call("checkpoint_saved", step=step, path=path / f"step_{step}")


def step_of(step: int) -> tuple[dict[str, Any], list[Group]]:
    """The metrics and groups of a batch step: the second one taught nothing, the third has a reward that is missing."""
    odd: dict[int, list[float | None]] = {2: [0.0, 0.0], 3: [None, 1.0]}
    rewards = odd.get(step, [1.0, 0.0])
    learned = rewards != [0.0, 0.0]
    metrics = {
        "step": step, "loss": 0.1 if learned else None, "grad_norm": 0.5 if learned else 0.0, "reward/mean": 0.5 * learned,
        "length/mean": 2.0, "time/step_s": 1.5,
    }  # fmt: skip
    answers = [_answer(step, group, n, reward) for group in range(2) for n, reward in enumerate(rewards)]
    groups = [Group(f"{step}/{g}", {"id": str(g)}, [t for t in answers if t.group_id == f"{step}/{g}"]) for g in range(2)]
    return metrics, groups


def _answer(step: int, group: int, number: int, reward: float | None) -> Trajectory:
    length = number + 1
    ids, name = [7] * length, f"{step}/{group}"
    made = Trajectory([1, 2], ids, [True] * length, [-0.5] * length, [step - 1] * length, "stop", reward, group_id=name)
    made.sample_id, made.env = f"{name}/{number}", "arithmetic"
    made.messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "日" * length}]
    return made


class _Told:
    """Keeps the first thing that a run would say about the hook."""

    def __init__(self) -> None:
        self.first = ""

    def note(self, text: str) -> None:
        self.first = self.first or text.partition("; it goes on being called")[0]

    @contextmanager
    def span(self, role: str, name: str, **args: Any) -> Iterator[dict[str, Any]]:
        yield args
