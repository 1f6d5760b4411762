"""Hooks on real runs: each is called once for each of its events, with what the run itself writes down; failures lose nothing."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain
from posttrain import Hook
from posttrain.config import load_config
from posttrain.errors import ConfigError, PluginError
from posttrain.loop import checkpoint
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.rollouts import read_rollouts

QUESTIONS = [{"question": f"{a}plus{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]


def likes_a(completion: str, row: Any) -> float:
    return completion.count("a") / 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return str(folder)


@pytest.fixture
def start(model: str, tmp_path: Path):
    def run(*hooks: Any, resume: Any = None, **settings: Any) -> Any:
        if resume is not None:
            return posttrain.train(resume=resume, reward=likes_a, data=QUESTIONS, hooks=list(hooks), **settings)
        return posttrain.train(
            model=model, data=QUESTIONS, reward=likes_a, prompt_column="question", run_dir=tmp_path, hooks=list(hooks),
            **{
                "rl": {"steps": 3, "group_size": 2, "batch_per_replica": 4}, "rollout": {"max_tokens": 4, "max_model_len": 32},
                "rl.discard_group_zero_advantage": False, "rollout.reward_workers": 1, "validation": {"prompts": 2, "every": 2},
                "checkpoint.every": 2, "checkpoint.keep_last": None, "grid": {"threads": 1}, "tracking": {"display": "none"},
                **settings,
            },
        )  # fmt: skip

    return run


class Everything(Hook):
    """Takes every argument of every hook."""

    def __init__(self, into: list[tuple[str, dict[str, Any]]] | None = None) -> None:
        self.calls = [] if into is None else into

    def _keep(self, event: str, **given: Any) -> None:
        self.calls.append((event, given))

    def run_start(self, path, config, step, steps):
        self._keep("run_start", path=path, config=config, step=step, steps=steps)

    def trajectory_scored(self, step, trajectory):
        self._keep("trajectory_scored", step=step, trajectory=trajectory)

    def before_publish(self, version):
        self._keep("before_publish", version=version)

    def after_publish(self, version, metrics):
        self._keep("after_publish", version=version, metrics=metrics)

    def metrics(self, step, groups):
        self._keep("metrics", step=step, groups=groups)
        return {"answers": sum(len(group.trajectories) for group in groups)}

    def step_end(self, step, metrics, groups, advantages):
        self._keep("step_end", step=step, metrics=metrics, groups=groups, advantages=advantages)

    def validation_end(self, step, metrics, groups):
        self._keep("validation_end", step=step, metrics=metrics, groups=groups)

    def checkpoint_saved(self, step, path):
        self._keep("checkpoint_saved", step=step, path=path, complete=(path / checkpoint.LOOP_FILE).is_file())

    def run_end(self, outcome, error, step):
        self._keep("run_end", outcome=outcome, error=error, step=step)


def of(calls: list[tuple[str, dict[str, Any]]], event: str) -> list[dict[str, Any]]:
    return [given for name, given in calls if name == event]


def test_each_event_calls_once_with_what_the_run_writes_down(start) -> None:
    hook = Everything()
    result = start(hook)
    calls, run = hook.calls, result.run
    step = ["trajectory_scored"] * 4
    publish = ["before_publish", "after_publish"]
    assert [name for name, _ in calls if name not in ("checkpoint_saved", "validation_end")] == [
        "run_start", *publish,
        *step, *publish, "metrics", "step_end",
        *step, *publish, "metrics", "step_end",
        *step, *publish, "metrics", "step_end",
        "run_end",
    ]  # fmt: skip
    for step_number in (2, 3):  # a checkpoint is written, and a version validated, beside the loop
        ended = calls.index(("step_end", next(given for given in of(calls, "step_end") if given["step"] == step_number)))
        assert ("checkpoint_saved", of(calls, "checkpoint_saved")[step_number - 2]) in calls[ended:]
    assert of(calls, "run_start")[0] == {
        "path": run, "config": yaml.safe_load((run / "config.yaml").read_text()), "step": 0, "steps": 3
    }  # fmt: skip
    assert [given["version"] for given in of(calls, "before_publish")] == [0, 1, 2, 3]
    assert [given["version"] for given in of(calls, "after_publish")] == [0, 1, 2, 3]
    assert all({"weights/bytes", "time/sync_s"} <= set(given["metrics"]) for given in of(calls, "after_publish"))
    for given, row in zip(of(calls, "step_end"), read_metrics(run), strict=True):
        assert {"step": given["step"], **given["metrics"]} == row
        assert row["hook/Everything/answers"] == 4 and row["hook/Everything/errors"] == 0 and row["time/hooks_s"] > 0
        assert set(given["advantages"]) == {t.sample_id for group in given["groups"] for t in group.trajectories}
    scored = [(given["step"], given["trajectory"].sample_id) for given in of(calls, "trajectory_scored")]
    written = [(n, row["sample_id"]) for n in (1, 2, 3) for row in read_rollouts(run, n)]
    assert Counter(scored) == Counter(written)
    assert all(given["trajectory"].reward is not None for given in of(calls, "trajectory_scored"))
    for given, row in zip(of(calls, "validation_end"), read_validation(run), strict=True):
        assert {"step": given["step"], **given["metrics"]} == row and len(given["groups"]) == row["validation/prompts"]
    saved = [{"step": n, "path": run / "checkpoints" / f"step_{n}", "complete": True} for n in (2, 3)]
    assert of(calls, "checkpoint_saved") == saved
    assert of(calls, "run_end") == [{"outcome": "done", "error": None, "step": 3}]
    spans = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert Counter(span["name"] for span in spans if span["role"] == "hooks") == Counter(
        name for name, _ in calls if name != "trajectory_scored"
    )


def test_hooks_change_nothing_of_the_training(start) -> None:
    steady = ("step", "reward/mean", "loss", "grad_norm", "tokens/trained")
    rows = [[{k: row[k] for k in steady} for row in start(*hooks).metrics()] for hooks in ((), (Everything(),))]
    assert rows[0] == rows[1]


def test_a_run_without_hooks_has_no_metric_of_them(start) -> None:
    (names, *_) = [set(row) for row in start().metrics()]
    assert not [name for name in names if name.startswith(("hook/", "time/hooks"))]


class Fails(Hook):
    """Raises at one event of one step."""

    def __init__(self, event: str, number: int) -> None:
        self.event, self.number = event, number

    def _at(self, event: str, number: int) -> None:
        if (event, number) == (self.event, self.number):
            raise ValueError("boom")

    def run_start(self, step):
        self._at("run_start", step)

    def trajectory_scored(self, step):
        self._at("trajectory_scored", step)

    def before_publish(self, version):
        self._at("before_publish", version)

    def step_end(self, step):
        self._at("step_end", step)

    def validation_end(self, step):
        self._at("validation_end", step)

    def checkpoint_saved(self, step):
        self._at("checkpoint_saved", step)

    def run_end(self, step):
        self._at("run_end", step)


FAILURES = [("run_start", 0, 0), ("validation_end", 0, 0), ("trajectory_scored", 1, 1), ("before_publish", 1, 1),
            ("step_end", 1, 1), ("checkpoint_saved", 2, 2), ("run_end", 3, 3)]  # fmt: skip


@pytest.mark.parametrize(("event", "number", "last"), FAILURES)
def test_a_hook_that_fails_the_run_ends_it_after_the_step_with_a_checkpoint(start, event: str, number: int, last: int) -> None:
    """`last` is the last step that the run does; the resumed run ends as an undisturbed one."""
    seen = Everything()
    entry = {"name": Fails(event, number), "on_error": "fail"}
    with pytest.raises(PluginError, match=rf"hook 'Fails' \(.*\) failed in {event}: ValueError: boom") as caught:
        start(entry, seen)
    error = caught.value
    assert error.code == "hook-failed" and error.exit_code == 2 and isinstance(error.__cause__, ValueError)
    run = error.run_dir  # type: ignore[attr-defined]
    done = [row["step"] for row in read_metrics(run)]
    if event == "checkpoint_saved":  # it comes from beside the loop, which may have begun another step
        last = done[-1]
    assert done == list(range(1, last + 1))
    assert of(seen.calls, "run_end")[0]["outcome"] == ("done" if event == "run_end" else "failed")
    assert "ValueError: boom" in (run / "logs" / "hooks.log").read_text()
    if last == 0:
        return
    assert checkpoint.find(run / "checkpoints")[-1].step == last
    if event == "step_end":
        start(seen, resume=run)
        whole = start()
        values = ("step", "reward/mean", "loss", "grad_norm")
        assert [[row[k] for k in values] for row in read_metrics(run)] == [
            [row[k] for k in values] for row in whole.metrics()
        ]


def test_a_hook_that_only_warns_is_counted_in_the_metrics_and_said_in_the_run(start) -> None:
    run = start({"name": Fails("trajectory_scored", 1)}, {"name": Fails("step_end", 2), "on_error": "disable"}).run
    rows = read_metrics(run)
    assert [row["hook/Fails/errors"] for row in rows] == [4, 4, 4]
    assert [row["hook/Fails#2/errors"] for row in rows] == [0, 0, 1]
    events = (run / "events.jsonl").read_text()
    assert events.count("failed in trajectory_scored") == 1 and "it is off for the rest of this run" in events
    assert (run / "logs" / "hooks.log").read_text().count("Traceback") == 5


class Counts(Hook):
    """Counts batch steps over resumes."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def step_end(self):
        self.count += 1


def test_state_travels_with_the_checkpoint(start) -> None:
    seen = Everything()
    run = start(Counts(), **{"rl.steps": 2}).run
    hook = Counts()
    start(hook, seen, resume=run, rl={"steps": 4})
    assert hook.count == 4
    assert of(seen.calls, "run_start")[0]["step"] == 2 and of(seen.calls, "run_start")[0]["steps"] == 4
    (saved,) = checkpoint.find(run / "checkpoints")[-1].plugin_states()
    assert (saved.kind, saved.name, saved.state) == ("hooks", "Counts", {"count": 4}) and saved.source
    start(resume=run, rl={"steps": 5})  # and without it
    said = (run / "events.jsonl").read_text()
    assert "left a state, and nothing in this run takes it" in said


def test_a_class_with_options_a_file_and_a_partial_config(start, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom posttrain import Hook\n\nclass Mine(Hook):\n    'Writes.'\n"
        "    @dataclass(frozen=True, kw_only=True)\n    class Options:\n        to: str  # file\n\n"
        "    def step_end(self, step):\n        open(self.options.to, 'a').write(f'{step} ')\n"
    )
    out = tmp_path / "steps"
    entry = {"name": f"{file}:Mine", "options": {"to": str(out)}}
    start(entry, **{"rl.steps": 1})
    assert load_config(["experiment=arithmetic_grpo", "hooks=[tensorboard]"]).config.hooks[0].name == "tensorboard"
    assert out.read_text() == "1 "
    with pytest.raises(ConfigError, match=r"hooks\[0\]\.options\.two: unknown key"):
        start({**entry, "options": {"to": "x", "two": 1}})
    with pytest.raises(ConfigError, match=r"hooks\[0\]\.on_error: must be warn \| disable \| fail, not 'wran'"):
        start({**entry, "on_error": "wran"})
    with pytest.raises(PluginError, match="no hook named 'tensorbord' is installed; did you mean 'tensorboard'"):
        start("tensorbord")
    with pytest.raises(ConfigError, match="must be above 0"):
        start({**entry, "timeout_s": 0})


def test_what_is_wrong_with_a_hook_is_told_before_anything_starts(start, tmp_path: Path) -> None:
    class Wrong(Hook):
        def on_step_end(self, step): ...

    with pytest.raises(PluginError, match="has a method 'on_step_end', which is no hook; did you mean 'step_end'"):
        start(Wrong())
    assert not list(tmp_path.glob("run-*"))


def test_the_loop_pays_a_function_call_where_there_is_no_hook(start, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.hooks.active import ActiveHook
    from posttrain.hooks.thread import HookThread

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a hook was called")

    for cls, name in ((ActiveHook, "call"), (HookThread, "run")):
        monkeypatch.setattr(cls, name, functools.partial(never))
    assert start().steps_done == 3
