"""The base class of every hook.

    class Slow(Hook):
        "Says when a step is slow."

        @dataclass(frozen=True, kw_only=True)
        class Options:
            seconds: float = 60.0  # from here on a step is slow

        def step_end(self, step, metrics):
            if metrics["time/step_s"] > self.options.seconds:
                print(f"step {step} took {metrics['time/step_s']:.0f} s")

Every public method is a hook of `specs.HookSpecs` and takes any of its arguments, by name; helpers begin with an underscore.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from posttrain.types import Declares


class Hook(Declares):
    """A plug-in's own code at fixed points of a run. `Options` are its settings under `hooks[i].options`.

    All methods of one hook run in one thread of their own, one after the other, while the run waits for them. Nothing may have
    an effect before `run_start`: a dry run makes the object, too.
    """

    api: ClassVar[int] = 1

    @dataclass(frozen=True)
    class Options:
        """Settings of the hook; a frozen dataclass with defaults, nested in the subclass."""

    def __init__(self, options: Any = None) -> None:
        self.options: Any = type(self).Options() if options is None else options

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this hook (the id of a tracker's run); plain JSON values. Written into every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up the state of the checkpoint that the run goes on from; called right before `run_start`."""
