"""What a resume finds changed on disk: code of plug-ins, which is said, and rows of the dataset, which are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.data.dataset import FIRST_FINGERPRINT_ROWS, fingerprint
from posttrain.errors import DataError
from posttrain.loop import checkpoint
from posttrain.loop.states import changed
from posttrain.plugins import resolve
from posttrain.plugins.origin import Origin
from posttrain.plugins.state import Keeper, source_digest
from posttrain.testing.tiny_model import write_tiny_model

ENVIRONMENT = """
import json
from pathlib import Path
from posttrain import Environment

class Mine(Environment):
    "Keeps nothing. Any answer with a 1 is right, so that random weights are right at times."

    def dataset(self, split):
        rows = [json.loads(line) for line in (Path(__file__).parent / "rows.jsonl").open()]
        return rows if split == "train" else [{"prompt": "0+1="}]

    def compute_reward(self, state):
        return float("1" in state.completion)
"""
REWARD = "def score(completion):\n    return float('1' in completion)\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A tiny model, an environment and a reward in files, and 1,000 rows."""
    write_tiny_model(tmp_path / "model")
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"id": str(i), "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(1000)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def start(site: Path) -> Callable[..., Path]:
    def run(resume: Path | None = None, environment: Any = None) -> Path:
        if resume is not None:
            return posttrain.train(resume=resume, **{"rl.steps": 2}).run
        return posttrain.train(
            model=str(site / "model"), environments=[environment or {"name": f"{site}/mine.py:Mine"}], run_dir=site / "runs",
            **{
                "rl": {"steps": 1, "group_size": 2, "batch_per_replica": 4}, "rl.discard_group_zero_advantage": False,
                "rollout": {"max_tokens": 4, "max_model_len": 64, "reward_workers": 1}, "validation.prompts": 0,
                "checkpoint.every": 1, "checkpoint.keep_last": None, "grid": {"threads": 1}, "tracking": {"display": "none"},
            },
        ).run  # fmt: skip

    return run


def last(run: Path) -> checkpoint.Checkpoint:
    return checkpoint.find(run / "checkpoints")[-1]


def said(run: Path) -> list[str]:
    """The lines about changed plug-ins in the run's events."""
    notes = [json.loads(line).get("args", {}).get("text", "") for line in (run / "events.jsonl").read_text().splitlines()]
    return [note for note in notes if "goes on from the checkpoint" in note]


def recorded(run: Path) -> dict[str, Any]:
    return {k: v for k, v in json.loads((run / "provenance.json").read_text())[-1]["changed"].items() if k != "rl.steps"}


def test_an_edited_environment_of_a_file_is_said_and_recorded(start: Any, site: Path) -> None:
    run = start()
    assert {(one.kind, one.name): (one.distribution, one.version) for one in last(run).origins()} == {
        ("algorithms", "grpo"): ("posttrain", posttrain.__version__), ("envs", "mine.py:Mine"): ("", ""),
        ("datapackers", "DecoderOnlyPacker"): ("posttrain", posttrain.__version__),
        ("engines", "hf"): ("posttrain", posttrain.__version__), ("transports", "inproc"): ("posttrain", posttrain.__version__),
    }  # fmt: skip
    assert all(len(one.source) == 64 for one in last(run).origins())
    same = start(resume=shutil.copytree(run, site / "runs" / "same"))
    assert said(same) == [] and recorded(same) == {}
    (site / "mine.py").write_text(ENVIRONMENT.replace('"1" in', '"2" in'))
    start(resume=run)
    (line,) = said(run)
    origins = [one for found in checkpoint.find(run / "checkpoints") for one in found.origins()]
    was, now = (one.source[:12] for one in origins if one.kind == "envs")
    who = "environment 'mine.py:Mine' (mine.py:Mine)"
    assert line == f"{who} goes on from the checkpoint, but it has changed: source {was} → source {now}" and was != now
    assert recorded(run) == {who: {"was": f"source {was}", "is": f"source {now}"}}


def test_an_edited_reward_is_said_of_the_environment_that_names_it(start: Any, site: Path) -> None:
    options = {"reward": f"{site}/reward.py:score", "data": f"{site}/rows.jsonl", "test_size": 1}
    run = start(environment={"name": "function", "options": options})
    (site / "reward.py").write_text(REWARD.replace("'1'", "'2'"))
    start(resume=run)
    (line,) = said(run)
    assert line.startswith("environment 'function' (posttrain ") and "but it has changed: reward.py:score " in line


def test_one_changed_row_of_a_thousand_is_refused_and_an_old_checkpoint_goes_on(start: Any, site: Path) -> None:
    """An old checkpoint has a fingerprint of 64 rows and no word of where plug-ins came from."""
    run, file = start(), site / "rows.jsonl"
    old = shutil.copytree(run, site / "runs" / "old")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    loop = last(old).path / checkpoint.LOOP_FILE
    content = json.loads(loop.read_text())
    del content["fingerprint_rows"], content["origins"]
    content["fingerprints"] = dict.fromkeys(content["fingerprints"], fingerprint(rows, FIRST_FINGERPRINT_ROWS))
    loop.write_text(json.dumps(content))
    older = shutil.copytree(old, site / "runs" / "older")
    rows[500] |= {"answer": "7"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="dataset of mine.py:Mine is not the one"):
        start(resume=run)
    (site / "mine.py").write_text(ENVIRONMENT + "# edited\n")
    assert start(resume=old) == old and said(old) == []
    rows[0] |= {"answer": "7"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="dataset of mine.py:Mine is not the one"):
        start(resume=older)


# --- what is compared -----------------------------------------------------------------------------------------------------


SOURCE = "from posttrain import Hook\nclass Mine(Hook):\n    def step_end(self): ...\n"


def test_an_edited_or_upgraded_package_is_said(posttrain_plugins: Any) -> None:
    points = {"posttrain.hooks": {"mine": "origin_source:Mine"}}
    where = posttrain_plugins.install("acme-hooks", files={"origin_source.py": SOURCE}, points=points, version="1.0")
    keeper = Keeper("hooks", "mine", resolve("hooks", "mine")(), ref="mine")
    was = Origin.of(keeper)
    assert changed([Origin.of(keeper)], [was], []) == ({}, [])
    (where / "origin_source.py").write_text(SOURCE + "# better\n")
    source_digest.cache_clear()  # another process
    now, who = Origin.of(keeper), "hook 'mine' (acme-hooks 1.0)"
    found, (line,) = changed([now], [was], [])
    assert list(found) == [who] and line.startswith(f"{who} goes on from the checkpoint, but it has changed: source ")
    assert changed([now], [was], [f"{who} goes on from the checkpoint, but its source …"])[1] == []  # a line for each, not two
    newer = replace(now, version="2.0")
    assert changed([newer], [was], [])[1] == [
        "hook 'mine' (acme-hooks 2.0) goes on from the checkpoint, but it has changed: acme-hooks 1.0 → acme-hooks 2.0"
    ]
    assert changed([newer], [], []) == changed([], [was], []) == ({}, [])  # new or gone: the config's keys tell


def test_what_a_script_defines_counts_by_its_own_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(posttrain.Hook):
        """Of a script, which is edited to resume."""

    assert Origin.of(Keeper("hooks", "Mine", Mine())).source
    monkeypatch.setattr(Mine, "__module__", "__main__")
    assert not Origin.of(Keeper("hooks", "Mine", Mine())).source
