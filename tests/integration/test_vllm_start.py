"""How vLLM starts and fails to start: each failure told apart, nothing left behind, nothing on the screen."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.config.rules import NOT_YET
from posttrain.data.hub import HUB_FAILURES
from posttrain.errors import EngineStartError
from posttrain.rollout import vllm_start
from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.vllm import VllmEngine, sample_seed
from posttrain.rollout.vllm_errors import FAILURES, check_model, start_error
from posttrain.rollout.vllm_start import (
    check_api,
    check_cores,
    check_installed,
    check_plugin_visible,
    divided_cores,
    engine_arguments,
    environment,
    log_files,
)
from posttrain.testing.tiny_model import write_tiny_model

pytestmark = pytest.mark.integration


def spec(folder: Path | str, **fields) -> EngineSpec:
    return EngineSpec(str(folder), "float32", 256, 8, (2, 3), **fields)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return folder


def with_config(model: Path, folder: Path, **changes) -> Path:
    config = json.loads((model / "config.json").read_text()) | changes
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- before any process starts


def test_the_installed_vllm_is_supported_and_has_what_is_called():
    check_installed()
    check_api()


VERSIONS = [(None, "not installed"), ("0.31.2", "0.31.2 is installed"), ("0.33.0", "supports >=0.32,<0.33")]


@pytest.mark.parametrize(("found", "words"), VERSIONS)
def test_another_version_is_refused_with_the_range(monkeypatch, found, words):
    monkeypatch.setattr(vllm_start, "_installed_version", lambda: found)
    with pytest.raises(EngineStartError, match=words) as caught:
        check_installed()
    assert "install vllm>=0.32,<0.33" in caught.value.fix


def test_a_changed_api_is_named(monkeypatch):
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.v1.engine.async_llm import AsyncLLM

    monkeypatch.delattr(layerwise, "get_layerwise_info")
    monkeypatch.setattr(AsyncLLM, "reset_prefix_cache", lambda self: None)
    with pytest.raises(EngineStartError, match=r"layerwise.get_layerwise_info, AsyncLLM.reset_prefix_cache\(reset_running_req"):
        check_api()


SETTINGS = [(None, False), ("posttrain", False), ("other, posttrain", False), ("other", True), ("", True)]


@pytest.mark.parametrize(("value", "hidden"), SETTINGS)
def test_vllm_plugins_that_hides_ours_is_found(monkeypatch, value, hidden):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_PLUGINS", value)
    if not hidden:
        check_plugin_visible()
        return
    with pytest.raises(EngineStartError, match="hides the plug-in 'posttrain'") as caught:
        check_plugin_visible()
    assert caught.value.code == "vllm-plugins" and "VLLM_PLUGINS=" in caught.value.fix


def test_a_path_that_is_absent_and_a_folder_without_config(tmp_path):
    for folder, cause in ((tmp_path / "nowhere", "neither a folder on this machine"), (tmp_path, "has no config.json")):
        with pytest.raises(EngineStartError, match="the model was not found") as caught:
            check_model(spec(folder))
        assert caught.value.code == "model-absent" and "model.name_or_path" in caught.value.fix
        assert cause in caught.value.cause


def test_an_unknown_architecture(model, tmp_path):
    folder = with_config(model, tmp_path / "odd", architectures=["NobodyKnowsForCausalLM"])
    with pytest.raises(EngineStartError, match="does not know the architecture NobodyKnowsForCausalLM") as caught:
        check_model(spec(folder))
    assert caught.value.code == "architecture" and "rollout.engine=hf" in caught.value.fix


@pytest.mark.parametrize("changes", [{"head_dim": 16}, {"head_dim": None, "num_attention_heads": 4}])
def test_heads_that_the_cpu_kernel_does_not_take(model, tmp_path, changes):
    with pytest.raises(EngineStartError, match="heads of 16 elements") as caught:
        check_model(spec(with_config(model, tmp_path / "small", **changes)))
    assert caught.value.code == "head-dim"


def test_heads_that_cannot_be_divided_among_the_workers(model):
    with pytest.raises(EngineStartError, match="2 attention heads cannot be divided among 4 workers") as caught:
        check_model(spec(model, tensor_parallel_size=4))
    assert caught.value.code == "tensor-parallel" and caught.value.fix.endswith("one of 1, 2")


def test_cores_are_divided_among_the_workers_or_given_for_each(model, tmp_path, monkeypatch):
    assert [divided_cores(range(5), n) for n in (1, 2, 3)] == ["0,1,2,3,4", "0,1|2,3,4", "0|1,2|3,4"]
    assert divided_cores([4, 6], 3) == "4|4|6" and divided_cores([7], 2) == "7|7"
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    with environment(VllmEngine.Options(), tmp_path / "vllm.log", tmp_path / "c.json", workers=2):
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == divided_cores(sorted(os.sched_getaffinity(0)), 2)
    check_cores(VllmEngine.Options(cpu_cores="0-3|4-7"), 2)
    with pytest.raises(EngineStartError, match="cpu_cores='0-3' is for 1 worker\\(s\\), and the engine has 2") as caught:
        VllmEngine.preflight(spec(model, tensor_parallel_size=2), VllmEngine.Options(cpu_cores="0-3"))
    assert caught.value.code == "cpu-cores" and "0-3|4-7" in caught.value.fix


def test_preflight_refuses_what_needs_no_start_and_lets_a_good_model_pass(model, tmp_path, monkeypatch):
    options = VllmEngine.Options()
    VllmEngine.preflight(spec(model), options)
    for changes, code in (({"architectures": ["NobodyKnows"]}, "architecture"), ({"head_dim": 16}, "head-dim")):
        with pytest.raises(EngineStartError) as caught:
            VllmEngine.preflight(spec(with_config(model, tmp_path / code, **changes)), options)
        assert caught.value.code == code
    monkeypatch.setattr(vllm_start, "_missing_api", lambda: ["AsyncLLM.generate"])
    with pytest.raises(EngineStartError, match=r"lacks AsyncLLM.generate"):
        VllmEngine.preflight(spec(model), options)
    assert not children()


def test_trust_in_the_model_s_code_reaches_vllm(model):
    for trust in (False, True):
        arguments = engine_arguments(spec(model, trust_remote_code=trust), VllmEngine.Options())
        assert arguments["trust_remote_code"] is trust


def test_the_reason_for_which_routing_replay_is_refused_is_vllm_s_own(tmp_path, monkeypatch):
    from vllm import AsyncEngineArgs

    write_tiny_model(tmp_path, family="qwen3_moe")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    options = VllmEngine.Options(engine_args={"enable_return_routed_experts": True})
    with pytest.raises(ValueError) as caught:
        AsyncEngineArgs(**engine_arguments(spec(tmp_path), options)).create_engine_config()
    assert "Model Runner V2 requires Triton" in str(caught.value) and "requires Triton" in NOT_YET["rl.routing_replay"].reason


# ---- what an exception and a log say

ABSENT, GATED, UNREACHABLE = HUB_FAILURES
LINES = {
    ABSENT: "OSError: nobody/nothing is not a local folder and is not a valid model identifier listed on the hub",
    GATED: "OSError: You are trying to access a gated repo. Make sure to have access to it",
    UNREACHABLE: "OSError: We couldn't connect to the hub to load the files, and couldn't find them in the cached files",
}
BY_CODE = {
    "architecture": "ValueError: Model architectures ['X'] are not supported for now.",
    "device-memory": "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than the engine's budget",
    "kv-cache": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "max-model-len": "ValueError: User-specified max_model_len (9000) is greater than the derived max_model_len (512)",
    "port": "OSError: [Errno 98] Address already in use",
    "head-dim": "ValueError: Head size 16 is not supported by PagedAttention.".replace("Head size", "head_size"),
    "vllm-plugins": "ValueError: Invalid weight transfer backend: posttrain. Available engines: ['nccl']",
}


@pytest.mark.parametrize("failure", FAILURES, ids=lambda f: f.message)
def test_each_failure_is_told_apart_by_what_the_log_says(failure, tmp_path):
    log, line = tmp_path / "vllm.log", LINES.get(failure) or BY_CODE[failure.code]
    log.write_text(f"INFO all well\nEngineCore ERROR {line}\nINFO the end\n")
    error = start_error(RuntimeError("Engine core initialization failed. See root cause above."), spec("m"), log)
    assert error.code == failure.code and error.fix == failure.fix and error.where == str(log)
    assert line.split(": ", 1)[1][:20] in error.cause


def test_an_unknown_failure_shows_the_last_error_of_the_log(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text("ZeroDivisionError: division by zero\nmore\n")
    error = start_error(RuntimeError("Engine core initialization failed"), spec("m"), log)
    assert error.code == "engine-start" and "division by zero" in error.cause
    assert "did not start within 300 s" in start_error(TimeoutError(), spec("m"), None).message


# ---- environment and logs


def test_the_environment_is_set_for_the_start_only_and_the_user_s_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    before = dict(os.environ)
    with environment(VllmEngine.Options(), tmp_path / "vllm.log", tmp_path / "c.json"):
        assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "7"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
        os.environ["LEFT_BY_VLLM"] = "1"
    assert dict(os.environ) == before


def test_logs_go_to_the_run_s_folder(tmp_path):
    log, config = log_files(spec("m", log_dir=tmp_path / "logs"))
    assert log.parent == tmp_path / "logs"
    handlers = json.loads(config.read_text())["handlers"]
    assert [h["filename"] for h in handlers.values()] == [str(log)]


def test_seeds_of_samples_differ_and_depend_on_both():
    seeds = {sample_seed(seed, index) for seed in range(20) for index in range(20)}
    assert len(seeds) == 400 and all(0 <= s < 2**63 for s in seeds)
    assert sample_seed(3, 4) == sample_seed(3, 4)


# ---- real starts


def start(engine: VllmEngine) -> None:
    asyncio.run(asyncio.wait_for(engine.start(), 240))


def children() -> list[str]:
    import psutil

    return [p.name() for p in psutil.Process().children(recursive=True) if "VLLM" in p.name()]


def test_a_context_longer_than_the_model_s(model, tmp_path):
    engine = VllmEngine(EngineSpec(str(model), "float32", 4096, 8, (2,), log_dir=tmp_path))
    with pytest.raises(EngineStartError, match="longer than the model's positions") as caught:
        start(engine)
    assert caught.value.code == "max-model-len" and not children()


def test_a_kv_cache_that_does_not_fit_is_told_apart_and_leaves_no_process(model, tmp_path):
    engine = VllmEngine(spec(model, log_dir=tmp_path), VllmEngine.Options(kv_cache_gib=4096))
    with pytest.raises(EngineStartError, match="the KV cache does not fit") as caught:
        start(engine)
    for key in ("rollout.gpu_memory_utilization", "rollout.max_model_len", "rollout.tensor_parallel_size"):
        assert key in caught.value.fix
    assert caught.value.where == str(tmp_path / "vllm.log") and not children()


def test_a_start_that_takes_too_long_leaves_no_process(model, tmp_path):
    engine = VllmEngine(spec(model, log_dir=tmp_path, start_timeout_s=0.5))
    with pytest.raises(EngineStartError, match="did not start within 0 s") as caught:
        start(engine)
    assert caught.value.code == "start-deadline" and not children()


OWNER = """
import asyncio, sys, time
from pathlib import Path
from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.vllm import VllmEngine

async def main():
    engine = VllmEngine(EngineSpec(sys.argv[1], "float32", 256, 8, (2,), log_dir=Path(sys.argv[2])))
    await engine.start()
    print(*[p.pid for p in engine._processes], flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_killed_owner_leaves_no_process_and_a_quiet_screen(model, tmp_path):
    import psutil

    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(model), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stderr is not None
    first = owner.stdout.readline()
    pids = [int(pid) for pid in first.split()]
    assert len(pids) == 2, "vLLM's core and its worker, and no other line on the screen"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 3
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    screen = owner.stdout.read() + owner.stderr.read()
    assert "vllm" not in screen.lower().replace(str(tmp_path).lower(), ""), screen
    assert "Initializing a V1 LLM engine" in (tmp_path / "vllm.log").read_text()
    owner.stdout.close()
    owner.stderr.close()


HELD = """
import asyncio, sys
from pathlib import Path
from posttrain.rollout.engine import EngineSpec
from posttrain.rollout.vllm import VllmEngine

async def main():
    engine = VllmEngine(EngineSpec(sys.argv[1], "float32", 256, 8, (2,), log_dir=Path(sys.argv[2])))
    await engine.start()
    asyncio.held = engine._llm  # outlives vLLM's own modules, as what the traceback of an error holds does
    await engine.close()

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_closed_engine_is_quiet_at_exit_even_when_something_holds_it(model, tmp_path):
    script = tmp_path / "held.py"
    script.write_text(HELD)
    ended = subprocess.run([sys.executable, str(script), str(model), str(tmp_path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
