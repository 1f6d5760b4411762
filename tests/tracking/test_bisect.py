"""Where two runs part: the first metric, token and tensor that differ."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.cli.main import main
from posttrain.errors import ConfigError
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.testing.tiny_run import TinyRun
from posttrain.tracking.bisect import TensorDifference, bisect, first_metric, first_tensor, first_trajectory
from posttrain.tracking.rollouts import read_rollouts, write_rollouts
from posttrain.types import Group

Make = Callable[[str, list[float | None]], Group]


def recorded(folder: Path, groups: list[Group]) -> list[dict[str, Any]]:
    (folder / "rollouts").mkdir(parents=True)
    write_rollouts(folder / "rollouts", 1, groups)
    return read_rollouts(folder, 1)


def test_the_first_metric_that_differs() -> None:
    a = {"step": 1, "reward/mean": 0.5, "time/step_s": 1.0, "only/a": 1, "loss": 0.25, "lr": 0.1}
    b = {"step": 1, "lr": 0.2, "reward/mean": 0.5, "loss": 0.5, "time/step_s": 2.0}
    found = first_metric(a, b)
    assert found is not None and (found.name, found.a, found.b) == ("loss", 0.25, 0.5)
    assert first_metric(a, {**a, "time/step_s": 3.0}) is None
    assert first_metric({"loss": math.nan}, {"loss": math.nan}) is None


CHANGES: dict[str, tuple[Callable[[Any], Any], tuple[str, int | None, Any, Any]]] = {
    "token": (lambda t: replace(t, token_ids=[3, 5, 2], rollout_logprobs=[-1.0, 0.0, -0.25]), ("token_ids", 1, 4, 5)),
    "log-prob": (lambda t: replace(t, rollout_logprobs=[-0.5, 0.0, -0.5]), ("rollout_logprobs", 2, -0.25, -0.5)),
    "version": (lambda t: replace(t, weight_versions=[7, -1, 8]), ("weight_versions", 2, 7, 8)),
    "reward": (lambda t: replace(t, reward=0.75), ("reward", None, 0.0, 0.75)),
    "length": (
        lambda t: replace(t, token_ids=[3], mask=[True], rollout_logprobs=[-0.5], weight_versions=[7], turns=[]),
        ("token_ids", 1, 4, "the end"),
    ),
    "sample": (lambda t: replace(t, sample_id="a/9"), ("sample", None, "a/1", "a/9")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_trajectory_token_and_field_that_differ(tmp_path: Path, group: Make, name: str) -> None:
    change, wanted = CHANGES[name]
    one, other = group("a", [1.0, 0.0]), group("a", [1.0, 0.0])
    other.trajectories[1] = change(other.trajectories[1])
    found = first_trajectory(recorded(tmp_path / "a", [one]), recorded(tmp_path / "b", [other]))
    assert found is not None and found.place == 1 and found.sample == "a/1"
    assert (found.field, found.position, found.a, found.b) == wanted


def test_equal_and_missing_trajectories(tmp_path: Path, group: Make) -> None:
    a, b = recorded(tmp_path / "a", [group("a", [1.0, None])]), recorded(tmp_path / "b", [group("a", [1.0])])
    assert first_trajectory(a, a) is None
    found = first_trajectory(b, a)
    assert found is not None and (found.place, found.sample, found.field, found.a, found.b) == (1, "a/1", "sample", None, "a/1")


def test_the_first_tensor_that_differs_is_by_layer() -> None:
    a = {f"layers.{n}.weight": torch.ones(2, 3) for n in (0, 2, 10)} | {"nan": torch.tensor([math.nan])}
    b = {name: tensor.clone() for name, tensor in a.items()}
    assert first_tensor(4, "weights", a, b) == TensorDifference(4, "weights", None, of=4)
    b["layers.10.weight"][0, 0] += 1
    b["layers.2.weight"][1] += torch.tensor([0.0, 0.5, 0.25])
    assert first_tensor(4, "weights", a, b) == TensorDifference(4, "weights", "layers.2.weight", 0.5, 2, 2, 4)
    b["layers.0.weight"] = torch.ones(3, 2)
    found = first_tensor(4, "weights", a, b)
    assert (found.name, found.largest, found.elements) == ("layers.0.weight", math.inf, 6)
    del b["layers.0.weight"]
    assert first_tensor(4, "weights", a, b).name == "layers.0.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same run of four steps, twice."""
    root = tmp_path_factory.mktemp("runs")
    write_tiny_model(root / "model")
    tiny = TinyRun(root / "model", root)
    settings = ["rl.steps=4", "checkpoint.every=2", "checkpoint.keep_last=null", "validation.prompts=0"]
    return tiny(settings).run, tiny(settings).run


@pytest.fixture
def other(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[1], tmp_path / "other"))


def lines(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str]]:
    code = main(["replay", "--bisect", *map(str, arguments)])
    return code, capsys.readouterr().out.splitlines()


def test_the_same_run_twice_is_equal_to_the_bit(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    found = bisect(*pair)
    assert found.same and found.step is None and found.last == 4 and not found.config and not found.only
    assert [(t.step, t.part, t.name) for t in found.tensors] == [(4, "weights", None), (4, "optimizer", None)]
    code, text = lines(capsys, *pair)
    assert code == 0 and text[-1] == "equal to the bit up to step 4"
    assert any(line.startswith("  checkpoint of step 4, optimizer: all ") for line in text)


def test_a_metric_and_a_token_that_differ_are_named(
    pair: tuple[Path, Path], other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    rows[2]["grad_norm"] += 1.0
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = bisect(pair[0], other)
    assert not found.same and found.step == found.recorded == 3
    assert found.metric is not None and found.metric.name == "grad_norm"
    assert found.trajectory is None and [t.step for t in found.tensors] == [4, 4]
    code, text = lines(capsys, pair[0], other)
    assert code == 1 and "the first batch step that differs is 3" in text
    assert any(line.startswith("  recorded of step 3: metric grad_norm is ") for line in text)
    assert "  recorded of step 3: all trajectories are equal to the bit" in text
    (other / "rollouts" / "step_000003.parquet").unlink()
    assert "  recorded of step 3: no rollouts in both" in lines(capsys, pair[0], other)[1]


def test_a_trajectory_that_differs_where_metrics_agree(
    pair: tuple[Path, Path], other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = other / "rollouts" / "step_000002.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[5]["rollout_logprobs"][0] = -9.0
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    code, text = lines(capsys, pair[0], other)
    assert code == 1 and "the first batch step that differs is 2" in text and "  recorded of step 2: all metrics agree" in text
    assert any(f": trajectory 5, sample {rows[5]['sample_id']}: rollout_logprobs, token 0 is " in line for line in text)


def test_a_tensor_that_differs_where_all_else_agrees(
    pair: tuple[Path, Path], other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = other / "checkpoints" / "step_4" / "policy" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][0, 0] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    found = bisect(pair[0], other)
    assert found.step == 4 and found.recorded is None and not found.same
    first = found.tensors[2]
    assert (first.name, first.elements, first.tensors) == (name, 1, 1) and first.largest == pytest.approx(0.5)
    code, text = lines(capsys, pair[0], other)
    assert code == 1 and "the first batch step that differs is 4" in text
    assert f"first {name}: 1 element(s), by up to 0.5" in text[-2]


def test_other_settings_other_lengths_and_other_metrics(
    pair: tuple[Path, Path], other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) | {"new/metric": 1.0} for line in (other / "metrics.jsonl").read_text().splitlines()][:3]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("keep_last: null", "keep_last: 7"))
    shutil.rmtree(other / "checkpoints")
    code, text = lines(capsys, pair[0], other)
    assert code == 0 and "config: checkpoint.keep_last is None in A, 7 in B" in text
    assert "only one of them has, not compared: new/metric" in text and "  no checkpoint is in both" in text
    assert text[-1] == "equal to the bit up to step 3; A has 4 steps, B 3"
    assert main(["replay", "--bisect", str(pair[0]), str(other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["only"] == ["new/metric"]
    (other / "metrics.jsonl").write_text(json.dumps({**rows[0], "loss": 77.0}) + "\n")
    assert "the first batch step that differs is 1" in lines(capsys, pair[0], other)[1]


def test_runs_without_a_step_in_common(pair: tuple[Path, Path], other: Path) -> None:
    (other / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="have no batch step in common") as caught:
        bisect(pair[0], other)
    assert caught.value.cause == "the one has done 4, the other 0" and caught.value.code == "no_step"
