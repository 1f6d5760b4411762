"""A Hugging Face folder from a checkpoint: what plain transformers, vLLM and every tool behind them loads.

    export("outputs/my-run", "my-model")                          # the newest checkpoint, exact
    export("outputs/my-run", "my-model-bf16", step=50, dtype="bfloat16")

The folder holds the weights (safetensors, tied ones once), the base model's config.json with the dtype of the weights, the
tokenizer with the chat template that was in force, the base model's generation_config.json with every id that ended a
completion in training, and a model card. It is written aside and renamed: it is there whole or not at all. The run is only
read, so it may go on meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from posttrain.config.schema import ModelConfig
from posttrain.data.hub import eos_token_ids, generation_config, model_config
from posttrain.data.packer import load_tokenizer
from posttrain.errors import ConfigError, DataError, EngineStartError, RunInterrupted
from posttrain.loop import checkpoint
from posttrain.loop.model_card import write_card
from posttrain.loop.model_folder import model_folder
from posttrain.policy.load import load_causal_lm, model_from_config
from posttrain.policy.saving import read_weights
from posttrain.tracking.files import writing
from posttrain.tracking.run_dir import find_run, saved_config

DTYPES = ("float32", "bfloat16", "float16")
SHARD_SIZE = "5GB"
ROOM = 64 * 2**20
"""Bytes beside the weights that must be free: the tokenizer's files are a few MB to a few tens of MB."""


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the policy of a checkpoint to the folder `out` as a Hugging Face model; returns `out`.

    run: a run directory, or one of its checkpoints.   step: of the checkpoint; default the newest.
    dtype: float32, bfloat16 or float16; default what the checkpoint holds (`rl.master_dtype`), which loses nothing.
    say: told where a model made by `model.factory` lies.
    Raises ConfigError (no such run, `out` is not empty, an unknown dtype), DataError (no checkpoint, no such step, a damaged
    one), EngineStartError or PackerError for the base model, RunInterrupted for a full disk. Nothing is left behind then.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} cannot be exported", fix=f"one of: {', '.join(DTYPES)}", where="dtype")
    found, folder = find_checkpoint(run, step), Path(out).expanduser().absolute()
    refuse_existing(folder)
    path = find_run(found.path)
    chosen = run_model(path)
    source = _base_model(chosen, path, say)
    with _aside(folder) as aside:
        wanted = _write_model(found, chosen, source, dtype, aside)
        tokenizer = load_tokenizer(source, chat_template=chosen.chat_template, trust_remote_code=chosen.trust_remote_code)
        tokenizer.save_pretrained(aside)
        _write_configs(source, wanted, eos_token_ids(source, tokenizer), aside)
        write_card(aside, path, found, chosen, wanted)
        if chosen.trust_remote_code:
            for code in Path(source).glob("*.py"):
                shutil.copy2(code, aside)
    return folder


def run_model(run: Path) -> ModelConfig:
    """What a run's config says about its model. Raises DataError when the config cannot be read."""
    from omegaconf import OmegaConf

    saved = OmegaConf.create(saved_config(run).get("model", {}))  # as written: an interpolation is escaped, or a secret
    return ModelConfig(**OmegaConf.to_container(saved, resolve=True))  # type: ignore[arg-type]


def _base_model(chosen: ModelConfig, run: Path, say: Callable[[str], None]) -> str:
    """The folder or hub name of the model that the run started from."""
    source = model_folder(chosen, run.parent, say)
    try:
        model_config(source)
    except EngineStartError as exc:
        raise EngineStartError(
            f"the base model of {run.name} was not found ({source})",
            cause=exc.cause,
            fix="put it back; where the path is relative, export from the folder in which the run was started",
            where="model.name_or_path",
            code=exc.code,
        ) from exc
    return source


def find_checkpoint(run: str | Path, step: int | None = None) -> checkpoint.Checkpoint:
    """The checkpoint of `step`, or the newest, of a run; or the one that `run` names itself."""
    path = find_run(run)
    given = Path(run).expanduser().absolute()
    named = int(match[1]) if given != path and (match := checkpoint.STEP.match(given.name)) else None
    if None not in (named, step) and named != step:
        raise ConfigError(f"--step {step} contradicts {given.name}", fix="leave one of the two out", code="usage")
    wanted, found = named if step is None else step, checkpoint.find(path / "checkpoints")
    if not found:
        raise DataError(
            f"{path} has no complete checkpoint yet",
            cause="a run writes one every checkpoint.every batch steps (0: only after the last step)",
            fix="wait for it; or go on with the run and write some: posttrain train --resume RUN checkpoint.every=N",
            code="no-checkpoint",
        )
    for one in found:
        if one.step == wanted or (wanted is None and one is found[-1]):
            return one
    raise DataError(
        f"{path} has no checkpoint of step {wanted}",
        cause="it was not written (checkpoint.every), or not kept (checkpoint.keep_last, checkpoint.keep_every)",
        fix=f"one of the steps that are there: {', '.join(str(one.step) for one in found)}",
        code="no-checkpoint",
    )


def refuse_existing(out: Path) -> None:
    """Raise ConfigError unless `out` is absent or an empty folder: nothing is ever overwritten."""
    try:
        empty = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
    except OSError as exc:
        raise ConfigError(
            f"cannot write {out}", cause=exc.strerror or str(exc), fix="give another folder", where=str(out), code="out-exists"
        ) from exc
    if empty and out == Path.cwd():
        raise ConfigError(
            f"{out} is the current folder, which an export cannot replace",
            fix="give a new one: ./model",
            where=str(out),
            code="out-exists",
        )
    if empty:
        return
    if out.exists() or out.is_symlink():
        raise ConfigError(
            f"{out} is already there"
            + (", a link" if out.is_symlink() else " and not empty" if out.is_dir() else ", and no folder"),
            cause="an export overwrites nothing",
            fix="give another folder, or remove this one first",
            where=str(out),
            code="out-exists",
        )


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when the block ends well, and is removed when it does not."""
    aside = out.with_name(f".{out.name[:40]}.{os.getpid()}.tmp")
    try:
        with writing(out):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            checkpoint.sync_tree(aside)
            refuse_existing(out)
            aside.rename(out)
    except (FileExistsError, NotADirectoryError) as exc:
        raise ConfigError(f"cannot write under {out.parent}", cause=str(exc), fix="give another folder", where=str(out)) from exc
    except PermissionError as exc:
        fix = "give a folder that you may write to"
        raise ConfigError(f"cannot write {out}", cause=exc.strerror or str(exc), fix=fix, where=str(out)) from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_model(found: checkpoint.Checkpoint, chosen: ModelConfig, source: str, dtype: str | None, aside: Path) -> str:
    """The weights, under the names and in the shards that transformers gives them; returns their dtype."""
    import torch
    from transformers import GenerationConfig

    state = _weights(found)
    wanted = dtype or str(next(iter(state.values())).dtype).removeprefix("torch.")
    torch_dtype = getattr(torch, wanted)
    refuse_without_room(aside, sum(tensor.numel() for tensor in state.values()) * torch_dtype.itemsize)
    with torch.device("meta"):
        model = model_from_config(source, torch_dtype, trust_remote_code=chosen.trust_remote_code)
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if wrong := sorted(name for name in own.keys() | held.keys() if own.get(name) != held.get(name)):
        raise DataError(
            f"{found.path} does not fit the model {source!r}: {len(wrong)} parameter(s) differ, such as {wrong[0]}",
            cause="the base model is not the one that the run started from",
            fix="put the run's base model back in its place",
            code="another-model",
        )
    cast = {name: tensor.to(torch_dtype) for name, tensor in state.items()}
    if buffers := model.state_dict().keys() & dict(model.named_buffers()).keys():
        # No run trains these, so no checkpoint holds them.
        base = load_causal_lm(source, wanted, trust_remote_code=chosen.trust_remote_code).state_dict()
        cast |= {name: base[name] for name in buffers}
    model.generation_config = GenerationConfig()  # transformers refuses to write some; the base model's own follows
    model.save_pretrained(aside, state_dict=cast, max_shard_size=SHARD_SIZE)
    return wanted


def _weights(found: checkpoint.Checkpoint) -> dict[str, Any]:
    """All parameters whole, whatever number of ranks wrote them."""
    try:
        return read_weights(found.policy)
    except DataError as exc:
        gone = not found.path.exists()
        raise DataError(
            f"the weights of {found.path} cannot be read",
            cause="the run that goes on has deleted it (checkpoint.keep_last)" if gone else exc.cause,
            fix="export another step: " + ", ".join(str(one.step) for one in checkpoint.find(found.path.parent)),
            code="checkpoint-damaged",
        ) from exc


def refuse_without_room(folder: Path, needed: int) -> None:
    """Raise RunInterrupted when the disk of `folder` has no room for `needed` bytes of weights and what lies beside them."""
    free = shutil.disk_usage(folder).free
    if free < needed + ROOM:
        raise RunInterrupted(
            f"the export needs {(needed + ROOM) / 2**20:,.0f} MiB, and {folder.parent} has {free / 2**20:,.0f} MiB free",
            cause="nothing was written",
            fix="free some space, give a folder on another disk, or export half the size: --dtype bfloat16",
            where=str(folder.parent),
            code="disk_full",
        )


def _write_configs(source: str, dtype: str, stop: tuple[int, ...], aside: Path) -> None:
    """The base model's own config.json with the new dtype, and its generation config with every id that ended a completion.

    What transformers wrote in their place holds the same in the words of its own version, which an older one misreads.
    """
    config = model_config(source)
    _write_json(aside / "config.json", _with_dtype(config, dtype) | {_dtype_key(config): dtype})
    generation = generation_config(source) or {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    _write_json(aside / "generation_config.json", generation | ({"eos_token_id": list(stop)} if stop else {}))


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with `dtype` in the place of every other, in the configs inside it too."""
    changed = {key: _with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    return {key: dtype if key in ("dtype", "torch_dtype") and value else value for key, value in changed.items()}


def _dtype_key(config: dict[str, Any]) -> str:
    """`torch_dtype` where the base model says so: the word of transformers before 5, which newer ones read too."""
    return "torch_dtype" if "torch_dtype" in config else "dtype"


def _write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
