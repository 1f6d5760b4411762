"""Evals outside of a run: of checkpoints, of the model before training, of Hugging Face folders, in one go.

    results = evaluate(["outputs/my-run"], names=["arithmetic"], samples=8, k=(1, 4))
    results = evaluate(["outputs/my-run", "my-model"])               # the run's own evals, and the same of another model

Weights reach the engine as they do in training: published, verified, proved by the canary. The prompts are made, the completions
drawn and scored by training's own code. A run's ledger is looked through first: an eval whose rows trained is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.bounds import check_bounds
from posttrain.config.entries import label_of
from posttrain.config.eval_rules import check_evals, same_entry
from posttrain.config.report import refuse
from posttrain.config.schema import MISSING, NO_ENGINE, EvalConfig
from posttrain.errors import ConfigError, DataError, RunAborted
from posttrain.evals.build import Eval, build_evals
from posttrain.evals.during import line
from posttrain.evals.heldout import Proof, ledger_proof, refuse_trained
from posttrain.evals.result import FOLDER, Result, Results
from posttrain.evals.run import beside, run_eval
from posttrain.evals.subject import Subject, base_model, load_model, logprobs, subjects_of, weights_of
from posttrain.evals.table import write_table
from posttrain.placement.out_of_memory import memory_explained
from posttrain.tracking.rollouts import write_rollouts
from posttrain.tracking.text import near

if TYPE_CHECKING:
    from posttrain.config.schema import RunConfig
    from posttrain.data.packer import DataPacker

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Flags:
    """What overrides every eval; None: as it says itself."""

    samples: int | None = None
    k: tuple[int, ...] | None = None
    prompts: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None

    def apply(self, entry: EvalConfig) -> EvalConfig:
        given = {name: getattr(self, name) for name in self.__slots__ if getattr(self, name) is not None}
        return replace(entry, **given)


def evaluate(
    given: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    names: Sequence[str] = (),
    steps: Sequence[int] | str | None = None,
    flags: Flags = Flags(),
    config_file: str | Path | None = None,
    out: str | Path | None = None,
    allow_trained: bool = False,
    say: Say = print,
) -> list[Result]:
    """Evaluate everything in `given` (see `evals.subject`), write the results and return them, in the order given.

    overrides: of the config, as on the command line.   names: environments to ask instead of the run's own evals.
    steps: of the runs in `given`.   out: folder of the results; default RUN/evals, ./evals/NAME for a model of no run.
    allow_trained: measure also on rows that trained, and say so. Raises what `posttrain train` raises for the same parts.
    """
    from posttrain.rollout.event_loop import run_to_end

    groups = _groups([subject for one in given for subject in subjects_of(one, steps)])
    if names:
        overrides = [*overrides, "evals=[" + ",".join(f"'{name}'" for name in names) + "]"]
    jobs = [_job(group, groups, overrides, flags, config_file, out, allow_trained, say) for group in groups]
    found: list[Result] = []
    for job in jobs:
        with memory_explained(job.given, job.config.evals):
            found += run_to_end(job.run(say))
        write_table(job.results, *([job.proof.text()] if job.proof else []))
    return found


def _groups(subjects: Sequence[Subject]) -> list[list[Subject]]:
    """Those that share an engine: the checkpoints of one run, by step; each once."""
    found: dict[Any, dict[int, Subject]] = {}
    for one in subjects:
        found.setdefault(one.run or one.model, {})[one.step] = one
    return [[steps[step] for step in sorted(steps)] for steps in found.values()]


@dataclass(frozen=True, slots=True)
class _Job:
    """The subjects that share an engine, and what is asked of them. given: the config before the flags."""

    given: RunConfig
    config: RunConfig
    subjects: list[Subject]
    model: str
    packer: DataPacker
    evals: list[Eval]
    results: Results
    proof: Proof | None

    async def run(self, say: Say) -> list[Result]:
        from posttrain.data.dataset import Source
        from posttrain.loop.build import build_rollouts, probe_prompts
        from posttrain.loop.prepare import build_engine
        from posttrain.loop.run import set_threads
        from posttrain.weights.canary import Canary
        from posttrain.weights.plane import WeightPlane

        config, logs = self.config, self.results.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        set_threads(config.grid.threads)
        environments = {one.key: one.env for one in self.evals}
        engine = build_engine(config, self.model, self.packer, logs)
        scorer, rollouts = build_rollouts(config, engine, self.packer, environments, logs)
        held: list[Any] = []  # the model whose turn it is
        asked = [Source(one.key, [draw.task for draw in one.draws]) for one in self.evals]
        probe = probe_prompts(self.packer, environments, asked, [])
        canary = Canary(lambda ids: logprobs(held[0], ids), probe, config.weights, dtype=config.rollout.dtype) if probe else None
        plane = WeightPlane.local(engine, _transport(config), config.weights, lambda: weights_of(held[0])(), canary=canary)
        try:
            await engine.start()
            await scorer.start()
            found: list[Result] = []
            for subject in self.subjects:
                held[:] = [load_model(subject, self.model, config)]
                await plane.sync(subject.step)
                for one in self.evals:
                    found.append(await self._ask(one, subject, beside(rollouts, self.evals), say))
            return found
        finally:
            parts: list[Any] = [scorer, plane, engine]
            for part in [rollouts.agents, *parts] if rollouts.agents else parts:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(part.close(), config.loop.shutdown_timeout_s)

    async def _within(self, work: Awaitable[Any], name: str) -> Any:
        limit = self.config.rollout.generate_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await work
        except TimeoutError as exc:
            fix = "raise rollout.generate_timeout_s if it is only slow; see the engine's log"
            raise RunAborted(f"waited {limit:g} s for {name}", fix=fix, where=str(self.results.folder / "logs")) from exc

    async def _ask(self, one: Eval, subject: Subject, rollouts: Any, say: Say) -> Result:
        result, groups = await run_eval(one, rollouts, self.config, subject.step, piece=self._within)
        result = replace(result, checked=self.proof.plain() if self.proof else {})
        if groups:
            folder = self.results.folder / one.label
            folder.mkdir(parents=True, exist_ok=True)
            write_rollouts(folder, subject.step, groups, decode=self.packer.decode, kind="completions")
        self.results.write(result)
        say(f"{subject.of}: {line(result)}")
        return replace(result, of=subject.of)


def _job(
    group: list[Subject], groups: Sequence[Sequence[Subject]], overrides: Sequence[str], flags: Flags,
    config_file: str | Path | None, out: str | Path | None, allow_trained: bool, say: Say,
) -> _Job:  # fmt: skip
    """Everything of a group that can be told before an engine starts."""
    from posttrain.loop.prepare import build_packer

    first = group[0]
    beside_run = next((one.run for other in groups for one in other if one.run is not None), None)
    given = _config(first, beside_run, overrides, config_file)
    config = replace(given, evals=tuple(flags.apply(entry) for entry in given.evals or _own(given, first)))
    if problems := [*check_bounds(config), *check_evals(config)]:
        raise refuse(problems)
    root = first.run.parent if first.run is not None else Path.cwd()
    model = base_model(config, first, root, say)
    evals, proof = _evals(config, first.run, changed=bool(overrides) or flags.prompts is not None)
    if proof is not None:
        if not allow_trained:
            refuse_trained(proof)
        say(f"{first.of}: {proof.text()}")
    results = Results(_folder(first, out, len(groups)))
    return _Job(given, config, group, model, build_packer(config, model), evals, results, proof)


def _config(subject: Subject, run: Path | None, overrides: Sequence[str], file: str | Path | None) -> RunConfig:
    """The config that a subject is evaluated under. run: the first one beside a model that is of none."""
    from posttrain.config.load import load_config

    source = subject.run or (run if file is None else None)
    if source is not None:
        config = saved_run_config(source, overrides)
    else:
        config = load_config(overrides, config_file=file, values=_values(subject.model, overrides, file)).config
    if config.rollout.engine == NO_ENGINE:
        raise ConfigError("the run has no engine", fix="choose one: rollout.engine=hf", where="rollout.engine", code="no-engine")
    if subject.run is not None:
        return config
    asked = any(text.lstrip("+").startswith("model.chat_template=") for text in overrides)
    template = config.model.chat_template if asked else None  # a run's own template is of its own model
    return replace(config, model=replace(config.model, name_or_path=subject.model, factory=None, chat_template=template))


def _values(model: str, overrides: Sequence[str], file: str | Path | None) -> dict[str, Any]:
    """What a config needs that trains nothing."""
    from posttrain.config.compose import compose

    tree = compose(overrides, config_file=file).tree
    entries: list[Any] = list(tree.get("evals") or [])
    if not entries:
        raise ConfigError(
            f"there is nothing to ask {model}", cause="a model that is of no run has no evals of its own",
            fix="--env NAME, or 'evals=[{name: NAME, options: {data: my.jsonl}}]', or --config FILE, or a run beside it",
            where="evals", code="no-evals",
        )  # fmt: skip
    named: dict[str, Any] = {"name": entries[0]} if isinstance(entries[0], str) else entries[0]
    trained = {"name": named.get("name", "???"), "options": dict(named.get("options") or {})}
    values: dict[str, Any] = {"model.name_or_path": model}
    if not tree.get("environments"):
        values["environments"] = [trained]
    if (tree.get("rl") or {}).get("steps", MISSING) == MISSING:
        values["rl.steps"] = 1
    return values


def _own(config: RunConfig, subject: Subject) -> Iterator[EvalConfig]:
    """An eval of the test split of each environment, where a run has no evals."""
    if subject.run is not None or config.environments:
        for entry in config.environments:
            name = label_of(entry)
            yield EvalConfig(name=entry.name, label=name.replace(":", "_"), options=dict(entry.options), prompts=256)


def _evals(config: RunConfig, run: Path | None, *, changed: bool) -> tuple[list[Eval], Proof | None]:
    """The evals, and what the ledger of the run says of their rows; None: there is no run. changed: `config` is not the run's."""
    from posttrain.data.dataset import build_sampler
    from posttrain.loop.prepare import build_environments

    if run is None:
        return build_evals(config, {}, []), None
    environments = build_environments(config)
    try:
        sampler = build_sampler(config, environments)
    except DataError as exc:
        if any(same_entry(entry, config.environments) is not None for entry in config.evals):
            raise
        evals = build_evals(config, {}, [])
        unknown = f"its training data cannot be read ({exc.message})"
        return evals, Proof(0, 0, sum(len(one.draws) for one in evals), unknown=unknown)
    evals = build_evals(config, environments, sampler.sources)
    if changed:  # which rows the run could draw is said by its own evals
        config = saved_run_config(run)
        environments = build_environments(config)
        sampler = build_sampler(config, environments)
    return evals, ledger_proof(run / "ledger.jsonl", sampler, evals, config, environments)


def saved_run_config(run: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a run, without its hooks."""
    from posttrain.config.load import load_config

    return load_config(["hooks=[]", *overrides], config_file=run / "config.yaml").config


def _folder(subject: Subject, out: str | Path | None, groups: int) -> Path:
    name = subject.run.name if subject.run is not None else Path(subject.model).name
    if out is not None:
        folder = Path(out).expanduser().absolute()
        return folder if groups == 1 else folder / name
    return subject.run / FOLDER if subject.run is not None else Path.cwd() / FOLDER / name


def _transport(config: RunConfig) -> Any:
    """To an engine that this process drives, whatever the run had."""
    from posttrain import plugins
    from posttrain.placement.grid import EMBEDDED

    name = "inproc" if config.rollout.engine in EMBEDDED else "shm"
    return plugins.build("transports", name, {}, where="weights.transport")


def pairs_of(results: Sequence[Result]) -> list[tuple[Result, Result]]:
    """What is compared: of one run the last step with the first, else everything with what was named first, by label."""
    found: list[tuple[Result, Result]] = []
    for label in dict.fromkeys(one.label for one in results):
        first, *others = [one for one in results if one.label == label]
        found += [(first, one) for one in (others if len({one.of for one in results}) > 1 else others[-1:])]
    return found


def recorded(given: str) -> list[Result]:
    """The newest recorded result of each eval: of a run, of one step of it (RUN/checkpoints/step_N), or of a folder of results.

    Raises ConfigError where there are none.
    """
    path = Path(given).expanduser().absolute()
    step = int(path.name.rpartition("_")[2]) if path.parent.name == "checkpoints" else None
    run = path.parent.parent if step is not None else path
    folder = run if (run / "summary.json").is_file() else run / FOLDER
    found = [one for one in Results(folder).read() if step is None or one.step == step]
    if not found:
        raise ConfigError(
            f"no eval is recorded in {near(folder)}" + (f" of step {step}" if step is not None else ""),
            fix=f"posttrain eval {given}", code="no-evals",
        )  # fmt: skip
    newest = {one.label: one for one in found}
    return [replace(one, of=given) for one in newest.values()]
