"""Ports, Ray clusters that are there already, and the interfaces that collective operations are told to use."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.cli.doctor.snapshot import Finding, Snapshot

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def ports(snapshot: Snapshot) -> Iterator[Finding]:
    address = snapshot.environ.get("RAY_ADDRESS", "")
    for port in snapshot.ports:
        name = f"port {port.number}"
        if port.holder is None:
            yield Finding(name, "ok", f"free ({port.chosen_by})")
        elif address.endswith(f":{port.number}"):
            yield Finding(name, "ok", f"{port.holder}; RAY_ADDRESS names it")
        elif port.holder.speaks:
            fix = f"another {port.chosen_by} and other devices for a second job; or RAY_ADDRESS=HOST:{port.number} to join it"
            yield Finding(name, "warn", f"another Ray cluster: {port.holder}", fix)
        else:
            yield Finding(name, "warn", f"taken by {port.holder}", f"another {port.chosen_by}, or end that process")
    if address and snapshot.ray_answers is not None:
        answers = bool(snapshot.ray_answers)
        what = f"{address}: {snapshot.ray_answers or 'no Ray cluster answers there'}"
        yield Finding("RAY_ADDRESS", "ok" if answers else "fail", what, "" if answers else "correct it, or unset RAY_ADDRESS")


def interfaces(snapshot: Snapshot) -> Iterator[Finding]:
    known = ", ".join(snapshot.interfaces)
    for variable in INTERFACES:
        value = snapshot.environ.get(variable)
        if not value:
            continue
        chosen = selected(variable, value, snapshot.interfaces)
        if not chosen:
            yield Finding(variable, "fail", f"{value}: no such interface", f"one of: {known}; or unset {variable}")
        elif set(chosen) == {"lo"}:
            yield Finding(
                variable, "warn", f"{value}: no other node can be reached over it", f"unset {variable}, unless one node"
            )
        else:
            yield Finding(variable, "ok", f"{value}: {', '.join(chosen)}")
    if not any(snapshot.environ.get(variable) for variable in INTERFACES):
        yield Finding("interface", "ok", f"chosen by the libraries from {known or 'none'}")


def selected(variable: str, value: str, interfaces: tuple[str, ...]) -> list[str]:
    """The interfaces that a value means. Gloo takes names. NCCL takes prefixes, `=` exact names, `^` all but these."""
    if variable.startswith("GLOO"):
        return [name for name in interfaces if name in [part.strip() for part in value.split(",")]]
    negated, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    wanted = [part.strip() for part in value.lstrip("^=").split(",") if part.strip()]
    return [
        name
        for name in interfaces
        if any(name == want if exact else name.startswith(want) for want in wanted) != negated
    ]  # fmt: skip
