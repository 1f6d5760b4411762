"""What a launcher decides before it starts anything: how many devices a grid needs, and the sbatch script. All of it is pure.

`sbatch_script` depends on its arguments alone: the same config and options give the same bytes. What differs from job to job
(the nodes, the job's number, a requeue) the script reads from Slurm when it runs. It does, in this order: import the container
on every node, up to three times; prove that the folder for runs is shared; start Ray, head first; train, or go on from the last
checkpoint after a requeue; end with the exit code of `posttrain train`, or put the job back into the queue when that code is 75.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from posttrain.errors import EXIT_RETRYABLE, ConfigError
from posttrain.placement.grid import Grid
from posttrain.placement.ports import RAY_PORT
from posttrain.placement.shared_root import node_local


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """One job. `arguments`: of `posttrain train`, without flags that say where to run. Paths are absolute.

    ray_cpus: the least that Ray offers on each node, where the node has fewer cores
    """

    name: str
    arguments: tuple[str, ...]
    backend: str
    root: str
    log_dir: str
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    ray_cpus: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    mounts: tuple[str, ...] = ()
    directives: tuple[str, ...] = ()
    ray_port: int = RAY_PORT
    requeues: int = 3


def devices(grid: Grid) -> int:
    """Accelerators that the roles of a grid need: shared when colocated, each its own when disaggregated."""
    policy, rollout = grid.policy[0] * grid.policy[1], grid.rollout[0] * grid.rollout[1]
    return max(policy, rollout) if grid.gpu_placement == "colocated" else policy + rollout


def nodes_for(grid: Grid, gpus_per_node: int, nodes: int | None) -> int:
    """How many nodes to ask for: the fewest that hold the grid, or the given number if it does. Raises ConfigError."""
    needed = devices(grid)
    fewest = -(-needed // gpus_per_node) if gpus_per_node else 1
    if grid.backend == "local" and (nodes or fewest) > 1:
        raise ConfigError(
            f"{nodes or fewest} nodes under grid.backend=local, which is one process",
            fix="set grid.backend=ray, or --nodes 1",
            where="--nodes",
            code="launch",
        )
    if nodes is not None and nodes < fewest:
        raise ConfigError(
            f"the grid needs {needed} devices, {nodes} node(s) with {gpus_per_node} each have {nodes * gpus_per_node}",
            cause=f"policy {list(grid.policy)} and rollout {list(grid.rollout)}, {grid.gpu_placement}",
            fix=f"--nodes {fewest}, or smaller shapes",
            where="--nodes",
            code="launch",
        )
    return nodes or fewest


def cpus_for(grid: Grid, nodes: int, gpus_per_node: int) -> int:
    """The least CPUs that each node has to offer (`cluster.cpus_of`: one that has all roles): without devices its part of the
    roles, so that Ray does not put them all on one."""
    if gpus_per_node:
        return 2 * gpus_per_node  # a device has two roles at most, with a CPU each
    return -(-(grid.policy[1] + grid.rollout[0]) // nodes)


def warnings(job: SlurmJob) -> list[str]:
    """What is likely to go wrong on more than one node: folders that each node has for itself."""
    folders = {"--run": job.root, "--log-dir": job.log_dir}
    local = [(flag, path) for flag, path in folders.items() if job.nodes > 1 and node_local(path)]
    return [
        f"{flag} {path} is local to a node by its name, and the job has {job.nodes}: "
        + ("give a folder on shared storage" if flag == "--run" else "logs stay where they are written and go with the job")
        for flag, path in local
    ]


def sbatch_script(job: SlurmJob) -> str:
    """The script to submit, complete. Raises ConfigError for values that cannot stand in it."""
    _refuse(job)
    parts = [_HEAD, _IMPORT if job.image else "", _SHARED, _RAY if job.backend == "ray" else "", _TRAIN]
    body = "".join(parts)
    for name, value in _values(job).items():
        body = body.replace(f"@{name}@", value)
    return "#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in _directives(job)) + body


def _directives(job: SlurmJob) -> list[str]:
    given = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node or None,
        "cpus-per-task": job.cpus_per_node,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": f"{job.log_dir}/%x-%j.log",
        "open-mode": "append",
        "signal": "B:TERM@120",
    }
    lines = [f"--{name}={value}" for name, value in given.items() if value is not None]
    lines += ["--exclusive"] if job.backend == "ray" else []
    lines += ["--requeue"] if job.requeues else ["--no-requeue"]
    return [*lines, *job.directives]


def _values(job: SlurmJob) -> dict[str, str]:
    on_ray = job.backend == "ray"
    command = ["posttrain", "launch", "ray", "--nodes", str(job.nodes)] if on_ray else ["posttrain", "train"]
    mounts = [f"{path}:{path}" for path in dict.fromkeys((job.root, job.log_dir))]
    return {
        "ROOT": shlex.quote(job.root),
        "LOG_DIR": shlex.quote(job.log_dir),
        "RAY_PORT": str(job.ray_port),
        "RAY_CPUS": str(job.ray_cpus),
        "REQUEUES": str(job.requeues),
        "RETRYABLE": str(EXIT_RETRYABLE),
        "IMAGE": shlex.quote(job.image or ""),
        "MOUNTS": shlex.quote(",".join([*mounts, *job.mounts])),
        "TRAIN": shlex.join([*command, *job.arguments]),
        "RESUME": shlex.join(command),
    }


def _refuse(job: SlurmJob) -> None:
    """Values of a #SBATCH line are read by Slurm, not by a shell: a space or a line break would make others of them."""
    named = {
        "--job-name": job.name, "--log-dir": job.log_dir, "--time": job.time, "--partition": job.partition,
        "--account": job.account,
    }  # fmt: skip
    for flag, value in named.items():
        if value is not None and re.search(r"[\s\"'\\]", value):
            raise ConfigError(f"{flag}={value!r} has spaces or quotes", fix="Slurm takes none", where=flag, code="launch")
    for line in job.directives:
        if not line.startswith("-") or "\n" in line:
            raise ConfigError(
                f"--sbatch {line!r} is no option of sbatch", fix="--sbatch=--qos=high", where="--sbatch", code="launch"
            )
    if job.mounts and not job.image:
        raise ConfigError("--mount goes with a container", fix="give --image, too", where="--mount", code="launch")


_HEAD = r"""# Written by `posttrain launch slurm`; submit it with sbatch.
#
# It ends with the exit code of the training: 0 done, 2 to 5 the same job would fail again, @RETRYABLE@ worth resuming (the job
# goes back into the queue, up to @REQUEUES@ times, and on from its last checkpoint). "Prolog hung on node ..." in Slurm's own log
# is harmless: a container or network storage took long to set up, and the job goes on.
set -u

readonly ROOT=@ROOT@ LOG_DIR=@LOG_DIR@
export POSTTRAIN_OUTPUT_ROOT="$ROOT/slurm-$SLURM_JOB_ID"
export IMAGINAIRE_OUTPUT_ROOT="$POSTTRAIN_OUTPUT_ROOT"
export POSTTRAIN_MODELS="${POSTTRAIN_MODELS:-$ROOT/models}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
readonly head="${nodes[0]}"
container=()
steps=()

say() { printf '%s launch: %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

# on NODE NAME COMMAND... &: a step there, beside the others. It becomes srun: killing it kills the step.
on() {
  local node="$1" name="$2"
  shift 2
  exec srun --nodes=1 --ntasks=1 --nodelist="$node" --job-name="$name" --overlap --cpu-bind=none "${container[@]}" "$@"
}

# everywhere COMMAND...: one task on each node.
everywhere() {
  srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --overlap --cpu-bind=none "${container[@]}" "$@"
}

# finish CODE: end the other steps, then the job.
finish() {
  for step in "${steps[@]}"; do kill -TERM "$step" 2>/dev/null; done
  for _ in {1..60}; do
    [ -z "$(jobs -pr)" ] && break
    sleep 1
  done
  if [ "$1" -eq @RETRYABLE@ ] && [ "${SLURM_RESTART_COUNT:-0}" -lt @REQUEUES@ ]; then
    say "exit code @RETRYABLE@: back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$1"
}
"""

_IMPORT = r"""
# The container: imported under a name on every node. The import can fail with `pyxis: ... File exists` when Slurm starts the task
# a second time, and what is left then would pass for a complete one: it is removed before the next attempt.
readonly IMAGE=@IMAGE@ MOUNTS=@MOUNTS@ NAME="posttrain-$SLURM_JOB_ID"

import_on() {
  local attempt
  for attempt in 1 2 3; do
    srun --nodes=1 --ntasks=1 --nodelist="$1" --overlap --container-image="$IMAGE" --container-name="$NAME" true && return 0
    say "import of $IMAGE on $1 failed, attempt $attempt of 3"
    # shellcheck disable=SC2016
    srun --nodes=1 --ntasks=1 --nodelist="$1" --overlap bash -c \
      'for name in "pyxis_$1" "pyxis_$2_$1"; do enroot remove -f "$name" </dev/null; done' remove "$NAME" "$SLURM_JOB_ID"
  done
  return 1
}

imports=()
for node in "${nodes[@]}"; do
  import_on "$node" &
  imports+=($!)
done
for import in "${imports[@]}"; do
  wait "$import" || { say "no container after three attempts"; finish 4; }
done
container=(--container-name="$NAME" --container-workdir="$PWD" --container-mounts="$MOUNTS,$PWD:$PWD")
"""

_SHARED = r"""
# Every node has to see the folder for runs as this one does; a folder that only has the same name there fails here.
mkdir -p "$POSTTRAIN_OUTPUT_ROOT" "$POSTTRAIN_MODELS" "$LOG_DIR" || finish 2
token="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')"
nonce="$POSTTRAIN_OUTPUT_ROOT/.posttrain-nonce-$token"
printf '%s' "$token" >"$nonce" || finish 2
# shellcheck disable=SC2016
if ! blind="$(everywhere bash -c '[ "$(cat "$1" 2>/dev/null)" = "$2" ] || echo "$SLURMD_NODENAME"' look "$nonce" "$token")"; then
  say "srun cannot start a task on every node"
  finish @RETRYABLE@
fi
rm -f "$nonce"
if [ -n "$blind" ]; then
  say "the folder for runs, $ROOT, is not shared: not seen by ${blind//$'\n'/ }"
  say "give a folder that every node mounts, and every container: --run FOLDER"
  finish 2
fi
"""

_RAY = r"""
# Ray: one head, the other nodes join it. The token is this job's own, so no node of it can join the cluster of another job.
readonly RAY_PORT=@RAY_PORT@
head_ip="$({ getent ahostsv4 "$head"; hostname -I | tr ' ' '\n'; } | awk 'NF && $1 !~ /^127\./ { print $1; exit }')"
head_ip="${head_ip:-127.0.0.1}"
listens() { (exec 3<>"/dev/tcp/$head_ip/$RAY_PORT") 2>/dev/null; }

if listens; then
  say "port $RAY_PORT on $head is taken, by another job's Ray cluster perhaps: give this job another --ray-port and other nodes"
  finish 2
fi
RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# ray_on NODE OPTION...: a node of the cluster, until the job ends. It offers its cores, and at least what the roles take there.
ray_on() {
  local node="$1"
  shift
  # shellcheck disable=SC2016
  on "$node" ray bash -c 'cores="$(OMP_NUM_THREADS="" OMP_THREAD_LIMIT="" nproc)"
    exec ray start "$@" --num-cpus="$((cores > $0 ? cores : $0))" --disable-usage-stats --block' @RAY_CPUS@ "$@" \
    >"$LOG_DIR/ray-$SLURM_JOB_ID-$node.log" 2>&1 &
  steps+=($!)
}

ray_on "$head" --head --node-ip-address="$head_ip" --port="$RAY_PORT" --include-dashboard=false
for _ in {1..300}; do
  listens && break
  kill -0 "${steps[0]}" 2>/dev/null || break
  sleep 1
done
listens || { say "Ray did not start on $head: see $LOG_DIR/ray-$SLURM_JOB_ID-$head.log"; finish 4; }
for node in "${nodes[@]:1}"; do ray_on "$node" --address="$head_ip:$RAY_PORT"; done
export RAY_ADDRESS="$head_ip:$RAY_PORT"
"""

_TRAIN = r"""
# The training, on the first node; after a requeue it goes on from the last checkpoint.
train=(@TRAIN@)
checkpoints=("$POSTTRAIN_OUTPUT_ROOT"/*/checkpoints/step_*)
if [ -e "${checkpoints[-1]}" ]; then
  train=(@RESUME@ --resume "${checkpoints[-1]%/checkpoints/*}")
fi
say "${train[*]}"
on "$head" training "${train[@]}" &
training=$!
again=1

# srun answers SIGTERM by killing its step; the training is to close what it has open, so the signal goes to the step itself.
# shellcheck disable=SC2317
pass_on() {
  again=1
  squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j' | while read -r step name; do
    [ "$name" = training ] && scancel --signal=TERM "$step"
  done
}
trap pass_on TERM INT # ends the wait, not the training
while [ -n "$again" ]; do
  again=
  wait "$training"
  code=$?
done
say "exit code $code"
finish "$code"
"""
