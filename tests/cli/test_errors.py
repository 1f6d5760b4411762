"""One screen, no traceback, the documented exit code; and the whole story when asked for."""

from __future__ import annotations

import errno
import pickle
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from string import Formatter

import pytest

from posttrain.cli.main import main
from posttrain.cli.report import disk_full, exit_code, report
from posttrain.errors import (
    CATALOGUE,
    ConfigError,
    DataError,
    EngineStartError,
    PluginError,
    RunAborted,
    RunInterrupted,
    WaitExpired,
    WeightSyncError,
    error,
)

TOY = "experiment=toy"


def raising(exc: BaseException):
    def train(loaded, **_):
        raise exc

    return train


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (ConfigError("x"), 2),
        (PluginError("x"), 2),
        (error("E14"), 2),
        (error("E16", reason="it is not there"), 2),
        (DataError("x"), 3),
        (EngineStartError("x"), 4),
        (RunAborted("x"), 5),
        (RunInterrupted("x"), 75),
        (WaitExpired("x"), 75),
        (WeightSyncError("x"), 75),
        (WeightSyncError("x", retryable=False), 5),
        (RunAborted("x", retryable=True), 75),
        (OSError(errno.ENOSPC, "full", "/disk/file"), 75),
        (ValueError("odd"), 1),
        (KeyboardInterrupt(), 130),
        (ExceptionGroup("g", [ValueError("a"), DataError("x")]), 3),
    ],
)
def test_exit_codes(exc, code, fake_train, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POSTTRAIN_OUTPUT_ROOT", str(tmp_path))
    fake_train(raising(exc))
    assert main(["train", TOY]) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and 0 < len(err.splitlines()) <= 24


def test_an_error_is_message_where_cause_fix_docs(capsys) -> None:
    exc = ConfigError("it is wrong", where="rl.steps", cause="because", fix="do this", anchor="troubleshooting.md#it")
    assert report(exc) == 2
    assert capsys.readouterr().err == textwrap.dedent("""\
        error: it is wrong
          where: rl.steps
          cause: because
          fix:   do this
          docs:  docs/troubleshooting.md#it
    """)


DOCUMENTED = {f"E{number}": name for names, name in (
    ((9, 10, 11, 12, 13, 14), "PackerError"), ((15,), "MissingConfigException"), ((16,), "OptimizerDependencyError")
) for number in names}  # fmt: skip


@pytest.mark.parametrize("code", CATALOGUE)
@pytest.mark.parametrize("travelled", [False, True], ids=["here", "from another process"])
def test_a_documented_error_keeps_its_class_name_and_text_without_a_traceback(code, travelled, capsys) -> None:
    entry = CATALOGUE[code]
    fields = {name for text in (entry.text, entry.cause, entry.fix) for _, name, _, _ in Formatter().parse(text) if name}
    values = {name: f"<{name}>" for name in fields}
    exc = error(code, **values)
    exc = pickle.loads(pickle.dumps(exc)) if travelled else exc
    assert report(exc) == exit_code(exc)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"error: {entry.text.format(**values)}",
        f"  cause: {entry.cause.format(**values)}",
        f"  fix:   {entry.fix.format(**values)}",
        f"  docs:  docs/{entry.anchor} ({code}, {DOCUMENTED.get(code, entry.cls.__name__)})",
    ]


def test_the_names_of_the_documented_ones_are_as_documented() -> None:
    assert CATALOGUE["E15"].text.startswith("MissingConfigException: Could not load 'experiment/")
    assert CATALOGUE["E16"].text == "ModuleNotFoundError: No module named 'apex'"
    assert issubclass(CATALOGUE["E16"].cls, ModuleNotFoundError)


def test_the_failed_run_and_how_to_go_on_are_said(capsys) -> None:
    exc = RunInterrupted("an engine died", fix="look at its log")
    exc.run_dir = Path("/runs/a")
    assert report(exc) == 75
    assert "  run:   /runs/a; go on: posttrain train --resume /runs/a" in capsys.readouterr().err


def test_traceback_on_request(fake_train, capsys) -> None:
    fake_train(raising(DataError("bad rows")))
    assert main(["train", TOY, "--traceback"]) == 3
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and "in train" in err and "error: bad rows" in err


def test_an_unexpected_error_is_one_line_and_a_log(fake_train, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POSTTRAIN_OUTPUT_ROOT", str(tmp_path))
    fake_train(raising(ZeroDivisionError("a\nb")))
    assert main(["train", TOY]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: unexpected ZeroDivisionError: a b\n") and "--traceback" in err
    (log,) = tmp_path.glob("error-*.log")
    assert str(log) in err and "Traceback" in log.read_text()


def test_a_full_disk_says_so_and_how_to_go_on(fake_train, capsys) -> None:
    exc = RuntimeError("checkpoint failed")
    exc.__cause__ = OSError(errno.ENOSPC, "No space left on device", "/runs/a/checkpoints/x")
    exc.run_dir = Path("/runs/a")
    fake_train(raising(exc))
    assert main(["train", TOY]) == 75
    err = capsys.readouterr().err
    assert err.startswith("error: no space left on device while writing /runs/a/checkpoints/x\n")
    assert "the last checkpoint is intact" in err and "posttrain train --resume /runs/a" in err


@pytest.mark.parametrize(
    "exc",
    [
        OSError(errno.EDQUOT, "quota"),
        RuntimeError("IoError(Os { code: 28, kind: StorageFull, message: ... })"),
        RuntimeError("PytorchStreamWriter failed writing file data/0"),
        ExceptionGroup("g", [OSError(errno.ENOSPC, "x")]).exceptions[0],
    ],
)
def test_full_disks_as_libraries_tell_them(exc) -> None:
    assert disk_full(exc) is not None
    assert disk_full(OSError(errno.ENOENT, "no")) is None


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian", TOY], ["there is no command 'trian'", "posttrain train"]),
        (["rl.steps=3"], ["there is no command 'rl.steps=3'", "posttrain train rl.steps=3"]),
        (
            ["train", "--use_ppo_clip", "true"],
            ["has no flag --use_ppo_clip", "rl.objective.use_ppo_clip=true; values are given as key=value"],
        ),
        (["train", "--learning-rate=1e-5"], ["has no flag --learning-rate", "rl.optimizer.lr=1e-5"]),
        (["train", "--cgf", "job"], ["has no flag --cgf", "posttrain train --help"]),
        (["train", "--config"], ["expected one argument"]),
        (["train", TOY, "--resume", "x", "--config", "y"], ["--resume does not go with --config"]),
        (["train", TOY, "--multirun", "--cfg", "job"], ["--multirun does not go with --cfg"]),
        (["train", TOY, "seed=1,2"], ["is a sweep over several values", "--multirun"]),
        (["train", "--resume", "/no/such/run"], ["there is no run at /no/such/run"]),
        (
            ["train", "experiment=toyy"],
            ["MissingConfigException: Could not load 'experiment/toyy'", "did you mean toy?", "docs/troubleshooting.md#"],
        ),
        (["train", TOY, "use_tis=true"], ["use_tis: unknown key", "the path here is rl.objective.use_tis=true"]),
        (["plugins", "lsit"], ["invalid choice"]),
    ],
)
def test_what_is_typed_wrong(arguments, parts, capsys) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert all(part in err for part in parts), err
    assert "Traceback" not in err


def test_e15_is_preceded_by_its_warning(capsys, fake_distribution) -> None:
    fake_distribution(
        "lab",
        points={"posttrain.experiments": {"lab": "cli_lab2"}},
        files={"cli_lab2.py": "import zarr\nEXPERIMENTS = {'arrays': {}}"},
    )
    assert main(["train", "experiment=arrays"]) == 2
    err = capsys.readouterr().err
    warning = "warning: skipped 1 experiment module(s) needing absent optional dependencies ['zarr']\n"
    assert (
        err.index(warning) < err.index("error: MissingConfigException: Could not load 'experiment/arrays'")
        and "pip install zarr" in err
    )


STAND_IN = """
import asyncio, sys, types
module = types.ModuleType("posttrain.loop.run")
def train(loaded, **_):
    async def forever():
        try:
            print("started", flush=True)
            await asyncio.sleep(60)
        finally:
            print("closed", flush=True)
    try:
        asyncio.run(forever())
    except BaseException as exc:
        exc.run_dir = "/runs/a"
        raise
module.train = train
sys.modules["posttrain.loop.run"] = module
from posttrain.cli.main import main
sys.exit(main(["train", "experiment=toy"]))
"""


@pytest.mark.parametrize(("signal", "code", "word"), [(2, 130, "Ctrl-C"), (15, 143, "SIGTERM")])
def test_signals_close_everything_and_are_said(signal, code, word) -> None:
    child = subprocess.Popen([sys.executable, "-c", STAND_IN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "started\n"
    time.sleep(0.1)
    child.send_signal(signal)
    out, err = child.communicate(timeout=30)
    assert (child.returncode, out) == (code, "closed\n")
    assert f"stopped by {word}" in err and "posttrain train --resume /runs/a" in err and "Traceback" not in err


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m posttrain.cli plugins list | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("kind") and done.stderr == ""
