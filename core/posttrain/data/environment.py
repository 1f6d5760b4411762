"""The environment contract: where prompts come from and what an answer is worth.

An environment object is shared by all episodes and holds no state of any of them; what belongs to one episode is in its
`EpisodeState`. It is sent to the processes that score synchronous rewards, so it must pickle (classes of a notebook do).
A reward that cannot be computed is unscorable, never 0: raise, or return `Reward(None)`. The smallest environment:

    class Parity(Environment):
        '''Say whether a number is even.'''

        def dataset(self, split):
            numbers = range(100) if split == "train" else range(100, 120)
            return [{"id": str(n), "n": n, "answer": "yes" if n % 2 == 0 else "no"} for n in numbers]

        def format_prompt(self, task):
            return [{"role": "user", "content": f"Is {task['n']} even? Say yes or no."}]

        def compute_reward(self, state):
            return float(state.completion.strip().lower() == state.task["answer"])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

from posttrain.data.reward_range import Range
from posttrain.types import Declares, Message, Reward, Trajectory

Split: TypeAlias = Literal["train", "test"]
Prompt: TypeAlias = list[Message] | str | list[int]
"""What a model is asked: chat messages (through the chat template), a plain text, or token ids for full control."""


@runtime_checkable
class RowDataset(Protocol):
    """A map-style dataset: `datasets.Dataset`, a list, or anything with a length and rows by index.

    A row is a mapping. Its `id` names it for ever; a row without one is named by its index. Two threads may read at a time.
    A dataset may also have `where(index) -> str`, a row's place for messages, and `window: int`, how far ahead of the draws it is
    to be read when its rows come from a stream (see `data.view`).
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(slots=True)
class EpisodeState:
    """Everything about one episode, and the only place for what an environment wants to remember about it.

    task         the dataset row
    prompt       what `format_prompt` returned
    messages     the conversation so far, the model's last turn included
    completion   text of the model's last turn, without special tokens
    trajectory   the token record; its reward fields are still empty
    custom       free for the environment
    seed         for the environment's own randomness; differs from episode to episode
    turn         model turns so far
    offload      `await offload(method, *args, timeout=s)`: calls `environment.method(state, *args)`, a plain function, in a
                 process that is killed at the deadline; what it changes in `custom` is there afterwards. Raises TimeoutError
                 after `timeout` seconds and RuntimeError for what it raised. None where nobody hosts the episode
    """

    task: Mapping[str, Any]
    prompt: Prompt
    messages: list[Message] = field(default_factory=list)
    completion: str = ""
    trajectory: Trajectory | None = None
    custom: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    turn: int = 0
    offload: Callable[..., Awaitable[Any]] | None = field(default=None, repr=False, compare=False)


class Environment(Declares, ABC):
    """Base class of every environment. `Options` are its settings under `environments[i].options`."""

    api: ClassVar[int] = 1
    reward_timeout_s: float = 0.0
    """Seconds that one reward may take where that is more than `rollout.reward_timeout_s`. An object may set its own."""
    answer_timeout_s: float = 0.0
    """The same for one `env_response`, and `rollout.env_timeout_s`."""
    offloads: ClassVar[bool] = False
    """Whether it calls `state.offload`: its processes are then there also where its own methods are coroutines."""
    metrics: Mapping[str, Range] = {}
    """How parts of its reward are shown: bounds, which end is the good one, weight. An object may set its own."""
    max_turns: int = 10
    """Model turns after which an episode ends, whatever `env_response` would say. An object may set its own."""

    @dataclass(frozen=True)
    class Options:
        """Settings of the environment; a frozen dataclass with defaults, nested in the subclass."""

    def __init__(self, options: Any = None) -> None:
        self.options: Any = type(self).Options() if options is None else options

    @abstractmethod
    def dataset(self, split: Split) -> RowDataset:
        """The rows of `split`. The same options give the same rows with the same ids, on every machine and on every call."""

    def format_prompt(self, task: Mapping[str, Any]) -> Prompt:
        """What the model is asked about this row; the same in training and evals. Default: the row's `prompt`."""
        return task["prompt"]  # type: ignore[no-any-return]

    def task_key(self, task: Mapping[str, Any]) -> Any:
        """What makes two rows the same task: one that trains has the key of no held-out row. Default: the prompt.

        For an environment whose prompts do not tell its rows apart: a game names what it hides.
        """
        return self.format_prompt(task)

    async def start(self) -> None:
        """Bring up what episodes share: a pool of sandboxes, a client. Once, on the event loop, before the first episode.

        What it makes is not sent to the processes that score: keep it out of the pickle.
        """

    async def close(self) -> None:
        """Give back what `start` made; idempotent."""

    def env_response(self, state: EpisodeState) -> list[Message] | Awaitable[list[Message] | None] | None:
        """The environment's answer to the model's last turn; None ends the episode. Default: a single turn.

        A plain function runs in a pool of processes (what it changes in `state.custom` comes back), a coroutine on the event
        loop, each within `rollout.env_timeout_s`. What it raises ends the episode, which is then unscorable.
        """
        return None

    @abstractmethod
    def compute_reward(self, state: EpisodeState) -> Reward | float | Awaitable[Reward | float]:
        """What the finished episode is worth. A plain function runs in a pool of processes, a coroutine on the event loop."""

    async def finish_reward(self, state: EpisodeState, reward: Reward) -> Reward | float:
        """Work that waits, on the event loop, after a plain `compute_reward` has given `reward`; its result is what counts.

        For a judge that is asked only when a check passed, say. Not called when `reward` is unscorable. Default: `reward`.
        """
        return reward


def episode(env: Environment, task: Mapping[str, Any], completion: str, *, seed: int = 0) -> EpisodeState:
    """The state of a single-turn episode that was answered with `completion`."""
    prompt = env.format_prompt(task)
    messages: list[Message] = [*as_messages(prompt), {"role": "assistant", "content": completion}]
    return EpisodeState(task, prompt, messages, completion, seed=seed, turn=1)


class ChatOrText(list[Message]):
    """Chat messages that may be asked as plain text: through the chat template of a model that has one, else as `text`.

    For a question that any model can be asked, an instruct model and a base model alike.
    """

    @property
    def text(self) -> str:
        """The contents, one after the other, with an empty line between."""
        return "\n\n".join(str(message["content"]) for message in self)


class ToolChat(ChatOrText):
    """Chat messages and the tools that the model may call, as JSON schemas of functions (`data.tools`).

    A chat template that knows tools gets them; for any other model they are described in the system message.
    """

    def __init__(self, messages: Iterable[Message], tools: Iterable[dict[str, Any]]) -> None:
        super().__init__(messages)
        self.tools = list(tools)


Style: TypeAlias = Literal["auto", "chat", "text"]
"""auto: chat messages where the model has a chat template, else text; chat: through the template; text: as plain text."""


def user_prompt(text: str, *, system: str | None = None, style: Style = "auto") -> Prompt:
    """One question as a prompt, with a system message before it when there is one."""
    messages = ChatOrText([Message(role="system", content=system)] if system else [])
    messages.append(Message(role="user", content=text))
    return messages if style == "auto" else list(messages) if style == "chat" else messages.text


def as_messages(prompt: Prompt) -> list[Message]:
    """The conversation that a prompt opens: its own messages, a text as the user's, none for ids."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(m) for m in prompt] if is_messages(prompt) else []  # type: ignore[misc, arg-type]


def is_messages(prompt: object) -> TypeGuard[list[Message]]:
    """Whether a prompt is a list of chat messages (an empty list is not)."""
    return isinstance(prompt, Sequence) and not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


class Rows(Sequence[dict[str, Any]]):
    """Rows made on demand by `make(index)`: a dataset of any size that costs no memory.

    `make` must depend on the index alone. Raises IndexError outside `0..size-1`.
    """

    def __init__(self, size: int, make: Any) -> None:
        self._size, self._make = size, make

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        position = int(index) + self._size if index < 0 else int(index)
        if not 0 <= position < self._size:
            raise IndexError(f"row {index} of {self._size}")
        return self._make(position)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._make(i) for i in range(self._size))
