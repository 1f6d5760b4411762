import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from posttrain.data.dataset import Draw
from posttrain.errors import RunAborted
from posttrain.loop.ledger import ENDS, MOVES, Ledger


def draw(index: int) -> Draw:
    return Draw(index, 0, "env", f"row{index}", {})


def test_a_draw_ends_once_and_is_written(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.drawn(draw(0))
    for state in ("dispatched", "drawn", "dispatched", "finished", "admitted", "trained"):
        ledger.move(0, state, step=1)
    with pytest.raises(RunAborted, match="draw 0 cannot become trained: it is not open"):
        ledger.move(0, "trained")
    ledger.close()
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line) == {"draw": 0, "epoch": 0, "env": "env", "row": "row0", "state": "trained", "step": 1}


def test_drawing_twice_is_refused():
    ledger = Ledger()
    ledger.drawn(draw(3))
    with pytest.raises(RunAborted, match="drawn twice"):
        ledger.drawn(draw(3))


def test_lines_of_draws_that_will_end_again_are_kept_aside(tmp_path):
    """A resume from step 2: 7 draws were taken by then, 4 of them are pending in the checkpoint."""
    path = tmp_path / "ledger.jsonl"
    steps = {0: 1, 1: 2, 2: 3, 3: 3, 4: 3, 8: 3}
    path.write_text("".join(json.dumps({"draw": i, "step": step}) + "\n" for i, step in steps.items()) + '{"draw": 9, "st')
    Ledger(path).cut_after(2, drawn=7, pending=[3, 4, 5, 6])
    assert [json.loads(line)["draw"] for line in path.read_text().splitlines()] == [0, 1, 2]
    aside = (tmp_path / "ledger.jsonl.superseded").read_text()
    assert all(f'"draw": {i}, ' in aside for i in (3, 4, 8)) and '{"draw": 9, "st' in aside


class LedgerMachine(RuleBasedStateMachine):
    """Random moves: the ledger accepts exactly those of the table, and counts each draw's end once."""

    def __init__(self):
        super().__init__()
        self.ledger, self.model, self.ended = Ledger(), {}, 0

    @rule()
    def take(self):
        index = len(self.model)
        self.ledger.drawn(draw(index))
        self.model[index] = "drawn"

    @rule(index=st.integers(0, 5), state=st.sampled_from(["dispatched", "finished", "admitted", "trained", "dropped"]))
    def move(self, index, state):
        legal = state in MOVES.get(self.model.get(index, ""), ())
        if legal:
            self.ledger.move(index, state)
            self.model[index] = state
            self.ended += state in ENDS
        else:
            with pytest.raises(RunAborted):
                self.ledger.move(index, state)

    @invariant()
    def every_draw_is_open_or_ended(self):
        assert len(self.ledger.open) + self.ended == len(self.model)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=30, stateful_step_count=20, derandomize=True, deadline=None)
