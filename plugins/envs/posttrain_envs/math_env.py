"""Math problems with one final answer, checked by number, by text, and only then by algebra.

    environments=[{name: math, options: {data: openai/gsm8k, data_config: main}}]
    environments=[{name: math, options: {data: my.jsonl}}]         # rows: question (or problem), answer

The answer is the last `\\boxed{…}` after the model's thinking; `answer` chooses another place (`posttrain_envs.math_answer`).
Most answers are decided in microseconds (`posttrain_envs.math_compare`). What needs algebra goes to math-verify in a process
that may be killed (`posttrain_envs.verifier`, `pip install 'posttrain[math]'`); `algebra: false` does without, and such an
answer is then wrong.

An answer that math-verify cannot decide within `verify_timeout_s` seconds of computing, or that is a tower of powers, is wrong:
0, counted in the part `gave_up`. It is not unscorable, as a fault of the machine is: a model could escape a bad reward by
writing what hangs its judge.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from posttrain.data.environment import Environment, EpisodeState, Prompt, RowDataset, Split, user_prompt
from posttrain.data.source import DataOptions, open_rows
from posttrain.errors import ConfigError
from posttrain.types import Reward
from posttrain_envs.math_answer import Where, find
from posttrain_envs.math_compare import same
from posttrain_envs.math_rows import QUESTIONS, Format, Problems, detect, different, read
from posttrain_envs.tags import visible, well_formed

ASKED = (*QUESTIONS, "prompt")
"""Columns that ask; rows that agree in them are one problem."""
PROMPT = "{question}\n\nThink step by step, and put the final answer in \\boxed{}."


class Math(Environment):
    """Math problems with a final answer: GSM8K, MATH, DAPO-Math, DeepScaleR and files of your own."""

    api: ClassVar[int] = 1
    provides = ("binary_rewards",)

    @dataclass(frozen=True, kw_only=True)
    class Options(DataOptions):
        """Where the problems come from, how they are asked, where the answer is, and who checks it."""

        format: Format = "auto"  # of the rows; auto goes by the columns
        system: str | None = None  # system message
        prompt: str | None = PROMPT  # user message; {question} is filled in; null: the question alone
        style: Literal["auto", "chat", "text"] = "auto"  # auto: chat messages where the model has a chat template, else text
        answer: Where = "auto"  # where the answer is: boxed, hash (####), tag (<answer>), line (Answer: …), last_number
        thinking: bool = False  # the template opens <think> for the model: without </think> there is no answer
        format_weight: float = 0.0  # share of the reward for the format, 0 to 1
        algebra: bool = True  # ask math-verify where numbers and text cannot decide
        verify_timeout_s: float = 5.0  # computing time of math-verify for one answer

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.prompt is not None and "{question}" not in self.prompt:
                raise ConfigError(f"prompt={self.prompt!r} does not hold the question", fix="write {question} where it belongs")
            if not 0 <= self.format_weight <= 1:
                raise ConfigError(f"format_weight={self.format_weight} must be 0 to 1")
            if not 0 < self.verify_timeout_s <= 600:
                raise ConfigError(f"verify_timeout_s={self.verify_timeout_s} must be above 0 and at most 600")
            if self.algebra and importlib.util.find_spec("math_verify") is None:
                raise ConfigError(
                    "the environment `math` needs the package math-verify, which is not installed",
                    fix="pip install 'posttrain[math]', or set `algebra: false` and compare numbers and text only",
                    code="math-verify",
                )

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        if self.options.format_weight:
            self.lacks = ("binary_rewards",)

    def dataset(self, split: Split) -> RowDataset:
        """The source's rows with `question` and `gold`. Repetitions in DAPO's file are left out, also across the splits.

        Finding them reads the whole file; a stream is not searched.
        """
        form = self.options.format
        rows = open_rows(self.options, split, same=ASKED)
        if len(rows) == 0 or rows.window is not None or "dapo" not in (form, detect(rows[0])):
            return Problems(rows, form)
        others = open_rows(self.options, "test", same=ASKED) if split == "train" else None
        return Problems(rows, form, different(rows, without=others))

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        o = self.options
        question = read(task, o.format)["question"]
        text = question if o.prompt is None else o.prompt.replace("{question}", question)
        return user_prompt(text, system=o.system, style=o.style)

    def compute_reward(self, state: EpisodeState) -> Reward:
        """Parts: `correct`; `format` (an answer where it belongs, all tags closed); `gave_up` (math-verify could not decide)."""
        o = self.options
        gold = read(state.task, o.format)["gold"]
        closed = not o.thinking or "</think>" in state.completion
        answer = find(visible(state.completion), o.answer) if closed else None
        correct, judge = self._judge(gold, answer)
        form = float(answer is not None and well_formed(state.completion))
        total = (1 - o.format_weight) * correct + o.format_weight * form
        parts = {"correct": float(correct), "format": form, "gave_up": float(judge == "gave_up")}
        return Reward(total, parts, {"extracted": answer, "answer": gold, "judge": judge})

    def _judge(self, gold: str, answer: str | None) -> tuple[bool, str]:
        """Whether it is right, and who says so: `none` (no answer), `text` (our own comparison), `algebra`, `gave_up`."""
        if answer is None:
            return False, "none"
        decided = same(gold, answer)
        if decided is not None or not self.options.algebra:
            return bool(decided), "text"
        verdict = _verify(gold, answer, self.options.verify_timeout_s)
        return verdict == "same", "gave_up" if verdict == "gave up" else "algebra"


@functools.lru_cache(4096)
def _verify(gold: str, answer: str, timeout_s: float) -> str:
    """What math-verify says; the completions of a group often agree, and a hang is not to be paid for eight times."""
    from posttrain_envs.verifier import verify

    return verify(gold, answer, timeout_s=timeout_s).value
