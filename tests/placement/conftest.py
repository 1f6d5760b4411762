"""A Slurm of one machine for tests: `srun`, `scontrol`, `squeue`, `scancel`, `enroot` and a `ray` that only listens, as scripts.

`srun` runs its command once for each node it is asked for, under that node's name; on SIGTERM it kills the command, as Slurm's
does. A container is a folder `rootfs/NODE/pyxis_NAME` that the import leaves behind, whole or in part; a step in a container
needs a whole one. The environment tells them what to do: STUB_IMPORT_FAILS (imports that break on each node), STUB_BLIND (nodes
that have another folder for runs), STUB_RAY_FAILS (Ray's head ends at once), STUB_CODES (how the training ends, by restart).
Every call is written to `calls`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRUN = r"""
image= name= step=none list=$STUB_NODES
while [[ $1 == --* ]]; do
  case $1 in
    --nodelist=*) list=${1#*=} ;;
    --job-name=*) step=${1#*=} ;;
    --container-image=*) image=${1#*=} ;;
    --container-name=*) name=${1#*=} ;;
  esac
  shift
done
echo "srun $list ${image:+import }${name:+in }$*" >>"$STUB/calls"
run_on() {
  export SLURMD_NODENAME=$1 rootfs=$STUB/rootfs/$1/pyxis_$name tries=$STUB/tries-$1
  if [ -n "$image" ] && [ ! -e "$rootfs/whole" ]; then
    [ -e "$rootfs" ] && { echo "pyxis: mkdir: $rootfs: File exists" >&2; return 1; }
    mkdir -p "$rootfs"
    echo x >>"$tries"
    [ "$(wc -l <"$tries")" -gt "${STUB_IMPORT_FAILS:-0}" ] || { echo "pyxis: extraction stopped" >&2; return 1; }
    touch "$rootfs/whole"
  fi
  [ -z "$name" ] || [ -e "$rootfs/whole" ] || { echo "pyxis: no container $name" >&2; return 1; }
  shift
  case " ${STUB_BLIND:-} " in *" $SLURMD_NODENAME "*) set -- "${@//$POSTTRAIN_OUTPUT_ROOT/$STUB/other}" ;; esac
  "$@" &
  task=$!
  mkdir -p "$STUB/steps"
  echo "$step" >"$STUB/steps/$task"
  trap 'echo "srun: forcing job termination" >&2; kill -KILL $task' TERM
  wait $task
  code=$?
  rm -f "$STUB/steps/$task"
  return $code
}
code=0
for node in $list; do run_on "$node" "$@" || code=$?; done
exit $code
"""
SQUEUE = r"""
cd "$STUB/steps" && for task in *; do echo "41.$task $(<"$task")"; done
"""
SCANCEL = r"""
echo "scancel $*" >>"$STUB/calls"
kill -TERM "${2#41.}"
"""
SCONTROL = r"""
echo "scontrol $*" >>"$STUB/calls"
[ "$1" = show ] && printf '%s\n' $STUB_NODES
exit 0
"""
SBATCH = r"""
echo "sbatch $*" >>"$STUB/calls"
[ -z "${STUB_REFUSES:-}" ] || { echo "sbatch: error: invalid partition" >&2; exit 1; }
echo "41;cluster"
"""
ENROOT = r"""
echo "enroot $SLURMD_NODENAME $*" >>"$STUB/calls"
rm -rf "$STUB/rootfs/$SLURMD_NODENAME/${*: -1}"
"""
RAY = r"""#!PYTHON
import os, signal, socket, sys, time
open(os.environ["STUB"] + "/calls", "a").write(f"ray {os.environ['SLURMD_NODENAME']} {' '.join(sys.argv[1:])}\n")
if os.environ.get("STUB_RAY_FAILS"):
    sys.exit("no")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if "--head" in sys.argv:
    port = int(next(a for a in sys.argv if a.startswith("--port=")).split("=")[1])
    server = socket.create_server(("", port))
while True:
    time.sleep(0.05)
"""
TRAIN = r"""#!PYTHON
import json, os, pathlib, signal, sys, time
stub = os.environ["STUB"]
names = ("POSTTRAIN_OUTPUT_ROOT", "IMAGINAIRE_OUTPUT_ROOT", "POSTTRAIN_MODELS", "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
told = {"argv": sys.argv[1:], "node": os.environ["SLURMD_NODENAME"], **{name: os.environ.get(name) for name in names}}
with open(stub + "/trained", "a") as file:
    file.write(json.dumps(told) + "\n")
joined = lambda: sum(line.startswith("ray ") for line in open(stub + "/calls"))
while told["RAY_ADDRESS"] and joined() < len(os.environ["STUB_NODES"].split()):  # as launch ray waits for its nodes
    time.sleep(0.02)
if os.environ.get("STUB_WAITS"):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pathlib.Path(stub, "waiting").touch()
    time.sleep(60)
if "--resume" not in sys.argv:
    (pathlib.Path(told["POSTTRAIN_OUTPUT_ROOT"]) / "toy-20260101-000000" / "checkpoints" / "step_10").mkdir(parents=True)
codes = os.environ.get("STUB_CODES", "0").split(",")
sys.exit(int(codes[min(int(os.environ.get("SLURM_RESTART_COUNT", 0)), len(codes) - 1)]))
"""
QUIET = "exit 0\n"


class Slurm:
    """The stubs in a folder that comes first on the PATH of a script. nodes: of the job; environment: of the stubs."""

    def __init__(self, folder: Path, nodes: str) -> None:
        self.folder, self.nodes = folder, nodes
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        programs = {
            "srun": SRUN,
            "scontrol": SCONTROL,
            "sbatch": SBATCH,
            "enroot": ENROOT,
            "squeue": SQUEUE,
            "scancel": SCANCEL,
            "ray": RAY,
            "posttrain": TRAIN,
        }
        for name, text in {**programs, "getent": QUIET, "hostname": QUIET}.items():
            self.install(name, text)

    def install(self, name: str, text: str) -> None:
        path = self.bin / name
        text = text.lstrip("\n") if text.startswith("#!") else f"#!/bin/bash{text if text[0] == chr(10) else chr(10) + text}"
        path.write_text(text.replace("#!PYTHON", f"#!{sys.executable}"), encoding="utf-8")
        path.chmod(0o755)

    def environment(self, **given: str) -> dict[str, str]:
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RAY_", "POSTTRAIN_", "IMAGINAIRE_"))
        }
        job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "n[1-2]", "STUB": str(self.folder), "STUB_NODES": self.nodes}
        return {**kept, **job, "PATH": f"{self.bin}:{os.environ['PATH']}", **given}

    def start(self, script: str, **given: str) -> subprocess.Popen[str]:
        path = self.folder / "job.sbatch"
        path.write_text(script, encoding="utf-8")
        return subprocess.Popen(
            ["bash", path],
            env=self.environment(**given),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
        )

    def run(self, script: str, **given: str) -> tuple[int, str]:
        """The script's exit code and what it said."""
        process = self.start(script, **given)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    def calls(self, program: str) -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(f"{program} ")]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path / "slurm", "n1 n2")
