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
    ledger.drawn(draw(0), 1)
    for state in ("dispatched", "finished", "admitted", "trained"):
        ledger.move(0, state)
    with pytest.raises(RunAborted, match="draw 0 cannot become trained: it is not open"):
        ledger.move(0, "trained")
    ledger.close()
    (line,) = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert json.loads(line) == {"draw": 0, "epoch": 0, "env": "env", "row": "row0", "step": 1, "state": "trained"}


def test_drawing_twice_is_refused():
    ledger = Ledger()
    ledger.drawn(draw(3), 1)
    with pytest.raises(RunAborted, match="drawn twice"):
        ledger.drawn(draw(3), 1)


def test_lines_past_a_step_are_kept_aside(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps({"draw": i, "step": i + 1}) + "\n" for i in range(4)) + '{"draw": 4, "st')
    Ledger(path).cut_after(2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    aside = (tmp_path / "ledger.jsonl.superseded").read_text()
    assert '"step": 3' in aside and '{"draw": 4, "st' in aside


class LedgerMachine(RuleBasedStateMachine):
    """Random moves: the ledger accepts exactly those of the table, and counts each draw's end once."""

    def __init__(self):
        super().__init__()
        self.ledger, self.model, self.ended = Ledger(), {}, 0

    @rule()
    def take(self):
        index = len(self.model)
        self.ledger.drawn(draw(index), 1)
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
        ended = self.ledger.counts["trained"] + self.ledger.counts["dropped"]
        assert len(self.ledger.open) + ended == len(self.model)
        assert ended == self.ended

    @invariant()
    def state_survives_a_round_trip(self):
        other = Ledger()
        other.load_state_dict(json.loads(json.dumps(self.ledger.state_dict())))
        assert other.open == self.ledger.open


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=30, stateful_step_count=20, derandomize=True, deadline=None)
