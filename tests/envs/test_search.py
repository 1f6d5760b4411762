"""The search environment: its index against numbers computed by hand, its tools, its rewards, and its data."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import plugins
from posttrain.data.environment import ToolChat, episode
from posttrain.errors import ConfigError, DataError
from posttrain.testing import EnvContract
from posttrain_envs.bm25 import BM25, words
from posttrain_envs.search import Search
from posttrain_envs.short_answer import equal, f1, normal

DOCUMENTS = [
    {"id": "tarn", "title": "Tarn",
     "text": "Tarn is a town on the river Ebb. " + "Its market is old. " * 20 + "The bridge has 12 arches."},
    {"id": "ebb", "title": "Ebb", "text": "The Ebb is a river. It rises on Mount Sor and ends in the sea."},
    {"id": "sor", "title": "Mount Sor", "text": "Mount Sor is 1,843 m high."},
    {"id": "7", "text": "Nothing of note."},
]  # fmt: skip
QUESTIONS = [
    {"id": "q1", "question": "Where does the river of Tarn rise?", "answers": ["Mount Sor", "Sor"], "documents": ["ebb"]},
    {"id": "q2", "question": "How high is Mount Sor, in metres?", "answers": "1843", "documents": ["sor"]},
    {"id": "q3", "question": "What is Tarn?", "answers": ["a town"]},
    *({"id": f"x{n}", "question": f"Is {n} in the documents?", "answers": "no"} for n in range(20)),
]


def made(**options: Any) -> Search:
    return Search(Search.Options(**{"data": QUESTIONS, "corpus": DOCUMENTS, "test_size": 4, **options}))


def use(env: Search, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """What the tools answer."""
    text = "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in calls)
    messages = asyncio.run(env.env_response(episode(env, QUESTIONS[0], text)))
    return [message["content"] for message in messages or []]


class TestSearch(EnvContract):
    @pytest.fixture
    def env(self) -> Search:
        return made()

    def gold(self, row: Mapping[str, Any]) -> str:
        golds = row["answers"]
        return f"<answer>{golds if isinstance(golds, str) else golds[0]}</answer>"


# --- BM25 ---------------------------------------------------------------------------------------------------------------------


def test_scores_by_hand() -> None:
    """Three texts of 3, 2 and 4 words, 3 on average; k1 = 1.2, b = 0.75.

    cat is in one of three: idf = ln(1 + 2.5/1.5) = 0.980829; once in 3 of 3 words: 0.980829 · 2.2 / (1 + 1.2) = 0.980829.
    the is in two of three: idf = ln(1 + 1.5/2.5) = 0.470004; once in 3 words: · 2.2/2.2; once in 2 words: damping
    1.2 · (0.25 + 0.75 · 2/3) = 0.9, so 0.470004 · 2.2/1.9 = 0.544215. dog: once in 2 words, three times in 4: idf 0.470004,
    damping 1.2 · (0.25 + 0.75 · 4/3) = 1.5, so 0.470004 · 3 · 2.2 / 4.5 = 0.689339.
    """
    index = BM25(["The cat sat", "the dog", "dog dog, DOG ran"])
    assert index.search("cat", 9) == [(0, pytest.approx(0.980829, abs=1e-6))]
    assert index.search("the", 9) == [(1, pytest.approx(0.544215, abs=1e-6)), (0, pytest.approx(0.470004, abs=1e-6))]
    assert index.search("dog", 9) == [(2, pytest.approx(0.689339, abs=1e-6)), (1, pytest.approx(0.544215, abs=1e-6))]
    assert index.search("the dog", 9)[0] == (1, pytest.approx(2 * 0.544215, abs=1e-6))
    assert index.search("a cat the", 1) == [(0, pytest.approx(0.980829 + 0.470004, abs=1e-6))]


def test_k1_and_b() -> None:
    """k1 = 0: how often does not count. b = 0: the length does not. k1 = 2, b = 1: tf 3 in 4 of 3 words, damping 2 · 4/3."""
    texts, idf = ["The cat sat", "the dog", "dog dog, DOG ran"], math.log(1 + 1.5 / 2.5)
    assert [score for _, score in BM25(texts, k1=0).search("dog", 9)] == [pytest.approx(idf)] * 2
    assert dict(BM25(texts, b=0).search("dog", 9)) == {1: pytest.approx(idf), 2: pytest.approx(idf * 3 * 2.2 / 4.2)}
    assert dict(BM25(texts, k1=2, b=1).search("dog", 9))[2] == pytest.approx(idf * 3 * 3 / (3 + 8 / 3))
    for bad in ({"k1": -1}, {"b": 1.1}, {"b": -0.1}):
        with pytest.raises(ValueError, match="k1="):
            BM25(texts, **bad)


def test_words_and_ties() -> None:
    assert words("It's ＡＢＣ-12 Straße, É") == ["it", "s", "abc", "12", "strasse", "é"]
    assert [place for place, _ in BM25(["b", "a", "b", "b"]).search("b", 2)] == [0, 2]
    for texts, query in (([], "a"), (["", " "], "a"), (["a"], ""), (["a"], "b")):
        assert BM25(texts).search(query, 5) == []


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.text("ab c", max_size=12), min_size=1, max_size=8), st.text("ab cd", max_size=6))
def test_scores_are_the_sum_over_words(texts: list[str], query: str) -> None:
    """Against the formula, written plainly."""
    split = [words(text) for text in texts]
    mean = sum(map(len, split)) / len(split)
    wanted = dict[int, float]()
    for word in set(words(query)):
        holds = sum(word in one for one in split)
        for place, one in enumerate(split):
            if tf := one.count(word):
                idf = math.log(1 + (len(split) - holds + 0.5) / (holds + 0.5))
                wanted[place] = wanted.get(place, 0.0) + idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(one) / mean))
    assert dict(BM25(texts).search(query, 99)) == pytest.approx(wanted)


# --- the tools ------------------------------------------------------------------------------------------------------------------


def test_search_and_open() -> None:
    rest_of_sor = {"id": "[sor]", "start": 17}
    found, one, rest = use(made(), ("search", {"query": "river"}), ("open", {"id": "ebb"}), ("open", rest_of_sor))
    assert found.splitlines()[:3] == [
        "1. [ebb] Ebb", "   The Ebb is a river. It rises on Mount Sor and ends in the sea.", "2. [tarn] Tarn",
    ]  # fmt: skip
    assert found.endswith("…") and len(found.splitlines()[3]) == 3 + 200 + 1
    assert one == "[ebb] Ebb\n\nThe Ebb is a river. It rises on Mount Sor and ends in the sea."
    assert rest == "Mount Sor is 1,843 m high."


def test_a_piece_begins_near_the_word() -> None:
    (text,) = use(made(snippet=60), ("search", {"query": "arches", "k": 1}))
    head, piece = text.split("\n")
    assert head == "1. [tarn] Tarn" and "12 arches." in piece and piece.strip().startswith("…") and len(piece) < 70


@pytest.mark.parametrize(
    ("name", "given", "words_"),
    [
        ("search", {"query": "zebra"}, "no document holds any of these words"),
        ("search", {"query": ""}, "no document holds"),
        ("search", {"query": "x " * 50_000}, "no document holds"),
        ("search", {"query": "river", "k": 0}, "Error: ValueError: k must be 1 to 50"),
        ("search", {"query": 7}, "Error: search: query must be text"),
        ("open", {"id": "tarm"}, "Error: ValueError: there is no document 'tarm'; did you mean tarn?"),
        ("open", {"id": "z" * 100_000}, "Error: ValueError: there is no document 'zzz"),
        ("open", {"id": "ebb", "start": 10_000}, "Error: ValueError: start must be 0 to"),
        ("open", {"id": "ebb", "start": -1}, "Error: ValueError: start must be 0 to"),
        ("open", {"id": "7"}, "[7] \n\nNothing of note."),
        ("look", {}, "Error: there is no tool 'look'"),
    ],
)
def test_what_is_wrong_is_told(name: str, given: dict[str, Any], words_: str) -> None:
    (told,) = use(made(), (name, given))
    assert told.startswith(words_) and len(told) < 200


def test_the_corpus_is_read_once_at_the_start() -> None:
    env = made()
    asyncio.run(env.start())
    library = env.__dict__["_library"]
    use(env, ("search", {"query": "river"}))
    assert env.__dict__["_library"] is library and "_library" not in env.__getstate__()


def test_questions_and_documents_from_files(tmp_path: Path) -> None:
    questions = [{"q": f"Where is {n}?", "a": ["here", "there"]} for n in range(9)]
    documents = [{"name": f"d{n}", "body": f"{n} is here"} for n in range(9)]
    for name, rows in (("q", questions), ("d", documents)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = plugins.load("envs", "search", data=str(tmp_path / "q.jsonl"), columns={"question": "q", "answers": "a"}, test_size=2,
                       corpus=str(tmp_path / "d.jsonl"), corpus_columns={"id": "name", "text": "body"})  # fmt: skip
    assert len(env.dataset("train")) == 7 and use(env, ("search", {"query": "5"})) == ["1. [d5] \n   5 is here"]
    prompt = env.format_prompt(env.dataset("train")[0])
    assert isinstance(prompt, ToolChat) and [tool["function"]["name"] for tool in prompt.tools] == ["search", "open"]
    assert prompt.tools[0]["function"]["parameters"]["required"] == ["query"]


# --- the reward -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "gold", "right", "shared"),
    [
        ("The  mount-SOR.", "Mount Sor", True, 1.0),
        ("Mount", "Mount Sor", False, 2 / 3),
        ("a high mount, Sor", "Mount Sor", False, 0.8),
        ("Sor Sor", "Mount Sor", False, 0.5),
        ("1,843 metres", "1843", True, 1.0),
        ("1843.0", "1843", True, 1.0),
        ("-1843", "1843", False, 0.0),
        ("1844", "1843", False, 0.0),
        ("Ｅbb", "ebb", True, 1.0),
        ("?", "!", False, 0.0),
        ("the", "The", True, 1.0),
        ("C", "C++", False, 0.0),
    ],
)
def test_answers_are_compared(answer: str, gold: str, right: bool, shared: float) -> None:
    assert equal(answer, gold) == right and f1(answer, gold) == pytest.approx(shared), (normal(answer), normal(gold))


def test_rewards() -> None:
    env, row = made(), QUESTIONS[0]
    for text, right in (
        ("<answer>sor</answer>", 1), ("\\boxed{Mount Sor}", 1), ("Mount Sor", 0), ("<answer>Ebb</answer>", 0),
        ("<think><answer>Sor</answer></think>", 0), ("<answer>Sor</answer> no: <answer>Tarn</answer>", 0),
    ):  # fmt: skip
        assert env.compute_reward(episode(env, row, text)).total == right
    half = made(partial=True)
    assert half.lacks == ("binary_rewards",)
    assert half.compute_reward(episode(half, row, "<answer>Mount Ebb</answer>")).total == 0.5


def test_whether_a_document_that_holds_the_answer_was_seen() -> None:
    env, row = made(), QUESTIONS[0]
    state = episode(env, row, "<answer>Sor</answer>")
    assert env.compute_reward(state).parts["found"] == 0.0
    state.messages.append({"role": "tool", "name": "search", "content": use(env, ("search", {"query": "rises"}))[0]})
    assert env.compute_reward(state).parts["found"] == 1.0
    assert "found" not in env.compute_reward(episode(env, QUESTIONS[2], "")).parts


@pytest.mark.parametrize("options", [
    {}, {"corpus": DOCUMENTS, "k1": -1.0}, {"corpus": DOCUMENTS, "b": 2.0}, {"corpus": DOCUMENTS, "snippet": 0},
    {"corpus": DOCUMENTS, "prompt": "?"}, {"corpus": DOCUMENTS, "max_turns": 0}, {"corpus": DOCUMENTS, "tool_timeout_s": 0.0},
    {"corpus": DOCUMENTS, "test_size": -1},
])  # fmt: skip
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plugins.load("envs", "search", data=QUESTIONS, **options)


def test_documents_without_a_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"id": "a", "text": "b"}\n{"id": "c"}\n')
    with pytest.raises(DataError, match="text"):
        asyncio.run(made(corpus=str(tmp_path / "d.jsonl")).start())
