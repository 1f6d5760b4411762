"""Whether programs that a model wrote can be shut in on this machine: what the environments with sandboxes need."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.cli.doctor.snapshot import Finding, Snapshot


def sandbox(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.sandbox is None:
        yield Finding("sandbox", "warn", "not on this system: the environments code and python_tool need Linux, or a provider")
    elif snapshot.sandbox:
        what = f"programs of a model would not be isolated: {snapshot.sandbox} (environments code and python_tool refuse to run)"
        install = "apt-get install bubblewrap, 0.7 or newer, or pip install 'posttrain[sandbox]'"
        fix = f"{install}; in a container also: docker run --security-opt seccomp=unconfined"
        yield Finding("sandbox", "warn", what, fix)
    else:
        yield Finding("sandbox", "ok", "bubblewrap isolates programs of a model")
