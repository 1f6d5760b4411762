"""The script for a machine with a GPU works where there is none: what it names exists, and the same code runs on the CPU."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("check_gpu.py")
BLIND = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def call(*arguments: str, **environment: str) -> tuple[int, str]:
    command, env = [sys.executable, str(SCRIPT), *arguments], {**BLIND, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout or done.stderr


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("check_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["check_gpu"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["check_gpu"]


def test_the_checks_fit_into_ten_minutes(script: ModuleType) -> None:
    names = [check.name for check in script.CHECKS]
    assert len(set(names)) == len(names)
    assert sum(check.budget_s for check in script.CHECKS) <= script.LIMIT_S < 600
    code, text = call("--list")
    assert code == 0 and [line.split()[0] for line in text.splitlines()[:-1]] == names


def test_without_a_gpu_nothing_is_checked_and_that_is_said() -> None:
    assert call() == (0, "no GPU here: nothing checked\n")


def test_what_makes_sense_without_a_gpu_holds_here(script: ModuleType) -> None:
    code, text = call("--device", "cpu")
    cheap = [check.name for check in script.CHECKS if check.without_gpu]
    assert code == 0, text
    assert re.findall(r"^ok +(\S+)", text, re.MULTILINE) == cheap and "value_gap_float32" in text and "gib_per_s" in text
    assert f"{len(cheap)} of {len(cheap)} checks hold on cpu" in text


def test_a_check_that_overruns_is_ended_and_fails_the_script(tmp_path: Path) -> None:
    code, text = call("--device", "cpu", "--only", "device", "--limit", "0.01", TMPDIR=str(tmp_path))
    assert code == 1 and re.search(r"^FAILED +device", text, re.MULTILINE) and "still running after" in text
    assert "0 of 1 checks hold" in text


def test_a_check_that_does_not_hold_says_why(script: ModuleType, tmp_path: Path) -> None:
    def work(device: str, folder: Path) -> Any:
        script.expect(script.gap([1.0, 2.0], [1.0, 2.5]) < 0.1, f"too far apart on {device}")

    assert script.attempt(work, "cpu", tmp_path) == (False, "AssertionError: too far apart on cpu")
    assert script.gap([float("nan")], [1.0]) == float("inf")


def imported(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(name here, module, name there) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            yield from ((alias.asname or alias.name, str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else "", ""


def resolve(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def test_every_name_that_a_check_uses_exists() -> None:
    """Also on the lines that only a GPU reaches: imports, and attributes of imported modules, like `torch.cuda.nccl.version`."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    known = {
        here: resolve(module, name) if name else importlib.import_module(module or here) for here, module, name in imported(tree)
    }
    chains = set()
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if parts and isinstance(inner, ast.Name) and isinstance(known.get(inner.id), ModuleType):
            chains.add((inner.id, *parts))
    assert ("torch", "cuda", "set_per_process_memory_fraction") in chains and ("torch", "cuda", "nccl", "version") in chains
    absent = []
    for root, *parts in chains:
        found = known[root]
        for part in parts:
            if not hasattr(found, part):
                absent.append(".".join((root, *parts)))
                break
            found = getattr(found, part)
    assert not absent


def test_the_overrides_of_the_runs_are_legal() -> None:
    """The configs that the whole runs load, as far as they stand in the script as plain text."""
    from posttrain.config.load import load_config

    lists = [
        node.args[0] for node in ast.walk(ast.parse(SCRIPT.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "load_config"
    ]  # fmt: skip
    assert len(lists) == 2
    for given in lists:
        assert isinstance(given, ast.List)
        values = [value.value for value in given.elts if isinstance(value, ast.Constant)]
        config = load_config([str(value) for value in values]).config
        assert config.rollout.engine == "vllm" and config.rl.steps == 2
