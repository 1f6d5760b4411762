"""The table: blocks of results, differences paired by prompt, and what keeps two from being compared."""

from dataclasses import replace
from pathlib import Path

from eval_toys import result

from posttrain.evals.result import Results
from posttrain.evals.table import NOT_DISTINGUISHABLE, before_after, differences, text, write_table

WORSE = [[0, 0, 0, 0], [1, 0, 0, 0]] * 10
BETTER = [[1, 1, 0, 0], [1, 1, 1, 0]] * 10


def test_before_and_after_with_intervals_and_a_verdict() -> None:
    before, after = result(WORSE), result(BETTER, step=40)
    shown = text([before, after], before_after([before, after])).splitlines()
    assert shown[0] == "toy: toy, 20 prompts (test) x 4, temperature 1"
    assert shown[1].split() == ["step", "accuracy", "pass@2", "pass^2", "no", "reward"]  # the reward is the accuracy
    assert shown[2].strip().startswith("0  0.125 [") and shown[3].strip().startswith("40  0.625 [")
    assert shown[4].strip().startswith("40 - 0  +0.500 [+0.500, +0.500]")
    assert shown[5].split() == ["better", "better", "better"]
    assert "95% interval" in shown[-1]


def test_noise_is_not_distinguishable_and_less_is_worse() -> None:
    same = [d.verdict for d in differences(result(WORSE), result([[1, 0, 0, 0], [0, 0, 0, 0]] * 10, step=1))]
    assert same == [NOT_DISTINGUISHABLE] * 4
    assert {d.verdict for d in differences(result(BETTER), result(WORSE, step=1))} == {"worse"}


def test_a_reward_that_is_no_accuracy_has_its_column() -> None:
    shown = text([result([[0.5, 0.5, 0.5, 1.0]] * 8)])
    assert "reward                accuracy" in shown and "0.625 [0.625, 0.625]" in shown and "0.250 [0.250, 0.250]" in shown


def test_missing_rewards_are_shown_by_cause() -> None:
    assert "3 raised of 8" in text([result([[1, None, None, 0], [0, 0, 0, None]])])


def test_two_that_were_asked_otherwise_say_so() -> None:
    greedy = replace(result(WORSE), settings=result(WORSE).settings | {"temperature": 0.0})
    assert differences(greedy, result(BETTER))[0].unlike == ("temperature 0.0 and 1.0",)
    shown = text([greedy, result(BETTER[:6], step=1)], [(greedy, result(BETTER[:6], step=1))])
    assert "asked otherwise" in shown and "compared over the 6 prompts that both asked, of 20" in shown


def test_nothing_in_common_is_not_compared() -> None:
    other = result(BETTER, step=1)
    other = replace(other, rows=[row | {"id": f"x{row['id']}"} for row in other.rows])
    assert differences(result(WORSE), other) == []
    assert "no prompt in common" in text([result(WORSE), other], [(result(WORSE), other)])


def test_whose_results_they_are_is_named_once() -> None:
    a, b = replace(result(WORSE), of="outputs/run"), replace(result(BETTER), of="my-model")
    shown = text([a, b], [(a, b)])
    assert shown.startswith("A: outputs/run\nB: my-model\n") and "B 0 - A 0" in shown


def test_prompts_that_trained_are_marked() -> None:
    checked = {"trained": [["toy", "3", 17], ["toy", "4", 18], ["other", "1", 2]]}
    assert "2 of these prompts were drawn for training" in text([replace(result(WORSE), checked=checked)])


def test_the_file_is_about_everything_in_the_folder(tmp_path: Path) -> None:
    files = Results(tmp_path)
    for one in (result(WORSE), result(WORSE, step=20), result(BETTER, step=40)):
        files.write(one)
    table = write_table(files, "none of the rows trained")
    assert "40 - 0" in table and (tmp_path / "table.txt").read_text() == table + "\nnone of the rows trained\n"
