"""The page about writing plug-ins shows what `posttrain new` writes, and what its six broken forms say."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main
from posttrain.plugins.scaffold import DRAFTS, files
from posttrain.testing import EnvContract

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "write-a-plugin.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^```text\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
TYPED = ["train", "experiment=arithmetic_grpo", "environments=[{name: my_sums}]"]
BROKEN = {
    "no environment named": ("", ""),
    "needs 'wordfreq'": ("import random\n", "import random\nimport wordfreq\n"),
    "cannot be imported": ("class MySumsEnv", "LIMIT = {'largest': 19}['lowest']\n\n\nclass MySumsEnv"),
    "not a subclass": ("MySumsEnv(Environment)", "MySumsEnv"),
    "is written for api 2": ("api = 1", "api = 2"),
    "cannot be a dataclass": ("seed: int = 0", "words: list[str] = []"),
}
"""What a message says -> a piece of the code, and what stands there instead."""


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_form_says_what_the_page_shows(message: str, posttrain_plugins: Any, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = BROKEN[message]
    written = {path.removeprefix("src/"): text for path, text in files("env", "my_sums").items() if path.startswith("src/")}
    assert good in written["my_sums/env.py"]
    written["my_sums/env.py"] = written["my_sums/env.py"].replace(good, bad, 1)
    points = {"posttrain.envs": {"my_sums": "my_sums.env:MySumsEnv"}}
    site = posttrain_plugins.install("my-sums", files=written, points=points, version="0.1.0")
    typed = [text.replace("my_sums", "my_sum") for text in TYPED] if not good else TYPED
    assert main(typed) == 2
    seen = capsys.readouterr().err.replace(f"{site}/my_sums", "my-sums/src/my_sums")
    (shown,) = [block for block in SHOWN if block.startswith("error: ") and message in block]
    assert plain(seen) == plain(shown)


def plain(text: str) -> str:
    return re.sub(r"installed: .*", "installed: NAMES", text)


def test_new_prints_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "env", "my-sums"]) == 0
    assert capsys.readouterr().out == next(block for block in SHOWN if block.startswith("my-sums/"))


def test_the_page_has_every_kind_and_how_it_is_selected() -> None:
    rows = re.findall(r"^\| `(\w+) NAME` \|.*\| `([^|]+)` \|$", PAGE, flags=re.MULTILINE)
    assert dict(rows) == {draft: about.selection.replace("$name", "NAME") for draft, about in DRAFTS.items()}


EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "write_a_plugin"
TRANSCRIPT = (EXAMPLE / "transcript.txt").read_text(encoding="utf-8")


def test_the_transcript_is_the_script_s_and_says_what_the_page_says() -> None:
    """What was typed is what the script types, and every broken form is told there as on the page."""
    script = (EXAMPLE / "write_a_plugin.sh").read_text(encoding="utf-8")
    shown = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", TRANSCRIPT, flags=re.MULTILINE)]
    typed = re.findall(r'^  (type_|break_) "(.*)"$', script, flags=re.MULTILINE)
    assert len(shown) == sum(1 if name == "type_" else 2 for name, _ in typed) - 2, "two lines are those of break_ itself"
    assert [line for line in shown if line[:2] == ["posttrain", "new"]] == [["posttrain", "new", "env", "my-sums"]]
    errors = [plain(block) for block in SHOWN if block.startswith("error: environment") or "no environment named" in block]
    assert len(errors) == len(BROKEN) and not [block for block in errors if block not in plain(TRANSCRIPT)]
    trained = next(block for block in SHOWN if block.startswith("$ pip install"))
    assert not [line for line in trained.splitlines() if line not in TRANSCRIPT.splitlines()]


def test_the_transcript_has_the_laws_that_there_are() -> None:
    laws = [name for name in vars(EnvContract) if name.startswith("test_")]
    assert f"\n{len(laws)} laws: " in TRANSCRIPT and f"\n{len(laws)} laws: " in PAGE
