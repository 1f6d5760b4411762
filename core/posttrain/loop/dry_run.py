"""`posttrain train --dry-run`: everything that can be told without reading the model's weights or starting anything.

It makes ready what a run makes ready before its model loads (`prepare`), looks at the prompts, and leaves nothing behind. What
would end a run there ends the dry run with the same error and the same exit code.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from posttrain.config.rules import batch_plan
from posttrain.data.dataset import Draw, place_of, read_row, row_id
from posttrain.data.environment import as_messages
from posttrain.errors import ConfigError
from posttrain.loop.prepare import Prepared, prepare
from posttrain.loop.rollouts import ask, opening_of
from posttrain.tracking.run_dir import output_root, unwritable
from posttrain.tracking.text import near, number, printable

if TYPE_CHECKING:
    from posttrain.config.load import LoadedConfig
    from posttrain.config.schema import RunConfig
    from posttrain.data.dataset import Source

PROMPTS = 256
"""So many prompts of each environment are tokenised."""

SHOWN = 600
"""Characters of the prompt that is shown."""

STATE_BYTES = 12
"""Of a checkpoint, for each parameter in fp32: itself and two moments."""


def dry_run(loaded: LoadedConfig, *, root: str | Path | None = None) -> list[str]:
    """The report, a line each. root: folder for runs. Raises what a run would raise before its model loads."""
    config = loaded.config
    folder = output_root(root)
    check_writable(folder)
    notes: list[str] = list(loaded.notes)
    with tempfile.TemporaryDirectory(prefix="posttrain-") as logs:
        ready = prepare(config, root=folder, logs=Path(logs), say=notes.append, make_model=False)
        return [
            *_section("config", _config(loaded)),
            *_section("objective", [config.rl.objective.name]),
            *_section("data", _data(config, ready)),
            *_section("batch", _batch(config)),
            *_section("model", _model(config, ready)),
            *_section("engine", _engine(config, ready)),
            *_section("disk", _disk(config, ready, folder)),
            *_section("notes", notes),
            "ok",
        ]


def check_writable(folder: Path) -> None:
    """Raise ConfigError when runs could not be made under `folder`; the folder itself is not made."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise unwritable(folder, "not a folder" if not there.is_dir() else f"{there} may not be written")


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    for i, line in enumerate(lines):
        yield f"{title if i == 0 else '':<11}{line}"


def _config(loaded: LoadedConfig) -> Iterator[str]:
    counts: dict[str, int] = {}
    for origin in loaded.origins.values():
        source = origin.partition(":")[0] if ":" in origin else origin
        counts[source] = counts.get(source, 0) + 1
    yield f"{loaded.config.name}: {', '.join(f'{n} from {source}' for source, n in counts.items()) or 'defaults'}"


def _data(config: RunConfig, ready: Prepared) -> Iterator[str]:
    for source in ready.sampler.sources:
        held_out = sum(draw.env == source.env for draw in ready.held_out)
        yield f"{source.env}: {_rows(source)} train, {held_out} of the held-out ones are validated on"
        if ready.engine is not None:
            yield from _prompts(config, ready, source)
        elif ready.packer is not None:
            yield from _pair(config, ready, source)
        else:
            yield from _shown("the first prompt, not tokenised", _as_text(ask(ready.environments[source.env], _draw(source, 0))))

    for one in ready.evals:
        yield f"eval {one.label}: {len(one.draws)} prompts ({one.entry.split}) x {one.entry.samples}, none of which trains"

def _rows(source: Source) -> str:
    try:
        return f"{number(len(source.rows))} rows"
    except TypeError:
        return "a stream of rows"


def _prompts(config: RunConfig, ready: Prepared, source: Source) -> Iterator[str]:
    """The first prompt, and how long prompts are. Raises DataError for one that leaves no room for a completion."""
    env, packer, limit = ready.environments[source.env], ready.packer, config.rollout.max_model_len
    assert packer is not None
    lengths: list[int] = []
    first: list[int] = []
    for position in range(min(PROMPTS, len(source.rows))):
        ids = opening_of(env, packer, _draw(source, position), limit).item["prompt_ids"]
        lengths.append(len(ids))
        first = first or list(ids)
    for draw in ready.held_out:
        if draw.env == source.env:
            lengths.append(len(opening_of(env, packer, draw, limit).item["prompt_ids"]))
    yield from _shown(f"the first prompt, {len(first)} tokens", packer.decode(first))
    yield f"{len(lengths)} prompts looked at have {min(lengths)} to {max(lengths)} tokens"
    room = limit - max(lengths)
    if room < config.rollout.max_tokens:
        yield (
            f"the longest leaves room for {room} tokens of rollout.max_tokens={config.rollout.max_tokens}: "
            f"rollout.max_model_len={max(lengths) + config.rollout.max_tokens} would hold both"
        )


def _pair(config: RunConfig, ready: Prepared, source: Source) -> Iterator[str]:
    """The first pair, as it would train."""
    from posttrain.loop.pairs import Pairs

    assert ready.packer is not None
    pairs = Pairs(ready.packer, cast("Any", ready.environments), config.rollout.max_model_len)
    chosen, rejected = pairs.group(_draw(source, 0)).trajectories
    parts = (("the first prompt", chosen.prompt_ids), ("chosen", chosen.token_ids), ("rejected", rejected.token_ids))
    for title, ids in parts:
        yield from _shown(f"{title}, {len(ids)} tokens", ready.packer.decode(ids))


def _draw(source: Source, position: int) -> Draw:
    row = read_row(source, position)
    return Draw(position, 0, source.env, row_id(row, position), row, place_of(source.rows, position))


def _as_text(prompt: Any) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in as_messages(prompt)) or str(prompt)


def _shown(title: str, text: str) -> Iterator[str]:
    yield f"{title}:"
    yield from (f"  | {line}" for line in printable(text, SHOWN).splitlines())


def _batch(config: RunConfig) -> Iterator[str]:
    plan, rl = batch_plan(config), config.rl
    yield f"{plan.batch} completions a batch step: {plan.groups} prompts x {plan.group_size}"
    mini = f"{plan.n_mini} optimizer steps of {plan.mini}" if plan.mini else "1 optimizer step"
    yield f"{mini} (legal rl.mini_batch_per_replica: {_some(plan.legal_minis)})"
    micro = f"{plan.micro} completions" if plan.micro else f"up to {number(rl.micro_batch_tokens)} tokens"
    yield f"micro-batches of {micro} (legal rl.micro_batch_per_replica: {_some(plan.legal_micros)})"
    yield f"{rl.steps} batch steps: {number(rl.steps * plan.groups)} prompts, {number(rl.steps * plan.n_mini)} optimizer steps"


def _some(values: Sequence[int]) -> str:
    return ", ".join(map(str, values if len(values) <= 12 else [*values[:5], "…", *values[-5:]]))  # type: ignore[list-item]


def _model(config: RunConfig, ready: Prepared) -> Iterator[str]:
    if ready.model is None:
        yield f"not made yet: the run will, with {config.model.factory}"
        yield "its tokenizer, the tokens of the prompts and the engine are not looked at"
        return
    yield near(ready.model)
    yield f"{number(_parameters(config, ready.model) / 1e6)}M parameters; packer {type(ready.packer).__name__}"


def _engine(config: RunConfig, ready: Prepared) -> Iterator[str]:
    r = config.rollout
    if ready.engine is None:
        yield "none: completions come with the data" if ready.model else f"{r.engine}: not looked at"
    else:
        yield f"{r.engine} ({r.dtype}): nothing that it would refuse to start with"


def _disk(config: RunConfig, ready: Prepared, folder: Path) -> Iterator[str]:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if ready.model is None:
        yield f"{_bytes(free)} free under {near(folder)}"
        return
    size = _parameters(config, ready.model) * (STATE_BYTES if config.rl.master_dtype == "float32" else STATE_BYTES // 2)
    kept = (config.checkpoint.keep_last or 1) + 1  # a new one is whole before an old one goes
    yield f"{_bytes(free)} free under {near(folder)}; a checkpoint takes about {_bytes(size)}, up to {kept} lie there at a time"
    if kept * size > free:
        raise ConfigError(
            f"{folder} has {_bytes(free)} free, and {kept} checkpoints of {_bytes(size)} may lie there at a time",
            fix="free space, give another folder with --run, or lower checkpoint.keep_last",
            code="disk_full",
        )


def _parameters(config: RunConfig, path: str) -> int:
    """Counted on the meta device, which needs no weights."""
    import torch

    from posttrain.policy.load import model_from_config

    with torch.device("meta"):
        model: Any = model_from_config(path, torch.float32, trust_remote_code=config.model.trust_remote_code)
    return sum(p.numel() for p in model.parameters())


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
