"""Hooks: a plug-in's own code at fixed points of a run, for trackers, alerts, extra metrics and files of one's own.

    from posttrain import Hook

    class Best(Hook):
        "Remembers the best step."

        def run_start(self, path):
            self.file, self.best = path / "best.txt", 0.0

        def step_end(self, step, metrics):
            if metrics["reward/mean"] > self.best:
                self.best = metrics["reward/mean"]
                self.file.write_text(f"step {step}: {self.best}")

`posttrain.train(..., hooks=[Best()])`, or as a plug-in of the group `posttrain.hooks` by name: `hooks=[{name: best}]`. The points
are the methods of `specs.HookSpecs`; a hook names those of their arguments that it wants.
"""

from __future__ import annotations

from posttrain.hooks.active import Reporter
from posttrain.hooks.hook import Hook
from posttrain.hooks.run_hooks import RunHooks, build_hooks
from posttrain.hooks.specs import EVENTS, HookSpecs, hookimpl

__all__ = ["EVENTS", "Hook", "HookSpecs", "Reporter", "RunHooks", "build_hooks", "hookimpl"]
