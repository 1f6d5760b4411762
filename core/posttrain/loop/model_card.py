"""The README.md of an exported model: where it comes from, in the front matter that model hubs read and in words."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.plugins.functions import without_folders
from posttrain.tracking.metric_names import score_of
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.run_dir import saved_config
from posttrain.tracking.text import number

if TYPE_CHECKING:
    from posttrain.config.schema import ModelConfig
    from posttrain.loop.checkpoint import Checkpoint

TEMPLATE = """\
---
{front}---

# {title}

{base} after reinforcement learning with posttrain: {objective}, {step} batch steps.

{table}

## Results

{results}

## Provenance

{provenance}

Sampled in training at temperature {temperature}, up to {max_tokens} tokens. `generation_config.json` is the base model's own,
with every token that ended a completion in training. Licence and limits are those of the base model.
"""


def write_card(folder: Path, run: Path, found: Checkpoint, model: ModelConfig, dtype: str) -> None:
    """Write `folder/README.md` for the checkpoint `found` of `run`, whose weights are stored in `dtype`."""
    (folder / "README.md").write_text(card(run, found, model, dtype), encoding="utf-8")


def card(run: Path, found: Checkpoint, model: ModelConfig, dtype: str) -> str:
    """The text. Paths of this machine are left out, but for their last part."""
    import yaml

    tree = saved_config(run)
    rl, rollout = tree["rl"], tree["rollout"]
    on_hub = model.factory is None and not Path(model.name_or_path).expanduser().exists()
    base = _shown(model.factory or model.name_or_path)
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= {"base_model": base} if on_hub else {}
    front["tags"] = ["posttrain", "reinforcement-learning", _shown(rl["objective"]["name"])]
    facts = {
        "Base model": f"`{base}`",
        "Run": f"`{run.name}`, step {found.step} of {rl['steps']}",
        "Objective": f"`{_one_line(rl['objective'])}`",
        "Group size, batch": f"{rl['group_size']}, {rl['batch_per_replica']}",
        "Optimizer": f"`{rl['optimizer']['name']}`, learning rate {rl['optimizer']['lr']:g}",
        "Weights": f"trained in {rl['master_dtype']}, stored here in {dtype}",
    }
    return TEMPLATE.format(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        title=tree["name"],
        base=f"`{base}`",
        objective=f"`{_shown(rl['objective']['name'])}`",
        step=found.step,
        table=_table(("", ""), facts.items()),
        results=_results(run, found.step),
        provenance=_provenance(run, found, tree),
        temperature=f"{rollout['temperature']:g}",
        max_tokens=rollout["max_tokens"],
    )


def _results(run: Path, step: int) -> str:
    """The run's score before and after, up to the step of the checkpoint."""
    validations, metrics = read_validation(run), read_metrics(run)
    score = score_of(*validations[:1], *metrics[:1])
    held_out = [(row["step"], row[score.held_out]) for row in validations if row.get(score.held_out) is not None]
    trained = [(row["step"], row[score.trained]) for row in metrics if row.get(score.trained) is not None]
    rows = []
    for name, values in ((f"{score.name} on held-out prompts", held_out), (f"{score.name} in training", trained)):
        if values := [(at, value) for at, value in values if at <= step]:
            (first, before), (last, after) = values[0], values[-1]
            rows.append((name, f"{number(before)} (step {first})", f"{number(after)} (step {last})"))
    return _table(("", "before", "after"), rows) if rows else "No reward was recorded."


def _provenance(run: Path, found: Checkpoint, tree: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True, default=str).encode()).hexdigest()
    lines = [f"- config: sha256 `{digest}`"]
    for name, fingerprint in found.loop_state().get("fingerprints", {}).items():
        lines.append(f"- data: `{_shown(name)}`, fingerprint `{fingerprint}`")
    if factory := tree["rl"]["data"]["factory"]:
        lines.append(f"- data made by: `{_shown(factory)}`")
    try:
        started = json.loads((run / "provenance.json").read_text(encoding="utf-8"))[-1]
    except (OSError, ValueError, IndexError):
        return "\n".join(lines)
    lines.append(f"- started: {started['time']}, Python {started['python']}")
    lines.append("- versions: " + ", ".join(f"{name} {version}" for name, version in started["libraries"].items()))
    if state := (started.get("git") or {}).get("working_directory"):
        lines.append(f"- commit: `{state['commit']}`" + (" with uncommitted changes" if state["dirty"] else ""))
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """A value as it may leave this machine: of a path here, and of a `file.py:name`, the last part."""
    text = without_folders(str(value))
    here = text.startswith("~") or os.path.isabs(text) or (os.sep in text and os.path.exists(text))
    return Path(text).name if here else text


def _one_line(plugin: Mapping[str, Any]) -> str:
    """A plug-in with the options that are set: `grpo clip_low=0.2`."""
    flat = {**plugin, **plugin.get("options", {})}
    options = {key: value for key, value in flat.items() if key not in ("name", "options") and value not in (None, False)}
    return " ".join([_shown(plugin["name"]), *(f"{key}={_shown(value)}" for key, value in options.items())])


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
