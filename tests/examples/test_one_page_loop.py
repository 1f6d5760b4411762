"""Learning itself: the one-page loop and the demo's experiment, with the model that `make demo` makes."""

import asyncio
import importlib.util
import math
from pathlib import Path
from statistics import fmean

import pytest
import torch

from posttrain.config.load import load_config
from posttrain.loop.run import train
from posttrain_experiments import tiny
from posttrain_experiments.arithmetic import PROBLEMS

PAGE = Path(__file__).parents[2] / "docs/examples/one_page_loop.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.build(folder, environment=PROBLEMS, say=lambda line: None)
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_one_page_loop_learns(model):
    spec = importlib.util.spec_from_file_location("one_page_loop", PAGE)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    rewards = asyncio.run(page.main(12, model))
    assert len(rewards) == 12 and all(math.isfinite(r) for r in rewards)
    assert fmean(rewards[:2]) < 0.5 < 0.65 < fmean(rewards[-2:]), rewards


def test_it_fits_one_page():
    assert len(PAGE.read_text().splitlines()) < 300


def test_the_demo_learns(model, tmp_path):
    result = train(
        load_config(["experiment=arithmetic_grpo", f"model.name_or_path={model}", "model.factory=null", "rl.steps=20",
                     "validation.every=0", "tracking.display=none"]),
        run_dir=tmp_path,
    )
    assert result.summary.held_out_before <= 0.4
    assert result.summary.held_out_after >= 0.85
