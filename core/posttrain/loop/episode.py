"""An episode: one sample of one prompt, turn by turn, to the token. It generates nothing itself and knows no engine.

    episode = Episode(opening, packer, limit=4096, max_tokens=256)
    while True:
        episode.take(await …)                     # a completion of `episode.ids`, at most `episode.room` tokens
        if (messages := …) is None or not episode.answer(messages):
            break                                 # else `episode.ids` is the next prompt
    episode.trajectory("0:math:7/0", "0:math:7", "math")

What was sampled is never tokenised again: the next prompt begins with all ids so far, and the packer's `extend` writes what the
template puts between turns, once and untrained. Some templates rewrite what was said (drop earlier thinking, trim). Then the
ids so far are a row of their own, and a new row begins with the prompt that the template renders: every trained token has the
context in which it was sampled. With `verbatim` (`rollout.keep_history_verbatim`) the ids are kept as they are instead, and the
engine is asked with them, rewritten or not. A run does one or the other in all its episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.data.environment import Prompt, ToolChat, as_messages, is_messages
from posttrain.data.packer import engine_input, next_prompt
from posttrain.tracking.rollouts import ROW
from posttrain.types import ENV_VERSION, FinishReason, Message, Trajectory, Turn

if TYPE_CHECKING:
    from posttrain.data.packer import DataPacker
    from posttrain.types import Completion


@dataclass(slots=True)
class Opening:
    """What an episode begins with.

    prompt     as the environment's `format_prompt` gave it       item   what the packer made of it, `prompt_ids` among it
    messages   the conversation that it opens
    """

    prompt: Prompt
    item: Mapping[str, Any]
    messages: list[Message]

    @classmethod
    def of(cls, prompt: Prompt, packer: DataPacker) -> Opening:
        """Raises PackerError for a prompt that cannot be asked."""
        return cls(prompt, engine_input(packer, prompt), as_messages(prompt))


@dataclass(slots=True)
class _Row:
    """Ids with one context: a prompt, and what follows it."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def add(self, ids: Sequence[int], completion: Completion | None = None) -> None:
        """Sampled tokens with what the engine said of them, or tokens of the environment."""
        if ids:
            self.turns.append(Turn(len(self.token_ids), len(self.token_ids) + len(ids), "model" if completion else "env"))
        self.token_ids += ids
        self.mask += [completion is not None] * len(ids)
        self.logprobs += completion.logprobs if completion else [0.0] * len(ids)
        self.versions += completion.versions if completion else [ENV_VERSION] * len(ids)


class Episode:
    """limit: `rollout.max_model_len`, prompt and all turns.   max_tokens: of one turn.   verbatim: see above."""

    def __init__(self, opening: Opening, packer: DataPacker, *, limit: int, max_tokens: int, verbatim: bool = False) -> None:
        self._opening, self._packer = opening, packer
        self._limit, self._max_tokens = limit, max_tokens
        self._chat = not isinstance(opening.prompt, str) and packer.chats
        asked = self._chat and is_messages(opening.prompt)  # else the environment gave ids, which no template renders again
        self._prefix = packer.thinking_prefix if asked else ""
        self._verbatim = verbatim or not asked
        self._rows = [_Row(list(opening.item["prompt_ids"]))]
        self.messages: list[Message] = list(opening.messages)
        self.completion = ""
        self.finish_reason: FinishReason = "length"
        self.turn = 0

    @property
    def ids(self) -> list[int]:
        """The prompt of the next turn."""
        row = self._rows[-1]
        return [*row.prompt_ids, *row.token_ids]

    @property
    def room(self) -> int:
        """Tokens that the next turn may have."""
        row = self._rows[-1]
        return max(0, min(self._max_tokens, self._limit - len(row.prompt_ids) - len(row.token_ids)))

    def take(self, done: Completion) -> None:
        """The model's turn."""
        self._rows[-1].add(done.token_ids, done)
        self.finish_reason = done.finish_reason
        if done.finish_reason in ("aborted", "error"):
            return
        said = self._packer.get_rollout_output(done.token_ids)
        self.completion = self._prefix + said["text"]
        turn: list[Message] = [dict(message) for message in said["messages"]]  # type: ignore[misc]
        if self._prefix and turn:
            turn[0]["content"] = self._prefix + turn[0]["content"]
        self.messages += turn
        self.turn += 1

    def answer(self, messages: Sequence[Message]) -> bool:
        """What the environment says to it. False: there is no room for a turn after that, and the ids stay as they are.

        Raises PackerError where the template cannot render it.
        """
        self.messages += messages
        ids, goes_on = self._next_prompt(messages)
        if len(ids) >= self._limit:
            self.finish_reason = "length"
            return False
        if goes_on:
            self._rows[-1].add(ids[len(self.ids) :])
        else:
            self._rows.append(_Row(ids))
        return True

    def _next_prompt(self, messages: Sequence[Message]) -> tuple[list[int], bool]:
        """The ids of the next turn's prompt, and whether they go on with those so far."""
        ids = self.ids
        if not self._chat:
            return [*ids, *self._packer.encode("".join(str(message["content"]) for message in messages))], True
        return next_prompt(self._packer, ids, messages, self._rendered, verbatim=self._verbatim, prefix=self._prefix)

    def trajectory(self, sample_id: str, group_id: str, env: str) -> Trajectory:
        """As it is now; the lists of tokens are the episode's own. A row without a turn is left out."""
        *before, last = [row for row in self._rows if row.turns] or self._rows[:1]
        made = [
            Trajectory(
                prompt_ids=row.prompt_ids, token_ids=row.token_ids, mask=row.mask, rollout_logprobs=row.logprobs,
                weight_versions=row.versions, finish_reason=self.finish_reason if row is last else "stop", group_id=group_id,
                sample_id=sample_id if row is last else f"{sample_id}#{number}", env=env, turns=row.turns,
                info={} if row is last else {ROW: number},
            )
            for number, row in enumerate([*before, last])
        ]  # fmt: skip
        made[-1].messages, made[-1].earlier = list(self.messages), made[:-1]
        return made[-1]

    def _rendered(self) -> list[int]:
        """The next prompt as the template has it, from all messages."""
        prompt = self._opening.prompt
        history: Prompt = ToolChat(self.messages, prompt.tools) if isinstance(prompt, ToolChat) else list(self.messages)
        return list(engine_input(self._packer, history)["prompt_ids"])
