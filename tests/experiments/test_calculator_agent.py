"""The recipe of the tool-using agent: what its model is taught, and that an episode is one row as it was taught."""

from __future__ import annotations

import random
from pathlib import Path

from posttrain.config.catalog import load_catalog
from posttrain.config.load import load_config
from posttrain.data.packer import continued, engine_input, init_data_packer
from posttrain.loop.run import train
from posttrain.testing.playing import play
from posttrain.tracking.metrics import read_metrics
from posttrain_envs.calculator import Calculator
from posttrain_experiments import tiny_calculator
from posttrain_experiments.calculator import EXPERIMENTS, QUESTIONS, TEMPLATE


def test_both_turns_are_taught() -> None:
    row = {"question": "12*34", "answer": "408"}
    first, second = tiny_calculator.teach(row, random.Random(0))
    assert first[:2] == ("12*34=", "<12*34>") and first[2].isdecimal() and first[2] != "408"
    assert second[:2] == ("12*34=<12*34><eos>408=", "408") and second[2] in ("407", "409")
    (_, _, guess), _ = tiny_calculator.teach({"question": "1-1", "answer": "0"}, random.Random(0))
    assert guess != "0"


def test_an_episode_reads_as_it_was_taught(tmp_path: Path) -> None:
    tiny_calculator.build(tmp_path, environment=QUESTIONS, steps=2, slip_steps=1, say=lambda line: None)
    packer = init_data_packer(str(tmp_path), chat_template=TEMPLATE)
    env = Calculator(Calculator.Options(**{**QUESTIONS, "terms": (2,)}))
    row = env.dataset("test")[0]
    state, reward = play(env, row, [f"<{row['question']}>", row["answer"]])
    assert reward.total == 1.0 and reward.parts["called"] == 1.0
    ids = engine_input(packer, state.prompt)["prompt_ids"] + packer.encode(f"<{row['question']}>") + [1]
    taught = next(iter(list(tiny_calculator.teach(row, random.Random(0)))[1:]))[0]
    assert packer.spell(continued(packer, ids, state.messages[2:3])) == taught
    assert packer.render(state.messages[:3]) == taught, "the template only appends: an episode is one row"


def test_the_recipe_runs(tmp_path: Path) -> None:
    """Shrunken to one step of a model that knows nothing yet."""
    tree = EXPERIMENTS["calculator_agent"]
    assert tree["model"]["factory_kwargs"]["environment"] == tree["environments"][0]["options"] == QUESTIONS
    run = train(
        load_config([
            "experiment=calculator_agent", "rl.steps=1", "rl.batch_per_replica=16", "validation.prompts=4",
            "++model.factory_kwargs.steps=2", "++model.factory_kwargs.slip_steps=1", "tracking.display=none",
        ]),
        run_dir=tmp_path,
    ).run  # fmt: skip
    (metrics,) = read_metrics(Path(run))
    assert "reward/called" in metrics and "reward/tool/calls" in metrics


def test_the_recipe_is_in_the_catalog() -> None:
    (entry,) = load_catalog().experiments["calculator_agent"]
    assert entry.parents == () and entry.help
