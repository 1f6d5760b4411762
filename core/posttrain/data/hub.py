"""What a model's folder or the hub says before the model is built: small JSON files, and why they cannot be had.

`HUB_FAILURES` and `known_failure` are the one place where a gated, absent or unreachable model gets its message and its code,
whoever meets it first: the packer, the policy or an engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import EngineStartError

WHERE = "model.name_or_path"
ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure that another library reports in words that `pattern` finds."""

    code: str
    message: str
    fix: str
    pattern: str


HUB_FAILURES = (
    Failure(
        "model-absent",
        "the model was not found",
        "correct model.name_or_path: the path of a Hugging Face folder, or a name on the hub; for a private model set HF_TOKEN",
        r"is not a valid model identifier|Repository ?Not ?Found",
    ),
    Failure(
        "model-gated",
        "the model is gated or private",
        "accept its licence on its page and set HF_TOKEN to a token that may read it; or give model.name_or_path a local folder",
        r"gated repo|40[13] (Client Error|Unauthorized|Forbidden)|access to model .* is restricted",
    ),
    Failure(
        "model-absent",
        "the model was not found: it is not in this machine's cache, and the hub cannot be asked",
        "give model.name_or_path a local folder, or fetch the model where there is a network; unset HF_HUB_OFFLINE if it is set",
        r"couldn't connect to|LocalEntryNotFoundError|OfflineModeIsEnabled",
    ),
)
"""In the order of the search: the hub answers an unknown name with 401 too, and advises on gated models in the same breath."""


def known_failure(
    failures: Iterable[Failure], model: str, said: BaseException | str, *, where: str = WHERE
) -> EngineStartError | None:
    """The first of `failures` that an exception (with what caused it) or a log tells of; None when it is none of them."""
    text = said if isinstance(said, str) else words(said)
    for known in failures:
        if match := re.search(known.pattern, text, re.IGNORECASE):
            cause = _line_of(text, match.start())
            return EngineStartError(f"{known.message} ({model})", cause=cause, fix=known.fix, where=where, code=known.code)
    return None


def model_config(name_or_path: str) -> dict[str, Any]:
    """The model's config.json.

    Raises EngineStartError: `model-absent`, `model-gated`, `model-config` (not JSON), and for what is no model that can be
    trained: `model-adapter`, `model-gguf`, `model-quantised`.
    """
    try:
        config = _read(name_or_path, "config.json")
        local = Path(name_or_path).expanduser()
        cause = f"{local} has no config.json" if local.is_dir() else "its page on the hub has no config.json"
    except OSError as exc:
        if refused := known_failure(HUB_FAILURES, name_or_path, exc):
            raise refused from exc
        config, cause = None, f"it is neither a folder on this machine nor a name on the hub: {str(exc).splitlines()[0]}"
    if config is None:
        raise _something_else(name_or_path) or _absent(name_or_path, cause)
    _refuse_quantised(name_or_path, config)
    if (Path(name_or_path).expanduser() / ADAPTER).is_file() and (adapter := _something_else(name_or_path)):
        raise adapter
    return config


def _absent(name_or_path: str, cause: str) -> EngineStartError:
    absent = HUB_FAILURES[0]
    return EngineStartError(f"{absent.message} ({name_or_path})", cause=cause, fix=absent.fix, where=WHERE, code=absent.code)


def _something_else(name_or_path: str) -> EngineStartError | None:
    """What a folder (or a file) holds in the place of a model: an adapter, or weights as one GGUF file; None: neither."""
    path = Path(name_or_path).expanduser()
    if (path / ADAPTER).is_file():
        base = (_read(name_or_path, ADAPTER) or {}).get("base_model_name_or_path") or "its base model"
        return EngineStartError(
            f"{name_or_path!r} holds a LoRA adapter, not a model",
            cause=f"it has {ADAPTER}: weights to be added to those of {base}",
            fix="merge it once, and name the merged folder: model = AutoPeftModelForCausalLM.from_pretrained(FOLDER); "
            "model.merge_and_unload().save_pretrained(OUT); the tokenizer's save_pretrained(OUT) too",
            where=WHERE, code="model-adapter",
        )  # fmt: skip
    if files := sorted(path.glob("*.gguf")) or [file for file in (path,) if file.suffix == ".gguf"]:
        return EngineStartError(
            f"{name_or_path!r} holds GGUF weights, not a Hugging Face model",
            cause=f"{files[0].name} is one file of quantised weights; there is no config.json beside it",
            fix="name the model that it was made from; or unpack it once: AutoModelForCausalLM.from_pretrained(FOLDER, "
            f"gguf_file={files[0].name!r}).save_pretrained(OUT), and AutoTokenizer likewise",
            where=WHERE, code="model-gguf",
        )  # fmt: skip
    return None


def _refuse_quantised(name_or_path: str, config: dict[str, Any]) -> None:
    """Quantised weights have no gradient, and a publication of them has other names and shapes than an engine loads."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        return
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else "unknown"
    raise EngineStartError(
        f"the model {name_or_path!r} is quantised ({method}), and quantised weights cannot be trained",
        cause="its config.json has a quantization_config",
        fix="name the unquantised model that it was made from",
        where=WHERE, code="model-quantised",
    )  # fmt: skip


def generation_config(name_or_path: str) -> dict[str, Any]:
    """The model's generation_config.json; empty when it has none, as a model need not. Raises `model-config`."""
    try:
        return _read(name_or_path, "generation_config.json") or {}
    except OSError:
        return {}


def eos_token_ids(name_or_path: str, tokenizer: Any = None) -> tuple[int, ...]:
    """Every id that ends a completion: those of generation_config.json, config.json and the tokenizer, in this order.

    Raises EngineStartError as `model_config` does.
    """
    config, generation = model_config(name_or_path), generation_config(name_or_path)
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        found += value if isinstance(value, list) else [] if value is None else [value]
    if (own := getattr(tokenizer, "eos_token_id", None)) is not None:
        found.append(own)
    return tuple(dict.fromkeys(int(i) for i in found))


def stop_token_ids(name_or_path: str, tokenizer: Any) -> tuple[int, ...]:
    """`eos_token_ids`, of which there must be one. Raises EngineStartError `no-eos`, and as `model_config` does."""
    found = eos_token_ids(name_or_path, tokenizer)
    if not found:
        raise EngineStartError(
            f"no token ends a completion of {name_or_path!r}",
            cause="neither generation_config.json, config.json nor the tokenizer names an EOS: every completion would be cut off",
            fix='write {"eos_token_id": ID} into generation_config.json of the model folder; or set rollout.ignore_eos=true',
            where=WHERE, code="no-eos",
        )  # fmt: skip
    return found


def _read(name_or_path: str, filename: str) -> dict[str, Any] | None:
    """A JSON file of a folder or of a hub model; None when the folder has none. Raises what the hub's client raises."""
    folder = Path(name_or_path).expanduser()
    path: str | Path | None = folder / filename
    if not folder.is_dir():
        from transformers.utils import cached_file

        path = cached_file(name_or_path, filename)
    if path is None or not Path(path).is_file():
        return None
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as exc:
        fix = "fetch or write the model folder again"
        raise EngineStartError(f"{path} is not valid JSON", cause=str(exc), fix=fix, where=WHERE, code="model-config") from exc


def words(exc: BaseException | None) -> str:
    """An exception and those that led to it, the last first."""
    lines = []
    while exc is not None:
        lines.append(f"{type(exc).__name__}: {exc}")
        exc = exc.__cause__ or exc.__context__
    return "\n".join(lines)


def _line_of(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : text.find("\n", at) if "\n" in text[at:] else None]
    return re.sub(r"^.*?(?=\w*(Error|Exception):)", "", line, count=1).strip()[:500]
