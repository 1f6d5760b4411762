"""The DataPacker contract: one object owns all shaping between a raw sample and what a model reads.

Tokenizer, chat template, placeholders and masks of a model live here and nowhere else. A packer has no weights, calls no
model, runs on the CPU and pickles. Token ids are the unit of exchange: what an engine sampled is never tokenised again.

    prompt ──get_rollout_input──▶ {"prompt_ids"} ──engine──▶ Trajectory ──get_policy_input──▶ {"input_ids", "mask"}
                                                                        ──policy_collate_fn──▶ {"input_ids": [B, L], …}

`mask[t]` is about token `t` itself, not about the position that predicts it. The smallest packer subclasses the built-in one:

    class Terse(DecoderOnlyPacker):
        def get_rollout_input(self, prompt):
            return super().get_rollout_input([{"role": "system", "content": "Be brief."}, *prompt])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from posttrain.data.environment import ChatOrText, Prompt, ToolChat, is_messages
from posttrain.data.hub import eos_token_ids as eos_token_ids
from posttrain.data.hub import model_config
from posttrain.data.hub import stop_token_ids as stop_token_ids
from posttrain.data.special_tokens import SpecialTokens
from posttrain.errors import PackerError, error
from posttrain.types import Declares, Message, Trajectory

if TYPE_CHECKING:
    import torch

    from posttrain.data.preference import Pair, PairIds, Truncate

TEXT_PACKER, PAIR_PACKER = "decoder_only", "preference"
_TOKENIZER_FIX = (
    "copy tokenizer.json and tokenizer_config.json of the same model into the folder, beside config.json: a fine-tuned model "
    "has those of its base model"
)
_TEMPLATE_FIX = "set model.chat_template to a Jinja template or to the path of a file that holds one"


class DataPacker(Declares, ABC):
    """Base class of every packer. The factory takes no argument; `setup` then binds the packer to a model.

    tokenizer        of the model, None before `setup`
    name_or_path     the model that the packer was set up for, "" before
    special_tokens   what the tokenizer puts around a plain text, what ends a completion, and the checks that follow from it
    template_variables   what the chat template reads in every rendering (`enable_thinking`)
    thinking_prefix      text that begins every turn of the model: part of the prompt, not sampled (`rollout.thinking_prefix`)
    """

    api: ClassVar[int] = 1
    template_variables: Mapping[str, Any] = {}
    thinking_prefix: str = ""

    def __init__(self) -> None:
        self.name_or_path = ""
        self.tokenizer: Any = None
        self.special_tokens = SpecialTokens()

    def setup(self, name_or_path: str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> DataPacker:
        """Load the tokenizer of `name_or_path`; `chat_template` (Jinja text or a file) replaces the tokenizer's own.

        Raises PackerError: E14 for an empty name, and for a tokenizer that cannot be loaded; EngineStartError for a model that
        is absent or gated. Returns the packer itself.
        """
        if not name_or_path:
            raise error("E14")
        tokenizer = load_tokenizer(name_or_path, chat_template=chat_template, trust_remote_code=trust_remote_code)
        self.name_or_path, self.tokenizer = name_or_path, tokenizer
        self.special_tokens = SpecialTokens.probe(tokenizer, eos_token_ids(name_or_path, tokenizer))
        return self

    @property
    def chats(self) -> bool:
        """Whether messages can be asked: the tokenizer has a chat template. A packer that renders by itself says True."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template writes the tools that there are itself."""
        return "tools" in str(getattr(self.tokenizer, "chat_template", None) or "")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no special tokens around it."""
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def spell(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens too."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    @abstractmethod
    def get_rollout_input(self, prompt: Prompt) -> dict[str, Any]:
        """What the engine gets for a prompt: `{"prompt_ids": list[int], …}`."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids without special tokens: what rewards and people read."""

    def get_rollout_output(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """A completion as the environment sees it: `{"text": str, "messages": [assistant message]}`."""
        text = self.decode(token_ids)
        return {"text": text, "messages": [{"role": "assistant", "content": text}]}

    @abstractmethod
    def get_policy_input(self, trajectory: Trajectory) -> dict[str, Any]:
        """The training row: `{"input_ids": [L], "mask": [L], "rollout_logprobs": [L]}`, each entry about token `t` itself."""

    @abstractmethod
    def policy_compute_max_len(self, items: Sequence[Mapping[str, Any]]) -> int:
        """The number of columns that a batch of rows needs, tokens."""

    @abstractmethod
    def policy_collate_fn(self, items: Sequence[Mapping[str, Any]], max_len: int) -> dict[str, torch.Tensor]:
        """The rows as CPU tensors of shape `[B, max_len]`, padded on the right. Padding is found by length, never by id."""

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The ids of the next turn's prompt: `ids` (prompt and sampled tokens so far) followed by `messages`.

        Raises PackerError when the template cannot continue; the result always starts with `ids`.
        """
        raise PackerError(
            f"{type(self).__name__} cannot continue a conversation",
            cause="it does not implement extend(ids, messages)",
            fix="implement it, or use a single-turn environment",
        )

    def get_preference_input(self, pair: Pair, *, max_len: int, truncate: Truncate) -> PairIds:
        """A preference pair as ids, one prompt and two completions, of at most `max_len` tokens per row (`preference.fit`).

        Raises PackerError when the packer is not made for pairs.
        """
        raise PackerError(
            f"{type(self).__name__} cannot shape preference pairs",
            cause="it does not implement get_preference_input(pair, max_len, truncate)",
            fix="leave rl.data.packer unset, or subclass posttrain_datapackers.preference:PreferencePacker",
            where="rl.data.packer",
        )

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Chat messages as text through the chat template, which may read `variables` too (`tools`, `enable_thinking`).

        Raises PackerError when there is no template, and when it fails.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise PackerError(
                f"the tokenizer of {self.name_or_path!r} has no chat template, and the prompt is a list of messages",
                cause="model.chat_template is not set and the model folder brings none",
                fix=f"{_TEMPLATE_FIX}; or let the environment's format_prompt return a string",
                where="model.chat_template",
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt,
                **{**self.template_variables, **variables},
            )
        except Exception as exc:
            raise PackerError(
                f"the chat template of {self.name_or_path!r} failed on messages with roles {[m.get('role') for m in messages]}",
                cause=f"{type(exc).__name__}: {exc}", fix=_TEMPLATE_FIX, where="model.chat_template",
            ) from exc
        return str(text)


def load_tokenizer(name_or_path: str, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer; `chat_template` (Jinja text or a file) replaces its own.

    Raises PackerError for a tokenizer that cannot be loaded, EngineStartError for a model that is absent or gated.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
    except Exception as exc:
        model_config(name_or_path)  # raises when it is the whole model that is absent or gated
        raise PackerError(
            f"the tokenizer of {name_or_path!r} cannot be loaded",
            cause=f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else 'no message'}",
            fix=_TOKENIZER_FIX, where="model.name_or_path",
        ) from exc
    if len(tokenizer) < 32 and not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        # Some classes are content without their files, and turn every text into nothing.
        raise PackerError(
            f"the tokenizer of {name_or_path!r} has an empty vocabulary",
            cause="the model folder brings no tokenizer files",
            fix=_TOKENIZER_FIX, where="model.name_or_path",
        )
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def init_data_packer(
    name_or_path: str, *, chat_template: str | None = None, trust_remote_code: bool = False, default: str = TEXT_PACKER
) -> DataPacker:
    """The packer for a model, chosen by the `model_type` of its config.json, set up.

    That is the installed packer plug-in named like the model type, else `default`. Raises E14 (no name), E11 (a
    vision model without a packer of its own), and PackerError for encoder-decoder models.
    """
    from posttrain.plugins.discovery import discover

    if not name_or_path:
        raise error("E14")
    config = model_config(name_or_path)
    model_type = str(config.get("model_type", ""))
    named = {info.name for info in discover("datapackers")} - {TEXT_PACKER, PAIR_PACKER}
    native = model_type in named
    if not native and config.get("vision_config") is not None:
        raise error("E11", model_type=model_type, known=", ".join(sorted(named)) or "none")
    if not native and config.get("is_encoder_decoder"):
        raise PackerError(f"model_type={model_type!r} is an encoder-decoder model", cause="only causal models can be trained",
                          fix="choose a decoder-only model in model.name_or_path")
    packer = load_packer(model_type if native else default)
    return packer.setup(name_or_path, chat_template=chat_template, trust_remote_code=trust_remote_code)


def load_packer(ref: str | Callable[[], DataPacker]) -> DataPacker:
    """A fresh, not yet set up packer from `rl.data.packer`: a plug-in name, or the path of a zero-argument factory.

    Raises E9 when the path is not importable here, E10 when the factory returns something else.
    """
    from posttrain.plugins.build import build_packer
    from posttrain.plugins.resolution import resolve

    name = ref if isinstance(ref, str) else getattr(ref, "__qualname__", repr(ref))
    factory = resolve("datapackers", ref, where="rl.data.packer")
    try:
        packer: DataPacker = build_packer(name, factory)
    except TypeError as exc:
        raise PackerError(
            f"DataPacker factory {name!r} failed when it was called without arguments",
            cause=f"{type(exc).__name__}: {exc}",
            fix="give it no required parameters; the model arrives through setup(name_or_path)",
            where="rl.data.packer",
        ) from exc
    return packer


def engine_input(packer: DataPacker, prompt: Prompt) -> dict[str, Any]:
    """`get_rollout_input` of any packer, behind the special-token guard: `prompt_ids` are ids, their BOS once.

    Tools that the template does not know are described in the system message; the thinking prefix follows the prompt of a chat.
    Raises E13, also for text whose tokens the tokenizer would add to, and PackerError for what else is not ids.
    """
    if isinstance(prompt, ToolChat) and not packer.knows_tools:
        from posttrain.data.tool_calls import with_described_tools

        prompt = ChatOrText(with_described_tools(prompt, prompt.tools))
    if isinstance(prompt, ChatOrText) and not packer.chats:
        prompt = prompt.text
    if is_messages(prompt) and any(message.get("role") == "tool" for message in prompt):
        said = spoken(packer, prompt)
        prompt = ToolChat(said, prompt.tools) if isinstance(prompt, ToolChat) else said
    item = dict(packer.get_rollout_input(prompt))
    ids = item.get("prompt_ids")
    if isinstance(ids, str):
        packer.special_tokens.check_text()
    if isinstance(ids, str) or ids is None or len(ids) == 0:
        raise PackerError(
            f"{type(packer).__name__}.get_rollout_input returned no ids but {'nothing' if ids is None else repr(ids)[:60]}",
            cause="an engine takes token ids, never text",
            fix='return {"prompt_ids": [...]}, a non-empty list of int',
            anchor="howto/custom-datapacker.md#the-methods",
        )
    packer.special_tokens.check(ids)
    if packer.thinking_prefix and is_messages(prompt):
        item["prompt_ids"] = [*ids, *packer.encode(packer.thinking_prefix)]
    return item


def continued(packer: DataPacker, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
    """`extend` of any packer: the prompt of the next turn of a chat, which begins with `ids`.

    Raises PackerError where the template cannot continue, and for an `extend` that changed what was there.
    """
    extended = [int(i) for i in packer.extend(ids, spoken(packer, messages))]
    if extended[: len(ids)] != list(ids):
        raise PackerError(
            f"{type(packer).__name__}.extend changed the ids so far", cause="what was sampled is trained as it was sampled",
            fix="return ids followed by what comes next", anchor="howto/custom-datapacker.md#the-methods",
        )  # fmt: skip
    return extended


def next_prompt(
    packer: DataPacker,
    ids: Sequence[int],
    added: Sequence[Message],
    rendered: Callable[[], list[int]],
    *,
    verbatim: bool,
    prefix: str = "",
) -> tuple[list[int], bool]:
    """The prompt of the next turn of a chat, and whether it begins with `ids`, which were read and sampled so far.

    It does where the template only appends. Where it rewrites what was said, the prompt is what the template renders from the
    whole conversation (`rendered`); not so with `verbatim`: the ids are kept, and a template that cannot go on is a PackerError.
    prefix: what the model's turn begins with, of the prompt.
    """
    kept: list[int] | None = None
    try:
        kept = [*continued(packer, ids, added), *packer.encode(prefix)]
    except PackerError:
        if verbatim:
            raise
    if kept is not None and verbatim:
        return kept, True
    whole = rendered()
    return (kept, True) if kept is not None and packer.spell(kept) == packer.spell(whole) else (whole, False)


def spoken(packer: DataPacker, messages: Sequence[Message]) -> list[Message]:
    """The messages as the template takes them: results of tools are the user's words where it knows nothing of tools."""
    if "tool" in str(getattr(packer.tokenizer, "chat_template", None) or ""):
        return list(messages)
    said: list[Message] = []
    for before, message in zip([None, *messages], messages, strict=False):
        if message.get("role") != "tool":
            said.append(message)
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if before is not None and before.get("role") == "tool":
            text = f"{said.pop()['content']}\n{text}"
        said.append({"role": "user", "content": text})
    return said


def require_packer(packer: DataPacker | None, owner: str) -> DataPacker:
    """The packer, or E12 naming the part that cannot be built without one."""
    if packer is None:
        raise error("E12", owner=owner)
    return packer


def read_chat_template(value: str) -> str:
    """The template itself from `model.chat_template`, which is Jinja text or the path of a file."""
    if "{" in value or "\n" in value:
        return value
    path = Path(value).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as exc:
        raise PackerError(
            f"model.chat_template={value!r} is neither a Jinja template nor a readable file",
            cause=f"{type(exc).__name__}: {exc.strerror}", fix=_TEMPLATE_FIX, where="model.chat_template",
        ) from exc
