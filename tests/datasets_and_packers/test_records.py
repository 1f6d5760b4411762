"""Text files of rows: the index finds the rows that the text has, and every bad file is told with its line and the fix."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.data import records
from posttrain.data.locate import read_file
from posttrain.data.records import Csv, JsonLines, Tsv, read_csv, read_lines
from posttrain.errors import DataError

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
                      lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2), max_leaves=4)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=3)
BLANK = st.sampled_from(["", " ", "\t ", "  "])
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True,
                    suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=[1 << 22, 7], ids=["one block", "blocks of 7 bytes"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(records, "CHUNK", request.param)
    yield


@SETTINGS
@given(data=st.data())
def test_json_lines_are_json_loads_line_by_line(data: st.DataObject, tmp_path: Path, chunk: None) -> None:
    lines: list[tuple[str, Any]] = data.draw(st.lists(st.one_of(
        BLANK.map(lambda blank: (blank, None)),
        st.tuples(BLANK, OBJECTS, st.booleans()).map(lambda d: (d[0] + json.dumps(d[1], ensure_ascii=d[2]) + d[0], d[1])),
    ), max_size=8))
    end, last = data.draw(st.sampled_from(["\n", "\r\n"])), data.draw(st.booleans())
    text = end.join(line for line, _ in lines) + (end if last else "")
    bom = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    path = tmp_path / "rows.jsonl"
    path.write_bytes(bom + text.encode())
    want = [(number, row) for number, (_, row) in enumerate(lines, 1) if row is not None]
    table = JsonLines(path)
    assert [table[i] for i in range(len(table))] == list(table) == [row for _, row in want]
    assert [table.where(i) for i in range(len(table))] == [f"{path}:{number}" for number, _ in want]
    assert [table.name(i) for i in range(len(table))] == [str(number) for number, _ in want]
    with open(path, "rb") as file:
        assert list(read_lines(str(path), file)) == want


@SETTINGS
@given(data=st.data())
def test_csv_is_the_csv_module_with_line_numbers(data: st.DataObject, tmp_path: Path, chunk: None) -> None:
    kind = data.draw(st.sampled_from([Csv, Tsv]))
    names = TEXT.map(lambda text: re.sub(r"[;|\t]", " ", text)).filter(bool)  # one name "a;b" is refused: another delimiter
    header = data.draw(st.lists(names, min_size=1, max_size=3, unique=True))
    rows = data.draw(st.lists(st.lists(TEXT, min_size=len(header), max_size=len(header)), max_size=6))
    buffer = io.StringIO(newline="")
    end = data.draw(st.sampled_from(["\n", "\r\n"]))
    writer = csv.writer(buffer, delimiter=kind.delimiter, quoting=csv.QUOTE_ALL, lineterminator=end)
    writer.writerow(header)
    starts = []
    for row in rows:
        buffer.write(data.draw(st.sampled_from(["", "\n", "\r\n\n"])))
        starts.append(buffer.getvalue().count("\n") + 1)
        writer.writerow(row)
    path = tmp_path / "rows.csv"
    path.write_bytes(data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + buffer.getvalue().encode())
    table = kind(path)
    want = [dict(zip(header, row, strict=True)) for row in rows]
    assert [table[i] for i in range(len(table))] == list(table) == want
    assert [table.line(i) for i in range(len(table))] == starts
    with open(path, "rb") as file:
        assert [row for _, _, row in read_csv(str(path), kind.delimiter, file)] == want


def test_what_a_csv_leaves_open_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("n,t\n007,\nnull, 1.50\n")
    assert list(Csv(path)) == [{"n": "007", "t": ""}, {"n": "null", "t": " 1.50"}]


def test_a_file_travels_to_another_process_and_folder_and_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    sent = pickle.dumps(JsonLines("a.jsonl"))
    monkeypatch.chdir("/")
    assert list(pickle.loads(sent)) == [{"a": 1}, {"a": 2}]


def test_many_files_are_not_held_open(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    before = len(os.listdir("/proc/self/fd"))
    tables = [JsonLines(path, keep_open=False) for _ in range(20)]
    assert [t[1]["a"] for t in tables] == [2] * 20 and len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_file_that_changes_under_the_run_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    table = JsonLines(path)
    path.write_text('{"a": 1, "b": 3}\n{"a": 2}\n')
    with pytest.raises(DataError, match="has changed since it was opened"):
        table[0]


GOOD = '{"q": "a"}\n'
BAD_LINES = [
    ("broken", GOOD + '{"q": "a" "b": 1}\n', "my.jsonl:2 is not JSON", "Expecting ',' delimiter near", "correct the line"),
    ("cut", GOOD + GOOD + '{"q": "a', "my.jsonl:3 is not JSON", "Unterminated string", "correct the line"),
    ("python", "{'q': 1}\n", "my.jsonl:1 is not JSON", "property name enclosed in double quotes", "correct the line"),
    ("list", GOOD + "[1, 2]\n", "my.jsonl:2 is a list, not an object", "it begins '[1, 2]", ".json"),
    ("number", "\n\n7\n", "my.jsonl:3 is a number, not an object", "it begins", 'write rows such as {"question": "…"'),
    ("null", "null\n", "my.jsonl:1 is a null, not an object", "it begins", "write rows"),
    ("key twice", '{"q": {"x": 1, "x": 2}}\n', "my.jsonl:1 is not JSON", "the key 'x' is there twice", "correct the line"),
    ("NaN", '{"q": NaN}\n', "my.jsonl:1 is not JSON", "NaN is not JSON: write null", "correct the line"),
    ("infinite", '{"q": [-Infinity]}\n', "my.jsonl:1 is not JSON", "-Infinity is not JSON", "correct the line"),
    ("latin-1", b'{"q": "x"}\n{"q": "caf\xe9"}\n', "my.jsonl:2 is not UTF-8", "byte 0xe9 at column 11, after", "iconv -f LATIN1"),
    ("utf-16", GOOD.encode("utf-16"), "my.jsonl is UTF-16, not UTF-8", "", "iconv -f UTF-16"),
    ("gzip", b"\x1f\x8b\x08\x00", "my.jsonl is compressed", "", "gunzip"),
    ("empty", "", "my.jsonl is empty", "it holds no row", "one JSON object per line"),
    ("blank", "\n \n", "my.jsonl is empty", "it holds no row", "one JSON object per line"),
]


@pytest.mark.parametrize("text, message, cause, fix", [case[1:] for case in BAD_LINES], ids=[case[0] for case in BAD_LINES])
def test_bad_json_lines(
    text: str | bytes, message: str, cause: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as caught:
        list(read_file(Path("my.jsonl")))
    assert caught.value.message == message and caught.value.exit_code == 3
    assert cause in caught.value.cause and fix in caught.value.fix


BAD_TABLES = [
    ("ragged", "a.csv", "q,a\n1,2\n1,2,3\n", "a.csv:3 has 3 value(s), the header has 2", "the columns are q, a", 'goes in "…"'),
    ("short", "a.csv", 'q,a\n"x\ny",2\n1\n', "a.csv:4 has 1 value(s), the header has 2", "the columns are q, a", "each column"),
    ("quote", "a.csv", 'q,a\n1,2\n"x"y,1\n', "a.csv:3 is not CSV", "expected after", "write a quote inside a quoted value twice"),
    ("open", "a.csv", 'q,a\n1,2\n"x,1\n', "a.csv:3 is not CSV", "unexpected end of data", "twice"),
    ("twice", "a.tsv", "q\tq\n1\t2\n", "a.tsv:1 is no header", "the column 'q' is there twice", "a name for each column"),
    ("unnamed", "a.csv", "q,\n1,2\n", "a.csv:1 is no header", "a name is empty", "a name for each column"),
    ("header only", "a.csv", "q,a\n", "a.csv is empty", "it holds no row", "write rows"),
    ("nothing", "a.csv", "", "a.csv is empty", "it holds no row", "write rows"),
    ("encoding", "a.csv", b"q\ncaf\xe9\n", "a.csv:2 is not UTF-8", "byte 0xe9", "iconv"),
    ("document", "a.json", '[{"q": 1},\n{"q": }]', "a.json:2 is not JSON", "Expecting value near", "correct the file"),
    ("no list", "a.json", '{"a": {"q": 1},\n"b": 1}', "a.json holds no list of rows", "it holds a dict", "one object per line"),
    ("empty list", "a.json", "[]", "a.json is empty", "it holds no row", "write rows"),
    ("kind", "a.txt", "x", "a.txt is no data file that can be read", "its name ends in .txt", ".jsonl, .ndjson"),
]


@pytest.mark.parametrize("name, text, message, cause, fix", [c[1:] for c in BAD_TABLES], ids=[c[0] for c in BAD_TABLES])
def test_bad_tables(
    name: str, text: str | bytes, message: str, cause: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as caught:
        list(read_file(Path(name)))
    assert caught.value.message == message
    assert cause in caught.value.cause and fix in caught.value.fix


@pytest.mark.parametrize("text", ['[{"q": 1}, {"q": 2}]', '{"rows": [{"q": 1}, {"q": 2}], "version": 1}', '{"q": 1}\n{"q": 2}\n'])
def test_a_json_file_is_a_list_an_object_with_one_or_lines(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    assert list(read_file(tmp_path / "a.json")) == [{"q": 1}, {"q": 2}]


def test_a_very_long_value_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q\n" + "x" * 200_000 + "\n")
    assert len(Csv(tmp_path / "a.csv")[0]["q"]) == 200_000
