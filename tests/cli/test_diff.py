"""`posttrain diff`: the table, JSON, and a config beside a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.tracking.run_dir import RunDir


def run_of(root: Path, name: str, *overrides: str) -> str:
    loaded = load_config(["experiment=toy", *overrides])
    with RunDir.create(root, name) as run:
        run.write_config(loaded.tree, loaded.overrides, loaded.origins)
        return str(run.path)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setenv("A_SECRET_KEY", "hush-hush")
    long = "tracking.tags={a: " + "x" * 60 + ", key: '${oc.env:A_SECRET_KEY}'}"
    return run_of(tmp_path, "one", "rl.objective.clip_low=0.1"), run_of(tmp_path, "two", "rl.objective.name=cispo", long)


def test_one_aligned_table(two, capsys) -> None:
    assert main(["diff", *two]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[:2] == [f"A  {two[0]}", f"B  {two[1]}"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[4:] if line}
    assert rows["rl.objective.name"] == ["grpo", "experiment", "toy", "cispo", "command", "line"]
    assert rows["rl.objective.clip_low"] == ["0.1", "command", "line", "1.0", "default"]
    assert rows["rl.objective.use_ppo_clip"] == ["true", "auto", "null", "default"]
    header, row = lines[3], next(line for line in lines if line.startswith("rl.objective.name"))
    assert header.index("from") == row.index("experiment toy") and header.rindex("from") == row.index("command line")
    assert "x" * 39 + "…" in out and "hush" not in out and "other values agree" in out


def test_paths_are_shown_from_the_current_folder(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [run_of(tmp_path, f"{name}-run", f"model.name_or_path={tmp_path}/{name}") for name in ("a", "b")]
    assert main(["diff", *runs]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model.name_or_path"))
    assert row.split()[1::3] == ["a", "b"]


def test_json_has_whole_values_and_origins(two, capsys) -> None:
    assert main(["diff", *two, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["tracking.tags.a"] == {"a": {}, "b": {"value": "x" * 60, "origin": "command line"}}
    assert found["config"]["rl.objective.name"]["a"] == {"value": "grpo", "origin": "experiment toy"}
    assert "hush" not in json.dumps(found) and "seed" not in found["config"]


def test_all_shows_what_agrees(two, capsys) -> None:
    assert main(["diff", *two, "--all"]) == 0
    assert "\nseed  " in capsys.readouterr().out


def test_a_run_beside_the_experiment_or_file_that_it_began_with(two, tmp_path, capsys) -> None:
    assert main(["diff", "experiment=toy", two[0]]) == 0
    out = capsys.readouterr().out
    assert "rl.objective.clip_low  0.2  default  0.1  command line" in out.replace("   ", "  ")
    assert "results" not in out
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump({"experiment": "toy", "seed": 3}))
    assert main(["diff", str(file), two[0]]) == 0
    assert "my.yaml:2" in capsys.readouterr().out


def test_equal_runs_agree_with_the_same_exit_code(two, capsys) -> None:
    assert main(["diff", two[0], two[0]]) == 0
    assert "the configs agree in all" in capsys.readouterr().out


def test_no_run(tmp_path, capsys) -> None:
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "there is no run at" in capsys.readouterr().err
