"""Rows of evals never train: kept out of the sampler, refused at the start, looked up in the ledger."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from eval_toys import Toy
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.schema import EnvironmentConfig, EvalConfig, ModelConfig, RLConfig, RunConfig
from posttrain.data.dataset import Draw, PromptSampler, Source, build_sampler
from posttrain.data.environment import Rows
from posttrain.data.holdout import apart
from posttrain.errors import DataError
from posttrain.evals.build import Eval, build_evals, draws_of
from posttrain.evals.heldout import ledger_proof, refuse_eval_rows, refuse_trained


def rows(count: int, start: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"r{n}", "ask": f"{n}?", **more} for n in range(start, start + count)]


def config(*evals: EvalConfig, **more: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(name_or_path="m"), rl=RLConfig(steps=3, batch_per_replica=8, group_size=2),
        environments=(EnvironmentConfig(name="toy"),), evals=evals, **more,
    )  # fmt: skip


def an_eval(asked: Sequence[dict[str, Any]], name: str = "toy") -> Eval:
    entry = EvalConfig(name=name, options={})
    return Eval(entry, Toy(held=asked), draws_of(entry, asked, "evals[0]"))


HOLDOUT = EvalConfig(name="toy", options={}, split="holdout", prompts=3)


# the sampler


def test_held_out_rows_and_their_copies_are_out_of_the_training_data() -> None:
    made = [*rows(10), {"id": "copy", "ask": "1?"}, {"id": "bad", "bad": True}]
    train, held = apart(made, 3, Toy(), "toy")
    assert [row["id"] for row in held] == ["r0", "r1", "r2"]
    assert [row["id"] for row in train] == [*(f"r{n}" for n in range(3, 10)), "bad"]
    assert train.notes == ["3 row(s) are held out for evals, and 1 that ask the same do not train either"]  # type: ignore[attr-defined]
    assert train.where(0) == "row 3"  # type: ignore[attr-defined]


def test_rows_without_ids_keep_their_place_as_their_name_on_both_sides() -> None:
    train, held = apart([{"ask": str(n)} for n in range(5)], 2, Toy(), "toy")
    assert [row["id"] for row in held] == ["0", "1"] and [row["id"] for row in train] == ["2", "3", "4"]


def test_rows_without_end_cost_nothing() -> None:
    train, held = apart(Rows(10**9, lambda i: {"id": str(i), "ask": str(i)}), 5, Toy(), "toy")
    assert isinstance(train, Rows) and len(train) == 10**9 - 5 and train[0]["id"] == "5" and len(held) == 5


@pytest.mark.parametrize("made", [rows(3), [*rows(3), {"id": "copy", "ask": "0?"}]])
def test_nothing_left_to_train_is_told(made: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match=r"holds out 3 rows|left to train"):
        apart(made, 3, Toy(), "toy")


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 12), min_size=4, max_size=30), st.integers(1, 3))
def test_no_draw_of_any_epoch_asks_what_is_held_out(asked: list[int], count: int) -> None:
    made = [{"id": str(i), "ask": str(n)} for i, n in enumerate(asked)]
    env = Toy(made)
    try:
        sampler = build_sampler(config(EvalConfig(name="toy", options={}, split="holdout", prompts=count)), {"toy": env})
    except DataError:
        return
    held = {made[i]["ask"] for i in range(count)}
    assert not held & {draw.task["ask"] for draw in sampler.draw(3 * len(made))}


def test_two_evals_of_one_environment_hold_out_the_longer_prefix() -> None:
    env = Toy(rows(20))
    chosen = config(HOLDOUT, EvalConfig(name="toy", options={}, split="holdout", prompts=5, label="more"))
    sampler = build_sampler(chosen, {"toy": env})
    assert len(sampler.sources[0].rows) == 15
    source = sampler.sources[0]
    assert source.held is not None and len(source.held) == 5


# at the start


@pytest.mark.parametrize(
    "trains",
    [
        {"id": "other", "ask": "5?"},  # asks the same under another id
        {"id": "r5", "ask": "5?"},
    ],
)
def test_a_row_that_trains_and_is_asked_is_refused(trains: dict[str, Any]) -> None:
    env = Toy([*rows(3), trains])
    refuse = refuse_eval_rows([an_eval(rows(4, 4))], config(), {"toy": env})
    sampler = PromptSampler([Source("toy", env.dataset("train"))], seed=0)
    with pytest.raises(DataError, match="row 3 of toy trains, and the eval toy asks it") as caught:
        sampler.watch(refuse)
    assert "split=holdout" in caught.value.fix and caught.value.code == "not-held-out"


def test_the_same_content_asked_in_other_words_is_the_same_row_of_one_plugin() -> None:
    class Louder(Toy):
        def format_prompt(self, task: Any) -> str:
            return super().format_prompt(task).upper() + "!"

    env = Louder([{"id": "x", "ask": "5?"}])
    source = Source("toy", env.dataset("train"))
    with pytest.raises(DataError, match="trains, and the eval"):
        refuse_eval_rows([an_eval(rows(4, 4))], config(), {"toy": env})(source, 0, source.rows[0])
    refuse_eval_rows([an_eval(rows(4, 4), name="another")], config(), {"toy": env})(source, 0, source.rows[0])


def test_a_row_that_cannot_be_asked_about_is_left_to_others() -> None:
    refuse_eval_rows([an_eval(rows(2))], config(), {"toy": Toy()})(Source("toy", [{}]), 0, {"bad": True})
    called: list[int] = []
    refuse = refuse_eval_rows([], config(), {"toy": Toy()}, lambda source, position, row: called.append(position))
    refuse(Source("toy", [{}]), 7, {"ask": "?"})
    assert called == [7]


# afterwards


def ledger_of(path: Path, draws: Sequence[Draw], *, torn: bool = False) -> Path:
    ends = [{"draw": d.index, "epoch": d.epoch, "env": d.env, "row": d.row_id, "state": "trained", "step": 1} for d in draws]
    lines = [json.dumps(end) for end in ends]
    path.write_text("\n".join(lines) + ('\n{"draw": 9' if torn else "\n"), encoding="utf-8")
    return path


def test_the_ledger_proves_that_no_eval_row_trained(tmp_path: Path) -> None:
    env, chosen = Toy(rows(20)), config(HOLDOUT)
    sampler = build_sampler(chosen, {"toy": env})
    evals = [Eval(HOLDOUT, Toy(), draws_of(HOLDOUT, sampler.sources[0].held, "evals[0]"))]  # type: ignore[arg-type]
    ledger = ledger_of(tmp_path / "ledger.jsonl", sampler.draw(40), torn=True)
    found = ledger_proof(ledger, sampler, evals, chosen, {"toy": env})
    assert found.trained == () and (found.draws, found.rows, found.asked) == (40, 17, 3) and not found.unknown
    assert found.text() == "none of the 3 eval rows is among the 40 draws of 17 rows in the ledger"
    refuse_trained(found)
    assert sampler.index == 40  # the run's own sampler is where it was


def test_a_row_that_did_train_is_found_with_its_draw(tmp_path: Path) -> None:
    env, chosen = Toy(rows(20)), config()
    sampler = build_sampler(chosen, {"toy": env})
    draws = sampler.draw(12)
    asked = an_eval([{"id": "mine", "ask": draws[7].task["ask"]}, {"id": "new", "ask": "never"}])
    found = ledger_proof(ledger_of(tmp_path / "l", draws), sampler, [asked], chosen, {"toy": env})
    assert found.trained == (("toy", "mine", 7),)
    with pytest.raises(DataError, match=r"1 of 2 eval rows were drawn for training: mine of toy \(draw 7\)") as caught:
        refuse_trained(found)
    assert caught.value.exit_code == 3 and "--allow-trained" in caught.value.fix


def test_draws_that_the_ledger_lacks_are_no_matter_and_changed_data_is_told(tmp_path: Path) -> None:
    env, chosen = Toy(rows(20)), config()
    sampler = build_sampler(chosen, {"toy": env})
    draws = sampler.draw(12)
    kept = ledger_of(tmp_path / "l", [draws[0], draws[11]])
    assert ledger_proof(kept, sampler, [an_eval(rows(1, 90))], chosen, {"toy": env}).draws == 2
    other = build_sampler(chosen, {"toy": Toy(rows(20, 50))})
    found = ledger_proof(kept, other, [an_eval(rows(1, 90))], chosen, {"toy": env})
    assert "not the run's" in found.unknown and found.text().startswith("whether eval rows trained is not known")
    assert ledger_proof(tmp_path / "none", sampler, [], chosen, {"toy": env}).draws == 0


# which rows an eval asks


def test_an_eval_of_what_trains_asks_what_is_held_out_there(monkeypatch: pytest.MonkeyPatch) -> None:
    env = Toy(rows(20), rows(4, 100))
    monkeypatch.setattr("posttrain.plugins.build", lambda *_, **__: Toy())
    chosen = config(HOLDOUT, EvalConfig(name="toy", options={}, label="test", prompts=2))
    sampler = build_sampler(chosen, {"toy": env})
    held, test = build_evals(chosen, {"toy": env}, sampler.sources)
    assert [draw.row_id for draw in held.draws] == ["r0", "r1", "r2"] and [draw.row_id for draw in test.draws] == ["r100", "r101"]
    assert held.key == "eval:toy" and test.key == "eval:test" and held.env is not test.env
