"""`posttrain template-check`: the table, what to do, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from posttrain.cli.main import main

sys.path.append(str(Path(__file__).parents[1] / "datasets_and_packers"))
from chat_styles import CHATML, QWEN3, TOOLS, write_style


def test_the_table_and_a_template_from_a_file(tmp_path, capsys):
    model = str(write_style(tmp_path / "model", TOOLS))
    assert main(["template-check", model]) == 0
    out = capsys.readouterr().out
    assert out.startswith("check ") and "turns, thinking       ok " in out
    assert out.endswith("\nmulti-turn works, no turn splits\n")
    (tmp_path / "other.jinja").write_text(QWEN3.template)
    assert main(["template-check", model, "--chat-template", str(tmp_path / "other.jinja")]) == 0
    out = capsys.readouterr().out
    assert "turns, thinking: the packer sends the sampled ids as they are" in out
    assert out.endswith("\nmulti-turn works; rows may split: turns, thinking\n")


def test_something_wrong_and_json(tmp_path, capsys):
    model = str(write_style(tmp_path, CHATML, eos=("<|end|>",)))
    assert main(["template-check", model]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("WRONG: end of turn")
    assert main(["template-check", model, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["works"]) == (model, False)
    assert found["lines"][0]["name"] == "end of turn" and found["lines"][0].keys() == {"name", "verdict", "found", "fix"}


@pytest.mark.parametrize(("template", "said"), [
    ("{% for m in messages %}", "the chat template of"),
    ("missing.jinja", "is neither a Jinja template nor a readable file"),
])  # fmt: skip
def test_templates_that_cannot_be_used(tmp_path, capsys, template, said):
    assert main(["template-check", str(write_style(tmp_path, CHATML)), "--chat-template", template]) == 2
    assert said in capsys.readouterr().err


def test_no_template_and_no_model(tmp_path, capsys):
    folder = write_style(tmp_path / "model", CHATML)
    (folder / "chat_template.jinja").unlink()
    assert main(["template-check", str(folder)]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main(["template-check", str(tmp_path / "absent")]) == 4
    assert "the model was not found" in capsys.readouterr().err
