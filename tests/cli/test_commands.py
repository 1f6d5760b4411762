"""What each command prints, and that it is fast and light."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

import posttrain
from posttrain.cli.main import HELP, main
from posttrain.config import load_config

TOY = "experiment=toy"


def run(*arguments: str) -> int:
    return main(list(arguments))


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_is_one_screen(flag, capsys) -> None:
    assert run(flag) == 0
    text = capsys.readouterr().out
    assert text == HELP and len(text.splitlines()) <= 24 and all(len(line) <= 110 for line in text.splitlines())
    for word in ("train", "show", "experiments list", "plugins list", "doctor", "--resume", "--multirun", "143"):
        assert word in text


def test_no_command_shows_the_help_and_fails(capsys) -> None:
    assert run() == 2 and capsys.readouterr().out == HELP


def test_version(capsys) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"posttrain {posttrain.__version__}\n"


@pytest.mark.parametrize("command", ["train", "show", "plugins", "experiments"])
def test_every_command_has_help(command, capsys) -> None:
    assert run(command, "--help") == 0
    assert f"posttrain {command}" in capsys.readouterr().out


def test_plugins_list(capsys, fake_distribution) -> None:
    fake_distribution(
        "rl-broken", points={"posttrain.envs": {"broken": "cli_broken:Env"}}, files={"cli_broken.py": "import not_there\n"}
    )
    fake_distribution("other", points={"posttrain.envs": {"toy": "cli_other:Env"}}, files={"cli_other.py": "class Env: pass\n"})
    assert run("plugins", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["kind", "name", "from", "state", "what", "[options]"]
    cells = {tuple(line.split()[:2]): line for line in lines}
    assert " ok  " in cells["algorithms", "grpo"]
    assert "GRPO: advantages normalised by the group, PPO's clip, token mean. [loss_aggregation," in cells["algorithms", "grpo"]
    assert "quarantined  ! needs 'not_there', which is missing." in cells["envs", "broken"]
    assert ("envs", "toys/toy") in cells and ("envs", "other/toy") in cells and "toys 1.0" in cells["envs", "toys/toy"]


def test_plugins_list_as_json(capsys) -> None:
    assert run("plugins", "list", "--json", "--kind", "algorithms") == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    options = {option["name"]: option for option in entries["grpo"]["options"]}
    assert options["clip_high"]["default"] == "0.28" and options["clip_high"]["help"] and entries["grpo"]["api"] == 1
    assert set(entry["kind"] for entry in entries.values()) == {"algorithms"}


def test_plugins_doctor(capsys, fake_distribution) -> None:
    fake_distribution(
        "rl-broken", points={"posttrain.envs": {"broken": "cli_broken2:Env"}}, files={"cli_broken2.py": "import not_there\n"}
    )
    assert run("plugins", "doctor", "toy") == 0
    assert capsys.readouterr().out.startswith("ok envs/toy (toys 1.0), ")
    assert run("plugins", "doctor", "broken") == 2
    text = capsys.readouterr().out
    assert (
        "needs 'not_there', which is missing" in text and "fix: pip install not_there" in text and "1 plug-in, 1 broken" in text
    )
    assert run("plugins", "doctor", "nosuch") == 2


def test_the_doctor_finds_nothing_broken_in_what_posttrain_brings(capsys, monkeypatch) -> None:
    """An extra that is not installed is no fault: it is told with what to type."""
    monkeypatch.setenv("POSTTRAIN_PLUGINS", "none")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "trackio" else real(name, *a))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    assert run("plugins", "doctor", "--kind", "hooks") == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if "hooks/trackio" in line)
    assert lines[at].startswith("-  ") and lines[at].endswith("optional: needs 'trackio', which is missing")
    assert lines[at + 1].strip() == "to have it: pip install 'posttrain[trackio]'"
    assert lines[-1].endswith(" plug-ins, 0 broken, 1 optional and not installed")
    assert run("plugins", "list", "--json", "trackio") == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert (entry["state"], entry["fix"]) == ("optional", "pip install 'posttrain[trackio]'")


@pytest.mark.parametrize(("builtin", "requires"), [(False, 'absent_one; extra == "one"'), (True, "absent_one")])
def test_what_others_bring_or_what_is_required_stays_broken(builtin, requires, capsys, fake_distribution) -> None:
    """Only an extra of posttrain itself may be absent; what it requires may not, and others are to say what they need."""
    fake_distribution(
        "posttrain" if builtin else "rl-extra", version="9.0", requires=(requires,),
        points={"posttrain.envs": {"extra": "cli_extra:Env"}}, files={"cli_extra.py": "import absent_one\n"},
    )  # fmt: skip
    assert run("plugins", "doctor", "extra") == 2
    assert "! " in capsys.readouterr().out


def test_experiments_list(capsys, fake_distribution) -> None:
    fake_distribution(
        "lab", points={"posttrain.experiments": {"lab": "cli_lab"}}, files={"cli_lab.py": "import zarr\nEXPERIMENTS = {}"}
    )
    assert run("experiments", "list") == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if line.startswith("toy ")]
    assert "cli_toy_experiments (toys 1.0)" in line and line.endswith("Toy experiments.")
    assert "warning: skipped 1 experiment module(s) needing absent optional dependencies ['zarr']" in err


def test_cfg_job_prints_a_config_that_can_be_used(capsys, tmp_path) -> None:
    assert run("train", TOY, "--cfg", "job", "rl.steps=7") == 0
    path = tmp_path / "job.yaml"
    path.write_text(capsys.readouterr().out)
    assert load_config([], config_file=path).config == load_config([TOY, "rl.steps=7"]).config


def test_case_ops_3_cfg_job_shows_no_token(capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "tok-123")
    assert run("train", TOY, "tracking.tags.note=${oc.env:HF_TOKEN}", "--cfg", "job") == 0
    out, err = capsys.readouterr()
    assert "tok-123" not in out + err and "note: ${oc.env:HF_TOKEN}" in out


def test_train_hands_everything_to_the_loop(fake_train, tmp_path) -> None:
    calls = []
    fake_train(lambda loaded, **kwargs: calls.append((loaded, kwargs)))
    file = tmp_path / "my.yaml"
    file.write_text("seed: 4\n")
    assert run("train", "--run", "/out", TOY, "--config", str(file), "rl.steps=3") == 0
    ((loaded, kwargs),) = calls
    assert (loaded.config.seed, loaded.config.rl.steps, loaded.overrides) == (4, 3, (TOY, "rl.steps=3"))
    assert kwargs == {"run_dir": "/out", "resume": None}


def test_resume_starts_from_the_runs_own_config(fake_train, tmp_path) -> None:
    calls = []
    fake_train(lambda loaded, **kwargs: calls.append((loaded, kwargs)))
    old = load_config([TOY, "seed=9"])
    (tmp_path / "checkpoints" / "step_2").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(old.yaml())
    for given in (tmp_path, tmp_path / "checkpoints" / "step_2"):
        assert run("train", "--resume", str(given), "rl.steps=5") == 0
        loaded, kwargs = calls.pop()
        assert (loaded.config.seed, loaded.config.rl.steps) == (9, 5)
        assert kwargs == {"run_dir": None, "resume": str(given)}


def test_show_calls_the_tracker(monkeypatch) -> None:
    import types

    calls = []
    module = types.ModuleType("posttrain.tracking.show")
    module.show = lambda run, step: calls.append((run, step))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "posttrain.tracking.show", module)
    assert run("show", "outputs/x", "--step", "3") == 0 and calls == [("outputs/x", 3)]


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["experiments", "list"], ["train", "--help"]])
def test_looking_imports_nothing_heavy_and_little_at_all(arguments) -> None:
    # Modules are counted, not seconds: they are what the time goes into, and a slow disk does not change them.
    code = (
        "import sys; from posttrain.cli.main import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'hydra', 'omegaconf', 'vllm', 'ray', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(len(sys.modules), heavy, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done
    modules, heavy = done.stderr.splitlines()[-1].split(maxsplit=1)
    assert heavy == "set()" and int(modules) < 300, f"{modules} modules, {heavy}"
