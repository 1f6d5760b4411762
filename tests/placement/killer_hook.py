"""A hook that sends a signal to one role of its run, at a given moment: the faults of the cluster tests."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import posttrain


class Killer(posttrain.Hook):
    """Kill, stop or end a role once."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        """Whom, when, and with what."""

        role: str
        when: str  # run_start, before_publish, after_publish, trajectory_scored, step_end; checkpoint: while one is written
        step: int = 2
        number: int = 9
        after_s: float = 0.0  # later than the moment, from a thread

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._done = False

    def run_start(self, path: Any) -> None:
        self._run = Path(path)
        if self.options.when == "checkpoint":
            threading.Thread(target=self._at_checkpoint, daemon=True).start()
        self._at("run_start", self.options.step)

    def before_publish(self, version: int) -> None:
        self._at("before_publish", version)

    def after_publish(self, version: int) -> None:
        self._at("after_publish", version)

    def trajectory_scored(self, step: int) -> None:
        self._at("trajectory_scored", step)

    def step_end(self, step: int) -> None:
        self._at("step_end", step)

    def _at(self, moment: str, step: int) -> None:
        if moment != self.options.when or step < self.options.step or self._done:
            return
        self._done = True
        if self.options.after_s:
            threading.Thread(target=self._send, daemon=True).start()
        else:
            self._send()

    def _at_checkpoint(self) -> None:
        while not (self._run / "checkpoints" / f"tmp_step_{self.options.step}").exists():
            time.sleep(0.001)
        self._send()

    def _send(self) -> None:
        time.sleep(self.options.after_s)
        pid = json.loads((self._run / "logs" / "roles.json").read_text())[self.options.role]["pid"]
        (self._run / "killed").write_text(str(time.time()))
        os.kill(pid, self.options.number)
