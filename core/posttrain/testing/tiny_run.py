"""A whole training of a few steps in seconds: a tiny model with random weights, the `hf` engine, all the real parts.

    result = TinyRun(model_folder, tmp_path)(env="mine")
    result.metrics()[-1]["reward/mean"], result.rollouts()[0]["completion"]
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.loop.result import RunResult

LETTERS = "posttrain.testing.letters:Letters"
CONFIG: dict[str, Any] = {
    "rl": {"steps": 3, "group_size": 4, "batch_per_replica": 16, "discard_group_zero_advantage": False},
    "rollout": {"max_tokens": 8, "max_model_len": 128, "reward_timeout_s": 20.0},
    "environments": [{"name": LETTERS}],
    "validation": {"prompts": 2},
    "grid": {"threads": 1},
    "tracking": {"display": "none"},
}
"""What a tiny run is where the test says nothing else."""


class TinyRun:
    """Trains on call, as `posttrain.train` does, for three steps of 16 completions, and returns the RunResult.

    overrides   as on the command line: `["rl.objective.name=mine", "rl.steps=1"]`
    env, data, reward, model and all other keywords: those of `posttrain.train`; they go before the overrides
    resume      a run to go on with: `tiny_run(["rl.steps=5"], resume=result.run)`
    """

    def __init__(self, model: Path, root: Path) -> None:
        self.model, self.root = model, root

    def __call__(self, overrides: Sequence[str] = (), *, resume: Path | None = None, **given: Any) -> RunResult:
        import torch

        from posttrain.config.load import load_config
        from posttrain.loop.run import train

        threads = torch.get_num_threads()
        try:
            if resume is not None:
                loaded = load_config(overrides, config_file=Path(resume) / "config.yaml", values=self._values(given, {}))
                return train(loaded, resume=resume)
            self.root.mkdir(parents=True, exist_ok=True)
            file = self.root / "tiny.yaml"
            file.write_text(json.dumps(CONFIG), encoding="utf-8")
            values = self._values({"model": self.model, **given}, CONFIG)
            return train(load_config(overrides, config_file=file, values=values), run_dir=self.root / "runs")
        finally:
            torch.set_num_threads(threads)

    def _values(self, given: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
        from posttrain.config.call import call_values

        settings = dict(given)
        parts = {name: settings.pop(name, None) for name in ("model", "data", "reward", "env")}
        return call_values(**parts, settings=settings, environments=base.get("environments", ()))
