"""The wheel holds the six packages, their entry points and nothing else; requirements are complete pins."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = {"posttrain_algorithms", "posttrain_datapackers", "posttrain_envs", "posttrain_hooks", "posttrain_experiments"}
PACKAGES = {"posttrain", *PLUGINS}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = out.glob("*.whl")
    return found


OUTSIDE = """
import sys, torch
import posttrain, posttrain_algorithms, posttrain_envs, posttrain_datapackers, posttrain_experiments
assert all(sys.argv[1] in module.__file__ for name, module in sys.modules.items() if name.split(".")[0].startswith("posttrain"))
objective = posttrain.build_objective("grpo", group_size=2)
assert objective.advantages([1.0, 0.0], ["g", "g"]).sum() == 0
assert posttrain.load_config(["experiment=arithmetic_grpo"]).config.rl.objective.name == "grpo"
from pathlib import Path
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.testing.tiny_run import TinyRun
write_tiny_model(Path("tiny"))
result = TinyRun(Path("tiny"), Path.cwd())(["rl.steps=1"])
assert result.steps_done == 1 and (result.export("exported") / "model.safetensors").is_file()
from posttrain.cli.main import main
sys.exit(main(["plugins", "list"]))
"""


def test_it_trains_and_exports_unpacked_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """With the wheel's own metadata and without the clone on the path; its dependencies are those of this environment."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    clean = "import sys; sys.path[:] = [p for p in sys.path if not p.startswith(tuple(sys.argv[2:]))]\n"
    sources = [str(ROOT / part) for part in ("core", "plugins", "experiments")]
    command = [sys.executable, "-c", clean + OUTSIDE, str(site), *sources]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "arithmetic" in done.stdout and "(ambiguous" not in done.stdout


def test_it_holds_the_six_packages_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == PACKAGES
    assert "posttrain/py.typed" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_it_holds_every_module_of_the_sources(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    roots = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
    kinds = ("*.py", "*.jsonl", "*.tmpl")
    sources = {str(p.relative_to(ROOT / r)) for r in roots for kind in kinds for p in (ROOT / r).rglob(kind)}
    assert sources - packed == set()


def test_every_entry_point_names_something_that_exists(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    (file,) = [n for n in names if n.endswith("entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(archive.read(file).decode())
    absent = []
    for group in parser.sections():
        for name, value in parser[group].items():
            module, _, attribute = value.partition(":")
            path = module.replace(".", "/") + ".py"
            source = archive.read(path).decode() if path in names else ""
            if not source or (attribute and not re.search(rf"^(?:class|def|async def) {attribute}\b", source, re.MULTILINE)):
                absent.append(f"{group}: {name} = {value}")
    assert not absent, absent


def test_requirements_pin_every_dependency_of_the_package() -> None:
    lines = (ROOT / "requirements" / "cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[\w.!]+", pin) for pin in pins), "exact pins without local versions"
    names = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    assert not names & {"torchvision", "torchaudio", "torchcodec", "posttrain"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in ("cpu", "reasoning-gym", "smollm2", "plot", "tensorboard", "wandb", "test", "dev", "docs"):
        wanted += project["project"]["optional-dependencies"][extra]
    bare = {re.sub(r"[-_.]+", "-", re.split(r"[<>=!~ \[;]", w)[0]).lower() for w in wanted}
    assert bare - names == set()


def test_this_environment_is_the_pinned_one() -> None:
    """A drifted environment would test something else than what `make setup` installs."""
    wrong = {}
    for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            installed = metadata.version(name).partition("+")[0]
            if installed != version:
                wrong[name] = f"{installed}, pinned {version}"
    assert not wrong, wrong
