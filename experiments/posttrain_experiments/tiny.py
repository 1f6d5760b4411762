"""A tiny character-level language model with a real tokenizer, made by code in seconds: nothing is fetched.

    python -m posttrain_experiments.tiny out/tiny        # writes an ordinary Hugging Face folder

The model starts as somebody who can add and is careless: supervised training first on right sums, then on sums that are
mostly one too large. It then has something to sample from, and reinforcement learning has something to teach. The warm-up is
counted in steps, not in seconds, and sees only the train split of the environment, so it is the same everywhere. `make` does
the same for any task that comes with right and careless answers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from posttrain_envs.arithmetic import Arithmetic

CHARACTERS = "0123456789+-*/=?.,:;!()<>|' \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
PAD, EOS = "<pad>", "<eos>"
CHAT_TEMPLATE = (  # a message alone is its bare text, which is how the model was asked in its warm-up
    "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ '<eos>' }}"
    "{% elif not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
SLIP_SHARES = (0.3, 0.7)
"""How often an answer of the second phase is right, and careless."""

Lesson: TypeAlias = tuple[str, str, str]
"""What is asked, the right answer, and a careless one."""


def build(
    out: Path,
    *,
    environment: Mapping[str, Any] | None = None,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    steps: int = 360,
    slip_steps: int = 140,
    batch: int = 128,
    lr: float = 3e-3,
    say: Callable[[str], None] = print,
) -> None:
    """Write a model that adds carelessly to `out`. environment: options of `arithmetic`; the rest as in `make`."""
    rows = Arithmetic(Arithmetic.Options(**(environment or {}))).dataset("train")
    lessons = [(f"{row['problem']}=", row["answer"], str(int(row["answer"]) + 1)) for row in rows]
    make(
        out, lessons, seed=seed, hidden_size=hidden_size, layers=layers, steps=steps, slip_steps=slip_steps, batch=batch, lr=lr,
        say=say,
    )  # fmt: skip


def make(
    out: Path,
    lessons: Sequence[Lesson],
    *,
    seed: int,
    hidden_size: int,
    layers: int,
    steps: int,
    slip_steps: int,
    batch: int,
    lr: float,
    say: Callable[[str], None],
) -> None:
    """Write a model that was warmed up on `lessons` to `out` as a Hugging Face folder (config, weights, tokenizer).

    steps, slip_steps   optimizer steps on right answers, and on answers that are mostly careless
    """
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(len(tokenizer), hidden_size, layers)
    count = sum(p.numel() for p in model.parameters())
    say(f"tiny model: {count / 1e6:.2f}M parameters, warm-up of {steps} + {slip_steps} steps, seed {seed}")
    with one_thread():
        warm_up(model, tokenizer, lessons, steps=steps, slip_steps=slip_steps, batch=batch, lr=lr, seed=seed, say=say)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: a model this small gains nothing from a second, and waiting for it costs minutes on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def build_tokenizer() -> Any:
    """A fast tokenizer with one token per character, `<pad>` 0 and `<eos>` 1, and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(vocabulary: int, hidden_size: int, layers: int) -> Any:
    """A Llama with tied embeddings and heads of 32, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = hidden_size // 32
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def warm_up(
    model: Any, tokenizer: Any, lessons: Sequence[Lesson], *, steps: int, slip_steps: int, batch: int, lr: float, seed: int,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Supervised training of `model` in place, on right answers and then on careless ones."""
    ids, mask = encode(tokenizer, lessons)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1)
    began, total = time.perf_counter(), steps + slip_steps
    for step in range(1, total + 1):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / 30) * (1 - 0.9 * step / total)
        rows = torch.randint(ids.shape[1], (batch,), generator=generator)
        shares = torch.tensor(SLIP_SHARES if step > steps else (1.0, 0.0))
        slips = torch.multinomial(shares, batch, replacement=True, generator=generator)
        loss = answer_loss(model, ids[slips, rows], mask[slips, rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == total:
            say(f"  warm-up step {step}/{total}  loss {loss.item():.3f}  {time.perf_counter() - began:.1f} s")


def encode(tokenizer: Any, lessons: Sequence[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and answer masks `[2, lessons, L]`: first with the right answers, then with the careless ones."""
    texts = [(lesson[0], lesson[which]) for which in (1, 2) for lesson in lessons]
    pairs = [(tokenizer(ask)["input_ids"], [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]) for ask, answer in texts]
    width = max(len(ask) + len(answer) for ask, answer in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    mask = torch.zeros(len(pairs), width, dtype=torch.bool)
    for row, (ask, answer) in enumerate(pairs):
        ids[row, : len(ask) + len(answer)] = torch.tensor(ask + answer)
        mask[row, len(ask) : len(ask) + len(answer)] = True
    shape = (2, len(lessons), width)
    return ids.view(shape), mask.view(shape)


def answer_loss(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the answers' tokens; ids, mask `[B, L]`."""
    logits = model(ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits[mask[:, 1:]], ids[:, 1:][mask[:, 1:]])


if __name__ == "__main__":
    build(Path(sys.argv[1]))
