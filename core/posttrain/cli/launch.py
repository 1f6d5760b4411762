"""`posttrain launch local | ray | slurm`: the same training, here, in a Ray cluster of its own, or as a Slurm job."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.main import Parser
from posttrain.cli.train import add_config_arguments, load
from posttrain.config.secrets import conceal_text
from posttrain.errors import EXIT_OK, ConfigError
from posttrain.placement.cluster import cpus_of
from posttrain.placement.grid import resolve_grid
from posttrain.placement.launch import SlurmJob, cpus_for, nodes_for, sbatch_script, warnings
from posttrain.placement.ports import RAY_PORT
from posttrain.tracking.run_dir import output_root

if TYPE_CHECKING:
    from posttrain.config.load import LoadedConfig

DEFAULTS = {"ray_port": RAY_PORT, "wait": 300, "gpus_per_node": 0, "requeues": 3}
"""What the parser leaves None: a flag that is given is told from one that is not, also when both say the same."""

OF_SLURM = (
    "gpus_per_node", "cpus_per_node", "time", "partition", "account", "job_name", "image", "mount", "sbatch", "requeues", "out",
    "submit",
)  # fmt: skip
OF_A_CLUSTER = ("log_dir", "ray_port", "nodes", "wait")
UNUSED = {"local": (*OF_A_CLUSTER, *OF_SLURM), "ray": OF_SLURM, "slurm": ("wait",)}
"""Flags that a target does nothing with, by where argparse keeps them."""

EPILOG = """\
local   trains in this process, as posttrain train does
ray     starts a Ray cluster on this node under --ray-port, trains in it, and ends it; with RAY_ADDRESS set, joins that one
slurm   writes an sbatch script (and submits it with --submit)

examples:
  posttrain launch local experiment=arithmetic_grpo
  posttrain launch ray experiment=cluster_grpo --ray-port 6380
  posttrain launch slurm experiment=cluster_grpo --nodes 2 --gpus-per-node 8 --time 04:00:00 --run /shared/runs

Two jobs on one node need both: a --ray-port each, and nodes or devices that the other does not use.
The script ends with the exit code of the training; 75 puts the job back into the queue, up to --requeues times.
"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="posttrain launch",
        description="Train here, in a Ray cluster, or as a Slurm job.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="posttrain launch local|ray|slurm [experiment=NAME] [KEY=VALUE ...] [flags]",
    )
    made.add_argument("target", choices=["local", "ray", "slurm"], metavar="local|ray|slurm", help="where to train")
    _, where = add_config_arguments(made)
    where.add_argument("--log-dir", metavar="DIR", help="logs of Ray's nodes and of the Slurm job (default: launch/ in --run)")
    where.add_argument("--ray-port", type=_port, metavar="N", help=f"Ray's control store (default: {RAY_PORT})")
    where.add_argument(
        "--nodes", type=_count, metavar="N", help="ray: wait for them; slurm: ask for them (default: as few as do)"
    )
    where.add_argument("--wait", type=_count, metavar="SECONDS", help="ray: for it to start and nodes to join (300)")
    job = made.add_argument_group("slurm")
    job.add_argument("--gpus-per-node", type=int, metavar="N", help="devices of each node (default: 0, a CPU run)")
    job.add_argument("--cpus-per-node", type=_count, metavar="N", help="cores of each node")
    for name, text in (
        ("time", "limit, as Slurm writes it"),
        ("partition", "where"),
        ("account", "whose"),
        ("job-name", "its name"),
    ):
        job.add_argument(f"--{name}", metavar="VALUE", help=text)
    job.add_argument("--image", metavar="IMAGE", help="container that enroot and pyxis import: docker://…, or a .sqsh file")
    job.add_argument("--mount", action="append", default=[], metavar="FROM:TO", help="another folder for the container")
    job.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="another #SBATCH line: --sbatch=--qos=high")
    job.add_argument("--requeues", type=int, metavar="N", help="times that exit code 75 queues the job again (3)")
    job.add_argument("--out", metavar="FILE", help="where to write the script (default: NAME.sbatch; -: print it)")
    job.add_argument("--submit", action="store_true", help="submit it, too")
    return made


def run(args: argparse.Namespace) -> int:
    if given := _given(args, UNUSED[args.target]):
        fix = f"leave {_flags(given)} out"
        if args.target != "slurm":
            fix += ", or use posttrain launch " + ("slurm" if set(given) & set(OF_SLURM) else "ray (with grid.backend=ray)")
        raise _unused(given, f"posttrain launch {args.target}", fix)
    if args.target == "ray" and os.environ.get("RAY_ADDRESS") and (given := _given(args, ("ray_port", "log_dir"))):
        fix = f"leave {_flags(given)} out, or unset RAY_ADDRESS to start a cluster of its own"
        raise _unused(given, "posttrain launch ray with RAY_ADDRESS set, which joins a cluster", fix)
    return {"local": _local, "ray": _ray, "slurm": _slurm}[args.target](args)


def _local(args: argparse.Namespace) -> int:
    loaded = load(args)
    if loaded.config.grid.backend != "local":
        raise _wrong_backend("local", loaded)
    return _train(args, loaded)


def _ray(args: argparse.Namespace) -> int:
    from posttrain.placement.ray_head import ray_head, wait_for_nodes

    loaded = load(args)
    if loaded.config.grid.backend != "ray":
        raise _wrong_backend("ray", loaded)
    _fill(args)
    if address := os.environ.get("RAY_ADDRESS"):
        wait_for_nodes(address, args.nodes or 1, args.wait)
        return _train(args, loaded)
    if (args.nodes or 1) > 1:
        raise ConfigError(
            f"--nodes {args.nodes} without RAY_ADDRESS: a cluster that is started here has this node",
            fix="start the others' nodes and set RAY_ADDRESS=HOST:PORT, or use posttrain launch slurm",
            where="--nodes",
            code="launch",
        )
    cpus = cpus_of(resolve_grid(loaded.config.grid))
    with ray_head(args.ray_port, log_dir(args) / f"ray-{args.ray_port}.log", cpus=cpus, timeout=args.wait):
        return _train(args, loaded)


def _train(args: argparse.Namespace, loaded: LoadedConfig) -> int:
    from posttrain.loop.run import train

    train(loaded, run_dir=args.run, resume=args.resume)
    return EXIT_OK


def _slurm(args: argparse.Namespace) -> int:
    loaded = load(args)
    config = loaded.config
    grid = resolve_grid(config.grid)
    if config.grid.backend == "local" and (given := _given(args, ("ray_port",))):
        where = "posttrain launch slurm with grid.backend=local, which starts no Ray"
        raise _unused(given, where, f"leave {_flags(given)} out, or set grid.backend=ray")
    _fill(args)
    nodes = nodes_for(grid, args.gpus_per_node, args.nodes)
    job = SlurmJob(
        name=args.job_name or config.name,
        arguments=tuple(_arguments(args)),
        backend=config.grid.backend,
        root=str(output_root(args.run)),
        log_dir=str(log_dir(args)),
        nodes=nodes,
        gpus_per_node=args.gpus_per_node,
        cpus_per_node=args.cpus_per_node,
        ray_cpus=cpus_for(grid, nodes, args.gpus_per_node),
        time=args.time,
        partition=args.partition,
        account=args.account,
        image=args.image,
        mounts=tuple(args.mount),
        directives=tuple(args.sbatch),
        ray_port=args.ray_port,
        requeues=args.requeues,
    )
    script = sbatch_script(job)
    for line in warnings(job):
        print(f"warning: {line}", file=sys.stderr)
    if args.out == "-" and not args.submit:
        print(script, end="")
        return EXIT_OK
    path = Path(args.out or f"{job.name}.sbatch")
    path.write_text(script, encoding="utf-8")
    return _submit(path, job) if args.submit else _say(f"written: {path}; submit it with: sbatch {path}")


def _arguments(args: argparse.Namespace) -> list[str]:
    """What the script gives to `posttrain train`: as typed, files by their absolute path, without the values of secrets."""
    given = [conceal_text(text) for text in args.overrides]
    for flag in ("config", "resume"):
        if value := getattr(args, flag):
            given += [f"--{flag}", str(Path(value).expanduser().absolute())]
    return given


def _submit(path: Path, job: SlurmJob) -> int:
    if shutil.which("sbatch") is None:
        raise ConfigError("there is no sbatch here", fix=f"submit it where Slurm is: sbatch {path}", code="launch")
    Path(job.log_dir).mkdir(parents=True, exist_ok=True)  # Slurm makes no folder for a job's output
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError("Slurm refused the job", cause=done.stderr.strip(), fix=f"correct the options: {path}", code="launch")
    return _say(f"submitted {path} as job {done.stdout.strip().partition(';')[0]}; its log: {job.log_dir}")


def log_dir(args: argparse.Namespace) -> Path:
    """`--log-dir`, else launch/ in the folder for runs."""
    return Path(args.log_dir).expanduser().absolute() if args.log_dir else output_root(args.run) / "launch"


def _given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of the flags that were typed."""
    values = {name: getattr(args, name) for name in names}
    return [name for name, value in values.items() if not (value is None or value is False or value == [])]  # 0 was typed


def _fill(args: argparse.Namespace) -> None:
    for name, value in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _unused(names: Sequence[str], target: str, fix: str) -> ConfigError:
    flags = _flags(names)
    return ConfigError(f"{flags} would do nothing: {target}", fix=fix, where=flags, code="launch")


def _wrong_backend(target: str, loaded: LoadedConfig) -> ConfigError:
    backend = loaded.config.grid.backend
    return ConfigError(
        f"posttrain launch {target} with grid.backend={backend}",
        fix=f"set grid.backend={target}, or use posttrain launch {backend}",
        where="grid.backend",
        code="launch",
    )


def _say(line: str) -> int:
    print(line)
    return EXIT_OK


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError("a port is a number from 1 to 65535")
    return number
