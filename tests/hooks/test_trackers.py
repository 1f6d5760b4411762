"""The trackers of this environment: what they write is read back from their own files, also after a crash and a resume."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.config.schema import HookConfig
from posttrain.errors import PluginError
from posttrain.hooks import build_hooks


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_number_and_the_config(track, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert track("tensorboard", range(1, 4)) == {}
    folder = tmp_path / "run-1" / "tensorboard"
    assert scalars(folder) == {
        "validation/reward/mean": [(0, 0.125)],
        "loss": [(1, 0.5), (3, 1.5)],
        "reward/mean": [(1, 0.25), (2, 0.5), (3, 0.75)],
    }
    events = EventAccumulator(str(folder))
    events.Reload()
    (text,) = events.Tensors("config/text_summary")
    assert b"      steps: 3\n" in text.tensor_proto.string_val[0]


def test_a_resumed_run_goes_on_in_the_same_curves_without_what_was_past_the_checkpoint(track, tmp_path: Path) -> None:
    track("tensorboard", range(1, 4))  # the last checkpoint is of step 1
    time.sleep(1.1)  # files of one second and one process are read in the order of a number at the end of their names, as text
    track("tensorboard", range(2, 5))
    found = scalars(tmp_path / "run-1" / "tensorboard")
    assert found["reward/mean"] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert found["loss"] == [(1, 0.5), (3, 1.5), (4, 2.0)]


def records(file: Path) -> list[Any]:
    """The records of a finished `.wandb` file; W&B's own process may still be writing it when the run has ended."""
    end = time.monotonic() + 60
    while not (found := list(parse(file.read_bytes()))) or not any(r.WhichOneof("record_type") == "exit" for r in found):
        assert time.monotonic() < end, f"{file} has no end"
        time.sleep(0.1)
    return found


def parse(data: bytes) -> Iterator[Any]:
    """The records by W&B's own messages: a LevelDB log of blocks of 32 KiB behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, parts = 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def history(file: Path) -> list[dict[str, str]]:
    rows = [r.history for r in records(file) if r.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): item.value_json for item in row.item} for row in rows]


@pytest.fixture
def no_wandb_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_wandb_offline_has_every_number_and_the_config_and_goes_on_under_the_same_id(
    track, tmp_path: Path, no_wandb_account: None
) -> None:
    state = track("wandb", range(1, 4), project="mine", tags=["a", "b"])
    (first,) = tmp_path.glob("run-1/wandb/offline-run-*/run-*.wandb")
    rows = [{k: v for k, v in row.items() if not k.startswith("_")} for row in history(first)]
    assert rows == [
        {"step": "0", "validation/reward/mean": "0.125"},
        {"step": "1", "loss": "0.5", "reward/mean": "0.25"},
        {"step": "2", "reward/mean": "0.5"},
        {"step": "3", "loss": "1.5", "reward/mean": "0.75"},
    ]
    (started,) = [r.run for r in records(first) if r.WhichOneof("record_type") == "run"]
    assert (started.project, started.display_name, list(started.tags)) == ("mine", "run-1", ["a", "b"])
    config = {item.key: item.value_json for item in started.config.update}
    assert config["name"] == '"tiny"' and '"steps":3' in config["rl"].replace(" ", "")
    (ended,) = [r.exit for r in records(first) if r.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == 0
    assert state == {"wandb": {"id": started.run_id}} and started.run_id in first.name
    again = track("wandb", range(3, 5), state, project="mine")
    files = sorted(tmp_path.glob("run-1/wandb/offline-run-*/run-*.wandb"))
    assert again == state and [f.name for f in files] == [first.name] * 2
    assert {"step": "4", "loss": "2", "reward/mean": "1"}.items() <= history(files[-1])[-1].items()


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")])
def test_a_tracker_that_is_not_installed_is_told_with_what_to_type(name: str, module: str, monkeypatch) -> None:
    for loaded in [m for m in sys.modules if m == module or m.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.delitem(sys.modules, f"posttrain_hooks.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # what an import of it finds
    with pytest.raises(PluginError) as caught:
        build_hooks([HookConfig(name=name)])
    error = caught.value
    assert error.code == "plugin-dependency" and error.where == "hooks[0]"
    assert f"hook {name!r} (posttrain " in error.message and f"needs {module!r}, which is missing" in error.message
    assert error.fix == f"pip install 'posttrain[{name}]'"


def test_no_tracker_is_imported_unless_it_is_selected() -> None:
    import subprocess

    code = (
        "import sys\nfrom posttrain.cli.main import main\n"
        "assert main(['plugins', 'list']) == 0 and main(['train', '--help']) == 0\n"
        "from posttrain.config import load_config\nload_config(['experiment=arithmetic_grpo', 'hooks=[{name: wandb}]'])\n"
        "print({'wandb', 'tensorboard', 'trackio'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
