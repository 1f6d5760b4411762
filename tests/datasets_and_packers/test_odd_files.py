"""Files and streams that hold what no run can use: each is told as a DataError with its place, and none is read loosely."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from posttrain.data import row_check
from posttrain.data.dataset import Source
from posttrain.data.hub_data import _refusal
from posttrain.data.locate import find_tables, read_file
from posttrain.data.objects import tables_of
from posttrain.data.records import JsonLines
from posttrain.data.row_check import RowCheck
from posttrain.data.tables import Spool, Stream
from posttrain.errors import DataError


def refusal(path: Path, text: str) -> DataError:
    path.write_bytes(text.encode())
    with pytest.raises(DataError) as caught:
        list(read_file(path))
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(("value", "words"), [
    ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
    ('{"a": NaN}', "NaN is not JSON"),
    ('{"a": 1e999}', "1e999 is larger than any number"),
    (f'{{"a": {"9" * 5000}}}', "4300 digits"),
    (f'{{"a": {"[" * 100_000}{"]" * 100_000}}}', "nested too deep"),
    ('{"a": "\\ud83d\\ude00 \\ud800 x"}', "holds \\ud800, half of a surrogate pair"),
    ('{"\\uDC00": 1}', "holds \\uDC00, half of a surrogate pair"),
])
def test_json_and_json_lines_are_read_alike_and_strictly(value: str, words: str, tmp_path: Path) -> None:
    good = '{"a": "\\ud83d\\ude00 \\\\ud800 1e30"}'
    lines = refusal(tmp_path / "x.jsonl", f"{good}\n{value}\n")
    assert words in str(lines) and lines.message.startswith(f"{tmp_path}/x.jsonl:2 ")
    rows = f'{{"rows": [\n{good},\n\n\n\n\n{value},\n{good}\n]}}'
    for line, text in ((1, f"[{value}]"), (2, f"[{good},\n{value}]"), (7, rows)):
        document = refusal(tmp_path / "x.json", text)
        assert words in str(document) and document.message.startswith(f"{tmp_path}/x.json:{line} ")
    (tmp_path / "good.json").write_text(f"[{good}]")
    assert list(read_file(tmp_path / "good.json")) == [{"a": "😀 \\ud800 1e30"}]


@pytest.mark.parametrize(("name", "text", "words"), [
    ("x.csv", "q;a\n1;2\n", "x.csv:1 has one column, 'q;a'"),
    ("x.csv", "q\ta\n1\t2\n", "name the file"),
    ("x.tsv", "q|a\n1|2\n", "separated by '|'"),
    ("x.csv", "q,a\r1,2\r", "tr '\\r' '\\n' <"),
    ("x.jsonl", '{"q": 1}\r{"q": 2}\r', "tr '\\r' '\\n' <"),
])
def test_other_delimiters_and_line_ends_are_named(name: str, text: str, words: str, tmp_path: Path) -> None:
    assert words in str(refusal(tmp_path / name, text))


def test_a_table_of_one_column_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("q\n1;2\n")
    assert list(read_file(tmp_path / "x.csv")) == [{"q": "1;2"}]


def test_a_device_and_a_list_of_names_are_no_data() -> None:
    with pytest.raises(DataError, match="/dev/null is no regular file"):
        find_tables("/dev/null")
    with pytest.raises(DataError, match="is a list of files") as caught:
        tables_of(["a.jsonl", "b.jsonl"], "data")
    assert "glob" in caught.value.fix


def test_a_folder_with_glob_characters_in_its_name_is_meant_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs[1]" / "deep").mkdir(parents=True)
    (tmp_path / "runs[1]" / "deep" / "x.jsonl").write_text('{"q": 1}\n')
    for text in (f"{tmp_path}/runs[1]/*/*.jsonl", f"{tmp_path}/runs[[]1]/**/x.jsonl"):
        assert len(find_tables(text)["train"]) == 1  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    assert len(find_tables("runs[1]/**/*.jsonl")["train"]) == 1  # type: ignore[arg-type]


def test_rows_of_a_stream_that_cannot_be_kept() -> None:
    spool = Spool(Stream.of([{"q": 1}, {"q": threading.Lock()}], "mine"), lambda *row: True)
    with pytest.raises(DataError, match="mine, row 2 cannot be kept on disk"):
        spool.read(2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told() -> None:
    spool = Spool(Stream.of([{"q": 1}], "mine"), lambda *row: True)
    spool._file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115 (the spool's)
    with pytest.raises(DataError, match="the rows of mine cannot be kept on disk after row 0") as caught:
        spool.read(1)
    assert "No space left" in caught.value.cause and "TMPDIR" in caught.value.fix


def test_any_failure_of_the_check_beside_the_run_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_check, "FIRST_ROWS", 5)

    def refuse(position: int, row: Any) -> None:
        if position == 7:
            raise KeyError("answer")

    check = RowCheck(Source("e", [{"q": i} for i in range(10)]), refuse)
    check.first()
    check.start()
    with pytest.raises(DataError, match="the rows of e could not be checked") as caught:
        check.wait()
    assert "KeyError: 'answer'" in caught.value.cause


def test_threads_that_read_a_sent_file_first_open_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n' * 8)
    sent = pickle.loads(pickle.dumps(JsonLines(tmp_path / "x.jsonl")))
    opened, real, together = [], os.open, threading.Barrier(2)

    def slow(*args: Any) -> int:
        opened.append(real(*args))
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)  # a second thread that opens it too comes here meanwhile
        return opened[-1]

    monkeypatch.setattr("posttrain.data.records.os.open", slow)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(sent.__getitem__, range(8))) == [{"a": 1}] * 8
    assert len(opened) == 1


@pytest.mark.parametrize(("said", "code"), [
    ("row 14015 of the file is broken", "dataset"), ("403 Client Error: Forbidden for url", "dataset-gated"),
])
def test_a_number_with_401_in_it_is_no_gate(said: str, code: str) -> None:
    assert _refusal("a/b", None, ValueError(said)).code == code


@pytest.mark.parametrize(("value", "why"), [("0", "cannot be reached"), ("", "cannot be reached"), ("1", "OFFLINE is set")])
def test_hf_hub_offline_0_is_not_set(value: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert why in _refusal("a/b", None, ConnectionError("Couldn't reach 'a/b' on the Hub")).message
