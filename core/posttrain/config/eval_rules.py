"""What the entries of `evals` mean together, and what they have in common with the `environments` that train.

    environments=[{name: math, options: {data: my.jsonl}}]
    evals=[{name: math, split: holdout, prompts: 100, samples: 8, k: [1, 4]}, {name: gpqa, options: {data: gpqa.jsonl}}]

An entry without options that names an entry of `environments`, by its name or its label, is an eval of just that: the same
options, the same rows. `split: holdout` takes the first rows of it out of training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from posttrain.config import entries
from posttrain.config.schema import MISSING, NO_ENGINE, EnvironmentConfig
from posttrain.config.walker import Problem

if TYPE_CHECKING:
    from posttrain.config.schema import EvalConfig, RunConfig

LABEL = r"[\w][\w.+=@#-]*"


def label_of(entry: EvalConfig) -> str:
    """What the results of an entry are called: its label, else its name as a file name."""
    return entry.label if entry.label is not None else re.sub(r"[^\w.+=@#-]+", "_", entry.name.rpartition("/")[2])


def check_evals(config: RunConfig) -> Iterator[Problem]:
    """A problem for each key of an entry that cannot be, alone or beside the others."""
    if config.evals and config.rollout.engine == NO_ENGINE:
        yield Problem("evals", "nothing is generated with rollout.engine=none", "remove evals, or choose an engine")
    first: dict[str, int] = {}
    for i, entry in enumerate(config.evals):
        path, label = f"evals[{i}]", label_of(entry)
        if entry.label is not None and not re.fullmatch(LABEL, label):
            yield Problem(f"{path}.label", f"{label!r} cannot name a file of results", "use letters, digits and . _ - + = @ #")
        before = first.setdefault(label, i)
        if before != i and entry.name != MISSING:
            yield Problem(f"{path}.label", f"{label!r} is also what evals[{before}] is called", f"evals.{i}.label=NAME")
        yield from _samples(path, entry)
        yield from _length(path, entry, config)
        if not (entry.every or entry.before or entry.after):
            yield Problem(path, "is never due: before, after and every say no", f"set evals.{i}.every=N, or remove it")


def _samples(path: str, entry: EvalConfig) -> Iterator[Problem]:
    few = [k for k in entry.k if not 1 <= k < entry.samples]
    if few:
        k = max(few)
        what = f"{list(entry.k)}: pass@{k} is estimated from more than {k} completions a prompt, and samples={entry.samples}"
        fix = f"set samples={2 * k} or more, or a smaller k" + ("; the accuracy is pass@1" if few == [1] else "")
        yield Problem(f"{path}.k", what, fix if k >= 1 else "each k is at least 1")
    if entry.samples > 1 and entry.temperature == 0:
        what = f"{entry.samples} greedy completions of a prompt are all the same"
        yield Problem(f"{path}.samples", what, "set samples=1, or a temperature above 0")


def _length(path: str, entry: EvalConfig, config: RunConfig) -> Iterator[Problem]:
    limit = config.rollout.max_model_len
    if entry.max_tokens is not None and entry.max_tokens >= limit:
        what = f"{entry.max_tokens} leaves no room for a prompt in rollout.max_model_len={limit}"
        yield Problem(f"{path}.max_tokens", what, "set it below rollout.max_model_len, or raise that")


def trained_entry(
    entry: EvalConfig, path: str, trained: Sequence[EnvironmentConfig]
) -> tuple[EnvironmentConfig | None, list[Problem]]:
    """The entry of `environments` that an entry without options is an eval of; None when it is its own environment."""
    labelled = [one for one in trained if entries.label_of(one) == entry.name]
    named = labelled or [one for one in trained if one.name == entry.name]
    if entry.options is not None or not named:
        return None, []
    if len(named) > 1:
        labels = ", ".join(entries.label_of(one) for one in named)
        what = f"{entry.name!r} is the name of {len(named)} entries of environments"
        return None, [Problem(f"{path}.name", what, f"name one by its label ({labels}), or give options")]
    return named[0], []


def same_entry(entry: EvalConfig, trained: Sequence[EnvironmentConfig]) -> int | None:
    """The position of the entry of `environments` with the name and the resolved options of an eval; None: it does not train."""
    found = (i for i, one in enumerate(trained) if (one.name, dict(one.options)) == (entry.name, dict(entry.options or {})))
    return next(found, None)


def check_holdout(entry: EvalConfig, path: str, trained: Sequence[EnvironmentConfig]) -> Iterator[Problem]:
    """Problems of `split: holdout`, with resolved options."""
    if entry.split != "holdout":
        return
    if same_entry(entry, trained) is None:
        fix = "leave its options out, so that they are those of environments; or split=test"
        yield Problem(f"{path}.split", "holdout keeps rows out of training, and nothing trains on this environment", fix)
    if entry.prompts == 0:
        yield Problem(f"{path}.prompts", "0 would hold out every row", "say how many rows are kept out of training: prompts=N")
