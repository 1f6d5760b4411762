"""What a run refuses of its environments and rows, before a model is made."""

import pytest

from posttrain.config.load import load_config
from posttrain.data.dataset import PromptSampler, Source
from posttrain.errors import DataError
from posttrain.loop.prepare import build_environments
from posttrain.loop.validation import held_out_draws, refuse_held_out


def test_rows_that_ask_what_validation_asks_are_refused():
    environments = build_environments(load_config(["experiment=arithmetic_grpo"]).config)
    own = Source("arithmetic", environments["arithmetic"].dataset("train"))
    draws = held_out_draws([own], environments, 80)
    fresh = [{"id": "mine", "problem": "20+20", "answer": "40"}]
    leaked = [*fresh, {**draws[3].task, "id": "copy"}]

    def watch(rows, draws=draws):
        PromptSampler([Source("arithmetic", rows)], seed=0).watch(refuse_held_out(draws, environments))

    watch(fresh)
    watch(own.rows)
    with pytest.raises(DataError, match="row 1 trains and asks what validation asks, the held-out row 3") as caught:
        watch(leaked)
    assert caught.value.exit_code == 3 and "validation.prompts=0" in caught.value.fix
    watch(leaked, held_out_draws([own], environments, 0))


def test_the_test_split_of_a_factory_is_what_validation_asks():
    environments = build_environments(load_config(["experiment=arithmetic_grpo"]).config)
    source = Source("arithmetic", [{"id": "a", "problem": "1+1"}], test=[{"id": "b", "problem": "2+2"}])
    assert [draw.row_id for draw in held_out_draws([source], environments, 80)] == ["b"]


def test_a_factory_that_brings_held_out_rows_stops_the_run_before_a_model_is_made(tmp_path):
    from posttrain.loop.run import train

    made = "[{'problem': f'{a}+{b}', 'answer': ''} for a in range(20) for b in range(20)]"
    (tmp_path / "leak.py").write_text(f"def rows():\n    return {made}\n")
    factory = f"rl.data.factory={tmp_path}/leak.py:rows"
    with pytest.raises(DataError, match="asks what validation asks"):
        train(load_config(["experiment=arithmetic_grpo", factory, "tracking.display=none"]), run_dir=tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))
