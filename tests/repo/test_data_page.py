"""The table of messages in docs/howto/custom-data.md: each is seen here, with the fix that it shows, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import hub_data
from posttrain.data.dataset import PromptSampler, Source, rows_of
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import DataError

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "custom-data.md"
Q = '{"question": "1+1=", "answer": "2"}\n'
MANY = "".join(f'{{"question": "{i}+1=", "answer": "{i + 1}"}}\n' for i in range(40))


def read(files: dict[str, str | bytes] | None = None, **options: Any) -> Callable[[], object]:
    """Draws all rows that these options give."""

    def run() -> object:
        for name, text in (files or {}).items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        made = DataOptions(**{"data": "my.jsonl", **options})
        sampler = PromptSampler([Source("function", open_rows(made, "train", required=("question",)))], seed=0)
        sampler.watch()
        return sampler.draw(len(sampler.sources[0].rows))

    return run


def factory(text: str) -> Callable[[], object]:
    def run() -> object:
        Path("my_data.py").write_text(text)
        return rows_of("my_data.py:rows", {})

    return run


def changed() -> None:
    Path("my.jsonl").write_text(MANY)
    rows = open_rows(DataOptions(data="my.jsonl"), "train")
    Path("my.jsonl").write_text(Q)
    rows[0]


def hub(said: str) -> Callable[[], object]:
    def run() -> object:
        raise hub_data._refusal("openai/gsm8k", None, ValueError(said))

    return run


ENDLESS = "import itertools\ndef rows():\n    return ({'question': f'{i}'} for i in itertools.count())\n"
CASES: list[Callable[[], object]] = [
    read({"my.jsonl": Q}, data="my.jsnl"),
    read({"my.jsonl": Q * 2 + '{"question": "1+1=" "answer": "2"}\n'}),
    read({"my.jsonl": Q + "[1, 2]\n"}),
    read({"my.jsonl": (Q + '{"question": "café"}\n').encode("latin-1")}),
    read({"my.jsonl": Q.encode("utf-16")}),
    read({"my.jsonl": b"\x1f\x8b\x08\x00"}),
    read({"my.jsonl": ""}),
    read({"my.csv": "question,answer\n1+1=,2\n1,000+1=,1001\n"}, data="my.csv"),
    read({"my.csv": 'question,answer\n"say "yes"",yes\n'}, data="my.csv"),
    read({"my.csv": "question,question\n1,2\n"}, data="my.csv"),
    read({"my.csv": "question;answer\n1;2\n"}, data="my.csv"),
    read({"my.jsonl": '{"question": "1+1= \\ud83d"}\n'}),
    read({"data/a.jsonl": Q, "data/a.csv": "question\n1\n"}, data="data"),
    read({"data/notes.md": "words"}, data="data"),
    read({"data/train.jsonl": Q, "data/more.jsonl": Q}, data="data"),
    read({"my.jsonl": '{"qestion": "1+1="}\n'}),
    read({"my.jsonl": '{"id": "7", "question": "1+1="}\n{"id": "7", "question": "1+2="}\n'}),
    read({"my.jsonl": MANY, "my_data.py": "def short(row): return row['length'] < 9\n"}, filter="my_data.py:short"),
    read({"my.jsonl": MANY, "my_data.py": "def short(row): return False\n"}, filter="my_data.py:short"),
    read({"my.jsonl": MANY}, test_size=40),
    read({"my.jsonl": MANY}, test_data="my.jsonl"),
    read({"my.jsonl": MANY}, data_split="validation"),
    read({"my.jsonl": MANY}, streaming=True, take=100, test_size=0),
    read({"my_data.py": ENDLESS}, data="my_data.py:rows"),
    changed,
    factory("import no_such_package\n"),
    factory("def rows(): return open('absent.txt')\n"),
    factory("def rows(): return 7\n"),
    factory("def rows(): return {'question': ['1+1='], 'answer': ['2']}\n"),
    hub("Couldn't reach 'openai/gsm8k' on the Hub (OfflineModeIsEnabled)"),
    hub("Config name is missing.\nPlease pick one among the available configs: ['main', 'socratic']"),
    hub("DatasetNotFoundError: Dataset 'openai/gsm8k' is a gated dataset on the Hub."),
    hub("DatasetNotFoundError: Dataset 'openai/gsm8k' doesn't exist on the Hub or cannot be accessed."),
]


def table(cases: list[Callable[[], object]]) -> list[str]:
    """The lines of the page's table."""
    lines = []
    for case in cases:
        with pytest.raises(DataError) as caught:
            case()
        assert caught.value.exit_code == 3
        lines.append(f"| `{caught.value.message}` | {caught.value.fix} |".replace("|…", "…"))
    return lines


def test_the_page_shows_the_messages_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.data import source

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "LARGEST_STREAM", 1000)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    seen = []
    for number, case in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        seen += table([case])
    seen = [line.replace("1,000 rows", "1,000,000 rows") for line in seen]
    shown = re.findall(r"^\| `.*\|$", PAGE.read_text(encoding="utf-8").partition("| Message | Fix |")[2], flags=re.MULTILINE)
    assert shown == seen, "the table should be:\n" + "\n".join(seen)


def test_the_environment_of_the_page_reads_a_file_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain import load
    from posttrain.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n# my_package/capitals.py\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    Path("capitals.py").write_text(blocks[0], encoding="utf-8")
    Path("my.jsonl").write_text('{"country": "France", "capital": "Paris"}\n{"country": "Peru"}\n')
    env = load("envs", "capitals.py:Capitals", data=[{"country": "France", "town": "Paris"}], columns={"capital": "town"})
    assert list(env.dataset("train")) == [{"id": "1", "country": "France", "capital": "Paris"}]
    with pytest.raises(DataError, match="my.jsonl:2 has no column 'capital'"):
        load("envs", "capitals.py:Capitals", data="my.jsonl").dataset("train")
    with pytest.raises(ConfigError, match="colums"):
        load("envs", "capitals.py:Capitals", data="my.jsonl", colums={})
