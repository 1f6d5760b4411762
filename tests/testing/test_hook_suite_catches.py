"""Each law of hooks fails for the hook that breaks it, and says what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain import Hook
from posttrain.testing import HookContract


class Good(Hook):
    """Counts steps."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.steps = 0

    def run_start(self, path):
        self.file = path / "steps.txt"

    def step_end(self, step, metrics):
        self.steps += 1

    def run_end(self):
        self.file.write_text(str(self.steps))

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Misspelt(Good):
    def step_ends(self, step):
        """No hook."""


class Tomorrows(Good):
    api = 2


class Silent(Good):
    __doc__ = ""


class WritesAtOnce(Good):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        Path("early.txt").touch()


class LossIsANumber(Good):
    def step_end(self, step, metrics):
        self.steps += round(metrics["loss"])


class RewardIsANumber(Good):
    def metrics(self, groups):
        return {"best": max(t.reward for group in groups for t in group.trajectories)}


class TooSlow(Good):
    def step_end(self, step):
        time.sleep(2)


class NeedsAStep(Good):
    """Divides by the steps that were done."""

    def run_end(self):
        self.file.write_text(str(1 / self.steps))


class FromTheFirst(Good):
    def step_end(self, step):
        self.seen = [0] if step == 1 else [*self.seen, step]


class Sorts(Good):
    def step_end(self, groups):
        groups[0].trajectories.sort(key=lambda t: -len(t.token_ids))


class Forgets(Good):
    def load_state_dict(self, state):
        """Takes nothing up."""


class NotJson(Good):
    def state_dict(self):
        return {"steps": {self.steps}}


BROKEN: dict[tuple[str, type[Hook]], str] = {
    ("test_its_methods_are_hooks_and_name_what_they_take", Misspelt): "did you mean 'step_end'",
    ("test_it_names_a_contract_version", Tomorrows): "api = 2",
    ("test_it_names_a_contract_version", Silent): "docstring",
    ("test_nothing_happens_before_a_run_starts", WritesAtOnce): "'early.txt': open files and connections in run_start",
    ("test_it_gets_through_a_run", LossIsANumber): "failed in step_end: TypeError",
    ("test_it_gets_through_a_run", RewardIsANumber): "failed in metrics: TypeError",
    ("test_it_gets_through_a_run", TooSlow): "did not come back in 0.5 s",
    ("test_it_ends_with_a_run_that_fails", NeedsAStep): "stopped after 0 steps: .*ZeroDivisionError",
    ("test_it_goes_on_with_a_run", FromTheFirst): "'seen'",
    ("test_what_it_gets_is_not_changed", Sorts): "copy it first",
    ("test_state_survives_a_crash", Forgets): "load_state_dict",
    ("test_state_survives_a_crash", NotJson): "failed in state_dict",
}


@pytest.mark.parametrize(("law", "broken"), BROKEN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_hook_that_breaks_a_law_is_told(
    law: str, broken: type[Hook], told: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    suite = HookContract()
    suite.timeout_s = 0.5 if broken is TooSlow else 30.0
    message = told(suite, law, broken())
    assert re.search(BROKEN[law, broken], message), message


def test_no_law_is_without_a_hook_that_breaks_it(laws: Callable[[type], set[str]]) -> None:
    assert laws(HookContract) == {law for law, _ in BROKEN}


class TestGood(HookContract):
    plugin = Good


class TestTensorBoard(HookContract):
    plugin = "tensorboard"
