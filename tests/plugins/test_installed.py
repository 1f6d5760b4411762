"""The five errors as a person sees them, and what broken plug-ins do to everybody else; the packages are really installed.

The screens are in tests/data/plugin_errors/. After a deliberate change:  UPDATE_SCREENS=1 pytest tests/plugins/test_installed.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """\
model: {name_or_path: tiny}
rl: {steps: 1, objective: {name: grpo}}
environments: [{name: arithmetic}]
"""
SELECTED = ["dependency", "raises", "type", "new", "old", "options"]


@pytest.fixture(autouse=True)
def config(tmp_path: Path) -> Path:
    file = tmp_path / "my.yaml"
    file.write_text(CONFIG)
    return file


def nothing_happened(site: Path, tmp_path: Path) -> bool:
    """No run directory, and no plug-in imported that was not selected."""
    return not (tmp_path / "outputs").exists() and not list(site.rglob("*.ran"))


@pytest.fixture(autouse=True)
def no_traces(broken_site: Path) -> None:
    for file in broken_site.rglob("*.ran"):
        file.unlink()


@pytest.mark.parametrize("name", [*SELECTED, "hangmna"])
def test_selected_and_broken_is_one_screen_before_anything_starts(name, broken_site, screen, golden, tmp_path) -> None:
    seen = screen(broken_site, "train", "--config", "my.yaml", f"environments.0.name={name}")
    golden("not-installed" if name == "hangmna" else name, seen.err)
    assert (seen.code, seen.out) == (2, "") and not (tmp_path / "outputs").exists()
    ran = {file.parent.name for file in broken_site.rglob("*.ran")}
    imported = set() if name in ("new", "old", "hangmna") else {f"rl_{name}"}
    assert ran == imported, "only the selected one is imported, and not even that for its api"


@pytest.mark.parametrize(
    "override",
    [*(f"{key}=part" for key in ("rollout.engine", "weights.transport", "rl.data.packer")),
     "rl.data.packer=rl_parts:Part", "hooks=[{name: part}]"],
)
def test_other_kinds_are_told_before_there_is_a_run_too(override, broken_site, screen, tmp_path) -> None:
    seen = screen(broken_site, "train", "--config", "my.yaml", override)
    assert seen.code == 2 and "RuntimeError: no part" in seen.err and f"where: {override.partition('=')[0]}" in seen.err, seen
    assert not (tmp_path / "outputs").exists() and (broken_site / "rl_parts" / "__init__.ran").exists()


def test_known_and_not_installed(older_site, screen, golden, tmp_path) -> None:
    seen = screen(older_site, "train", "--config", "my.yaml", "environments.0.name=reasoning_gym")
    golden("known", seen.err)
    assert seen.code == 2 and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(("name", "raised"), [("raises", "KeyError: 'b'"), ("dependency", "No module named 'absent_games'")])
def test_the_original_traceback_is_kept(name, raised, broken_site, screen) -> None:
    seen = screen(broken_site, "train", "--config", "my.yaml", f"environments.0.name={name}", "--traceback")
    story = seen.err.partition("The above exception was the direct cause of the following exception")
    assert raised in story[0] and f'File "SITE/rl_{name}/env.py", line 3' in story[0]
    assert "PluginError" in story[2] and seen.err.count(f"error: environment '{name}'") == 1


def test_unselected_and_broken_is_one_line_each_and_nothing_more(broken_site, screen, golden, tmp_path) -> None:
    seen = screen(broken_site, "train", "--config", "my.yaml", "--cfg", "job")
    assert seen.code == 0 and "name: arithmetic" in seen.out
    golden("quarantined", "".join(line for line in seen.err.splitlines(keepends=True) if "quarantined" in line))
    assert nothing_happened(broken_site, tmp_path)


def test_a_run_beside_them_trains_and_imports_none(broken_site, tmp_path, monkeypatch) -> None:
    from posttrain.config.load import load_config
    from posttrain.loop.run import train
    from posttrain.testing.tiny_model import write_tiny_model

    monkeypatch.syspath_prepend(str(broken_site))
    write_tiny_model(tmp_path / "tiny")
    model = [f"model.name_or_path={tmp_path}/tiny", "environments.0.options.largest=9"]
    small = ["rl.batch_per_replica=8", "rl.group_size=4", "rollout.max_tokens=2", "validation.prompts=0", "tracking.display=none"]
    loaded = load_config([*model, *small], config_file=tmp_path / "my.yaml")
    assert sum("quarantined" in note for note in loaded.notes) == 4
    assert train(loaded, run_dir=tmp_path / "outputs").steps_done == 1 and not list(broken_site.rglob("*.ran"))


def test_help_knows_nothing_of_plugins(broken_site) -> None:
    code = (
        "import sys; from posttrain.cli.main import main; main(['--help'])\n"
        "print([name for name in sys.modules if name.startswith(('posttrain.plugins', 'importlib.metadata', 'rl_'))])"
    )
    environment = {**os.environ, "PYTHONPATH": str(broken_site)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_good_one_beside_them_is_selected_by_name(broken_site, screen, tmp_path) -> None:
    for name in ("hangman", "rl-hangman/hangman", "rl_hangman.env:Env"):
        seen = screen(broken_site, "train", "--config", "my.yaml", f"environments.0.name={name}", "--cfg", "job")
        assert seen.code == 0 and f"name: {name}" in seen.out and "error" not in seen.err
    assert nothing_happened(broken_site, tmp_path)


def test_posttrain_plugins_keeps_them_out_of_sight(broken_site, screen, tmp_path) -> None:
    seen = screen(broken_site, "train", "--config", "my.yaml", "--cfg", "job", POSTTRAIN_PLUGINS="none")
    assert seen.code == 0 and "quarantined" not in seen.err
    listed = screen(broken_site, "plugins", "list", "--json", POSTTRAIN_PLUGINS="hangman,rl-raises")
    states = {e["name"]: e["state"] for e in json.loads(listed.out) if e["kind"] == "envs" and e["distribution"] != "posttrain"}
    assert states == {**dict.fromkeys(SELECTED, "hidden"), "hangman": "ok", "raises": "ok"}
    assert nothing_happened(broken_site, tmp_path)


def test_the_list_tells_of_broken_ones_what_it_tells_of_good_ones(broken_site, screen, tmp_path) -> None:
    seen = screen(broken_site, "plugins", "list", "--json")
    entries = {e["name"]: e for e in json.loads(seen.out) if e["kind"] == "envs" and e["distribution"] != "posttrain"}
    assert set(entries) == {*SELECTED, "hangman"}
    for name, entry in entries.items():
        assert entry["group"] == "posttrain.envs" and entry["help"] and entry["file"] == f"SITE/rl_{name}/env.py"
    why = {name: entry["why"] for name, entry in entries.items()}
    assert why == {
        "dependency": "needs 'absent_games', which is missing",
        "raises": "",  # only an import tells; plugins doctor does it
        "type": "",
        "new": "is written for api 9",
        "old": "is written for api 0",
        "options": "its option words has a mutable default",
        "hangman": "",
    }
    assert all((entry["state"] == "quarantined") == bool(entry["why"]) for entry in entries.values())
    assert entries["dependency"]["fix"] == "pip install 'rl-dependency[games]'"
    assert entries["options"]["options"] == [{"name": "words", "type": "list[str]", "default": "[]", "help": "to guess"}]
    assert nothing_happened(broken_site, tmp_path)


def test_the_doctor_imports_each_in_quarantine(broken_site, screen) -> None:
    seen = screen(broken_site, "plugins", "doctor", "--kind", "envs")
    assert seen.code == 2 and "6 broken" in seen.out.splitlines()[-1]
    assert "cannot be imported [SITE/rl_raises/env.py:3: KeyError: 'b']" in seen.out and "ok envs/hangman" in seen.out
