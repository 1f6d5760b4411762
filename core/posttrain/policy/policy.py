"""The policy: a model, its optimizer, and one batch step of any objective; in one process, or sharded over several ranks.

    policy = Policy(config, "path/of/a/model", objective)               # on every rank with the same arguments, mesh=mesh
    result = policy.train_step(rows)                                    # the optimizer steps of one batch
    for weight in policy.local_weights(): ...                           # what this rank publishes from

A batch step goes: deal the rows into `n_mini` optimizer steps, those to the ranks and each rank's share into micro-batches →
record old log-probs of the whole batch, with the update's own micro-batches and code (when several steps need them) → record
those of the frozen reference model (when the objective needs it) → per optimizer step: forward and backward of each
micro-batch, clip, step. Contributions of micro-batches and ranks sum to the step's loss, so how the rows are cut changes
nothing but rounding.

On a mesh every public method that computes is collective: all ranks call it with the same arguments, each does its share, and
all get the same result. FSDP gathers a layer when every rank runs it, so all ranks run the same number of forwards.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posttrain.config.schema import RunConfig
from posttrain.data.seeds import derive_seed
from posttrain.errors import ConfigError
from posttrain.objective.objective import Objective
from posttrain.policy import prefix, saving
from posttrain.policy.load import load_causal_lm
from posttrain.policy.memory import memory_guard
from posttrain.policy.micro import MicroBatch, Totals
from posttrain.policy.module import PolicyModule
from posttrain.policy.optimizer import build_optimizer, clip_and_step
from posttrain.policy.packing import PackedRows
from posttrain.policy.partition import deal_atoms, micro_batches
from posttrain.policy.probe import Drift, check_forward, not_deterministic
from posttrain.policy.ranks import Ranks, agree_on_old_logprobs
from posttrain.policy.rows import Row
from posttrain.policy.schedule import lr_factor
from posttrain.policy.sharding import local, local_parameters, local_weight, release, shard_module
from posttrain.policy.snapshot import Snapshots
from posttrain.policy.step import StepMeasures, StepResult, means
from posttrain.weights.publication import LocalWeight

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("posttrain.policy")


class Policy:
    """The trained model of a run.

    mesh: a DeviceMesh with the axes ("dp_replicate", "dp_shard"); None: one process holds everything.
    writers: a gloo group of the same ranks. Without it the snapshot of a sharded policy is written while nothing trains.
    before_change: called before any weight changes, for whoever still reads them.
    `version` counts batch steps that trained; `updates` counts optimizer steps, skipped ones included, and places the
    learning rate on its curve. `notes` are lines to say about how the model is computed. Raises EngineStartError when the
    model cannot be loaded, ConfigError when its dtypes do not fit each other or the probe finds that this policy would not
    compute the model's own log-probs, E5 when the ranks were not built alike.
    """

    def __init__(
        self, config: RunConfig, model_path: str, objective: Objective, *, mesh: DeviceMesh | None = None, writers: Any = None
    ) -> None:
        self.config, self.rl, self.objective = config, config.rl, objective
        self.ranks = Ranks.of(mesh, writers)
        self._snapshots = Snapshots()
        self.version = self.updates = 0
        self.notes: list[str] = []
        self.before_change: Callable[[], None] = lambda: None
        agree_on_old_logprobs(self.ranks.gather(self.needs_old_logprobs()))
        torch.manual_seed(derive_seed(config.seed, "policy"))  # torch's own is another in every process
        with memory_guard("loading the model"):
            self.module = self._build_module(model_path)
            self.reference: PolicyModule | None = None
            if objective.needs_reference():
                self.reference = copy.deepcopy(self.module).requires_grad_(False)
            if mesh is not None:
                for module in (self.module, self.reference):
                    if module is not None:
                        shard_module(module, mesh)
            check_forward(self.module, self.ranks)
            release(self.module)
            self.shards = local_parameters(self.module)
            self.optimizer = build_optimizer(self.rl, self.shards)

    @property
    def dp_world(self) -> int:
        """Data-parallel ranks."""
        return self.ranks.world

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return int(self.module.model.get_input_embeddings().num_embeddings)

    @property
    def n_mini(self) -> int:
        """Optimizer steps per batch step."""
        return self.rl.batch_per_replica // (self.rl.mini_batch_per_replica or self.rl.batch_per_replica)

    def needs_old_logprobs(self) -> bool:
        """Whether this rank would record log-probs before the first of several optimizer steps; all ranks must say the same."""
        return self.n_mini > 1 and self.objective.needs_old_logprobs()

    def train_step(self, rows: list[Row]) -> StepResult:
        """Train on one batch of rows, all of which train.

        Raises ValueError for an empty batch, OutOfMemory, and RunAborted (E8) when old log-probs do not describe the update's
        forward; no weight has moved then.
        """
        if not rows:
            raise ValueError("train_step got no rows; a batch with nothing to learn trains no step")
        measures = StepMeasures()
        with memory_guard("training"):
            with measures.phase("pack"):
                parts = deal_atoms(rows, range(len(rows)), self.n_mini)
                steps = [(Totals.of([rows[i] for i in part]), self._micro_batches(rows, part)) for part in parts if part]
            if len(steps) > 1 and self.needs_old_logprobs():
                with measures.phase("old_logprobs"):
                    for micro in (micro for _, step in steps for micro in step):
                        micro.old = self._recorded(self.module, micro)
            if self.reference is not None:
                with measures.phase("reference"):
                    for micro in (micro for _, step in steps for micro in step):
                        micro.reference = self._recorded(self.reference, micro)
            for number, (totals, step) in enumerate(steps):
                self._optimizer_step(totals, step, measures, first=number == 0)
            self.version += 1
            return measures.result(self.ranks)

    def evaluate(self, rows: list[Row]) -> dict[str, float]:
        """The loss of `rows` as one optimizer step and the algorithm's own measures; no weight moves."""
        measures, totals, loss = StepMeasures(), Totals.of(rows), 0.0
        with torch.no_grad():
            for micro in self._micro_batches(rows, range(len(rows))):
                if self.reference is not None:
                    micro.reference = self._recorded(self.reference, micro)
                share, stats = self.objective.score(self.module, micro.inputs(totals))
                if not micro.idle:
                    measures.add_stats(stats)
                    loss += float(share)
        release(self.module)
        measures.losses.append(loss)
        shares = self.ranks.gather(measures.share())
        return {"loss": sum(share.losses[0] for share in shares), **means(shares)}

    def logprobs(self, rows: list[Row]) -> list[list[float]]:
        """Log-probs of each row's trained tokens under the current weights, in the order of the rows; no gradient."""
        own: dict[int, list[float]] = {}
        for micro in self._micro_batches(rows, range(len(rows))):
            values = self._recorded(self.module, micro).split(micro.packed.lengths)
            own |= {index: value.tolist() for index, value in zip(micro.indices, values, strict=False)}
        found = {index: value for part in self.ranks.gather(own) for index, value in part.items()}
        return [found[index] for index in range(len(rows))]

    def score(self, sequences: Sequence[Sequence[int]], dtype: str | torch.dtype) -> list[list[float]]:
        """What an engine that holds these weights in `dtype` should say: the log-prob, at temperature 1, of each token from the
        second on. The weights are rounded for the forward and restored to the bit; for canaries."""
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        rows = [
            Row(input_ids=list(ids), mask=[False] + [True] * (len(ids) - 1), rollout_logprobs=[0.0] * len(ids))
            for ids in sequences
        ]
        shards = [shard for shard in self.shards if shard.dtype != wanted]
        exact = [shard.detach().clone() for shard in shards]
        temperature, self.module.temperature = self.module.temperature, 1.0
        try:
            with torch.no_grad():
                for shard in shards:
                    shard.copy_(shard.to(wanted))
            return self.logprobs(rows)
        finally:
            self.module.temperature = temperature
            with torch.no_grad():
                for shard, value in zip(shards, exact, strict=True):
                    shard.copy_(value)

    def local_weights(self) -> Iterator[LocalWeight]:
        """What this rank holds of every parameter, under its Hugging Face name, tied ones once, as stored and without a copy.

        Not collective: nothing is gathered. Gradients are freed first, so that a publication does not stand beside them.
        """
        self._drop_gradients()
        return (local_weight(name, parameter, self.ranks) for name, parameter in self.module.model.named_parameters())

    def named_weights(self, dtype: str | torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every whole parameter under its Hugging Face name, in `dtype`, tied ones once. Not copied where the dtype is the same
        and no rank holds a part; collective, and as large as the model in the end, where one does."""
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, parameter in self.module.model.named_parameters():
            yield name, (parameter if self.ranks.mesh is None else parameter.full_tensor()).detach().to(wanted)

    def save(self, folder: str | Path) -> None:
        """Write weights and everything else that the next step depends on; see `posttrain.policy.saving`."""
        self.snapshot()(Path(folder))

    def snapshot(self) -> Callable[[Path], None]:
        """Copy what `save` writes to host memory, as it is now; returns what writes the copy, once and in any thread.

        Not collective; the writer is, over `writers`, and training may go on meanwhile. One at a time: raises RuntimeError while
        a former one is not written and not dropped, OutOfMemory when the copy does not fit.
        """
        return self._snapshots.take(self._copied)

    def _copied(self) -> Callable[[Path], None]:
        state = {
            "optimizer": self.optimizer.state_dict(), "version": self.version, "updates": self.updates,
            "rng": torch.get_rng_state(),
        }  # fmt: skip
        with memory_guard("copying a checkpoint"):
            return saving.snapshot(dict(self.module.model.named_parameters()), state, self.ranks)

    def load(self, folder: str | Path) -> None:
        """Continue from `save`, bit for bit, whatever number of ranks wrote it.

        Raises DataError when the folder is damaged or holds another model's state; no weight has moved then.
        """
        self.before_change()
        state = saving.load(Path(folder), dict(self.module.model.named_parameters()), self.ranks)
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.updates = state["version"], state["updates"]
        torch.set_rng_state(state["rng"])

    def _build_module(self, model_path: str) -> PolicyModule:
        storage, compute = getattr(torch, self.rl.master_dtype), getattr(torch, self.rl.param_dtype)
        if storage.itemsize < compute.itemsize:
            raise ConfigError(
                f"rl.param_dtype={self.rl.param_dtype} is wider than rl.master_dtype={self.rl.master_dtype}",
                cause="the body cannot compute in more precision than its parameters are stored in",
                fix=f"set rl.param_dtype={self.rl.master_dtype}, or rl.master_dtype={self.rl.param_dtype}",
                where="rl.param_dtype",
            )
        chosen = self.config.model
        model = load_causal_lm(
            model_path, storage, attn_implementation=chosen.attn_implementation, trust_remote_code=chosen.trust_remote_code
        )
        if self.ranks.mesh is None:  # else each shard moves when it is cut
            model.to("cuda" if torch.cuda.is_available() else "cpu")
        return PolicyModule(
            model,
            shared_prefix=self._shares_prefix(model),
            temperature=self.config.rollout.temperature,
            chunk_tokens=self.rl.logprob_chunk_tokens,
            gradient_checkpointing=self.rl.gradient_checkpointing,
            compute_dtype=None if compute == storage else compute,
        )

    def _shares_prefix(self, model: Any) -> bool:
        """Whether a group's prompt is computed once: as asked, where that is exact."""
        asked, problem = self.rl.shared_prefix, prefix.why_not(model)
        if asked and problem:
            self.notes.append(
                f"rl.shared_prefix: off, each row computes its prompt itself; on model_type={model.config.model_type!r} a shared "
                f"prefix would not be exact: {problem}"
            )
        used, wanted = model.config._attn_implementation, self.config.model.attn_implementation
        if used != wanted and not (asked and not problem):
            self.notes.append(f"model.attn_implementation: {used}, because {wanted} would leave out the model's soft cap")
        return asked and not problem

    def _micro_batches(self, rows: list[Row], part: Sequence[int]) -> list[MicroBatch]:
        """This rank's share of the rows `part`, laid out; as many micro-batches of as many forwards as on every other rank."""
        own, count = deal_atoms(rows, part, self.ranks.world)[self.ranks.rank], self.rl.micro_batch_per_replica
        pieces = micro_batches(
            rows, own, count=count and max(1, count // self.ranks.world), tokens=self.rl.micro_batch_tokens,
            keep_groups=self.module.shared_prefix,
        )  # fmt: skip
        micros = [self._micro_batch(rows, piece) for piece in pieces]
        forwards = self.ranks.gather([len(micro.packed.forwards) for micro in micros])
        for number in range(max(map(len, forwards))):
            if number == len(micros):
                shortest = min(part, key=lambda index: rows[index].context)
                micros.append(self._micro_batch(rows, [shortest], idle=True))
            micros[number].packed.fill(max(counts[number] for counts in forwards if number < len(counts)))
        return micros

    def _micro_batch(self, rows: list[Row], piece: list[int], *, idle: bool = False) -> MicroBatch:
        chosen = [rows[index] for index in piece]
        return MicroBatch(chosen, self.module.pack(chosen), [] if idle else piece)

    @staticmethod
    def _recorded(module: PolicyModule, micro: MicroBatch) -> Tensor:
        with torch.no_grad():
            found = module(micro.packed)[0]
        release(module)
        return found

    def _optimizer_step(self, totals: Totals, step: list[MicroBatch], measures: StepMeasures, *, first: bool) -> None:
        loss, drifts = 0.0, list[Drift]()
        with measures.phase("forward_backward"):
            for micro in step:
                loss += self._forward_backward(micro, totals, measures, drifts, first=first)
        measures.losses.append(loss)
        if first and any(micro.old is not None for micro in step):
            self._check_determinism(drifts)
        total_updates = self.rl.steps * self.n_mini
        measures.lr = self.rl.optimizer.lr * lr_factor(self.rl.lr_scheduler, self.updates, total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = measures.lr
        with measures.phase("optimizer"):
            self.before_change()
            for shard, parameter in zip(self.shards, self.module.parameters(), strict=True):
                shard.grad = None if parameter.grad is None else local(parameter.grad)
            outcome = clip_and_step(self.optimizer, self.shards, self.rl.optimizer.grad_clip, self.ranks)
            self._drop_gradients()
        measures.outcomes.append(outcome)
        self.updates += 1
        if outcome.skipped:
            log.warning("optimizer step %d skipped: its gradient norm is %s; no weight moved", self.updates, outcome.grad_norm)

    def _forward_backward(
        self, micro: MicroBatch, totals: Totals, measures: StepMeasures, drifts: list[Drift], *, first: bool
    ) -> float:
        """Add the micro-batch's gradient; its contribution to the loss."""
        if micro.idle:
            (self.module(micro.packed)[0] * 0.0).sum().backward()
            return 0.0
        seen: list[Tensor] = []

        def model(rows: PackedRows, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
            logprobs, entropies = self.module(rows, entropy=entropy)
            seen.append(logprobs.detach())
            return logprobs, entropies

        inputs = micro.inputs(totals)
        loss, stats = self.objective.score(model, inputs, entropy=True)
        if first and micro.old is not None:
            drifts.append(Drift.of(micro.old, seen[0]))
        (loss * self.dp_world).backward()  # FSDP averages over ranks; contributions must sum
        measures.add(stats, seen[0], inputs.rollout_logprobs, first=first)
        return float(loss.detach())

    def _check_determinism(self, own: list[Drift]) -> None:
        """Raise E8 on every rank when the first step's forward moved on any; its gradients are dropped."""
        if failure := not_deterministic(self.module.model, Drift.all(self.ranks.gather(Drift.all(own)))):
            self._drop_gradients()
            raise failure

    def _drop_gradients(self) -> None:
        for parameter in (*self.module.parameters(), *self.shards):
            parameter.grad = None
