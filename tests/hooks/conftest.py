"""A small run as a tracker sees it, without a model: the events of two batch steps, or of a resumed third."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.schema import HookConfig
from posttrain.hooks import build_hooks

CONFIG = {"name": "tiny", "rl": {"steps": 3, "optimizer": {"lr": 1e-6}}, "environments": [{"name": "arithmetic"}]}


class Quiet:
    """Fails on any note: a tracker that fails says so."""

    def note(self, text: str) -> None:
        raise AssertionError(text)

    @contextmanager
    def span(self, role: str, name: str, **args: Any):
        yield args


@pytest.fixture
def track(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Drive a tracker over `steps` and return the state that a checkpoint would carry."""

    def run(name: str, steps: range, state: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        hooks = build_hooks([HookConfig(name=name, options=options)])
        hooks.load_state_dict(state or {})

        async def main() -> dict[str, Any]:
            (tmp_path / "run-1").mkdir(exist_ok=True)
            begin = steps.start - 1
            async with hooks.running(Quiet(), path=tmp_path / "run-1", config=CONFIG, step=begin, steps=steps.stop - 1):
                if begin == 0:
                    await hooks.call("validation_end", step=0, metrics={"validation/reward/mean": 0.125}, groups=[])
                for step in steps:
                    metrics = {"loss": None if step == 2 else 0.5 * step, "reward/mean": step / 4, "text": "no number"}
                    await hooks.step_end(step, metrics=metrics, groups=[], advantages={})
                saved = await hooks.state_dict()
            assert hooks.active[0].errors == 0
            return saved

        return asyncio.run(main())

    return run
