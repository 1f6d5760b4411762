"""Looking at the machine: everything that the checks need, in a few seconds, without importing torch, vLLM, Ray or NIXL."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

import posttrain
from posttrain.cli.doctor.snapshot import Port, Snapshot, Space, UcxCopy
from posttrain.config.secrets import is_secret
from posttrain.placement.ports import holder, ray_version
from posttrain.plugins.discovery import discover
from posttrain.plugins.doctor import quarantined
from posttrain.plugins.kinds import KINDS
from posttrain.rollout.vllm_start import PLUGIN
from posttrain.sandbox.cage import BUBBLEWRAP
from posttrain.tracking.run_dir import output_root

RELEVANT = re.compile(
    r"(UCX|NCCL|GLOO|PYTORCH|VLLM|RAY|CUDA|POSTTRAIN|IMAGINAIRE|NIXL|TORCH|OMP)_\w+|HF_HUB_OFFLINE|HF_HOME|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|SLURM_JOB_NUM_NODES"
)


def look(*, run: str | None = None, ports: Mapping[str, int], timeout: float = 3.0) -> Snapshot:
    """The snapshot of this machine. ports: number by the flag or key that chooses it. timeout: seconds for each program asked."""
    environ = {name: value for name, value in sorted(os.environ.items()) if RELEVANT.fullmatch(name) and not is_secret(name)}
    root = output_root(run)
    with ThreadPoolExecutor(8) as pool:
        cma = pool.submit(cross_memory, timeout)
        gpu = pool.submit(nvidia, timeout)
        isolation = pool.submit(BUBBLEWRAP.problem) if sys.platform == "linux" else None
        held = {key: pool.submit(holder, number, timeout=1.0) for key, number in ports.items()}
        ray = pool.submit(_at_address, environ.get("RAY_ADDRESS", ""))
        ucx = pool.submit(ucx_copies, environ, timeout)
        requirements = tuple(metadata.requires("posttrain") or ())
        broken = tuple((f.plugin.full_name, f.problem, f.fix) for f in quarantined())
        devices, device_problem, driver_cuda = gpu.result()
        return Snapshot(
            python=platform.python_version(),
            system=platform.platform(),
            posttrain=posttrain.__version__,
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            environ=environ,
            requires_python=metadata.metadata("posttrain")["Requires-Python"],
            requirements=requirements,
            installed=_installed(requirements),
            devices=devices,
            device_problem=device_problem,
            driver_cuda=driver_cuda,
            torch_cuda=_torch_cuda(),
            vllm_cuda=_vllm_cuda(),
            ucx=ucx.result(),
            cma=cma.result(),
            sandbox=isolation.result() if isolation else None,
            interfaces=tuple(name for _, name in socket.if_nameindex()),
            ports=tuple(Port(key, number, held[key].result()) for key, number in ports.items()),
            ray_answers=ray.result(),
            shm=_space(Path("/dev/shm")),
            disk=_space(_existing(root)),
            root=str(root),
            root_problem=_unwritable(_existing(root)),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            hub_token=_hub_token(),
            receiver_declared=any(e.name == PLUGIN for e in metadata.entry_points(group="vllm.general_plugins")),
            plugins=sum(len(discover(kind)) for kind in KINDS),
            quarantined=broken,
        )


def _installed(requirements: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in {re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements}:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _said(command: list[str], timeout: float) -> str | None:
    """What a program prints; None when it is not there. Raises RuntimeError when it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except FileNotFoundError:
        return None
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RuntimeError(f"{command[0]} does not answer: {type(exc).__name__}") from exc
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or [""]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {last[0]}")
    return done.stdout


def nvidia(timeout: float) -> tuple[tuple[str, ...], str, str]:
    """Names of the GPUs, why the driver did not answer, and the newest CUDA that it runs."""
    try:
        table = _said(["nvidia-smi"], timeout)
        names = _said(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], timeout)
    except RuntimeError as exc:
        return (), str(exc), ""
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", table or "")
    return tuple(line.strip() for line in (names or "").splitlines() if line.strip()), "", cuda[1] if cuda else ""


def _folder(module: str) -> Path | None:
    """Where a package lies, without importing it."""
    with suppress(ImportError, ValueError):
        spec = find_spec(module)
        if spec is not None and spec.origin:
            return Path(spec.origin).parent
    return None


def _torch_cuda() -> str | None:
    folder = _folder("torch")
    with suppress(OSError):
        if folder is not None:
            found = re.search(r"^cuda\b[^=]*= *['\"]([\d.]+)", (folder / "version.py").read_text(), re.MULTILINE)
            return found[1] if found else None
    return None


def _vllm_cuda() -> str | None:
    """The CUDA runtime that vLLM's compiled part is linked to."""
    folder = _folder("vllm")
    for library in sorted(folder.glob("_C*.so")) if folder is not None else ():
        with suppress(OSError, ValueError), library.open("rb") as file, mapped(file) as content:
            if found := re.search(rb"libcudart\.so\.(\d+)", content):
                return found[1].decode()
    return None


def mapped(file: BinaryIO) -> mmap.mmap:
    """A file of any size, to be searched without reading all of it."""
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def ucx_copies(environ: Mapping[str, str], timeout: float) -> tuple[UcxCopy, ...]:
    """Every UCX that a process of this environment could load, each folder once."""
    found: dict[str, str] = {}
    for spec in ("nixl_cu12", "nixl_cu13", "nixl"):
        if (folder := _folder(spec)) is not None and any(Path(f"{folder}.libs").glob("libucp*.so*")):
            found.setdefault(os.path.realpath(f"{folder}.libs"), "nixl")
    preload = [Path(item) for item in re.split(r"[ :]+", environ.get("LD_PRELOAD", "")) if re.search(r"libuc[ps]\b", item)]
    for path in preload:
        found.setdefault(os.path.realpath(path.parent), "LD_PRELOAD")
    for item in filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")):
        if any(Path(item).glob("libucp.so*")):
            found.setdefault(os.path.realpath(item), "LD_LIBRARY_PATH")
    with suppress(RuntimeError):
        for path in re.findall(r"=> (\S*/libucp\.so\S*)", _said(["/sbin/ldconfig", "-p"], timeout) or ""):
            found.setdefault(os.path.realpath(Path(path).parent), "the system's linker")
    return tuple(UcxCopy(folder, by) for folder, by in found.items())


_TARGET = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(0x59616d61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)
held = ctypes.create_string_buffer(b"posttrain")
print(os.getpid(), ctypes.addressof(held), flush=True)
sys.stdin.read()
"""
_READER = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
here = ctypes.create_string_buffer(9)
local, remote = Piece(ctypes.addressof(here), 9), Piece(int(sys.argv[2]), 9)
libc = ctypes.CDLL(None, use_errno=True)
got = libc.process_vm_readv(int(sys.argv[1]), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
print("" if got == 9 and here.raw == b"posttrain" else os.strerror(ctypes.get_errno()))
"""


def cross_memory(timeout: float) -> str | None:
    """Whether one process may read another's memory: tried, between two that are not related, as UCX does it.

    Returns "" when it works, else why not; None where the system has no such call. UCX, too, lets every process trace it first.
    """
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "process_vm_readv"):
        return None
    python = [sys.executable, "-E", "-S", "-c"]
    with subprocess.Popen([*python, _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        assert target.stdin is not None and target.stdout is not None
        try:
            where = target.stdout.readline().split()
            return (_said([*python, _READER, *where], timeout) or "").strip()
        except RuntimeError as exc:
            return str(exc)
        finally:
            target.stdin.close()


def _at_address(address: str) -> str | None:
    """What speaks at RAY_ADDRESS; None when there is none, or it is of a form that only Ray can follow."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or address.startswith("ray://"):
        return None
    return ray_version(host, int(port), timeout=1.5) or ""


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next((folder for folder in (path, *path.parents) if folder.exists()), Path("/"))


def _space(path: Path) -> Space | None:
    with suppress(OSError):
        usage = shutil.disk_usage(path)
        return Space(usage.total, usage.free)
    return None


def _unwritable(folder: Path) -> str:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".posttrain-doctor-"):
            return ""
    except OSError as exc:
        return exc.strerror or type(exc).__name__


def _hub_token() -> str:
    """Where the hub's token is; what it is stays there."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            return name
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    with suppress(OSError):
        if path.stat().st_size:
            return "the token file"
    return ""
