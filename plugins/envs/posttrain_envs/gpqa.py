"""Multiple choice with one correct answer, as in GPQA: the model ends with `Answer: C`.

    environments=[{name: gpqa, options: {data: gpqa_diamond.jsonl}}]
    evals=[{name: gpqa, options: {data: gpqa_diamond.csv}, samples: 8, k: [1, 4]}]

A row has the columns of the dataset: `Question`, `Correct Answer`, `Incorrect Answer 1` to `Incorrect Answer 3` (`columns` maps
others to these). The order of the choices is drawn from `choice_seed` and the question: the same in every run and at every place
of the row in its file, and a model that always says A is right in a quarter of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.data.environment import Environment, EpisodeState, Prompt, RowDataset, Split, user_prompt
from posttrain.data.seeds import derive_seed
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import ConfigError
from posttrain.types import Reward
from posttrain_envs.tags import visible

QUESTION, CORRECT = "Question", "Correct Answer"
COLUMNS = (QUESTION, CORRECT, *(f"Incorrect Answer {i}" for i in (1, 2, 3)))
LETTERS = "ABCD"
PROMPT = """\
Answer the following multiple choice question. Think step by step. The last line of your answer has the form 'Answer: X', \
where X is one of the letters A, B, C and D.

{question}

{choices}"""
_ANSWER = re.compile(r"(?i:answer(?:[ \t]+is)?)[ \t*_]*:[ \t*_$({\[]*(?:\\(?:boxed|text|mathrm)\{)*\(?([A-Z])(?![A-Za-z])")


class Gpqa(Environment):
    """Multiple choice in the format of GPQA: four choices in a seeded order, the last `Answer: X` counts."""

    api: ClassVar[int] = 1
    provides = ("binary_rewards",)

    @dataclass(frozen=True, kw_only=True)
    class Options(DataOptions):
        """Where the questions come from, and how they are asked."""

        system: str | None = None  # system message
        prompt: str = PROMPT  # user message; {question} and {choices} are filled in
        style: Literal["auto", "chat", "text"] = "auto"  # auto: chat messages where the model has a chat template, else text
        thinking: bool = False  # the template opens <think> for the model: without </think> there is no answer
        choice_seed: int = 0  # the order of the choices

        def __post_init__(self) -> None:
            super().__post_init__()
            for name in ("{question}", "{choices}"):
                if name not in self.prompt:
                    raise ConfigError(f"prompt={self.prompt!r} does not hold {name}", fix=f"write {name} where it belongs")

    def dataset(self, split: Split) -> RowDataset:
        """The source's rows, each with the five columns."""
        return open_rows(self.options, split, required=COLUMNS, same=(QUESTION,))

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        o = self.options
        choices, _ = self.choices(task)
        shown = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, choices, strict=True))
        text = o.prompt.replace("{question}", str(task[QUESTION]).strip()).replace("{choices}", shown)
        return user_prompt(text, system=o.system, style=o.style)

    def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `correct`; `format`, whether there was an answer at all."""
        _, right = self.choices(state.task)
        closed = not self.options.thinking or "</think>" in state.completion
        said = answer_of(state.completion) if closed else None
        return Reward(float(said == right), {"correct": float(said == right), "format": float(said is not None)},
                      {"extracted": said, "answer": right})  # fmt: skip

    def choices(self, task: Mapping[str, Any]) -> tuple[list[str], str]:
        """The choices in the order that they are asked, and the letter of the correct one."""
        texts = [str(task[column]).strip() for column in COLUMNS[1:]]
        order = list(range(len(texts)))
        random.Random(derive_seed(self.options.choice_seed, "choices", str(task[QUESTION]))).shuffle(order)
        return [texts[i] for i in order], LETTERS[order.index(0)]


def answer_of(completion: str) -> str | None:
    """The letter of the last `Answer: X` after the model's thinking; None without one."""
    found = _ANSWER.findall(visible(completion))
    return found[-1] if found else None
