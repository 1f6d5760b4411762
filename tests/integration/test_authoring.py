"""`posttrain new` for each kind: the package builds, installs with pip, keeps its contract, trains by name, and can be removed.

The environment that it is installed into is a new one, which finds what is installed in this one; nothing is fetched.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.plugins.scaffold import DRAFTS
from posttrain.tracking.metrics import read_metrics

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
NAMES = {"env": "my-sums", "algorithm": "my-reinforce", "datapacker": "tidy", "hook": "long-answers"}
SELECTED = {
    "env": "environments=[{name: my_sums, options: {largest: 9, test_size: 20}}]",
    "algorithm": "rl.objective.name=my_reinforce",
    "datapacker": "rl.data.packer=tidy",
    "hook": "hooks=[{name: long_answers, options: {tokens: 2}}]",
}
SMALL = ["rl.steps=3", "rl.group_size=4", "rl.batch_per_replica=32", "validation.prompts=4", "tracking.display=none"]
TINY = ["model.factory_kwargs.steps=30", "model.factory_kwargs.slip_steps=10"]


class Place:
    """An environment of its own, and a folder to work in."""

    def __init__(self, root: Path) -> None:
        self.root, self.environment = root, root / "environment"
        venv.create(self.environment, symlinks=True)
        self.python = str(self.environment / "bin" / "python")
        here = sysconfig.get_path("purelib")
        site = self.environment / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        (site / "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf-8")

    def run(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "POSTTRAIN_OUTPUT_ROOT": str(self.root / "outputs")}
        return subprocess.run([self.python, *arguments], cwd=cwd or self.root, env=variables, capture_output=True, text=True)

    def done(self, *arguments: str, cwd: Path | None = None) -> str:
        """What a command printed that is to work."""
        result = self.run(*arguments, cwd=cwd)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("authoring"))


@pytest.fixture(scope="module")
def packages(place: Place) -> dict[str, Path]:
    """A package of each kind, as written, and installed from its wheel."""
    for draft, name in NAMES.items():
        assert main(["new", draft, name, "--dir", str(place.root)]) == 0
    written = {draft: place.root / name for draft, name in NAMES.items()}
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check", "-q"]
    wheels = place.root / "wheels"
    place.done("-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", str(wheels), *map(str, written.values()))
    place.done("-m", "pip", "install", *offline, *map(str, sorted(wheels.iterdir())))
    return written


def test_every_kind_is_here() -> None:
    assert set(NAMES) == set(SELECTED) == set(DRAFTS)


def test_what_is_written_is_clean(packages: dict[str, Path]) -> None:
    """By ruff with rules that it leaves off by default, and by mypy as this repository is checked."""
    rules = ["--isolated", "--no-cache", "--select", "E,F,I,UP,B,SIM,RUF", "--line-length", "120"]
    for folder in packages.values():
        subprocess.run([sys.executable, "-m", "ruff", "check", "-q", *rules, "."], cwd=folder, check=True)
    sources = [str(folder / part) for folder in packages.values() for part in ("src", "tests")]
    found = subprocess.run([sys.executable, "-m", "mypy", *sources], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_each_keeps_its_own_tests(packages: dict[str, Path], place: Place) -> None:
    folders = [str(folder / "tests") for folder in packages.values()]
    out = place.done("-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *folders)
    assert "passed" in out and "failed" not in out


def test_the_laws_are_checked_from_the_command_line(packages: dict[str, Path], place: Place) -> None:
    out = place.done("-m", "posttrain.cli", "plugins", "check", "my_sums", "largest=9", "test_size=20")
    assert "ok    the splits share no prompt" in out and " 0 broken" in out
    source = place.root / "forgetful.py"
    text = (packages["env"] / "src" / "my_sums" / "env.py").read_text(encoding="utf-8")
    source.write_text(text.replace("random.Random(self.options.seed)", "random.Random()"), encoding="utf-8")
    broken = place.run("-m", "posttrain.cli", "plugins", "check", "forgetful.py:MySumsEnv", "--kind", "envs")
    assert broken.returncode == 2 and "FAIL  the same options give the same rows" in broken.stdout
    assert "draw from random.Random(seed)" in broken.stdout, "with the advice of the law"
    assert broken.stdout.count("FAIL") <= 4 and "Options" not in broken.stdout, "and no law that it keeps"


def test_a_run_trains_with_all_of_them_by_name_and_without_them_says_so(packages: dict[str, Path], place: Place) -> None:
    """The last test of the file: it uninstalls them."""
    train = ["-m", "posttrain.cli", "train", "experiment=arithmetic_grpo", *SMALL, *TINY]
    place.done(*train, *SELECTED.values())
    (run,) = (place.root / "outputs").glob("arithmetic-grpo-*")
    steps = read_metrics(run)
    assert len(steps) == 3 and all("hook/long_answers/long" in step and "reward/number" in step for step in steps)
    assert (run / "long_answers.json").exists()
    names = [path.name for path in packages.values()]
    place.done("-m", "pip", "uninstall", "-y", "-q", "--disable-pip-version-check", *names)
    for draft, name in NAMES.items():
        gone = place.run(*train, SELECTED[draft])
        plugin = name.replace("-", "_")
        assert gone.returncode == 2 and f"named {plugin!r} is installed" in gone.stderr, gone.stderr
    assert len(list((place.root / "outputs").glob("arithmetic-grpo-*"))) == 1, "nothing began without them"
