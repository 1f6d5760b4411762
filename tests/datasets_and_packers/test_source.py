"""`open_rows`: from what a person names to rows with stable ids in two splits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.data import split as splitting
from posttrain.data.dataset import PromptSampler, Source
from posttrain.data.source import DataOptions, load_rows, open_rows
from posttrain.errors import ConfigError, DataError

SETTINGS = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
Write = Callable[..., Path]


def ids(rows: Any) -> list[str]:
    return [row["id"] for row in rows]


def both(**options: Any) -> tuple[Any, Any]:
    made = DataOptions(**options)
    return open_rows(made, "train"), open_rows(made, "test")


def refused(code: str, **options: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        both(**options)
    assert caught.value.code == code and caught.value.exit_code == 3
    return caught.value


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, rows: list[Any]) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".jsonl"):
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        Path(name).write_text(json.dumps(rows))
    elif name.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), name)
    else:
        mark = "," if name.endswith(".csv") else "\t"
        Path(name).write_text("".join(mark.join(map(str, line)) + "\n" for line in [list(rows[0]), *(r.values() for r in rows)]))


ROWS = [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(30)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_kind_of_file_gives_the_same_rows(suffix: str, streaming: bool, folder: Path) -> None:
    write(f"my.{suffix}", ROWS)
    train, test = both(data=f"my.{suffix}", test_size=0, streaming=streaming)
    assert [{k: v for k, v in row.items() if k != "id"} for row in train] == ROWS and len(test) == 0
    first = 2 if suffix in ("csv", "tsv") else 1
    assert ids(train) == [str(i) for i in range(first, 30 + first)]
    assert train.where(2) == (f"my.{suffix}, row 3" if suffix in ("json", "parquet") else f"my.{suffix}:{2 + first}")
    assert both(data=str(folder / f"my.{suffix}"), streaming=streaming)[0].where(2).startswith(f"my.{suffix}")


def test_objects_of_python_give_the_same_rows(folder: Path) -> None:
    import datasets
    import pandas as pd

    dataset = datasets.Dataset.from_list(ROWS)

    def generate() -> Iterator[dict[str, str]]:
        yield from ROWS

    given: list[Any] = [ROWS, tuple(ROWS), dataset, dataset.to_iterable_dataset(), pd.DataFrame(ROWS), generate, generate(),
                        {"train": ROWS, "test": ROWS[:2]}, datasets.DatasetDict(train=dataset), lambda: dataset]
    for data in given:
        train, _ = both(data=data, test_size=0)
        assert ids(train) == [str(i + 1) for i in range(30)] and train[3]["answer"] == "4", data
    assert ids(both(data={"train": ROWS, "test": [{"question": "x"}]})[1]) == ["1"]
    dataset.save_to_disk("saved")
    assert ids(both(data="saved", test_size=0)[0])[-1] == "30"


def test_a_function_by_its_path(folder: Path) -> None:
    Path("mine.py").write_text(
        "ROWS = [{'q': i} for i in range(5)]\n"
        "def rows(): return ROWS\n"
        "def generate():\n    yield from ROWS\n"
        "def fails(): return open('absent.txt')\n"
        "def number(): return 7\n"
        "def breaks():\n    yield {'q': 1}\n    raise KeyError('x')\n"
    )
    for name in ("rows", "generate", "ROWS"):
        assert [row["q"] for row in both(data=f"mine.py:{name}")[0]] == list(range(5))
    assert "FileNotFoundError" in refused("data", data="mine.py:fails").cause
    assert "has no attribute 'other'" in refused("data", data="mine.py:other").cause
    assert refused("no-dataset", data="mine.py:number").message == (
        "the data of mine.py:number gave an int, which is no dataset"
    )
    assert refused("unreadable-row", data="mine.py:breaks").message == "the data of mine.py:breaks failed after row 1"


def test_a_folder_has_the_splits_that_its_files_are_named_by(folder: Path) -> None:
    write("d/train-00.jsonl", ROWS[:3])
    write("d/train-01.jsonl", ROWS[3:5])
    write("d/sub/test.jsonl", ROWS[5:6])
    write("d/.cache/x.jsonl", [{"no": 1}])
    (folder / "d/README.md").write_text("words")
    train, test = both(data="d")
    assert ids(train) == ["train-00.jsonl:1", "train-00.jsonl:2", "train-00.jsonl:3", "train-01.jsonl:1", "train-01.jsonl:2"]
    assert ids(test) == ["1"] and test.where(0) == "d/sub/test.jsonl:1" and train.where(4) == "d/train-01.jsonl:2"
    assert ids(both(data="d", streaming=True)[0]) == ids(train)
    assert len(both(data="d/train*.jsonl", test_size=0)[0]) == 5
    assert ids(both(data="d", data_split="test", test_size=0)[0]) == ["1"]
    assert "its splits: test, train" in refused("no-such-split", data="d", data_split="tran").cause
    write("d/more.jsonl", ROWS[:1])
    assert "others without a split, such as more.jsonl" in refused("mixed-files", data="d").message
    assert "options.data='d/train*.jsonl'" in refused("mixed-files", data="d").fix


def test_folders_and_paths_that_hold_no_data(folder: Path) -> None:
    write("d/a.jsonl", ROWS)
    write("d/a.csv", ROWS)
    assert refused("mixed-files", data="d").message == "d holds files of several kinds: a.csv, a.jsonl"
    (folder / "none").mkdir()
    assert refused("no-data-files", data="none").message == "the folder none holds no data file"
    assert "'data/*.jsonl'" in refused("no-data-files", data="none/*.jsonl").fix
    assert refused("no-such-file", data="d/b.jsonl").fix == "did you mean d/a.jsonl?"
    assert refused("no-such-file", data="e/b.jsonl").cause == "there is no folder e"
    assert refused("no-data", data=None).message == "options.data is not set"
    assert refused("no-dataset", data={"question": ["a"], "answer": ["b"]}).message == "data is a dict of columns"
    assert refused("empty-dataset", data=[]).message == "data is empty"
    assert refused("empty-dataset", data=iter(())).message == "data is empty"
    assert refused("not-an-object", data=["text"]).message == "data, row 1 is a str, not a mapping"


def test_columns_are_renamed_swapped_reached_into_and_missed_by_name(folder: Path) -> None:
    write("my.jsonl", [{"q": "2+2", "a": "4", "info": {"n": [5, {"x": 6}]}, "a.b": 7}])
    row = both(data="my.jsonl", columns={"question": "q", "deep": "info.n.1.x", "first": "info.n.0", "dotted": "a.b"})[0][0]
    assert row == {"id": "1", "a": "4", "info": {"n": [5, {"x": 6}]}, "question": "2+2", "deep": 6, "first": 5, "dotted": 7}
    assert both(data="my.jsonl", columns={"q": "a", "a": "q", "id": "a"})[0][0]["id"] == "4"
    error = refused("missing-column", data="my.jsonl", columns={"question": "questio"})
    assert error.message == "my.jsonl:1 has no column 'questio'" and error.cause == "it has q, a, info, a.b"
    with pytest.raises(DataError) as caught:
        open_rows(DataOptions(data="my.jsonl"), "train", required=("infos",))
    assert caught.value.fix == "write options.columns={infos: info}"


@SETTINGS
@given(row=st.dictionaries(st.text("abc", min_size=1, max_size=2), st.integers(), min_size=1, max_size=4), data=st.data())
def test_renaming_there_and_back_is_nothing(row: dict[str, int], data: st.DataObject) -> None:
    there = dict(zip(data.draw(st.permutations([f"new{i}" for i in range(len(row))])), row, strict=True))
    moved = both(data=[row], columns=there)[0][0]
    assert set(moved) == {"id", *there}
    back = both(data=[{k: v for k, v in moved.items() if k != "id"}], columns={old: new for new, old in there.items()})[0][0]
    assert back == {"id": "1", **row}


def test_ids_are_the_row_s_own_else_its_line(folder: Path) -> None:
    write("my.jsonl", [{"id": 7, "q": 1}, {"id": None, "q": 2}, {"q": 3}])
    assert ids(both(data="my.jsonl")[0]) == ["7", "2", "3"]


OPTIONS = st.fixed_dictionaries({}, optional={
    "test_size": st.integers(0, 8) | st.floats(0.05, 0.5), "split_seed": st.integers(0, 3), "take": st.integers(1, 12),
})


@SETTINGS
@given(values=st.lists(st.integers(0, 20), min_size=12, max_size=60), options=OPTIONS, odd=st.booleans())
def test_a_split_is_a_partition_with_stable_unique_ids_and_no_copy_on_both_sides(
    values: list[int], options: dict[str, Any], odd: bool
) -> None:
    rows = [{"q": v} for v in [*values, 98, 99, 100, 101]]
    keep = (lambda row: row["q"] % 2 == 1 or row["q"] > 97) if odd else None
    whole = {**options, "take": None}
    try:
        train, test = both(data=rows, filter=keep, **whole)
    except DataError as exc:
        assert exc.code == "small-dataset"
        return
    everything = Counter((row["id"], row["q"]) for row in [*train, *test])
    assert everything == Counter((str(i + 1), row["q"]) for i, row in enumerate(rows) if keep is None or keep(row))
    assert not {row["q"] for row in train} & {row["q"] for row in test}
    assert ids(train) == sorted(ids(train), key=int) and ids(test) == sorted(ids(test), key=int)
    fewer, same_test = both(data=rows, filter=keep, **options)
    assert ids(fewer) == ids(train)[: options.get("take")] and ids(same_test) == ids(test)
    if isinstance(options.get("test_size"), int) and len({row["q"] for row in rows}) == len(rows):
        assert len(test) == options["test_size"]


@SETTINGS
@given(count=st.integers(10, 60), size=st.integers(1, 5), seed=st.integers(0, 5), data=st.data())
def test_what_is_held_out_stays_so_when_a_filter_leaves_fewer_rows(count: int, size: int, seed: int, data: st.DataObject) -> None:
    rows = [{"q": i} for i in range(count)]
    out = data.draw(st.sets(st.integers(0, count - 1), max_size=count - size - 1))
    before = both(data=rows, test_size=size, split_seed=seed)[1]
    after = both(data=rows, test_size=size, split_seed=seed, filter=lambda row: row["q"] not in out)[1]
    assert {row["q"] for row in before} - out <= {row["q"] for row in after}


def test_seeds_choose_different_rows_and_large_data_splits_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [tuple(ids(both(data=[{"q": i} for i in range(200)], split_seed=seed)[1])) for seed in range(5)]
    assert len(set(chosen)) == 5 and {len(c) for c in chosen} == {10}
    monkeypatch.setattr(splitting, "SCANNED_ROWS", 100)
    assert tuple(ids(both(data=[{"q": i} for i in range(200)], split_seed=3)[1])) == chosen[3]
    assert len(both(data=[{"q": i} for i in range(10_000)])[1]) == 256


def test_rows_of_a_separate_test_split_do_not_train(folder: Path) -> None:
    write("train.jsonl", ROWS)
    write("test.jsonl", [{**ROWS[4], "id": "a"}, {**ROWS[7], "id": "b"}, {"question": "new", "answer": ""}])
    train, test = both(data="train.jsonl", test_data="test.jsonl")
    assert len(train) == 28 and ids(test) == ["a", "b", "3"] and "5" not in ids(train)
    assert train.notes == ["2 row(s) of the train split are in the test split too: they do not train"]
    assert refused("not-held-out", data="train.jsonl", test_data="train.jsonl").message.startswith("every row that would train")
    made = DataOptions(data="train.jsonl", test_data=[{"question": ROWS[0]["question"], "answer": "another"}])
    assert len(open_rows(made, "train", same=("question",))) == 29 and len(open_rows(made, "train")) == 30


def test_a_filter_by_path_sees_the_renamed_row_and_is_told_when_it_fails(folder: Path) -> None:
    write("my.jsonl", [{"q": i} for i in range(10)])
    Path("mine.py").write_text(
        "def even(row): return row['n'] % 2 == 0\ndef fails(row): return row['m']\ndef none(row): return 0\n"
    )
    assert ids(both(data="my.jsonl", columns={"n": "q"}, filter="mine.py:even")[0]) == ["1", "3", "5", "7", "9"]
    error = refused("filter", data="my.jsonl", filter="mine.py:fails")
    assert error.message == "the filter failed on my.jsonl:1" and error.cause == "KeyError: 'm'; the row has id, q"
    assert refused("empty-dataset", data="my.jsonl", filter="mine.py:none").cause == "options.filter let none stay"
    with pytest.raises(ConfigError, match="mine.py has no 'evn'"):
        both(data="my.jsonl", filter="mine.py:evn")


@pytest.mark.parametrize("options, text", [
    ({"test_size": 1.5}, "test_size=1.5 is no fraction"), ({"test_size": -1}, "test_size=-1 must be at least 0"),
    ({"take": 0}, "take=0 must be at least 1"), ({"test_size": 3, "test_data": "x"}, "test_data and test_size are both set"),
    ({"data": ""}, "data is empty"), ({"test_data": " "}, "test_data is empty"),
])
def test_options_that_cannot_work(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        DataOptions(**{"data": [], **options})


def test_a_test_split_that_leaves_nothing(folder: Path) -> None:
    assert refused("small-dataset", data=ROWS, test_size=30).message == "options.test_size=30 leaves none of 30 row(s) to train"
    assert refused("small-dataset", data=[{"q": 1}] * 30, test_size=2).cause == "all rows are copies of one"
    assert [len(rows) for rows in both(data=[{"q": 1}] * 30)] == [30, 0]
    assert [len(rows) for rows in both(data=ROWS[:3])] == [3, 0]


def test_case_data_1_a_file_smaller_than_a_batch_trains_each_row(folder: Path) -> None:
    write("my.jsonl", ROWS[:3])
    draws = PromptSampler([Source("e", both(data="my.jsonl")[0])], seed=0, batch=8).draw(8)
    assert Counter(d.row_id for d in draws[:6]) == {"1": 2, "2": 2, "3": 2}
    assert {d.where for d in draws} == {"my.jsonl:1", "my.jsonl:2", "my.jsonl:3"}


def test_load_rows_brings_both_splits_for_a_factory(folder: Path) -> None:
    from posttrain.data.dataset import rows_of

    write("my.jsonl", ROWS)
    splits = rows_of("posttrain.load_rows", {"data": "my.jsonl", "test_size": 5, "columns": {"problem": "question"}})
    assert len(splits["train"]) == 25 and len(splits["test"]) == 5 and "problem" in splits["train"][0]
    with pytest.raises(ConfigError, match="rl.data.factory_kwargs.colums"):
        load_rows("my.jsonl", colums={})


def test_an_environment_s_options_are_read_without_importing_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.plugins.build import option_fields
    from posttrain.plugins.card import read_card

    Path("mine_env.py").write_text(
        "import not_installed\nfrom dataclasses import dataclass\nfrom posttrain import DataOptions, Environment\n"
        "class Mine(Environment):\n    'Mine.'\n    @dataclass(frozen=True, kw_only=True)\n"
        "    class Options(DataOptions):\n        lenient: bool = False  # or not\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    card = read_card("mine_env:Mine")
    read = {field.name: (field.type, field.default) for field in option_fields(card) or []}
    assert card.complete and list(read) == [*DataOptions.__dataclass_fields__, "lenient"]
    assert read["take"] == (int | None, None) and read["data_split"] == (str, "train") and read["streaming"] == (bool, False)
    assert all(option.help for option in card.options)


def test_options_name_the_same_data_in_every_directory(folder: Path) -> None:
    names = {"my.jsonl": f"{folder}/my.jsonl", "data/*.csv": f"{folder}/data/*.csv", "m.py:rows": f"{folder}/m.py:rows",
             "~/x.json": str(Path("~/x.json").expanduser()), "pkg.mod:rows": "pkg.mod:rows", "openai/gsm8k": "openai/gsm8k",
             "object:data": "object:data"}  # fmt: skip
    assert {name: DataOptions(data=name).data for name in names} == names
    kept = DataOptions(data="openai/gsm8k", filter="m.py:keep", test_data="t.jsonl")
    assert (kept.filter, kept.test_data) == (f"{folder}/m.py:keep", f"{folder}/t.jsonl")
    assert DataOptions(data="openai/gsm8k", filter="pkg.mod.keep").filter == "pkg.mod.keep"
