"""Plug-in packages that are really built as wheels and really installed with pip, into a folder of their own, once a session."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SCREENS = Path(__file__).parents[1] / "data" / "plugin_errors"
ENV = '''"""{what}"""

from dataclasses import dataclass

from posttrain.data.environment import Environment


class Env(Environment):
    """{what}"""

    def dataset(self, split):
        return [{{"id": "0", "prompt": "?"}}]

    def compute_reward(self, state):
        return 1.0
'''
RAN = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
"""A file beside the module shows that somebody imported it."""


@dataclass(frozen=True)
class Package:
    """A distribution with one module. points: group -> name -> what it names."""

    points: Mapping[str, Mapping[str, str]]
    files: Mapping[str, str]
    version: str = "1.0"
    requires: tuple[str, ...] = ()
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def env(name: str, module: str, text: str, **about: object) -> Package:
    """A package whose one plug-in is the environment `name`."""
    files = {f"{module}/__init__.py": "", f"{module}/env.py": text}
    return Package({"posttrain.envs": {name: f"{module}.env:Env"}}, files, **about)


OPTIONS = '''
    @dataclass(frozen=True, kw_only=True)
    class Options:
        words: list[str] = []  # to guess
'''
BROKEN = {
    "rl-dependency": env(
        "dependency",
        "rl_dependency",
        RAN + "import absent_games.hangman\n" + ENV.format(what="Needs a package that is not there."),
        version="0.3.1",
        extras={"games": ("absent-games>=0.7",)},
    ),
    "rl-raises": env("raises", "rl_raises", RAN + "SETTINGS = dict(a=1)['b']\n" + ENV.format(what="Raises."), version="0.4"),
    "rl-type": env("type", "rl_type", RAN + 'class Env:\n    """Of no kind."""\n', version="0.5"),
    "rl-new": env("new", "rl_new", RAN + ENV.format(what="Of tomorrow.") + "\n    api = 9\n", version="9.0"),
    "rl-old": env("old", "rl_old", RAN + ENV.format(what="Of yesterday.") + "\n    api = 0\n", version="0.1"),
    "rl-options": env("options", "rl_options", RAN + ENV.format(what="With a list as a default.") + OPTIONS, version="0.6"),
}
PARTS = {
    "rl-parts": Package(
        {f"posttrain.{kind}": {"part": "rl_parts:Part"} for kind in ("engines", "transports", "datapackers", "hooks")},
        {"rl_parts/__init__.py": RAN + "raise RuntimeError('no part')\nclass Part: pass\n"},
        version="0.7",
    )
}
GOOD = {"rl-hangman": env("hangman", "rl_hangman", ENV.format(what="Six guesses."), version="0.3.1")}
CATALOGS = {
    "lab-good": Package(
        {"posttrain.experiments": {"lab_good": "lab_good.recipes"}},
        {
            "lab_good/__init__.py": "",
            "lab_good/recipes.py": '"""Recipes of a lab."""\nEXPERIMENTS = {'
            '"lab_quick": {"defaults": ["arithmetic_grpo"], "rl": {"steps": 3}},'
            ' "lab_robot": {"defaults": ["robot_grpo"]}, "lab_orphan": {"defaults": ["nobody_knows"]},'
            ' "lab_heir": {"defaults": ["lab_faulty"]}}\n',
        },
        version="2.0",
    ),
    "lab-robots": Package(
        {"posttrain.experiments": {"lab_robots": "lab_robots"}},
        {"lab_robots/__init__.py": 'import lerobot.datasets\nEXPERIMENTS = {"robot_grpo": {}}\n'},
        version="2.1",
        extras={"robots": ("lerobot>=0.3",)},
    ),
    "lab-faulty": Package(
        {"posttrain.experiments": {"lab_faulty": "lab_faulty"}},
        {"lab_faulty/__init__.py": 'EXPERIMENTS = {"lab_faulty": {}}\nraise RuntimeError("the disk is not mounted")\n'},
        version="2.2",
    ),
}
OLDER = {
    "posttrain": Package(
        {
            "posttrain.algorithms": {"grpo": "posttrain_algorithms.grpo:GRPO"},
            "posttrain.datapackers": {"decoder_only": "posttrain_datapackers.decoder_only:DecoderOnlyPacker"},
            "posttrain.envs": {"arithmetic": "posttrain_envs.arithmetic:Arithmetic"},
            "posttrain.engines": {"hf": "posttrain.rollout.hf:HFEngine"},
        },
        {},
        version="0.0.9",
    )
}
"""The metadata of a posttrain that brought less; its modules are today's."""

BUILD = """
import contextlib, io, json, os, sys
from hatchling.build import build_wheel
for folder in json.loads(sys.argv[2]):
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        build_wheel(sys.argv[1])
"""


def install(packages: Mapping[str, Package], root: Path) -> Path:
    """Build wheels of `packages` and pip-install them into `root/site`; nothing comes from the network."""
    folders = []
    for name, package in packages.items():
        folder = root / "sources" / name
        for path, text in package.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(_pyproject(name, package))
        folders.append(str(folder))
    wheels, site = root / "wheels", root / "site"
    wheels.mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(wheels), json.dumps(folders)], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(site), *map(str, sorted(wheels.iterdir()))], check=True)
    return site


def _pyproject(name: str, package: Package) -> str:
    lines = ["[build-system]", 'requires = ["hatchling"]', 'build-backend = "hatchling.build"', "[project]"]
    lines += [f'name = "{name}"', f'version = "{package.version}"', f"dependencies = {json.dumps(package.requires)}"]
    lines += ["[project.optional-dependencies]", *(f"{extra} = {json.dumps(needs)}" for extra, needs in package.extras.items())]
    for group, points in package.points.items():
        lines += [f'[project.entry-points."{group}"]', *(f'{key} = "{value}"' for key, value in points.items())]
    modules = sorted({path.split("/")[0] for path in package.files})
    lines += ["[tool.hatch.build.targets.wheel]", f"packages = {json.dumps(modules)}" if modules else "bypass-selection = true"]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def broken_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where six broken environments, broken parts of other kinds and a good environment are installed."""
    return install({**BROKEN, **PARTS, **GOOD}, tmp_path_factory.mktemp("broken"))


@pytest.fixture(scope="session")
def catalog_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where three catalogs are installed: a good one, one that lacks a dependency, one whose import raises."""
    return install(CATALOGS, tmp_path_factory.mktemp("catalogs"))


@pytest.fixture(scope="session")
def older_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an older posttrain is installed, as far as metadata goes."""
    return install(OLDER, tmp_path_factory.mktemp("older"))


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a screen with the one in tests/data/plugin_errors; UPDATE_SCREENS=1 writes it there."""

    def check(name: str, text: str) -> None:
        text = re.sub(r"(installed|known): [^;\n]*", r"\1: NAMES", text)
        file = SCREENS / f"{name}.txt"
        if os.environ.get("UPDATE_SCREENS"):
            file.write_text(text)
        assert text == file.read_text()

    return check


@dataclass(frozen=True)
class Screen:
    """What a command printed, with the paths of this machine taken out."""

    code: int
    out: str
    err: str


SERVE = """
import json, os, sys
import posttrain.cli.main
from posttrain.config.load import load_config
load_config(["model.name_or_path=m", "rl.steps=1", "rl.objective.name=grpo", "environments=[{name: arithmetic}]"])
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        for descriptor in (1, 2):
            os.dup2(os.open(order["files"][descriptor - 1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.chdir(order["cwd"])
        os.environ.update(order["variables"])
        code = posttrain.cli.main.main(order["arguments"])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Shells:
    """A process for each site, in which `posttrain …` has been imported and no plug-in has; each command is a fork of it."""

    def __init__(self) -> None:
        self._running: dict[Path, subprocess.Popen[str]] = {}

    def run(self, site: Path, arguments: Sequence[str], cwd: Path, variables: Mapping[str, str]) -> int:
        if site not in self._running:
            environment = {**os.environ, "PYTHONPATH": str(site)}
            command = [sys.executable, "-c", SERVE]
            pipe = subprocess.PIPE
            self._running[site] = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        shell = self._running[site]
        assert shell.stdin is not None and shell.stdout is not None
        files = [str(cwd / ".out"), str(cwd / ".err")]
        order = {"arguments": arguments, "cwd": str(cwd), "variables": dict(variables), "files": files}
        print(json.dumps(order), file=shell.stdin, flush=True)
        return int(shell.stdout.readline())

    def close(self) -> None:
        for shell in self._running.values():
            shell.communicate()


@pytest.fixture(scope="session")
def shells() -> Iterator[Shells]:
    made = Shells()
    yield made
    made.close()


@pytest.fixture
def screen(shells: Shells, tmp_path: Path) -> Callable[..., Screen]:
    """Runs `posttrain …` in a process that finds what is installed in `site`; outputs go to `tmp_path/outputs`."""

    def run(site: Path, *arguments: str, **variables: str) -> Screen:
        code = shells.run(site, arguments, tmp_path, {"POSTTRAIN_OUTPUT_ROOT": str(tmp_path / "outputs"), **variables})
        texts = ((tmp_path / name).read_text() for name in (".out", ".err"))
        return Screen(code, *(text.replace(str(site), "SITE").replace(str(tmp_path), "HERE") for text in texts))

    return run
