"""Every line of every ```bash block of README, CONTRIBUTING and docs is run, as far as a machine without GPU and network can.

How far that is, by the program that a line calls:

    posttrain …      for real, in this process, in a folder with the files that the pages show. A training is made small: one step
                     of the hf engine on a tiny model, at most 8 new tokens. Where the line asks for an engine that does not run
                     in this process (vLLM), or for data of a hub, its config is composed and checked instead (`--cfg job`).
                     A plan is of a tiny model, all else as it is; a template-check too.
                     Of a sweep the jobs are made, and the first is run
    python …         for real (a `--check` is added to the generator of the docs; benchmarks are only compiled)
    pytest …         the tests that it selects exist
    make …           the target exists, and `make -n` accepts it
    pip install …    the requirement is well formed, its extras are ours, its file exists; nothing is installed
    cat, head, …     for real, in bash
    source, cd, git clone, docker, podman, tensorboard, wandb, trackio    only their form: they would change the machine

Any other line fails: teach it here. The lines of a page are run in order, in one folder; a training that an earlier page has is
not run twice. RUN, RUN_A and RUN_B, and run directories with a date, stand for a run of one step, `multirun/NAME` for a sweep of
two, OUT for a new folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import COMMANDS, main
from posttrain.config.load import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
Small = Callable[[Any], list[str]]
HUB = {"gsm8k_grpo"}
"""Experiments whose data come from a hub, unless the line brings its own."""


def commands(page: Path) -> list[str]:
    """The command lines of a page, in order."""
    shown = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [line for block in shown for line in lines_of(block)]


def lines_of(block: str) -> Iterator[str]:
    """The commands of a block: continued lines joined, here-documents kept whole, comments and `&&` taken apart."""
    rest = block.replace("\\\n", " ").splitlines()
    while rest:
        line = rest.pop(0)
        if document := re.search(r"<<-?\s*['\"]?(\w+)", line):
            while rest and line.splitlines()[-1].strip() != document[1]:
                line += "\n" + rest.pop(0)
            yield line
            continue
        words = re.sub(r"(^|\s)#\s.*$", "", line).strip()
        yield from (part for part in re.split(r"\s+&&\s+", re.sub(r" +", " ", words)) if part)


SEEN: set[tuple[str, str]] = set()
"""Trainings that were run well on an earlier page, with the files that it shows: on others, the line is another."""


def shown_files(page: Path) -> str:
    """A page's blocks but its commands: what its files hold."""
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return "".join(content for language, content in blocks if language not in ("bash", "text"))


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_commands_of_the_page_work(
    page: Path, workshop: Callable[[Path], Path], ended_run: Path, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in order, in one folder, as a reader types them."""
    workshop(page)
    files = shown_files(page)
    for line in commands(page):
        if line.startswith("posttrain train") and ">" not in line and (line, files) in SEEN:
            continue
        print(f"{page.name}$ {line}")
        run_line(line, [placed(word, ended_run, tmp_path) for word in shlex.split(line)], small, monkeypatch)
        SEEN.add((line, files))


def placed(word: str, ended_run: Path, tmp_path: Path) -> str:
    """A word with what stands for a run, a sweep or a new folder filled in."""
    if word == "OUT" or word.startswith("OUT/"):
        return word.replace("OUT", str(tmp_path / "out"), 1)
    if re.fullmatch(r"multirun/[\w-]+", word):
        for number in ("0", "1"):
            shutil.copytree(ended_run, Path(word) / number / ended_run.name, dirs_exist_ok=True)
        return word
    found = re.match(r"(RUN(?:_[A-Z])?|(?:outputs|multirun)/[\w./-]*\d{4}-?\d{2}-?\d{2}[\w-]*)(?=/|$)", word)
    if found is None:
        return word
    copy = tmp_path / f"copy-{re.sub(r'[^A-Z_]', '', found[1]) or 'DATED'}"
    if not copy.exists():
        shutil.copytree(ended_run, copy)
    return str(copy) + re.sub(r"step_\d+", "step_1", word[found.end() :])


def run_line(line: str, words: list[str], small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        while words and (setting := re.fullmatch(r"([A-Z_]+)=(.*)", words[0])):
            patch.setenv(setting[1], setting[2])
            if setting[1] == "PYTHONPATH":
                patch.syspath_prepend(setting[2])
            words.pop(0)
        program = Path(words[0]).name if words[0].startswith(".venv/bin/") else words[0]
        if program in BASH:
            assert subprocess.run(["bash", "-ec", line], check=False).returncode == 0, line
            return
        assert program in PROGRAMS, f"no way to test {line!r}; add one to PROGRAMS"
        PROGRAMS[program](words[1:], small)


# posttrain ------------------------------------------------------------------------------------------------------------------


def run_posttrain(arguments: list[str], small: Small) -> None:
    arguments, redirect = split_redirect(arguments)
    if {"--multirun", "-m"} & set(arguments):
        arguments = [*first_job(arguments), *(["--dry-run"] if "--dry-run" in arguments else [])]
    if arguments[0] == "train" and not {"--help", "-h", "--cfg", "--dry-run"} & set(arguments):
        arguments = small_training(arguments, small)
    elif arguments[:2] == ["launch", "local"]:
        arguments = ["launch", *small_training(arguments[1:], small)]
    elif arguments[0] == "plan" and "--help" not in arguments:
        config = load_config([a for a in arguments[1:] if "=" in a]).config
        arguments = [*arguments, *(value for value in small(config) if value.lstrip("~").startswith("model."))]
    elif "--step" in arguments:
        arguments[arguments.index("--step") + 1] = "1"
    elif arguments[0] == "template-check":
        model = next(value for value in small(load_config(["experiment=arithmetic_grpo"]).config) if "name_or_path" in value)
        assert main([arguments[0], model.partition("=")[2], *arguments[2:]]) in (0, 1)  # it finds faults with a tiny vocabulary
        return
    if redirect:
        with open(redirect, "w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            assert main(arguments) == 0
    else:
        assert main(arguments) == 0, arguments


def split_redirect(arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments before a pipe, and the file that `> file` names."""
    if "|" in arguments:
        arguments = arguments[: arguments.index("|")]
    if ">" in arguments:
        at = arguments.index(">")
        return arguments[:at], arguments[at + 1]
    return arguments, None


def small_training(arguments: list[str], small: Small) -> list[str]:
    """The same command for one step of a tiny model, or with `--cfg job` where it cannot run here."""
    if "--resume" in arguments:
        return [*arguments, *(["rl.steps=2"] if any(a.startswith("rl.steps=") for a in arguments) else [])]
    given = [a for a in arguments[1:] if "=" in a]
    file = arguments[arguments.index("--config") + 1] if "--config" in arguments else None
    config = load_config(given, config_file=file).config
    chosen = next((a.split("=")[1] for a in given if a.startswith("experiment=")), "")
    own_data = any("data" in a for a in given if a.startswith("environments"))
    if config.rollout.engine not in ("hf", "none") or (chosen in HUB and not own_data):
        return [*arguments, "--cfg", "job"]
    values = small(config)
    taken = {value.split("=")[0] for value in values}
    return [*(a for a in arguments if a.split("=")[0].lstrip("+") not in taken), *values]


def first_job(arguments: list[str]) -> list[str]:
    """The first job of a sweep that Hydra made; there is more than one, and the last one's config is accepted, too."""
    from posttrain.cli import multirun

    jobs: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multirun, "run_job", lambda task, **_: jobs.append(list(task)) or 0)
        assert main(arguments) == 0
    assert len(jobs) > 1, "a sweep of one run"
    load_config(jobs[-1])
    return ["train", *jobs[0]]


# other programs -------------------------------------------------------------------------------------------------------------


def run_python(arguments: list[str], small: Small) -> None:
    if arguments[:2] == ["-m", "venv"]:
        return
    if arguments[0].startswith("tests/benchmarks/"):
        compile(Path(arguments[0]).read_text(encoding="utf-8"), arguments[0], "exec")
        return
    if arguments[0] == "docs/_generate.py":
        arguments = [*arguments, "--check"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = Path.cwd()
    if arguments[:2] == ["-m", "hatchling"]:  # builds the clone, into the page's folder
        folder, arguments = ROOT, [str(folder / a) if before == "-d" else a for before, a in pairwise(["", *arguments])]
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr


def dry_make(arguments: list[str], small: Small) -> None:
    targets = [a for a in arguments if "=" not in a]
    assert subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, check=False).returncode == 0, targets


def check_requirements(arguments: list[str], small: Small) -> None:
    """`pip install …`: what it names could be installed from here."""
    from packaging.requirements import Requirement

    assert arguments.pop(0) == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    while arguments:
        word = arguments.pop(0)
        if word in ("-r", "-c"):
            assert (ROOT / arguments.pop(0)).exists()
        elif word in ("--index-url", "--extra-index-url"):
            arguments.pop(0)
        elif word in ("-e", "--editable", "--no-deps", "--upgrade", "-U", "--no-build-isolation", "--quiet", "-q"):
            continue
        elif found := re.fullmatch(r"(\.|dist/[\w.*-]+\.whl)(?:\[([\w,-]+)\])?", word):
            assert set((found[2] or "").split(",")) - {""} <= set(extras), word
        else:
            requirement = Requirement(word)
            assert requirement.name != "posttrain" or requirement.extras <= set(extras), word


def select_tests(arguments: list[str], small: Small) -> None:
    """`pytest PATH -k WORD`: there is a test by that name. A file that the page shows is run."""
    if own := [a for a in arguments if a.endswith(".py") and not a.startswith("tests")]:
        plain = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir=."]
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", *plain, *own], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return
    paths = [ROOT / a for a in arguments if a.startswith("tests")]
    word = arguments[arguments.index("-k") + 1] if "-k" in arguments else ""
    files = [file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    assert any(re.search(rf"def test_\w*{word}", file.read_text(encoding="utf-8")) for file in files), arguments


def form_only(arguments: list[str], small: Small) -> None:
    assert arguments, "a command without arguments"


PROGRAMS: dict[str, Callable[[list[str], Small], None]] = {
    "posttrain": run_posttrain,
    "python": run_python,
    "python3": run_python,
    "make": dry_make,
    "pip": check_requirements,
    "pytest": select_tests,
    **dict.fromkeys(("source", "cd", "git", "docker", "podman", "tensorboard", "wandb", "trackio"), form_only),
}
BASH = {"cat", "head", "tail", "ls", "mkdir", "echo", "cp", "wc", "grep"}


def test_the_same_line_on_other_files_is_another(tmp_path: Path) -> None:
    pages = [tmp_path / f"{i}.md" for i in range(2)]
    for i, page in enumerate(pages):
        page.write_text(f"```python\n# mine.py\nsize = {i}\n```\n\n```bash\nposttrain train rl.steps=1\n```\n")
    assert commands(pages[0]) == commands(pages[1]) and shown_files(pages[0]) != shown_files(pages[1])


def test_there_are_commands() -> None:
    lines = {line for page in PAGES for line in commands(page)}
    assert len(lines) > 60
    assert sum(line.startswith("posttrain train") for line in lines) > 30


SHOWN = re.findall(
    r"(?:^|\$ )posttrain (\w[\w-]*)",
    "\n".join(b for p in PAGES for b in re.findall(r"^```text\n(.*?)^```", p.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)),
    flags=re.MULTILINE,
)


def test_transcripts_name_commands_that_exist() -> None:
    assert set(SHOWN) <= {*COMMANDS, "COMMAND"}, SHOWN
