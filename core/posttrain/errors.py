"""Every message that posttrain shows a person, in one place.

One picklable tree under `PosttrainError`; members also subclass the stdlib type that a caller would expect. An error says
what is wrong (the message), why (the cause) and how to fix it. The documented messages live in `CATALOGUE`, from which the
tables in the docs are generated; raise one with `error(code, **values)`:

    raise error("E14")
    raise error("E9", path="my_pkg.packers:make") from exc

Anything else is raised by its class: `raise ConfigError("…", fix="…")`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXIT_OK = 0
EXIT_UNEXPECTED = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_ENGINE = 4
EXIT_ABORTED = 5
EXIT_RETRYABLE = 75
EXIT_INTERRUPT = 130
EXIT_TERMINATED = 143


class PosttrainError(Exception):
    """Base of all errors. `code` is stable, `exit_code` is what the command line ends with.

    message: what is wrong, one or two sentences.   cause: why.   fix: what to type or change.
    where: the config path, file or plug-in concerned.   anchor: page and anchor in the docs.
    """

    code = "error"
    exit_code = EXIT_ABORTED
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        cause: str = "",
        fix: str = "",
        where: str = "",
        anchor: str = "",
        code: str | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.cause, self.fix, self.where, self.anchor = message, cause, fix, where, anchor
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {
            "cause": self.cause, "fix": self.fix, "where": self.where, "anchor": self.anchor,
            "code": self.code, "retryable": self.retryable,
        }, self.__dict__)

    def __str__(self) -> str:
        parts = [self.message]
        if self.where:
            parts.append(f"  where: {self.where}")
        if self.cause:
            parts.append(f"  cause: {self.cause}")
        if self.fix:
            parts.append(f"  fix:   {self.fix}")
        return "\n".join(parts)


def _rebuild(cls: type[PosttrainError], message: str, options: dict[str, Any], state: dict[str, Any]) -> PosttrainError:
    exc = cls.__new__(cls)
    PosttrainError.__init__(exc, message, **options)
    exc.__dict__.update(state)
    return exc


class ConfigError(PosttrainError, ValueError):
    """The configuration cannot work. Raised before anything starts. `problems` lists each when there are several."""

    code, exit_code = "config", EXIT_CONFIG
    problems: Sequence[object] = ()


class SharedRootError(ConfigError):
    """A node does not see the folder for runs as the driver does. `path`: the folder; `nodes`: who does not see it."""

    code = "shared_root"
    path: str = ""
    nodes: Sequence[str] = ()


class MissingConfigException(ConfigError):
    """`experiment=` names something that is not in an importable catalog (E15)."""

    code = "E15"


class PluginError(PosttrainError, ImportError):
    """A selected plug-in is absent, broken or of the wrong type."""

    code, exit_code = "plugin", EXIT_CONFIG


class DataError(PosttrainError, ValueError):
    """A dataset cannot be read or does not fit."""

    code, exit_code = "data", EXIT_DATA


class BatchError(PosttrainError, ValueError):
    """A batch of tokens or rewards lacks what the objective needs, or contradicts itself: a fault of the caller."""

    code = "batch"


class PackerError(PosttrainError, ValueError):
    """A DataPacker was built or used against its contract."""

    code, exit_code = "packer", EXIT_CONFIG


class EngineStartError(PosttrainError, RuntimeError):
    """A model or an engine did not start."""

    code, exit_code = "engine", EXIT_ENGINE


class RunAborted(PosttrainError, RuntimeError):
    """The run stopped and would stop again in the same way."""

    code, exit_code = "aborted", EXIT_ABORTED


class OutOfMemory(RunAborted, MemoryError):
    """A role ran out of host or device memory."""

    code = "oom"


class RunInterrupted(PosttrainError, RuntimeError):
    """The run stopped for a reason that may pass (a dead process, a full disk): resume it."""

    code, exit_code, retryable = "interrupted", EXIT_RETRYABLE, True


class WaitExpired(RunInterrupted, TimeoutError):
    """A named wait reached its deadline."""

    code = "deadline"


class WeightSyncError(PosttrainError, RuntimeError):
    """A weight update was refused or failed; the message names the origin."""

    code, exit_code = "weights", EXIT_RETRYABLE
    retryable = True


class SandboxError(PosttrainError, RuntimeError):
    """A sandbox failed, not the program in it: what was to be scored there is unscorable."""

    code, exit_code, retryable = "sandbox", EXIT_RETRYABLE, True


class OptimizerDependencyError(PosttrainError, ModuleNotFoundError):
    """E16: an optimizer needs a package that is not there."""

    code, exit_code = "E16", EXIT_CONFIG


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented message. `text` has named fields for `str.format`."""

    cls: type[PosttrainError]
    text: str
    cause: str
    fix: str
    anchor: str
    retryable: bool = False


_TROUBLE = "troubleshooting.md"
_PACKER = "howto/custom-datapacker.md"

CATALOGUE: dict[str, Entry] = {
    "E1": Entry(
        ConfigError,
        "ROLLOUT_RANKS={ranks} must equal rollout.tensor_parallel_size={tp}",
        "the rollout shape disagrees with the width of the engine's tensor parallelism",
        "set grid.ranks or grid.shapes.rollout so that the rank width equals rollout.tensor_parallel_size",
        f"{_TROUBLE}#placement-and-process-group-errors",
    ),
    "E2": Entry(
        ConfigError,
        "POLICY_REPLICAS={replicas} is unsupported",
        "the policy has no replica axis",
        "use grid.shapes.policy=[1,POLICY_RANKS] and configure HSDP as dp_replicate * dp_shard inside those ranks",
        f"{_TROUBLE}#placement-and-process-group-errors",
    ),
    "E3": Entry(
        ConfigError,
        "grid.shapes requires grid.backend='ray'",
        "explicit shapes were given under the local backend",
        "drop grid.shapes or set grid.backend=ray",
        f"{_TROUBLE}#placement-and-process-group-errors",
    ),
    "E4": Entry(
        ConfigError,
        "per-replica rendezvous not run (need ranks=TP>1 on GPU)",
        "rollout.tensor_parallel_size > 1 under the local backend",
        "vLLM with tensor parallelism needs grid.backend=ray; local is the TP=1 path",
        f"{_TROUBLE}#placement-and-process-group-errors",
    ),
    "E5": Entry(
        RunAborted,
        "policy cells disagree on needs_old_logprobs() ({answers})",
        "the policy's ranks were not built alike: another config, objective or version of a plug-in on one of them",
        "bring every node to the same code and config, then start again; a retry changes nothing",
        f"{_TROUBLE}#placement-and-process-group-errors",
    ),
    "E6": Entry(
        DataError,
        "dataset has {items} item(s) but world_size={world}",
        "the dataset is smaller than the number of workers, or the output root is not on a shared file system",
        "give the run a shared --run prefix, or a dataset with at least {world} items",
        f"{_TROUBLE}#wrong-or-missing-files-at-runtime",
    ),
    "E7": Entry(
        RunAborted,
        "dynamic sampling batch_step={step}: replay cells {cells} hold fewer informative trajectories than their quotas {quotas}",
        "{held} informative groups of {each} trajectories after {rounds} round(s), {prompts} prompts: too few groups have "
        "rewards that disagree ({zero} were all 0, {one} all 1); the step did not train",
        "all 0: an easier task or a partial reward; all 1: a harder task; neither: a larger rl.group_size. A larger "
        "rl.dynamic_sampling_max_extra_rollouts only defers this when no prompt gives rewards that disagree; "
        "rl.dynamic_sampling_on_budget_exhausted=proceed fills the batch with tied groups instead",
        f"{_TROUBLE}#a-batch-lacks-informative-groups",
    ),
    "E8": Entry(
        RunAborted,
        "π_old ahead-pass determinism probe failed: the log-prob of {share} of {tokens} tokens moved, by up to {gap} nats, "
        "between two forwards at unchanged weights; the forward routing was {routing}",
        "{cause}, so the recorded old log-probs do not describe the update's forward",
        "{fix}",
        f"{_TROUBLE}#the-ahead-pass-is-not-deterministic",
    ),
    "E9": Entry(
        PackerError,
        "Unable to import DataPacker factory '{path}'",
        "the dotted path is not importable here: {reason}",
        "install or mount the module identically on every node, or correct the path (form: package.module:attribute)",
        f"{_PACKER}#errors",
    ),
    "E10": Entry(
        PackerError,
        "DataPacker factory '{path}' must return a DataPacker",
        "it returned {got}",
        "return a fresh DataPacker subclass instance from the zero-argument factory",
        f"{_PACKER}#errors",
    ),
    "E11": Entry(
        PackerError,
        "model_type='{model_type}' declares vision_config but has no native packer",
        "registered model types: {known}",
        "set model_backend=hf, register a native packer, or pass an explicit one with rl.data.packer",
        f"{_PACKER}#errors",
    ),
    "E12": Entry(
        PackerError,
        "{owner} requires a DataPacker at construction",
        "packer=None was passed",
        "build one with posttrain.init_data_packer(name_or_path)",
        f"{_PACKER}#errors",
    ),
    "E13": Entry(
        PackerError,
        "packer tokenizer adds special tokens",
        "{reason}",
        "send token ids, or configure the tokenizer (see the guard section)",
        f"{_PACKER}#the-special-token-guard",
    ),
    "E14": Entry(
        PackerError,
        "DataPacker.setup: empty name_or_path",
        "the packer was built without a model id",
        "pass the same name_or_path that the model or the engine was built from",
        f"{_PACKER}#errors",
    ),
    "E15": Entry(
        MissingConfigException,
        "MissingConfigException: Could not load 'experiment/{name}'",
        "{reason}",
        "{remedy}",
        f"{_TROUBLE}#missingconfigexception-could-not-load-experiment",
    ),
    "E16": Entry(
        OptimizerDependencyError,
        "ModuleNotFoundError: No module named 'apex'",
        "rl.optimizer.name=fusedadam needs apex.optimizers.FusedAdam, and {reason}",
        "store the parameters in fp32 instead: rl.master_dtype=float32 rl.param_dtype=bfloat16 rl.optimizer.name=adamw; "
        "for bf16 storage without apex use rl.optimizer.name=adamw_master",
        f"{_TROUBLE}#modulenotfounderror-no-module-named-apex-at-optimizer-construction",
    ),
    "E25": Entry(
        WeightSyncError,
        "finish_weight_update({epoch}): the open update is epoch {open}",
        "body and worker disagree on the stream: a failed stream left another epoch open, or the body is stale",
        "the next set_bucket_plan supersedes an open epoch; if finish keeps failing, rebuild_engine()",
        f"{_TROUBLE}#begin_weight_update--finish_weight_update-refused-a-stream-and-the-lane-is-invalidated",
    ),
    "E26": Entry(
        WeightSyncError,
        "no update is open on this worker",
        "finish_weight_update without begin_weight_update",
        "the next set_bucket_plan supersedes; if finish keeps failing, rebuild_engine()",
        f"{_TROUBLE}#begin_weight_update--finish_weight_update-refused-a-stream-and-the-lane-is-invalidated",
    ),
    "E27": Entry(
        WeightSyncError,
        "begin_weight_update({epoch}) does not advance past epoch {last}",
        "the body's epoch went backwards: two bodies on one worker, or a body replaced without rebuilding the engine",
        "one body per engine; rebuild_engine()",
        f"{_TROUBLE}#begin_weight_update--finish_weight_update-refused-a-stream-and-the-lane-is-invalidated",
    ),
    "misfit": Entry(
        ConfigError,
        "the selected parts do not fit together: {needs} not met",
        "{table}",
        "do what stands under each line; posttrain plugins list NAME tells what a plug-in needs and provides",
        f"{_TROUBLE}#the-selected-parts-do-not-fit-together",
    ),
}


def error(code: str, **values: object) -> PosttrainError:
    """Build the documented error `code` with its message, cause and fix filled in. Raise the result."""
    entry = CATALOGUE[code]
    return entry.cls(
        entry.text.format(**values),
        cause=entry.cause.format(**values),
        fix=entry.fix.format(**values),
        anchor=entry.anchor,
        code=code,
        retryable=entry.retryable or entry.cls.retryable,
    )
