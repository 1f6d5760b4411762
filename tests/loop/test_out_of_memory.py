"""A run that runs out of memory ends with the steps, a run directory, and the changed values recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from posttrain.cli.report import report
from posttrain.errors import OutOfMemory
from posttrain.policy.module import PolicyModule
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.testing.tiny_run import TinyRun


def test_a_forward_that_does_not_fit_ends_the_run_with_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_model(tmp_path / "model")
    forward = PolicyModule.forward

    def greedy(self: PolicyModule, *given: object, **more: object) -> object:
        if torch.is_grad_enabled():
            torch.empty(2**50, dtype=torch.uint8)  # a real refusal of torch's allocator
        return forward(self, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(PolicyModule, "forward", greedy)
    with pytest.raises(OutOfMemory) as caught:
        TinyRun(tmp_path / "model", tmp_path)(["rl.micro_batch_per_replica=8"])
    assert report(caught.value) == 5
    shown = capsys.readouterr().err
    assert "the policy ran out of memory while training" in shown
    assert "2 rl.micro_batch_per_replica=4, 2, 1 (now 8; legal for dp_world=1)" in shown
    assert "docs:  docs/troubleshooting.md#out-of-memory" in shown
    (run,) = (tmp_path / "runs").iterdir()
    (entry,) = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
    assert entry["changed"]["rl.micro_batch_per_replica"] == {"was": None, "is": 8}
