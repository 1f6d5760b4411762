"""The files of the first hour are those that the page shows."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
FILES = ROOT / "docs" / "examples" / "first_hour"


@pytest.mark.parametrize("name", ["my_rewards.py", "train.py"])
def test_the_page_shows_the_file(name: str) -> None:
    shown = [b for b in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE) if b.startswith(f"# {name}\n")]
    assert [block.partition("\n")[2] for block in shown] == [(FILES / name).read_text(encoding="utf-8")]


def test_the_page_shows_the_first_rows_of_the_data() -> None:
    lines = (FILES / "my.jsonl").read_text(encoding="utf-8").splitlines()
    assert "$ head -2 my.jsonl\n" + "\n".join(lines[:2]) + "\n```" in PAGE
    rows = [json.loads(line) for line in lines]
    assert len({row["question"] for row in rows}) == len(rows) == 200
    assert all(str(eval(row["question"].rstrip("="))) == row["answer"] for row in rows)


def test_the_transcript_is_the_script_s_and_quiet() -> None:
    """What was typed is what the script types, what `cat` shows is the file, and nothing chatters in between."""
    script, transcript = ((FILES / name).read_text(encoding="utf-8") for name in ("first_hour.sh", "transcript.txt"))
    typed = [shlex.split(line)[1] for line in re.findall(r"^  type_ .*$", script, flags=re.MULTILINE)]
    shown = re.findall(r"^\$ (.*)$", transcript, flags=re.MULTILINE)
    for line, asked in zip(shown, typed, strict=True):
        parts = re.split(r"\$\(.*?\)|\$\w+", asked)  # around what the shell fills in
        assert re.fullmatch(".+".join(map(re.escape, parts)), line), asked
    for name in ("my_rewards.py", "train.py"):
        assert f"$ cat {name}\n{(FILES / name).read_text(encoding='utf-8')}$ " in transcript
    assert not re.search(r"warning|traceback|error:|/tmp|/home", transcript, flags=re.IGNORECASE)


def test_the_script_is_ten_lines_at_most() -> None:
    assert len((FILES / "train.py").read_text(encoding="utf-8").splitlines()) <= 10
