"""Pairs in the public forms, and rows that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.preference import Pair
from posttrain.errors import DataError
from posttrain.rollout.scoring import score
from posttrain_envs.preference import Preference, split_texts

ASK = [{"role": "user", "content": "Sky?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *ASK]


def says(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


def pair(**row: Any) -> Pair:
    return Preference(Preference.Options(data=[{"prompt": "a", "chosen": "b", "rejected": "c"}])).pair(row)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, Pair("2+2=", "4", "5")),
        ({"chosen": "The sky is blue.", "rejected": "The sky is green."}, Pair("The sky is", " blue.", " green.")),
        ({"prompt": ASK, "chosen": says("Blue."), "rejected": says("Green.")}, Pair(ASK, "Blue.", "Green.")),
        ({"prompt": ASK, "chosen": "Blue.", "rejected": "Green."}, Pair(ASK, "Blue.", "Green.")),
        ({"prompt": "Sky?", "chosen": says("Blue."), "rejected": says("Green.")}, Pair(ASK, "Blue.", "Green.")),
        ({"chosen": ASK + says("Blue."), "rejected": ASK + says("Green.")}, Pair(ASK, "Blue.", "Green.")),
        ({"prompt": "Sky?", "chosen": SYSTEM + says("Blue."), "rejected": SYSTEM + says("No.")}, Pair(SYSTEM, "Blue.", "No.")),
        ({"prompt": ASK, "chosen": ASK + says("Blue."), "rejected": ASK + says("No.")}, Pair(ASK, "Blue.", "No.")),
        (
            {"prompt": ASK, "chosen": ASK + says("Eh?") + ASK + says("Blue."), "rejected": ASK + says("Eh?") + ASK + says("No.")},
            Pair(ASK + says("Eh?") + ASK, "Blue.", "No."),
        ),
    ],
    ids=["texts", "implicit texts", "messages", "messages and texts", "text and answers", "implicit", "both", "both 2", "turns"],
)
def test_the_public_forms(row: dict[str, Any], wanted: Pair) -> None:
    assert pair(**row) == wanted


def test_fields_that_a_table_adds_to_messages_do_not_count() -> None:
    """A Parquet file gives every message the fields of all messages, empty where it had none."""
    chosen = [{**ASK[0], "tool_calls": None}, *says("Blue.")]
    assert pair(chosen=chosen, rejected=ASK + says("No.")) == Pair(ASK, "Blue.", "No.")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("a bluebird", "a blackbird", "a"),  # never inside a word
        ("12+7=19", "12+7=20", "12+7="),  # one word only: the letters in common
        ("x  yes", "x  no", "x"),  # all the white space goes with the answer
        ("a b", "a b c", "a"),
        ("\n\nHuman: Hi\n\nAssistant: I am", "\n\nHuman: Hi\n\nAssistant: I was", "\n\nHuman: Hi\n\nAssistant:"),
        ("\n\nHuman: A\n\nAssistant: B\n\nHuman: C\n\nAssistant: x", "\n\nHuman: A\n\nAssistant: B\n\nHuman: C\n\nAssistant: y",
         "\n\nHuman: A\n\nAssistant: B\n\nHuman: C\n\nAssistant:"),
    ],
)  # fmt: skip
def test_texts_are_parted_before_the_answers(chosen: str, rejected: str, prompt: str) -> None:
    parted = split_texts(chosen, rejected)
    assert parted[0] == prompt
    assert (parted[0] + parted[1], parted[0] + parted[2]) == (chosen, rejected)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"chosen": "blue", "rejected": "green"}, "do not begin alike"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "prompt is empty"),
        ({"prompt": 7, "chosen": "b", "rejected": "c"}, "prompt is a int"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "chosen is a str"),
        ({"prompt": "a", "chosen": "b", "rejected": says("c")}, "the same kind in chosen and rejected"),
        ({"prompt": "a", "chosen": [], "rejected": says("c")}, "chosen is an empty list"),
        ({"chosen": says("a"), "rejected": says("b")}, "no prompt"),
        ({"chosen": ASK, "rejected": ASK}, "not with an assistant's answer"),
        ({"chosen": ASK + says("a"), "rejected": SYSTEM + says("b")}, "part at message 1"),
        ({"prompt": "Sea?", "chosen": ASK + says("a"), "rejected": ASK + says("b")}, "do not hold the prompt"),
        ({"prompt": SYSTEM, "chosen": ASK + says("a"), "rejected": ASK + says("b")}, "do not hold the prompt"),
        ({"chosen": [{"role": "user", "content": [7]}, *says("a")], "rejected": says("b")}, "message 1 of chosen"),
    ],
)
def test_a_row_that_is_no_pair_says_why(row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pair(**row)


def test_pairs_that_teach_nothing_are_known() -> None:
    assert [pair(prompt="a", chosen=c, rejected=r).useless for c, r in (("b", "c"), ("b", "b"), ("", "c"), ("b", " \n"))] == [
        "", "identical", "empty", "empty",
    ]  # fmt: skip


def test_a_file_is_read_and_its_columns_renamed(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"question": f"{i}+1=", "good": str(i + 1), "bad": str(i)} for i in range(10)]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    env = Preference(Preference.Options(data=str(file), columns=columns, test_size=2))
    train, test = env.dataset("train"), env.dataset("test")
    assert (len(train), len(test)) == (8, 2)
    row = test[0]
    assert env.pair(row) == Pair(row["prompt"], row["chosen"], row["rejected"]) and env.format_prompt(row) == row["prompt"]
    assert score(env, row, row["chosen"]).total == 1 and score(env, row, row["rejected"]).total == 0


def test_a_missing_column_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(DataError, match="rejected") as caught:
        Preference(Preference.Options(data=str(file), test_size=0)).dataset("train")
    assert "pairs.jsonl:2" in str(caught.value)
