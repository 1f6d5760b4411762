"""What docs/howto/custom-datapacker.md says of wrong packers: seen here on a tiny model, with the real policy and objective."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from posttrain.config.load import load_config
from posttrain.loop.batches import make_row
from posttrain.loop.prepare import build_run_objective
from posttrain.policy.policy import Policy
from posttrain.policy.rows import Row
from posttrain.testing.tiny_model import write_tiny_model
from posttrain.types import Trajectory
from posttrain_datapackers.decoder_only import DecoderOnlyPacker

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "custom-datapacker.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
RUN = [
    "rl.steps=1", "rl.batch_per_replica=4", "rl.group_size=4", "environments=[{name: arithmetic}]", "rl.shared_prefix=false",
]  # fmt: skip


class OtherPrompt(DecoderOnlyPacker):
    """Shows the policy two tokens that the engine never saw."""

    def get_policy_input(self, trajectory):
        item = super().get_policy_input(trajectory)
        return {"input_ids": [20, 21, *item["input_ids"]], "mask": [False, False, *item["mask"]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path)
    return str(path)


def policy_of(folder, *overrides):
    config = load_config([f"model.name_or_path={folder}", "rl.objective.name=grpo", *RUN, *overrides]).config
    return Policy(config, folder, build_run_objective(config))


def measured(folder, packer, *overrides):
    """The metrics of one training step on four completions that the model itself could have sampled."""
    policy = policy_of(folder, *overrides)
    texts = [[7, 9, 2], [8, 8, 11, 2], [30, 5, 2], [6, 6, 6, 12, 2]]
    prompt = [10, 12, 14]
    honest = [Row(input_ids=prompt + t, mask=[False] * 3 + [True] * len(t), rollout_logprobs=[0.0] * (3 + len(t))) for t in texts]
    sampled = policy.logprobs(honest)
    rows = []
    for number, (ids, logprobs) in enumerate(zip(texts, sampled, strict=True)):
        made = Trajectory(prompt, ids, [True] * len(ids), logprobs, [0] * len(ids), "stop", float(number % 2), group_id="g")
        rows.append(make_row(made, packer.setup(folder), 1.0 if number % 2 else -1.0, 0.5))
    return policy.train_step(rows).metrics


def test_an_honest_packer_shows_a_ratio_of_one(folder):
    metrics = measured(folder, DecoderOnlyPacker())
    assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-4) and metrics["policy/logprob_gap"] < 1e-5


def test_another_prompt_passes_the_check_and_shows_in_the_ratio_alone(folder):
    metrics = measured(folder, OtherPrompt())
    assert metrics["policy/ratio_min"] < 0.9 and metrics["policy/logprob_gap"] > 0.05
    assert metrics["policy/clip_fraction"] == 0, "against π_old with one optimizer step the clip hides it"


def test_the_rollout_reference_and_the_sequence_mask_show_it_too(folder):
    assert measured(folder, OtherPrompt(), "rl.objective.ppo_clip_ref_logprobs=rollout")["policy/clip_fraction"] > 0
    narrow = ["rl.objective.seq_is_masking=true", "rl.objective.seq_is_mask_low=0.999", "rl.objective.seq_is_mask_high=1.001"]
    metrics = measured(folder, OtherPrompt(), *narrow)
    assert metrics["policy/seq_masked_share"] == 1 and metrics["grad_norm"] == 0


def test_the_check_of_the_page_raises_for_it(folder):
    names: dict = {}
    exec(PYTHON[1], names)
    made = Trajectory([10, 12], [7, 2], [True, True], [-1.0, -1.0], [0, 0], "stop")
    names["check"](DecoderOnlyPacker().setup(folder), made)
    with pytest.raises(AssertionError):
        names["check"](OtherPrompt().setup(folder), made)


def test_the_contract_test_of_the_page_passes(tmp_path, monkeypatch):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "packers.py").write_text(PYTHON[0])
    (package / "test_packers.py").write_text(PYTHON[2])
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert pytest.main(["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", "/dev/null", str(package)]) == 0
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
            del sys.modules[name]
