"""Loading a Hugging Face causal LM, with failures told apart: absent, gated, unknown architecture, damaged, other version."""

from __future__ import annotations

import logging
from typing import Any

import torch

from posttrain.data.hub import HUB_FAILURES, WHERE, known_failure, model_config
from posttrain.errors import ConfigError, EngineStartError
from posttrain.policy.attention import drops_terms

log = logging.getLogger("posttrain.policy")


def quiet_libraries() -> None:
    """Progress bars of the libraries would tear the display and fill the logs; what matters of them is said in lines of ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load_causal_lm(
    path: str, dtype: str | torch.dtype, *, attn_implementation: str = "sdpa", trust_remote_code: bool = False
) -> Any:
    """The model of a Hugging Face folder or name, stored in `dtype`, in evaluation mode, with every weight from the files.

    Its attention is `eager` where the one asked for would leave out a term that the config has.
    Raises EngineStartError, its code saying which: `model-absent`, `model-gated`, `architecture`, `model-version`,
    `model-config`, `weights-absent`, `weights-damaged`; and ConfigError for an attention implementation that is not there.
    """
    from transformers import AutoModelForCausalLM

    config = model_config(path)  # says clearly when there is no model at all
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=wanted, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    except Exception as exc:
        raise explain_failure(path, config, exc) from exc
    _refuse_incomplete(path, report)
    _refuse_not_causal(path, model)
    if drops_terms(model.config, attn_implementation):
        model.set_attn_implementation("eager")
    return model.eval()


def model_from_config(
    path: str, dtype: torch.dtype, *, attn_implementation: str = "sdpa", trust_remote_code: bool = False
) -> Any:
    """The model that the folder's config.json describes, its weights whatever its own initialisation makes of them.

    Under `torch.device("meta")` it takes no memory. Raises as `load_causal_lm` does, the codes about weights excepted.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = model_config(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
        )
    except (ValueError, OSError, ImportError, KeyError, AttributeError) as exc:
        raise explain_failure(path, raw, exc) from exc


def _refuse_incomplete(path: str, report: Any) -> None:
    """transformers fills what it does not find with random numbers; a policy must not start from those."""
    wrong = sorted(name for name, *_ in report["mismatched_keys"])
    missing = sorted(set(report["missing_keys"]) - set(wrong))
    if missing or wrong:
        problems = [
            f"{verb} {len(names)} parameter(s) ({', '.join(names[:3])})"
            for verb, names in (("lack", missing), ("have other shapes for", wrong)) if names
        ]  # fmt: skip
        raise EngineStartError(
            f"the weights of {path!r} {' and '.join(problems)}",
            cause="the files hold another model than config.json describes, or a part of it",
            fix="fetch or convert the model again",
            where=WHERE, code="weights-damaged",
        )  # fmt: skip
    if unused := sorted(report["unexpected_keys"]):
        log.warning("%s holds %d tensor(s) that the model does not use: %s", path, len(unused), ", ".join(unused[:3]))


def _refuse_not_causal(path: str, model: Any) -> None:
    """transformers builds a language model with a head from an encoder too; its tokens would see what comes after them."""
    seeing = [name for name, module in model.named_modules() if getattr(module, "is_causal", None) is False]
    if seeing:
        raise EngineStartError(
            f"model_type={model.config.model_type!r} is no causal language model",
            cause=f"{len(seeing)} attention layer(s) of {path!r} see the tokens to come ({seeing[0]})",
            fix="choose a decoder-only model in model.name_or_path",
            where=WHERE, code="architecture",
        )  # fmt: skip


def explain_failure(path: str, config: dict[str, Any], exc: Exception) -> Exception:
    """What transformers failed with, as the error that says which of the documented causes it is. For policies and engines."""
    import transformers

    text, name = str(exc), f"the model {path!r}"
    cause = text.strip().splitlines()[0] if text.strip() else type(exc).__name__
    here, made_with = transformers.__version__, str(config.get("transformers_version") or "")

    def start_error(message: str, code: str, fix: str, cause: str = cause) -> EngineStartError:
        return EngineStartError(message, cause=cause, fix=fix, where=WHERE, code=code)

    if refused := known_failure(HUB_FAILURES, path, exc):
        return refused
    if "does not appear to have a file named" in text or "no file named" in text.lower():
        return start_error(f"{name} has no weights", "weights-absent", "fetch the *.safetensors files into the model folder")
    if type(exc).__name__.startswith("StrictDataclass"):
        fix = "correct that value, or fetch the model's config.json again"
        return start_error(f"config.json of {path!r} has a value that cannot be", "model-config", fix, " ".join(text.split()))
    if "trust_remote_code" in text:
        return ConfigError(f"{name} brings its own code", cause=cause, fix="read it, then set model.trust_remote_code=true")
    if "attn_implementation" in text or "does not support an attention" in text:
        fix = "set model.attn_implementation=eager rl.shared_prefix=false"
        return ConfigError(f"{name} cannot run with this attention", cause=cause, fix=fix)
    if isinstance(exc, ImportError):
        return start_error(f"{name} needs a package that is not installed", "architecture", "install the package named above")
    newer = made_with and _numbers(made_with) > _numbers(here)
    if newer:
        cause = f"it was written by transformers {made_with}; this is {here}. {cause}"
        return start_error(f"{name} needs a newer transformers", "model-version", f"install transformers>={made_with}", cause)
    if "does not recognize this architecture" in text or "Unrecognized configuration class" in text:
        message = f"transformers {here} has no causal LM of model_type={config.get('model_type')!r}"
        return start_error(message, "architecture", "use a causal LM that it knows; a newer transformers may know this one")
    return start_error(f"{name} could not be loaded", "weights-damaged", "fetch or convert the model again")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
