"""`posttrain eval`: checkpoints, the model before training, exported models, two of them compared; and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import HELP, main
from posttrain.evals.result import Results

LETTERS = "posttrain.testing.letters:Letters"


@pytest.fixture(scope="module")
def run(posttrain_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of three steps, with a checkpoint of each and an eval of its own."""
    from posttrain.testing.tiny_run import TinyRun

    made = TinyRun(posttrain_tiny_model, tmp_path_factory.mktemp("cli-eval"))
    entry = {"name": LETTERS, "label": "letters", "prompts": 12, "samples": 4, "k": [2]}
    overrides = ["checkpoint.every=1", "checkpoint.keep_last=null", "tracking.display=none"]
    return Path(made(overrides, evals=[entry], rl={"optimizer": {"lr": 1e-3}}).run)


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_a_run_is_asked_its_own_evals_and_gives_what_it_gave_while_training(run: Path, capsys: Any) -> None:
    while_training = next(one for one in Results(run / "evals").read() if one.step == 3)
    code, out, err = ran(capsys, "eval", run, "~rollout.options", "weights.canary_every=1")
    assert code == 0 and "letters: " in out and "12 prompts (test) x 4, temperature 1" in out and "pass@2" in out
    assert "none of the 12 eval rows is among the 12 draws" in err
    again = next(one for one in Results(run / "evals").read() if one.step == 3)
    assert again.rows == while_training.rows and (run / "evals" / "letters" / "3.jsonl.superseded").exists()


def test_steps_of_a_run_before_training_too_with_a_paired_difference(run: Path, tmp_path: Path, capsys: Any) -> None:
    flags = ("--step", "0,3", "--env", LETTERS, "--samples", 6, "--k", "2,4", "--prompts", 20, "--out", tmp_path / "o")
    code, out, _ = ran(capsys, "eval", run, *flags)
    assert code == 0 and "  3 - 0" in out and "pass^4" in out and "20 prompts (test) x 6" in out
    label = next(path.name for path in (tmp_path / "o").iterdir() if path.is_dir() and path.name != "logs")
    assert {path.name for path in (tmp_path / "o" / label).glob("*.jsonl")} == {"0.jsonl", "3.jsonl"}
    lines = [json.loads(line) for line in (tmp_path / "o" / label / "0.jsonl").read_text().splitlines()]
    assert len(lines) == 20 and {line["n"] for line in lines} == {6}
    assert (tmp_path / "o" / "table.txt").exists() and (tmp_path / "o" / "summary.json").exists()


def test_a_checkpoint_and_its_export_cannot_be_told_apart(run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "model", "--step", "3"]) == 0
    code, out, _ = ran(capsys, "eval", run / "checkpoints" / "step_3", "model", "--json")
    found = json.loads(out[out.index("{") :])
    first, second = found["evals"]
    assert code == 0 and first["accuracy"] == second["accuracy"]
    assert {one["verdict"] for one in found["differences"]} == {"not distinguishable"}
    assert {one["difference"] for one in found["differences"]} == {0.0}
    assert (tmp_path / "evals" / "model" / "letters" / "0.jsonl").exists()


def test_a_model_of_no_run_needs_to_be_told_what_to_ask(run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(run), "model"]) == 0
    code, _, err = ran(capsys, "eval", "model")
    assert code == 2 and "there is nothing to ask" in err and "--env NAME" in err
    small = ("rollout.max_tokens=8", "rollout.max_model_len=64", "grid.threads=1")
    code, out, _ = ran(capsys, "eval", "model", "--env", LETTERS, "--prompts", 4, *small)
    assert code == 0 and "4 prompts (test) x 1, greedy" in out


def test_what_is_recorded_is_compared_without_an_engine(run: Path, capsys: Any, monkeypatch: Any) -> None:
    from posttrain.loop import prepare

    monkeypatch.setattr(prepare, "build_engine", None)
    code, out, _ = ran(capsys, "eval", "--compare", run, run)
    assert code == 0 and "not distinguishable" in out
    code, _, err = ran(capsys, "eval", "--compare", run, run / "checkpoints" / "step_2")
    assert code == 2 and "no eval is recorded" in err and "posttrain eval" in err


def test_rows_that_the_run_trained_on_are_refused_unless_it_is_meant(run: Path, tmp_path: Path, capsys: Any) -> None:
    asked = f"evals=[{{name: '{LETTERS}', label: seen, split: train, prompts: 400}}]"
    code, _, err = ran(capsys, "eval", run, asked)
    assert code == 3 and "eval rows were drawn for training" in err and "--allow-trained" in err
    code, out, _ = ran(capsys, "eval", run, asked.replace("400", "200"), "--allow-trained", "--out", tmp_path / "o")
    assert code == 0 and "drawn for training: this is no held-out score" in out


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ([], 2, "there is nothing to evaluate"),
        (["RUN", "--k", "4"], 2, "pass@4"),
        (["RUN", "--k", "four"], 2, "--k four is no list of numbers"),
        (["RUN", "--step", "9"], 3, "has no checkpoint of step 9"),
        (["RUN", "--env", "countdwn"], 2, "did you mean 'countdown'"),
        (["RUN", "--prompts", "-1"], 2, "must be at least 0"),
        (["RUN", "rollout.engin=hf"], 2, "did you mean rollout.engine"),
        (["/nowhere/at/all"], 2, "no run and no model"),
        (["RUN", "--compare", "RUN", "RUN"], 2, "--compare takes two recorded results"),
        (["RUN", "--sample", "4"], 2, "no flag --sample"),
    ],
)
def test_what_it_refuses(run: Path, capsys: Any, arguments: list[str], code: int, expected: str) -> None:
    found, _, err = ran(capsys, "eval", *[run if word == "RUN" else word for word in arguments])
    assert found == code and expected in err


def test_it_is_in_the_help_which_is_one_screen(capsys: Any) -> None:
    assert "posttrain eval RUN" in HELP and len(HELP.splitlines()) <= 24
    assert ran(capsys, "eval", "--help")[0] == 0


def test_an_engine_that_runs_out_of_memory_gets_the_steps(run: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    from posttrain.rollout.hf import HFEngine

    async def full(self: HFEngine) -> None:
        raise MemoryError("cannot allocate memory")

    monkeypatch.setattr(HFEngine, "start", full)
    code, _, err = ran(capsys, "eval", run, "--out", tmp_path / "o")
    assert code == 5 and "1 rollout.gpu_memory_utilization" in err and "5 stop" in err
    assert "--max-tokens" in err and "docs/troubleshooting.md#out-of-memory" in err
