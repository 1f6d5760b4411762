"""What 50 installed plug-ins cost: really built as wheels, really installed with pip, looked at by fresh processes; medians.

    python tests/benchmarks/bench_plugins.py [--count 50] [--repeat 9]

Processor time is printed beside the wall clock: on a busy machine only the first means something.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODULE = '''"""Guess number {n}: a game of words over several turns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.data.environment import Environment
{dependency}

Path(__file__).with_suffix(".ran").touch()


def similarity(left: str, right: str) -> float:
    """The share of letters that stand at the same place."""
    return sum(a == b for a, b in zip(left, right)) / max(len(left), len(right), 1)


class Env(Environment):
    """Guess word {n} of a list, told after each turn how near it was."""

    api: ClassVar[int] = 1

    @dataclass(frozen=True, kw_only=True)
    class Options:
        words: str = "words.txt"  # file with a word on each line
        length: int = {n}  # letters of a word
        mode: Literal["easy", "hard"] = "easy"  # hard: hints must be used
        turns: int = 6  # guesses in an episode
        seed: int = 0  # which words, in which order

    def dataset(self, split: str) -> list[dict[str, Any]]:
        return [{{"id": str(i), "prompt": f"word {{i}}?", "answer": "word"}} for i in range(100)]

    def env_response(self, state: Any) -> list[dict[str, str]] | None:
        if len(state.turns) >= self.options.turns:
            return None
        return [{{"role": "user", "content": f"near: {{similarity(state.completion, state.task['answer']):.2f}}"}}]

    def compute_reward(self, state: Any) -> float:
        return similarity(state.completion.strip(), state.task["answer"])
'''
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "rl-game-{n}"
version = "1.{n}"
dependencies = ["posttrain"]
[project.entry-points."posttrain.envs"]
game_{n} = "rl_game_{n}.env:Env"
"""
BUILD = """
import contextlib, io, os, sys
from pathlib import Path
from hatchling.build import build_wheel
for folder in sorted(Path(sys.argv[1]).iterdir()):
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        build_wheel(sys.argv[2])
"""
LOOK = """
import json, time
import posttrain.plugins
from posttrain.plugins import KINDS, discover
def now(): return time.perf_counter(), time.process_time()
marks = [now()]
found = [info for kind in KINDS for info in discover(kind)]
marks.append(now())
mine = [info.card for info in found if info.distribution.startswith("rl-game")]
marks.append(now())
ours = [info.card for info in found if not info.distribution.startswith("rl-game")]
marks.append(now())
assert all(card.help for card in mine + ours)
print(json.dumps([[1000 * (b - a) for a, b in zip(one, two)] for one, two in zip(marks, marks[1:])]))
"""
SELECT = "import posttrain.plugins as p; p.resolve('envs', 'game_7')"
IDLE = "import posttrain.plugins, posttrain.data.environment"


def install(root: Path, count: int) -> Path:
    """`count` distributions in `root/site`; every fifth one needs a package that is not there."""
    for n in range(count):
        folder = root / "sources" / f"{n:03d}"
        (folder / f"rl_game_{n}").mkdir(parents=True)
        (folder / "pyproject.toml").write_text(PROJECT.format(n=n))
        (folder / f"rl_game_{n}" / "__init__.py").write_text("")
        dependency = "import absent_words" if n % 5 == 4 else ""
        (folder / f"rl_game_{n}" / "env.py").write_text(MODULE.format(n=n, dependency=dependency))
    (root / "wheels").mkdir()
    subprocess.run([sys.executable, "-c", BUILD, str(root / "sources"), str(root / "wheels")], check=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    wheels = sorted(map(str, (root / "wheels").iterdir()))
    subprocess.run([*pip, "--target", str(root / "site"), *wheels], check=True)
    return root / "site"


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float, str]:
    """Wall and processor milliseconds of a fresh process, and what it printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1000 * wall, 1000 * spent, done.stdout


def row(name: str, values: list[tuple[float, float]], target: str = "") -> None:
    wall, spent = (statistics.median(column) for column in zip(*values, strict=True))
    print(f"{name:52s} {wall:7.0f} ms   processor {spent:7.0f} ms   {target}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site = install(Path(folder), args.count)
        none, many = dict(os.environ), {**os.environ, "PYTHONPATH": str(site)}
        print(f"{len(list(site.glob('*.dist-info')))} distributions installed, medians of {args.repeat} processes")
        look = [json.loads(timed([sys.executable, "-c", LOOK], many)[2]) for _ in range(args.repeat)]
        row("metadata of all plug-ins", [tuple(one[0]) for one in look], "target 60 ms")
        both = [(one[0][0] + one[1][0], one[0][1] + one[1][1]) for one in look]
        row("metadata, and help and options of the installed", both, "target 150 ms")
        row("help and options of those that posttrain brings", [tuple(one[2]) for one in look])
        command = [sys.executable, "-m", "posttrain.cli"]
        for words, target in ((["plugins", "list"], "target 500 ms"), (["plugins", "list", "--json"], ""), (["--help"], "")):
            for label, environment in (("none", none), (f"{args.count}", many)):
                runs = [timed([*command, *words], environment)[:2] for _ in range(args.repeat)]
                row(f"posttrain {' '.join(words)}, {label} installed", runs, target if label != "none" else "")
        imported = list(site.rglob("*.ran"))
        print(f"imported by all of this: {len(imported)} plug-ins")
        for label, code in (("base class only", IDLE), ("one of them selected", SELECT)):
            row(label, [timed([sys.executable, "-c", code], many)[:2] for _ in range(args.repeat)])
        print(f"imported by selecting one: {[file.parent.name for file in site.rglob('*.ran')]}")


if __name__ == "__main__":
    main()
