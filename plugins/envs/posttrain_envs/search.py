"""Questions that are answered by looking things up: a corpus of documents, and two tools, `search` and `open`.

    environments=[{name: search, options: {data: questions.jsonl, corpus: documents.jsonl}}]

A question has `question`, `answers` (a text, or a list of right ones) and, if you know, `documents`: the ids of those that hold
the answer. A document has `id`, `title` (may be left out) and `text`. Both come from whatever `data` can name, columns renamed
by `columns` and `corpus_columns`. The corpus is indexed in memory, once, by BM25 (`posttrain_envs.bm25`).

The answer is the last `<answer>…</answer>`, or `\\boxed{…}`, of the last turn, after the model's thinking. The reward is 1 when
it is one of the right ones, without regard to case, punctuation, articles and spaces (numbers are compared as numbers); with
`partial` it is the share of words in common (F1), the best of all right ones.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from posttrain.data.environment import EpisodeState, Prompt, RowDataset, Split, user_prompt
from posttrain.data.source import DataOptions, open_rows
from posttrain.data.tool_environment import ToolEnvironment, tool_metrics
from posttrain.errors import ConfigError, DataError
from posttrain.types import Reward
from posttrain_envs.bm25 import BM25, K1, B, words
from posttrain_envs.math_answer import find
from posttrain_envs.short_answer import equal, f1
from posttrain_envs.tags import visible

PROMPT = "{question}\n\nLook it up in the documents, then write the answer between <answer> and </answer>, as short as it can be."
MOST_FOUND = 50


class Search(ToolEnvironment):
    """Questions about a corpus of your own, with tools to search it and to open its documents."""

    api: ClassVar[int] = 1
    provides = ("binary_rewards",)

    @dataclass(frozen=True, kw_only=True)
    class Options(ToolEnvironment.Options, DataOptions):
        """Where questions and documents come from, how it is asked, and how documents are found."""

        corpus: Any = None  # documents: named as `data` is
        corpus_columns: dict[str, str] = field(default_factory=dict)  # {id, title or text: column of the corpus}
        k1: float = K1  # BM25: how much more a word counts that is there often
        b: float = B  # BM25: how much the length of a document matters, 0 to 1
        snippet: int = 200  # characters of a document that a search shows
        partial: bool = False  # the reward is the F1 of the words, instead of 1 for the right answer alone
        system: str | None = None  # system message
        prompt: str = PROMPT  # user message; {question} is filled in
        max_turns: int = 10  # turns of the model

        def __post_init__(self) -> None:
            ToolEnvironment.Options.__post_init__(self)
            DataOptions.__post_init__(self)
            if self.corpus is None:
                raise ConfigError("options.corpus is not set", cause="there is nothing to search",
                                  fix="name a file of documents, with id, title and text")
            if isinstance(self.corpus, str):
                from posttrain.data.locate import absolute_data

                object.__setattr__(self, "corpus", absolute_data(self.corpus))  # a resume may start in another directory
            if "{question}" not in self.prompt:
                raise ConfigError(f"prompt={self.prompt!r} does not hold the question", fix="write {question} where it belongs")
            if self.k1 < 0 or not 0 <= self.b <= 1 or self.snippet < 1 or self.max_turns < 1:
                raise ConfigError("k1 must be at least 0, b from 0 to 1, snippet and max_turns at least 1")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.max_turns = self.options.max_turns
        if self.options.partial:
            self.lacks = ("binary_rewards",)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_library"}

    async def start(self) -> None:
        """Read and index the corpus."""
        await asyncio.to_thread(lambda: self._library)

    @property
    def tools(self) -> Sequence[Callable[..., Any]]:  # type: ignore[override]
        return self.search, self.open

    async def search(self, query: str, k: int = 5) -> str:
        """Find documents by words. Gives the id, title and a piece of each, best first.

        Args:
            query: words that the document should hold
            k: how many documents at most
        """
        if not 1 <= k <= MOST_FOUND:
            raise ValueError(f"k must be 1 to {MOST_FOUND}")
        return await asyncio.to_thread(lambda: self._library.search(query, k, self.options.snippet))

    async def open(self, id: str, start: int = 0) -> str:
        """Read a document.

        Args:
            id: of the document, as a search gives it
            start: the character to begin at
        """
        document = await asyncio.to_thread(lambda: self._library.document(id))
        if not 0 <= start < max(1, len(document)):
            raise ValueError(f"start must be 0 to {len(document) - 1}")
        return document[start:]

    def dataset(self, split: Split) -> RowDataset:
        """The rows of `data`. Raises DataError."""
        return open_rows(self.options, split, required=("question", "answers"), same=("question",))

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        text = self.options.prompt.replace("{question}", str(task["question"]))
        return self.with_tools(user_prompt(text, system=self.options.system))

    def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `correct`; `f1`; `answered`; `found`, where the row names documents: a tool gave one; the metrics of tools."""
        o, golds = self.options, _texts(state.task, "answers")
        closed = not o.thinking or "</think>" in state.completion
        answer = find(visible(state.completion), "auto") if closed else None
        correct = answer is not None and any(equal(answer, gold) for gold in golds)
        shared = 1.0 if correct else 0.0 if answer is None else max(f1(answer, gold) for gold in golds)
        parts = {"correct": float(correct), "f1": shared, "answered": float(answer is not None), **tool_metrics(state)}
        if state.task.get("documents"):
            told = [str(message.get("content")) for message in state.messages if message.get("role") == "tool"]
            parts["found"] = float(any(f"[{id}]" in text for id in _texts(state.task, "documents") for text in told))
        return Reward(shared if o.partial else float(correct), parts, {"extracted": answer, "answer": golds[0]})

    @cached_property
    def _library(self) -> Library:
        o = self.options
        rows = open_rows(DataOptions(data=o.corpus, columns=o.corpus_columns, test_size=0), "train", required=("text",))
        return Library(rows, k1=o.k1, b=o.b)


class Library:
    """Documents by id, and their index. Threads may share it."""

    def __init__(self, rows: RowDataset, *, k1: float, b: float) -> None:
        self._rows = rows
        self._places = {str(rows[place]["id"]): place for place in range(len(rows))}
        self._index = BM25((self._whole(place) for place in range(len(rows))), k1=k1, b=b)

    def search(self, query: str, k: int, snippet: int) -> str:
        found = self._index.search(query, k)
        if not found:
            return "no document holds any of these words"
        return "\n".join(f"{n}. {self._shown(place, query, snippet)}" for n, (place, _) in enumerate(found, 1))

    def document(self, id: str) -> str:
        """The document, its id and title first. Raises ValueError when there is none."""
        place = self._places.get(id.strip().removeprefix("[").removesuffix("]"))
        if place is None:
            near = difflib.get_close_matches(id, self._places, n=3) if len(id) <= 64 and len(self._places) < 10_000 else []
            raise ValueError(f"there is no document {id[:64]!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
        row = self._rows[place]
        return f"[{row['id']}] {row.get('title') or ''}\n\n{row['text']}"

    def _whole(self, place: int) -> str:
        row = self._rows[place]
        return f"{row.get('title') or ''}\n{row['text']}"

    def _shown(self, place: int, query: str, length: int) -> str:
        """A document's id and title, and its text from a little before the first word of the query on."""
        row, asked = self._rows[place], set(words(query))
        text = " ".join(str(row["text"]).split())
        first = next((found.start() for found in re.finditer(r"\w+", text) if asked & set(words(found[0]))), 0)
        start = 0 if first < length // 2 else text.rfind(" ", 0, first - length // 4) + 1
        piece = text[start : start + length]
        return f"[{row['id']}] {row.get('title') or ''}\n   {'…' * (start > 0)}{piece}{'…' * (start + length < len(text))}"


def _texts(row: Mapping[str, Any], key: str) -> list[str]:
    """The texts of a column that holds one or a list of them. Raises DataError for none."""
    value = row[key]
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    found = [str(one) for one in several if one is not None]
    if not found:
        where = f"the column {key!r} of row {row.get('id')!r}"
        raise DataError(f"{where} is empty", fix="write a text, or a list of them", code="no-answer")
    return found
