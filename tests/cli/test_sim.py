import re

import pytest

from posttrain.cli import sim as command
from posttrain.cli.main import main
from posttrain.loop.ledger import Ledger
from posttrain.loop.sim import run as simulator


@pytest.fixture(autouse=True)
def forget():
    simulator._CALM.clear()
    yield
    simulator._CALM.clear()


def test_schedules_that_hold(capsys):
    assert main(["sim", "--seeds", "0:6", "--order", "logical"]) == 0
    assert "6 schedules" in (out := capsys.readouterr().out) and "no law was broken" in out


def test_several_processes_do_what_one_does(capsys, monkeypatch):
    """In the order of the seeds, so that the first that breaks a law is the one that is told."""
    monkeypatch.setattr(command, "WORTH_A_PROCESS", 3)
    said = []
    for jobs in ("1", "2"):
        assert main(["sim", "--seeds", "0:12", "--jobs", jobs]) == 0
        said.append(re.sub(r"in .* s \(.* schedules a minute\)", "", capsys.readouterr().out))
    assert said[0] == said[1] and said[0].startswith("12 schedules, ")
    args = command.parser().parse_args(["--seeds", "0:12"])
    each = list(command._each(range(12), args, 2))
    assert each == [command._outcome(args, seed) for seed in range(12)] and len({one.seconds for one in each}) == 12


def test_one_with_its_trace(capsys):
    assert main(["sim", "--seed", "3", "--ahead", "1", "--trace"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("life seconds    who        what") and "publisher  version" in out and "1 schedule," in out


def test_a_broken_law_prints_the_trace_and_how_to_replay_it(capsys, monkeypatch):
    monkeypatch.setattr(Ledger, "cut_after", lambda *args, **kwargs: None)
    assert main(["sim", "--seeds", "0:40", "--order", "arrival"]) == 1
    text = capsys.readouterr().err
    assert "\nseed " in text and "resumes from step" in text and "\nfaults: " in text
    replay = text.strip().splitlines()[-1].removeprefix("replay: posttrain ").split()
    assert replay[:2] == ["sim", "--seed"] and "--order arrival" in text
    assert main(replay) == 1
    assert capsys.readouterr().err == text


def test_no_processes_are_none(capsys):
    assert main(["sim", "--seeds", "0:3", "--jobs", "0"]) == 2
    assert "--jobs 0 is not 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("seeds", ["5:2", "3", "a:b"])
def test_a_range_that_is_none(capsys, seeds):
    assert main(["sim", "--seeds", seeds]) == 2
    assert f"--seeds {seeds} is not A:B with A below B" in capsys.readouterr().err
