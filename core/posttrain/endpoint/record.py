"""What a session recorded, as rows that can train: every sampled token with exactly the context that the engine read.

An answer goes on with the one before it when its prompt begins with that one's ids; the first that does shares its row. Whatever
else (a history that the agent or the template rewrote, a second answer to the same question, a parallel question) begins a row
of its own, whose prompt is what the engine read. No sampled token is in two rows as trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.tracking.rollouts import ROW
from posttrain.types import ENV_VERSION, FinishReason, Message, Trajectory, Turn


@dataclass(eq=False, slots=True)
class Answer:
    """One sampled answer, and what came before it.

    before    the answer that its conversation goes on with, if any
    goes_on   its prompt begins with the ids of `before`; else it was rendered as a whole
    given     the ids of the prompt, those of `before` left out where it goes on with them
    messages  what was said after `before`, the answer as its last
    """

    before: Answer | None
    goes_on: bool
    given: list[int]
    messages: list[Message]
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason

    @property
    def line(self) -> list[Answer]:
        """The answers of its conversation, from the first on."""
        out = [self]
        while (before := out[-1].before) is not None:
            out.append(before)
        return out[::-1]

    @property
    def ids(self) -> list[int]:
        """The whole prompt and the answer: what the next prompt begins with."""
        out: list[int] = []
        for answer in self.line:
            out = [*(out if answer.goes_on else ()), *answer.given, *answer.token_ids]
        return out

    @property
    def conversation(self) -> list[Message]:
        return [message for answer in self.line for message in answer.messages]


def rows(answers: Sequence[Answer]) -> list[Trajectory]:
    """The rows of the answers, in the order of their first ones; the row of the last answer is last."""
    chains: list[list[Answer]] = []
    ends: dict[int, list[Answer]] = {}  # id of the last answer of a chain -> the chain
    for answer in answers:
        chain = ends.pop(id(answer.before), None) if answer.goes_on else None
        if chain is None:
            chains.append(chain := [])
        chain.append(answer)
        ends[id(answer)] = chain
    chains.sort(key=lambda chain: chain[-1] is answers[-1])  # stable: all others as they were
    return [_row(chain) for chain in chains]


def episode(answers: Sequence[Answer], sample_id: str = "", group_id: str = "", env: str = "") -> Trajectory | None:
    """All rows as one trajectory: the row of the last answer, with the others as its `earlier`. None when there is no answer."""
    made = rows(answers)
    for number, row in enumerate(made):
        row.sample_id, row.group_id, row.env = sample_id, group_id, env
        if row is not made[-1]:
            row.sample_id, row.info = f"{sample_id}#{number}", {ROW: number}
    if not made:
        return None
    made[-1].earlier = made[:-1]
    return made[-1]


def _row(chain: Sequence[Answer]) -> Trajectory:
    first, last = chain[0], chain[-1]
    context = first.before.ids if first.goes_on and first.before is not None else []
    row = Trajectory([*context, *first.given], [], [], [], [], last.finish_reason, messages=last.conversation)
    for answer in chain:
        if answer is not first:
            _append(row, answer.given, [0.0] * len(answer.given), [ENV_VERSION] * len(answer.given), sampled=False)
        _append(row, answer.token_ids, answer.logprobs, answer.versions, sampled=True)
    return row


def _append(row: Trajectory, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, sampled: bool) -> None:
    begin = len(row.token_ids)
    row.token_ids += ids
    row.mask += [sampled] * len(ids)
    row.rollout_logprobs += logprobs
    row.weight_versions += versions
    if ids:
        row.turns.append(Turn(begin, len(row.token_ids), "model" if sampled else "env"))
