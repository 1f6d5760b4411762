"""Two runs told apart: values with origins, what ran them, data, results; and what cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.layers import ABSENT
from posttrain.errors import ConfigError, DataError
from posttrain.tracking.difference import NOT_RECORDED, compare, read_side
from posttrain.tracking.run_dir import RESUMED, RunDir, saved_json

CONFIG = {
    "name": "a",
    "rl": {"steps": 3, "objective": {"name": "grpo", "clip_low": 0.2}, "optimizer": {"betas": [0.9, 0.99]}},
    "environments": [{"name": "toy", "options": {"size": 3}}],
}
ORIGINS = {"name": "command line", "rl.steps": "experiment toy", "environments[0].options.size": "my.yaml:7"}


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """A run directory with this config, written as a run writes it."""

    def make(name: str, config: Any = CONFIG, origins: Any = ORIGINS, provenance: Any = None, score: float = 0.5) -> Path:
        with RunDir.create(tmp_path, name) as run:
            run.write_config(config, origins=origins)
            run.write_fingerprints({"toy": name})
            (run.path / "provenance.json").write_text(json.dumps([{"time": "t", "libraries": {"torch": "1"}}, provenance or {}]))
            row = {"step": 1, "reward/mean": score, "tokens/generated": 9, "time/step_s": 1.0}
            run.metrics.write_text(json.dumps(row) + "\n")
            run.validation.write_text("".join(json.dumps({"step": s, "validation/reward/mean": s + 0.25}) + "\n" for s in (0, 1)))
        return run.path

    return make


def changed(**rl: Any) -> dict[str, Any]:
    return {**CONFIG, "rl": {**CONFIG["rl"], **rl}}


def test_values_that_differ_with_the_origin_of_each(make_run) -> None:
    other = changed(steps=5, optimizer={"betas": [0.9, 0.98]}, objective={"name": "dpo", "beta": 0.1})
    other["environments"] = [{"name": "toy", "options": {"size": 4}}]
    found = compare(read_side(str(make_run("a"))), read_side(str(make_run("b", other, {"rl.steps": "call"}))))
    assert found.config == {
        "rl.steps": ((3, "experiment toy"), (5, "call")),
        "rl.objective.name": (("grpo", "default"), ("dpo", "default")),
        "rl.objective.clip_low": ((0.2, "default"), (ABSENT, "")),
        "rl.optimizer.betas": (([0.9, 0.99], "default"), ([0.9, 0.98], "default")),
        "environments[0].options.size": ((3, "my.yaml:7"), (4, "default")),
        "rl.objective.beta": ((ABSENT, ""), (0.1, "default")),
    }
    assert found.same == 2  # name, environments[0].name


def test_equal_values_of_other_types_differ_and_everything_can_be_asked_for(make_run) -> None:
    a, b = read_side(str(make_run("a", changed(steps=1)))), read_side(str(make_run("b", changed(steps=True))))
    assert list(compare(a, b).config) == ["rl.steps"]
    assert list(compare(a, b, everything=True).config) == [
        "name", "rl.steps", "rl.objective.name", "rl.objective.clip_low", "rl.optimizer.betas",
        "environments[0].name", "environments[0].options.size",
    ]  # fmt: skip


def test_what_ran_them_the_data_and_the_results(make_run) -> None:
    last = {"time": "u", "command": ["x"], "libraries": {"torch": "2", "numpy": "1"}, "git": {"posttrain": {"commit": "c"}}}
    a = read_side(str(make_run("a", provenance=last)))
    b = read_side(str(make_run("b", provenance={**last, "time": "v", "libraries": {"torch": "3", "numpy": "1"}}, score=0.75)))
    found = compare(a, b)
    assert found.provenance == {"libraries.torch": ("2", "3")}
    assert found.data == {"toy": ("a", "b")}
    assert found.results["reward/mean, last tenth"] == (0.5, 0.75)
    assert found.results["validation/reward/mean, before"] == (0.25, 0.25)
    assert found.results["validation/reward/mean, after"] == (1.25, 1.25)


def test_a_resume_keeps_origins_and_marks_what_it_changed(make_run) -> None:
    path = make_run("a")
    with RunDir.open(path) as run:
        run.write_config(changed(steps=9), origins={"rl.steps": "command line", "name": "config.yaml:1"})
    assert saved_json(path / "origins.json") == {**ORIGINS, "rl.steps": RESUMED}


def test_a_run_from_before_origins_says_so_and_a_resume_does_not_invent_them(make_run) -> None:
    path = make_run("a")
    (path / "origins.json").unlink()
    (path / "fingerprints.json").unlink()
    with RunDir.open(path) as run:
        run.write_config(changed(steps=9), origins={"rl.steps": "command line"})
    found = compare(read_side(str(path)), read_side(str(make_run("b"))))
    assert found.config["rl.steps"] == ((9, NOT_RECORDED), (3, "experiment toy")) and found.data == {}


def test_a_checkpoint_names_its_run_and_a_run_that_never_stepped_has_no_results(make_run) -> None:
    path = make_run("a")
    checkpoint = path / "checkpoints" / "step_2"
    checkpoint.mkdir()
    assert read_side(str(checkpoint)).config == CONFIG
    (path / "metrics.jsonl").unlink()
    (path / "validation.jsonl").unlink()
    assert read_side(str(path)).results.get("reward/mean, last tenth") is None


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.yaml", "a: [", "config.yaml cannot be read"),
        ("config.yaml", "- a", "is not a config"),
        ("origins.json", "{", "origins.json cannot be read"),
        ("provenance.json", "nonsense", "provenance.json cannot be read"),
    ],
)
def test_a_broken_run_is_told_with_its_file(make_run, file, text, message) -> None:
    path = make_run("a")
    (path / file).write_text(text)
    with pytest.raises(DataError, match=message):
        read_side(str(path))


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run at"):
        read_side(str(tmp_path / "nowhere"))
