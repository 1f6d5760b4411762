"""What is evaluated: the weights of a checkpoint, of the model that a run began with, or of a Hugging Face folder.

    outputs/my-run                        its newest checkpoint (`steps`: others; 0 is the model before training)
    outputs/my-run/checkpoints/step_20    this one
    my-model, Qwen/Qwen2.5-0.5B           a folder with a config.json, or a name

A run brings its config: the model, how it is sampled, its evals. A model alone takes that of the first run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.data.hub import model_config
from posttrain.errors import ConfigError, DataError
from posttrain.loop import checkpoint
from posttrain.loop.export import find_checkpoint
from posttrain.tracking.run_dir import CHECKPOINT, find_run
from posttrain.tracking.text import near

if TYPE_CHECKING:
    import torch

    from posttrain.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Subject:
    """of: whose weights they are, for people.   step: their version.   run, policy: None for a model that is of no run."""

    of: str
    step: int
    run: Path | None = None
    policy: Path | None = None
    model: str = ""


def subjects_of(given: str, steps: Sequence[int] | str | None = None) -> list[Subject]:
    """The subjects that a word on the command line means, by step. steps: of a run; `all`: its checkpoints; None: the newest.

    Raises ConfigError for what is neither a run nor a model, DataError for a step that has no checkpoint.
    """
    run = _run(given)
    if run is None:
        return [Subject(given, 0, model=_model(given))]
    if CHECKPOINT.fullmatch(Path(given).name):
        found = find_checkpoint(given, None)
        return [Subject(near(run), found.step, run, found.policy)]
    if steps == "all":
        steps = [one.step for one in checkpoint.find(run / "checkpoints")]
    wanted: list[int | None] = [None] if steps is None else [int(step) for step in steps]
    return sorted((_of_step(run, step) for step in wanted), key=lambda one: one.step)


def _of_step(run: Path, step: int | None) -> Subject:
    if step == 0:
        return Subject(near(run), 0, run)
    found = find_checkpoint(run, step)
    return Subject(near(run), found.step, run, found.policy)


def _run(given: str) -> Path | None:
    try:
        return find_run(given)
    except ConfigError:
        return None


def _model(given: str) -> str:
    path = Path(given).expanduser()
    if (path / "config.json").is_file():
        return str(path.absolute())
    if path.exists() or given.startswith(("/", "./", "../", "~")) or given.count("/") > 1:
        raise ConfigError(
            f"there is no run and no model at {given}",
            cause="the folder has neither a config.yaml nor a config.json" if path.is_dir() else "it is no folder",
            fix="give a run directory, RUN/checkpoints/step_N, or a Hugging Face folder", code="no_run",
        )  # fmt: skip
    model_config(given)
    return given


def load_model(subject: Subject, base: str, config: RunConfig) -> Any:
    """The model of a subject, its weights in the dtype of the engine. Raises DataError for another model's, and damaged ones."""
    import torch

    from posttrain.policy.load import load_causal_lm
    from posttrain.policy.saving import read_weights

    model = load_causal_lm(base, config.rollout.dtype, trust_remote_code=config.model.trust_remote_code)
    if subject.policy is None:
        return model
    own, held = dict(model.named_parameters()), read_weights(subject.policy)
    if wrong := sorted(n for n in own.keys() | held.keys() if n not in own or n not in held or own[n].shape != held[n].shape):
        raise DataError(
            f"{near(subject.policy.parent)} does not fit the model {base!r}: {len(wrong)} parameters differ, such as {wrong[0]}",
            cause="the base model is not the one that the run started from",
            fix="put the run's base model back in its place", code="another-model",
        )  # fmt: skip
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(held[name])
    return model


def weights_of(model: Any) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """What a weight plane publishes."""
    return lambda: ((name, parameter.detach()) for name, parameter in model.named_parameters())


def logprobs(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-prob at temperature 1 of each token from the second on: what a canary compares the engine with."""
    import torch

    found: list[list[float]] = []
    with torch.inference_mode():
        for sequence in sequences:
            ids = torch.tensor([list(sequence)])
            scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
            found.append(scores.gather(1, ids[0, 1:, None]).squeeze(1).tolist())
    return found


def base_model(config: RunConfig, subject: Subject, root: Path, say: Callable[[str], None]) -> str:
    """The folder or name of the model whose config, tokenizer and template a subject has."""
    from posttrain.loop.model_folder import model_folder

    return subject.model if subject.run is None else model_folder(config.model, root, say)
