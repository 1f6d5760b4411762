"""Arrows between packages point one way, and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "posttrain"
PLUGINS = ("posttrain_algorithms", "posttrain_datapackers", "posttrain_envs", "posttrain_hooks", "posttrain_experiments")
LAYERS = (
    ("types", "errors", "deprecation"),
    ("config", "plugins", "data", "hooks", "sandbox"),
    ("objective", "policy", "weights", "placement"),
    ("rollout",),
    ("loop", "tracking", "testing", "evals", "endpoint"),
    ("cli",),
)
"""From the bottom up. A part may import its own layer and those below, while it is being imported."""
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
HEAVY = ("torch", "vllm", "ray", "transformers", "hydra", "datasets", "nixl")


def imports(path: Path, *, deferred: bool) -> Iterator[tuple[int, str]]:
    """(line, module) of the imports of a file. Without `deferred`: only those that run when the module is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if deferred else _at_import(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            if node.module == "posttrain":
                yield from ((node.lineno, f"posttrain.{alias.name}") for alias in node.names)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_import(child)


def part_of(module: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == "posttrain" and len(names) > 1 and names[1] in LEVEL else None


def test_every_part_has_a_layer() -> None:
    parts = {p.stem for p in CORE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__", "__main__"}
    assert parts == set(LEVEL)


def test_the_core_never_imports_a_plugin() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in CORE.rglob("*.py")
        for line, module in imports(path, deferred=True)
        if module.split(".")[0] in PLUGINS
    ]
    assert not found, "\n".join(found)


def test_imports_point_down_the_layers() -> None:
    found = []
    for part, level in LEVEL.items():
        files = [CORE / f"{part}.py"] if (CORE / f"{part}.py").exists() else sorted((CORE / part).rglob("*.py"))
        for path in files:
            for line, module in imports(path, deferred=False):
                target = part_of(module)
                if target is not None and LEVEL[target] > level:
                    found.append(f"{path.relative_to(ROOT)}:{line} ({part}) imports {module}")
    assert not found, "\n".join(found)


def modules(*parts: str) -> list[str]:
    names = []
    for part in parts:
        folder = CORE / part
        files = [CORE / f"{part}.py"] if (CORE / f"{part}.py").exists() else sorted(folder.rglob("*.py"))
        names += [".".join(f.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__") for f in files]
    return [n for n in names if not n.endswith("__main__")]


def loaded_by(code: str) -> set[str]:
    """Which of the heavy modules `code` brings in, in a process of its own."""
    script = f"{code}\nimport sys\nprint(*({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


def test_import_posttrain_is_light() -> None:
    assert loaded_by("import posttrain, posttrain.types, posttrain.errors") == set()


def test_config_plugins_data_tracking_and_cli_import_nothing_heavy() -> None:
    names = modules("config", "plugins", "data", "hooks", "tracking", "cli")
    assert loaded_by("import " + ", ".join(names)) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["experiments", "list"]])
def test_looking_around_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"from posttrain.cli.main import main\nassert main({arguments!r}) == 0"
    assert loaded_by(code) == set()


def test_accepting_a_config_loads_neither_torch_nor_an_engine() -> None:
    code = "from posttrain.cli.main import main\nassert main(['train', 'experiment=arithmetic_grpo', '--cfg', 'job']) == 0"
    assert loaded_by(code) & {"torch", "vllm", "ray", "transformers", "nixl"} == set()
