"""The ranks of a policy in other processes, as one policy; here they are what answers to `together`."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RunAborted, RunInterrupted
from posttrain.loop import checkpoint, policy_group
from posttrain.loop.policy_group import PolicyGroup


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    said: list[Any] = []

    def together(roles: Any, method: str, *args: Any, timeout: float, kill: bool = True) -> list[Any]:
        said.append((method, *args, timeout, kill))
        if method == "write" and "full" in args[1]:
            failure = OSError(errno.ENOSPC, "No space left on device")
            raise RunAborted(f"policy-1 failed in write: {failure!r}", code="role-failed")
        return [7, 7]

    monkeypatch.setattr(policy_group, "together", together)
    return said


def test_a_snapshot_is_taken_and_written_on_all_ranks(calls: list[Any], tmp_path: Path) -> None:
    group = PolicyGroup([], timeout=9.0)
    write = group.snapshot()
    assert calls == [("snapshot", 9.0, True)]
    with pytest.raises(RuntimeError, match="not written yet"):
        group.snapshot()
    write(tmp_path)
    assert calls[1:] == [("write", 7, str(tmp_path), 9.0, False)]
    group.save(tmp_path)
    assert [name for name, *_ in calls[2:]] == ["snapshot", "write"]


def test_a_full_disk_of_a_rank_is_the_error_of_a_full_disk(calls: list[Any], tmp_path: Path) -> None:
    group = PolicyGroup([], timeout=9.0)
    with pytest.raises(RunInterrupted, match="checkpoint of step 3 was not written") as caught:
        checkpoint.write(tmp_path / "full", 3, group.snapshot(), {})
    assert caught.value.code == "disk_full" and not list((tmp_path / "full").iterdir())
