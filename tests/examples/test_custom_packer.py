"""The example of a packer and a dataset in a user's own repository runs by the command that its page prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.data.packer import DataPacker
from posttrain.testing import DataPackerContract
from posttrain.testing.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "examples" / "custom_packer"
SMALL = [
    "rl.steps=1", "rl.batch_per_replica=8", "rl.group_size=4", "grid.threads=1",
    "model.factory_kwargs.steps=2", "model.factory_kwargs.slip_steps=1", "rl.discard_group_zero_advantage=false",
]  # fmt: skip


def test_the_printed_command_trains_on_the_user_s_rows_through_the_user_s_packer(tmp_path: Path) -> None:
    from posttrain.tracking.rollouts import read_rollouts

    block = re.search(r"```bash\n(.*?)```", (FOLDER / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    path, program, *arguments = shlex.split(block[1].replace("\\\n", " "))
    assert path == "PYTHONPATH=docs/examples/custom_packer" and program == "posttrain"
    done = subprocess.run(
        [sys.executable, "-m", "posttrain.cli.main", *arguments, *SMALL, "--run", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(FOLDER)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = [p for p in tmp_path.iterdir() if (p / "metrics.jsonl").exists()]
    rollouts = read_rollouts(run, 1)
    assert len(rollouts) == 8
    question = 2 + "0123456789+-*/=?".index("?")
    assert {r["prompt_ids"][0] for r in rollouts} == {question}
    assert all(re.fullmatch(r"\d+:arithmetic:double-\d+", r["group_id"]) for r in rollouts)


class TestDoubles(DataPackerContract):
    @pytest.fixture
    def packer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataPacker:
        from posttrain.data.packer import load_packer

        monkeypatch.syspath_prepend(str(FOLDER))
        write_tiny_model(tmp_path)
        return load_packer("doubles:make_packer").setup(str(tmp_path))
