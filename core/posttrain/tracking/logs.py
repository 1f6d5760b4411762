"""One log file per role, through the standard `logging`.

Every record of the process goes to `logs/driver.log`; what the loggers of one role say goes to that role's file too:

    posttrain.policy  -> logs/policy.log         posttrain.rollout -> logs/rollout.log
    posttrain.rewards -> logs/rewards.log        posttrain.weights -> logs/weights.log
    posttrain.hooks   -> logs/hooks.log

A worker process calls `log_to(file)` for a file of its own. Nothing is printed: the screen belongs to the display.
"""

from __future__ import annotations

import logging
from pathlib import Path

ROLES = {role: f"posttrain.{role}" for role in ("policy", "rollout", "rewards", "weights", "hooks")}
FORMAT = "%(asctime)s.%(msecs)03d %(levelname).1s %(name)s: %(message)s"


def log_to(path: Path, logger: str = "", level: int = logging.INFO) -> logging.Handler:
    """Send the records of `logger` (default: all of this process) to `path`. Returns the handler, for `remove`."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
    handler.setLevel(level)
    target = logging.getLogger(logger)
    target.addHandler(handler)
    if target.getEffectiveLevel() > level:
        target.setLevel(level)
    return handler


class RoleLogs:
    """The handlers of one run in this process; `close` removes them."""

    def __init__(self, folder: Path) -> None:
        self._handlers = [("", log_to(folder / "driver.log"))]
        self._handlers += [(name, log_to(folder / f"{role}.log", name)) for role, name in ROLES.items()]

    def close(self) -> None:
        for name, handler in self._handlers:
            logging.getLogger(name).removeHandler(handler)
            handler.close()
        self._handlers = []
