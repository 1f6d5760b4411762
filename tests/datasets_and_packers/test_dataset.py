"""Datasets as a run builds them: from environments or a user's factory, with unreadable rows named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.schema import DataConfig, EnvironmentConfig, GridConfig, Plugin, RLConfig, RunConfig, ShapesConfig
from posttrain.data.dataset import PromptSampler, Source, build_sampler, check_size, fingerprint
from posttrain.data.environment import Environment, RowDataset, Rows
from posttrain.data.seeds import derive_seed
from posttrain.errors import ConfigError, DataError


class Letters(Environment):
    def dataset(self, split: Any) -> Any:
        return [{"id": c} for c in "abcdef"]

    def compute_reward(self, state: Any) -> float:
        return 0.0


def config(*environments: str, **data: Any) -> RunConfig:
    rl = RLConfig(steps=1, objective=Plugin(name="grpo"), group_size=2, batch_per_replica=8, data=DataConfig(**data))
    return RunConfig(rl=rl, environments=tuple(EnvironmentConfig(name=e) for e in environments or ("letters",)))


def test_build_sampler_reads_the_environment_or_the_user_s_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rows.py").write_text(
        "def make(count):\n    return [{'id': f'user{i}'} for i in range(count)]\n"
        "def text():\n    return 'rows'\n"
        "def fails():\n    raise OSError('no such file')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    one: dict[str, Environment] = {"letters": Letters()}
    assert sorted(d.row_id for d in build_sampler(config(), one).draw(6)) == list("abcdef")
    for path in ("user_rows:make", "user_rows.make", f"{tmp_path}/user_rows.py:make"):
        made = build_sampler(config(factory=path, factory_kwargs={"count": 9}), one).draw(9)
        assert sorted(d.row_id for d in made) == [f"user{i}" for i in range(9)]
    for name, problem in (("text", "gave a str, which is no dataset"), ("fails", "failed"), ("absent", "cannot be imported")):
        with pytest.raises(DataError, match=problem):
            build_sampler(config(factory=f"user_rows:{name}"), one)
    with pytest.raises(ConfigError, match="one environment, and there are 2"):
        build_sampler(config("letters", "other", factory="user_rows:make"), {**one, "other": Letters()})


def test_e6_fewer_rows_than_data_cells() -> None:
    four = [Source("a", [{"id": "1"}]), Source("b", [{"id": str(i)} for i in range(3)])]
    with pytest.raises(DataError) as caught:
        check_size(four, world=8)
    assert caught.value.message == "dataset has 4 item(s) but world_size=8" and caught.value.code == "E6"
    check_size(four, world=4)
    wide = config()
    for grid in (GridConfig(shapes=ShapesConfig(rollout=(8, 1))), GridConfig(dp_replicate=4, dp_shard=2)):
        with pytest.raises(DataError, match="dataset has 6 item.s. but world_size=8"):
            build_sampler(replace(wide, grid=grid), {"letters": Letters()})


def test_a_row_that_cannot_be_read_is_named() -> None:
    class Broken(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index == 3:
                raise OSError("bad sector")
            return super().__getitem__(index)

    sampler = PromptSampler([Source("letters", Broken({"id": i} for i in range(5)))], seed=0, shuffle=False)
    with pytest.raises(DataError, match="row 3 of the training dataset of letters cannot be read") as caught:
        sampler.draw(5)
    assert "bad sector" in caught.value.cause


def test_a_hugging_face_dataset_is_a_dataset() -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"id": f"r{i}", "question": "?"} for i in range(5)])
    assert isinstance(rows, RowDataset) and len(fingerprint(rows)) == 12
    assert sorted(d.row_id for d in PromptSampler([Source("a", rows)], seed=0).draw(5)) == [f"r{i}" for i in range(5)]


def test_rows_are_made_on_demand() -> None:
    rows = Rows(10**9, lambda i: {"id": str(i)})
    assert rows[-1]["id"] == str(10**9 - 1) and [r["id"] for r in rows[2:4]] == ["2", "3"]
    with pytest.raises(IndexError):
        rows[10**9]


def test_seeds_are_named_and_63_bits_wide() -> None:
    assert derive_seed(0, "a", "bc") != derive_seed(0, "ab", "c") != derive_seed(0, "abc")
    assert derive_seed(1, "x") != derive_seed(0, "x") and derive_seed(0, "x", 1) == derive_seed(0, "x", "1")
    assert all(0 <= derive_seed(s, "p") < 2**63 for s in range(200))
    assert derive_seed(0, "sampling", "g", 0) == 8374368446296544370  # a run must draw the same on every machine and version
