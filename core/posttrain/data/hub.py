"""Small JSON files of a model, read without building the model: config.json, generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posttrain.errors import EngineStartError


def model_config(name_or_path: str) -> dict[str, Any]:
    """The model's config.json. Raises EngineStartError when the model is not there."""
    config = _read(name_or_path, "config.json")
    if config is not None:
        return config
    local = Path(name_or_path).expanduser()
    cause = f"{local} has no config.json" if local.is_dir() else "it is neither a folder on this machine nor a readable hub name"
    raise EngineStartError(
        f"the model {name_or_path!r} was not found",
        cause=cause,
        fix="check model.name_or_path; for a gated or private model set HF_TOKEN and accept its licence on its page",
        where="model.name_or_path",
        code="model-absent",
    )


def eos_token_ids(name_or_path: str, tokenizer: Any = None) -> tuple[int, ...]:
    """Every id that ends a completion: those of generation_config.json, config.json and the tokenizer, in this order."""
    found: list[int] = []
    for source in (_read(name_or_path, "generation_config.json"), _read(name_or_path, "config.json")):
        value = (source or {}).get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(int(i) for i in found))


def _read(name_or_path: str, filename: str) -> dict[str, Any] | None:
    folder = Path(name_or_path).expanduser()
    path: str | Path | None = folder / filename
    if not folder.is_dir():
        from transformers.utils import cached_file

        try:
            path = cached_file(name_or_path, filename, _raise_exceptions_for_missing_entries=False)
        except OSError:
            path = None
    if path is None or not Path(path).is_file():
        return None
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as exc:
        raise EngineStartError(f"{path} is not valid JSON", cause=str(exc), fix="fetch or write the model folder again") from exc
