"""One function and one file, as a newcomer runs them: from Python by keywords, and by the command line, on a tiny model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import posttrain
from posttrain.errors import ConfigError, RunAborted
from posttrain.loop.result import RunResult
from posttrain.testing.tiny_model import write_tiny_model

QUESTIONS = [{"question": f"{a}plus{b}", "answer": str(a + b)} for a in range(5) for b in range(5)]
SHORT: dict[str, Any] = {
    "rl": {"steps": 2, "group_size": 4, "batch_per_replica": 16, "optimizer": {"lr": 3e-2}},
    "rollout": {"max_tokens": 8, "max_model_len": 32},
    "validation": {"prompts": 2},
    "grid": {"threads": 1},
    "tracking": {"display": "none"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def likes_a(completion: str, row: Any) -> float:
    return completion.count("a") / 8


def train(model: str, **given: Any) -> RunResult:
    return posttrain.train(model=model, prompt_column="question", run_dir="outputs", **{"data": QUESTIONS, **SHORT, **given})


def rewards(result: RunResult) -> list[float]:
    return [row["reward/mean"] for row in result.metrics()]


SCRIPT = """\
import pathlib; pathlib.Path("ran").open("a").write("once ")
import posttrain

def score(completion, row):
    return completion.count("a") / 8

result = posttrain.train(model=MODEL, data="my.jsonl", reward=score, prompt_column="question",
                         rl={"steps": 6, "group_size": 8, "batch_per_replica": 64, "optimizer": {"lr": 3e-2}},
                         rollout={"max_tokens": 8, "max_model_len": 32}, grid={"threads": 1})
print("learned", [round(row["reward/mean"], 3) for row in result.metrics()])
"""


def test_ten_lines_without_a_main_guard_learn_and_run_once(folder: Path, model: str) -> None:
    """As a stranger types it: a function of the script itself reaches the reward processes, which do not run the script."""
    assert len(SCRIPT.splitlines()) - 2 <= 10
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "train.py").write_text(SCRIPT.replace("MODEL", repr(model)))
    done = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    learned = json.loads(done.stdout.partition("learned ")[2])
    assert learned[0] < 0.1 and learned[-1] > 0.6, learned
    assert (folder / "ran").read_text() == "once "
    assert "step 1/6" in done.stdout and "held-out reward" in done.stdout  # the progress was shown
    (run,) = (folder / "outputs").glob("run-*")
    assert yaml.safe_load((run / "config.yaml").read_text())["environments"][0]["options"]["reward"] == "object:score"


def test_the_command_of_the_first_page(folder: Path) -> None:
    """`posttrain train experiment=… environments=[{name: function, …}]` in a new folder, and a resume from another one."""
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_rewards.py").write_text("def score(completion, row):\n    return float(completion.strip() == row['answer'])\n")
    options = "{reward: my_rewards.py:score, data: my.jsonl, prompt_column: question, answer_column: answer}"
    small = ["model.factory_kwargs.steps=20", "model.factory_kwargs.slip_steps=5", "rl.batch_per_replica=16", "rl.steps=1"]
    command = [sys.executable, "-m", "posttrain.cli", "train"]
    given = ["experiment=arithmetic_grpo", f"environments=[{{name: function, options: {options}}}]", *small]
    done = subprocess.run([*command, *given], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "outputs").glob("arithmetic-grpo-*")
    (folder / "elsewhere").mkdir()
    more = subprocess.run(
        [*command, "--resume", str(run), "rl.steps=2"], cwd=folder / "elsewhere", capture_output=True, text=True, timeout=300
    )
    assert more.returncode == 0 and "Done: 2 of 2" in more.stdout, more.stderr


def test_several_rewards_are_metrics_and_a_fault_is_no_zero(folder: Path, model: str) -> None:
    async def judge(completion: str) -> float | None:
        await asyncio.sleep(0)
        return None if completion.startswith("b") else 1.0

    result = train(model, reward={"a": likes_a, "length": (lambda c: len(c), 0.01), "judge": (judge, 0.5)})
    first = result.metrics()[0]
    assert {"reward/a", "reward/length", "reward/judge"} <= set(first) and first["reward/judge"] == 1.0
    for row in result.rollouts(1):
        unscorable = row["completion"].replace(" ", "").startswith("b")
        assert (row["reward"] is None) == unscorable
        if not unscorable:
            parts = dict(row["reward_parts"])
            assert row["reward"] == pytest.approx(parts["a"] + 0.01 * parts["length"] + 0.5 * parts["judge"])


def test_rewards_that_raise_or_are_late_are_counted_under_their_cause(folder: Path, model: str) -> None:
    def odd(completion: str) -> float:
        import time

        if len(completion) % 3 == 0:
            raise RuntimeError("no")
        if completion.startswith("a"):
            time.sleep(60)
        return float(len(completion))

    result = train(model, reward=odd, rl={**SHORT["rl"], "steps": 1}, validation={"prompts": 0},
                   **{"rollout.reward_timeout_s": 1.0, "rollout.ignore_eos": False})  # fmt: skip
    found = {row["info"].get("cause") for row in result.rollouts(1)}
    unscorable = sum(row["reward"] is None for row in result.rollouts(1))
    assert result.metrics()[0]["rollout/unscorable_count"] == unscorable and found <= {None, "raised", "timeout"}
    with pytest.raises(RunAborted, match=r"the reward of sample '.+' \(function\) failed"):
        train(model, reward=odd, **{"rollout.reward_timeout_s": 1.0, "rollout.strict_rewards": True})


def test_a_notebook_whose_loop_runs_already(folder: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def cell() -> RunResult:
        return train(model, reward=lambda c: c.count("a"), tracking={"display": "lines"})

    result = asyncio.run(cell())
    assert result.steps_done == 2 and len(rewards(result)) == 2
    assert "step 1/2" in capsys.readouterr().out and "Done: 2 of 2" in str(result)


def test_a_run_of_objects_goes_on_with_the_same_objects_only(folder: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.plugins import objects

    async def mine(completion: str) -> float:
        return float(completion.count("a"))

    result = train(model, reward=mine, checkpoint={"every": 1})
    monkeypatch.setattr(objects, "_held", {})  # another process
    command = [sys.executable, "-m", "posttrain.cli", "train", "--resume", str(result.run), "rl.steps=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "object of the Python process" in done.stderr and "resume=RUN, reward=" in done.stderr
    with pytest.raises(ConfigError, match="object:data"):
        posttrain.train(resume=result.run, reward=mine, rl={"steps": 3})
    longer = posttrain.train(resume=result.run, reward=mine, data=QUESTIONS, rl={"steps": 3})
    assert longer.run == result.run and longer.steps_done == 1 and len(rewards(longer)) == 3
    with pytest.raises(ConfigError, match=r"cannot change these keys(.|\n)*rl.group_size: 4 → 8"):
        posttrain.train(resume=result.run, reward=mine, data=QUESTIONS, rl={"group_size": 8})
    with pytest.raises(ConfigError, match="a resumed run keeps its config"):
        posttrain.train(resume=result.run, experiment="arithmetic_grpo")


def test_an_environment_of_ones_own_by_class_and_by_object(folder: Path, model: str) -> None:
    class Letters(posttrain.Environment):
        """Say a."""

        def dataset(self, split: Any) -> Any:
            return [{"id": str(i), "prompt": c} for i, c in enumerate("bcdefgh" if split == "train" else "xyz")]

        def compute_reward(self, state: Any) -> float:
            return state.completion.count("a") / 8

    for env in (Letters, Letters()):
        result = posttrain.train(model=model, env=env, run_dir="outputs", **SHORT)
        assert result.steps_done == 2 and result.rollouts()[0]["env"] == "object:Letters"


def test_a_base_model_is_asked_in_plain_text(folder: Path, tmp_path: Path) -> None:
    """No chat template: the default asks the bare question instead of failing."""
    from transformers import AutoTokenizer

    base = tmp_path / "base"
    write_tiny_model(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(base)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    result = train(str(base), reward=likes_a, rl={**SHORT["rl"], "steps": 1})
    assert result.rollouts(1)[0]["prompt"].replace(" ", "") in {row["question"] for row in QUESTIONS}
    said = "function: prompts are plain text, as the model has no chat template"
    assert said in (result.run / "events.jsonl").read_text()
    told = train(str(base), reward=likes_a, style="text", rl={**SHORT["rl"], "steps": 1})
    assert said not in (told.run / "events.jsonl").read_text()


def test_the_result_exports_its_model(folder: Path, model: str) -> None:
    result = train(model, reward=likes_a, rl={**SHORT["rl"], "steps": 1})
    out = result.export(folder / "exported", dtype="bfloat16")
    assert (out / "config.json").is_file() and json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert [row["step"] for row in result.validation()] == [0, 1]


def test_errors_are_exceptions_with_the_short_text(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        posttrain.train(model=model, data=QUESTIONS, reward=likes_a, promptcolumn="question")
    text = str(caught.value)
    assert "promptcolumn" in text and 'give it: rl={"steps": 20}' in text and "prompt_column" in text


def test_a_resume_takes_no_other_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stays in its directory"):
        posttrain.train(resume=tmp_path, run_dir="elsewhere")
