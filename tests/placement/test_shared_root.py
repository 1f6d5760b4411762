"""Two roots under one name are told from one shared root, with the path and the nodes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from posttrain.errors import ConfigError, SharedRootError
from posttrain.placement.shared_root import Nonce, Sighting, check, node_local, written


def elsewhere(nonce: Nonce, root: Path) -> Sighting:
    """What a node sees whose container has another folder at the same path."""
    return Nonce(str(root), nonce.token, nonce.node).look(patience=0)


def test_a_shared_root_passes_and_keeps_nothing(tmp_path: Path) -> None:
    with written(tmp_path) as nonce:
        travelled = pickle.loads(pickle.dumps(nonce.look))
        check(nonce, [nonce.look(), travelled(patience=0)])
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


def test_two_roots_are_told_with_path_and_nodes(tmp_path: Path) -> None:
    driver, other = tmp_path / "driver", tmp_path / "other"
    driver.mkdir(), other.mkdir()
    with written(driver) as nonce:
        sightings = [nonce.look(), elsewhere(nonce, other), Sighting("node-3", "there is no such folder")]
        with pytest.raises(SharedRootError) as caught:
            check(nonce, sightings)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, ConfigError) and error.code == "shared_root" and error.path == str(driver)
    assert "node-3" in error.nodes and len(error.nodes) == 2
    assert "the folder is there without the file" in error.cause and "--run FOLDER" in error.fix and str(driver) in error.message


def test_each_way_of_not_seeing_it_is_told_apart(tmp_path: Path) -> None:
    stale, gone, binary = tmp_path / "stale", tmp_path / "gone", tmp_path / "binary"
    stale.mkdir(), binary.mkdir()
    with written(tmp_path) as nonce:
        (stale / nonce.path.name).write_text("left over from another run")
        (binary / nonce.path.name).write_bytes(b"\xff\xfe")
        assert elsewhere(nonce, stale).problem == "the file is there and holds something else"
        assert elsewhere(nonce, gone).problem == "there is no such folder"
        assert "Unicode" in elsewhere(nonce, binary).problem


def test_two_nonces_never_answer_for_each_other(tmp_path: Path) -> None:
    with written(tmp_path) as first, written(tmp_path) as second:
        assert first.path != second.path
        first.path.unlink()
        assert first.look(patience=0).problem and not second.look(patience=0).problem


def test_a_root_that_the_driver_cannot_write_is_the_same_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SharedRootError, match="is not shared"), written(file):
        pass


def test_many_blind_nodes_stay_on_one_screen() -> None:
    nonce = Nonce("/shared", "t" * 64, "head")
    with pytest.raises(SharedRootError) as caught:
        check(nonce, [Sighting(f"n{i:03}", "there is no such folder") for i in range(100)])
    assert len(caught.value.nodes) == 100 and "92 more nodes" in caught.value.cause and len(caught.value.cause) < 600


def test_names_that_are_local_to_a_node() -> None:
    assert node_local("/tmp/imaginaire-output") and node_local("/dev/shm") and not node_local("/tmpfoo")
    assert not node_local("/lustre/runs") and os.path.isabs("/lustre/runs")
