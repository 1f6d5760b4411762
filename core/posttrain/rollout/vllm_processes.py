"""vLLM's processes, as their owner sees them: which there are, how they end, and that their shared memory ends with them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil  # type: ignore[import-untyped]


def children(before: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """This process's children that were not there before, without Python's resource tracker: it cleans up after the others."""
    import psutil  # comes with vLLM

    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    return [p for p in psutil.Process().children(recursive=True) if p not in before and p.pid != tracker]


def engine_processes(llm: Any) -> list[psutil.Process]:
    """vLLM's core and, after it, what the core has started."""
    import psutil

    cores = [psutil.Process(process.pid) for process in llm.engine_core.resources.engine_manager.processes]
    return [*cores, *(child for core in cores for child in core.children(recursive=True))]


def process_name(process: psutil.Process) -> str:
    """`VLLM::EngineCore (pid 4711)`, as `ps` shows it."""
    import psutil

    try:
        title = process.cmdline()[0]
    except (psutil.Error, IndexError):
        title = "a vLLM process"
    return f"{title} (pid {process.pid})"


def forget_names(processes: Sequence[psutil.Process]) -> None:
    """Unlink the shared memory that tensor-parallel workers on a CPU talk through; call it when all of them have opened it.

    What is mapped stays until the last of them has ended, however it ends. Their names would stay for ever.
    """
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            for path in set(re.findall(r"/dev/shm/vllm_dist_\S+$", maps, re.MULTILINE)):
                os.unlink(path)


def kill(processes: Sequence[psutil.Process], grace: float = 3.0) -> None:
    """End processes: the first (vLLM's core) may end the others and free their shared memory, then SIGKILL."""
    import psutil

    left = list(processes)
    forget_names(left)
    with contextlib.suppress(psutil.NoSuchProcess):
        if left:
            left[0].terminate()
            _, left = psutil.wait_procs(left, timeout=grace)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5.0)
