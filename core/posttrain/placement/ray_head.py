"""A Ray cluster on this node for one command: started under its own port, ended with it, whatever happens.

    with ray_head(6379, log=Path("ray.log")) as address:
        ...                                                    # RAY_ADDRESS names it

`ray stop` would end every cluster of this user on the node; here only what was started is ended. If this process is killed, the
kernel tells the head, which ends what it started.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from posttrain.errors import EngineStartError
from posttrain.placement.ports import check_free, ray_version

_PR_SET_PDEATHSIG = 1
_MODE, _TOKEN, _ADDRESS = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"


@contextmanager
def ray_head(port: int, log: Path, *, cpus: int = 0, timeout: float = 120.0, grace: float = 10.0) -> Iterator[str]:
    """Start a head, set RAY_ADDRESS (and a token of its own, unless one is set) for the block, end the cluster after it.

    cpus: the least that it offers, where the machine has fewer cores; a role takes one. timeout: seconds until it answers.
    grace: seconds for its processes to end by themselves. Raises ConfigError when the port is taken, EngineStartError when the
    head does not start.
    """
    check_free({port: "--ray-port"})
    before = {name: os.environ.get(name) for name in (_MODE, _TOKEN, _ADDRESS)}
    os.environ.setdefault(_MODE, "token")
    os.environ.setdefault(_TOKEN, secrets.token_hex(32))
    log.parent.mkdir(parents=True, exist_ok=True)
    process = _start(port, log, cpus)
    try:
        _await(process, port, log, timeout)
        address = os.environ[_ADDRESS] = f"127.0.0.1:{port}"
        yield address
    finally:
        _end(process, grace)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def wait_for_nodes(address: str, nodes: int, timeout: float) -> None:
    """Return when `nodes` nodes have joined the cluster. Raises EngineStartError after `timeout` seconds."""
    code = "import sys; from posttrain.placement.ray_head import _count; _count(sys.argv[1], int(sys.argv[2]))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, address, str(nodes)], capture_output=True, text=True, timeout=timeout, check=False
        )
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired as exc:
        last = (exc.stdout or b"").decode().split()[-1:]
        problem = [f"{last[0] if last else 0} of {nodes} have joined after {timeout:.0f} s"]
    if problem:
        raise EngineStartError(
            f"the Ray cluster at {address} does not have its {nodes} nodes",
            cause=problem[0],
            fix="look at the log of each node (ray-JOB-NODE.log in --log-dir); --wait SECONDS waits longer",
            code="ray-nodes",
        )


def _count(address: str, nodes: int) -> None:
    """In a process of its own: say how many nodes there are, until there are enough."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    while True:
        alive = sum(node["Alive"] for node in ray.nodes())
        print(alive, flush=True)
        if alive >= nodes:
            return
        time.sleep(1)


def _start(port: int, log: Path, cpus: int) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def with_its_owner() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    options = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats"]
    options.append(f"--num-cpus={max(cpus, len(os.sched_getaffinity(0)))}")
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block"]
    environment = {name: value for name, value in os.environ.items() if name != _ADDRESS}
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True,
            preexec_fn=with_its_owner,
        )  # fmt: skip


def _await(process: subprocess.Popen[bytes], port: int, log: Path, timeout: float) -> None:
    """Return when the head is up: its node is started, not only its control store."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if "Ray runtime started" in log.read_text(errors="replace") and ray_version("127.0.0.1", port):
            return
        time.sleep(0.2)
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ended = f"it ended with code {process.returncode}" if process.poll() is not None else f"not up after {timeout:.0f} s"
    raise EngineStartError(
        f"Ray did not start on port {port}",
        cause=f"{ended}; {lines[-1]}" if lines else ended,
        fix=f"read {log}; posttrain doctor checks ports, network and limits",
        where=str(log),
        code="ray-start",
    )


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End the head and all that it started: its session is its own."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
