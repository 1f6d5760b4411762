"""The policy: a model, its optimizer, and one batch step of any objective.

    policy = Policy(config, "path/of/a/model", objective)
    result = policy.train_step(rows)                    # the optimizer steps of one batch
    for name, tensor in policy.named_weights("bfloat16"): ...

A batch step goes: deal the rows into `n_mini` optimizer steps and those into micro-batches → record old log-probs of the
whole batch, with the update's own micro-batches and code (when several steps need them) → record those of the frozen
reference model (when the objective needs it) → per optimizer step: forward and backward of each micro-batch, clip, step.
Contributions of micro-batches sum to the step's loss, so their size changes nothing but rounding.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.config.schema import RunConfig
from posttrain.errors import ConfigError, DataError
from posttrain.objective.objective import Objective
from posttrain.policy import prefix
from posttrain.policy.load import load_causal_lm
from posttrain.policy.micro import MicroBatch, Totals
from posttrain.policy.module import PolicyModule
from posttrain.policy.optimizer import build_optimizer, clip_and_step
from posttrain.policy.packing import PackedRows
from posttrain.policy.partition import micro_batches, mini_batches
from posttrain.policy.probe import check_forward, not_deterministic
from posttrain.policy.rows import Row
from posttrain.policy.schedule import lr_factor
from posttrain.policy.step import StepMeasures, StepResult

log = logging.getLogger("posttrain.policy")


class Policy:
    """The trained model of a run.

    `version` counts batch steps that trained; `updates` counts optimizer steps, skipped ones included, and places the
    learning rate on its curve. `notes` are lines to say about how the model is computed. Raises EngineStartError when the
    model cannot be loaded, ConfigError when its dtypes do not fit each other or the probe finds that this policy would not
    compute the model's own log-probs.
    """

    def __init__(self, config: RunConfig, model_path: str, objective: Objective) -> None:
        self.config, self.rl, self.objective = config, config.rl, objective
        self.version = self.updates = 0
        self.dp_world = 1
        self.notes: list[str] = []
        self.module = self._build_module(model_path)
        check_forward(self.module)
        self.reference: PolicyModule | None = None
        if objective.needs_reference():
            self.reference = copy.deepcopy(self.module).requires_grad_(False)
        self.optimizer = build_optimizer(self.rl, self.module.parameters())

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return int(self.module.model.get_input_embeddings().num_embeddings)

    @property
    def n_mini(self) -> int:
        """Optimizer steps per batch step."""
        return self.rl.batch_per_replica // (self.rl.mini_batch_per_replica or self.rl.batch_per_replica)

    def train_step(self, rows: list[Row]) -> StepResult:
        """Train on one batch of rows, all of which train.

        Raises ValueError for an empty batch, and RunAborted (E8) when old log-probs do not describe the update's forward;
        no weight has moved then.
        """
        if not rows:
            raise ValueError("train_step got no rows; a batch with nothing to learn trains no step")
        measures = StepMeasures()
        with measures.phase("pack"):
            steps = [self._micro_batches(rows, part) for part in mini_batches(rows, self.n_mini) if part]
        if len(steps) > 1 and self.objective.needs_old_logprobs():
            with measures.phase("old_logprobs"):
                for micro in (micro for step in steps for micro in step):
                    micro.old = self._recorded(self.module, micro)
        if self.reference is not None:
            with measures.phase("reference"):
                for micro in (micro for step in steps for micro in step):
                    micro.reference = self._recorded(self.reference, micro)
        for number, step in enumerate(steps):
            self._optimizer_step(step, measures, first=number == 0)
        self.version += 1
        return measures.result()

    def evaluate(self, rows: list[Row]) -> dict[str, float]:
        """The loss of `rows` as one optimizer step and the algorithm's own measures; no weight moves."""
        measures, totals, loss = StepMeasures(), Totals.of(rows), 0.0
        with torch.no_grad():
            for micro in self._micro_batches(rows, list(range(len(rows)))):
                if self.reference is not None:
                    micro.reference = self._recorded(self.reference, micro)
                share, stats = self.objective.score(self.module, micro.inputs(totals))
                for name, array in stats.items():
                    measures.arrays[name].append(array.to("cpu", torch.float64))
                loss += float(share)
        return {"loss": loss, **measures.means()}

    def logprobs(self, rows: list[Row]) -> list[list[float]]:
        """Log-probs of each row's trained tokens under the current weights; no gradient."""
        found: list[list[float]] = [[] for _ in rows]
        for part in self._partition(rows, list(range(len(rows)))):
            packed = self.module.pack([rows[index] for index in part])
            with torch.no_grad():
                values = self.module(packed)[0].split(packed.lengths)
            for index, value in zip(part, values, strict=True):
                found[index] = value.tolist()
        return found

    def score(self, sequences: Sequence[Sequence[int]], dtype: str | torch.dtype) -> list[list[float]]:
        """What an engine that holds these weights in `dtype` should say: the log-prob, at temperature 1, of each token from the
        second on. The weights are rounded for the forward and restored to the bit; for canaries."""
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        rows = [
            Row(input_ids=list(ids), mask=[False] + [True] * (len(ids) - 1), rollout_logprobs=[0.0] * len(ids))
            for ids in sequences
        ]
        parameters = [p for p in self.module.parameters() if p.dtype != wanted]
        exact = [p.detach().clone() for p in parameters]
        temperature, self.module.temperature = self.module.temperature, 1.0
        try:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.copy_(parameter.to(wanted))
            return self.logprobs(rows)
        finally:
            self.module.temperature = temperature
            with torch.no_grad():
                for parameter, value in zip(parameters, exact, strict=True):
                    parameter.copy_(value)

    def named_weights(self, dtype: str | torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name, in `dtype`, tied ones once. Not copied where the dtype is the same."""
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        for name, parameter in self.module.model.named_parameters():
            yield name, parameter.detach().to(wanted)

    def save(self, folder: str | Path) -> None:
        """Write weights (`model.safetensors`, Hugging Face names) and everything else that the next step depends on."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: parameter.detach().contiguous() for name, parameter in self.module.model.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        state = {
            "optimizer": self.optimizer.state_dict(), "version": self.version, "updates": self.updates,
            "rng": torch.get_rng_state(),
        }  # fmt: skip
        torch.save(state, folder / "policy.pt")

    def load(self, folder: str | Path) -> None:
        """Continue from `save`, bit for bit. Raises DataError when the folder holds another model's state."""
        from safetensors.torch import load_file

        weights, own = load_file(Path(folder) / "model.safetensors"), dict(self.module.model.named_parameters())
        wrong = [name for name in weights.keys() | own.keys() if name not in own or _kind(weights.get(name)) != _kind(own[name])]
        if wrong:
            raise DataError(
                f"{folder} holds another model: {len(wrong)} parameter(s) differ in name, shape or dtype, such as {min(wrong)}",
                fix="resume with the model and the rl.master_dtype of the run that wrote it",
            )
        state = torch.load(Path(folder) / "policy.pt", weights_only=True)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
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
        ).to("cuda" if torch.cuda.is_available() else "cpu")
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

    def _partition(self, rows: list[Row], part: list[int]) -> list[list[int]]:
        return micro_batches(
            rows, part, count=self.rl.micro_batch_per_replica, tokens=self.rl.micro_batch_tokens,
            keep_groups=self.module.shared_prefix,
        )  # fmt: skip

    def _micro_batches(self, rows: list[Row], part: list[int]) -> list[MicroBatch]:
        chosen = [[rows[index] for index in piece] for piece in self._partition(rows, part)]
        return [MicroBatch(piece, self.module.pack(piece)) for piece in chosen]

    @staticmethod
    def _recorded(module: PolicyModule, micro: MicroBatch) -> Tensor:
        with torch.no_grad():
            return module(micro.packed)[0]

    def _optimizer_step(self, step: list[MicroBatch], measures: StepMeasures, *, first: bool) -> None:
        totals = Totals.of([row for micro in step for row in micro.rows])
        loss = 0.0
        with measures.phase("forward_backward"):
            for micro in step:
                loss += self._forward_backward(micro, totals, measures, first=first)
        measures.losses.append(loss)
        total_updates = self.rl.steps * self.n_mini
        measures.lr = self.rl.optimizer.lr * lr_factor(self.rl.lr_scheduler, self.updates, total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = measures.lr
        with measures.phase("optimizer"):
            outcome = clip_and_step(self.optimizer, self.module.parameters(), self.rl.optimizer.grad_clip)
        measures.outcomes.append(outcome)
        self.updates += 1
        if outcome.skipped:
            log.warning("optimizer step %d skipped: its gradient norm is %s; no weight moved", self.updates, outcome.grad_norm)

    def _forward_backward(self, micro: MicroBatch, totals: Totals, measures: StepMeasures, *, first: bool) -> float:
        """Add the micro-batch's gradient; its contribution to the loss."""
        seen: list[Tensor] = []

        def model(rows: PackedRows, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
            logprobs, entropies = self.module(rows, entropy=entropy)
            seen.append(logprobs.detach())
            return logprobs, entropies

        inputs = micro.inputs(totals)
        loss, stats = self.objective.score(model, inputs, entropy=True)
        if first and micro.old is not None and (failure := not_deterministic(self.module.model, micro.old, seen[0])):
            self.optimizer.zero_grad(set_to_none=True)
            raise failure
        (loss * self.dp_world).backward()  # FSDP averages over ranks; contributions must sum
        measures.add(stats, seen[0], inputs.rollout_logprobs, first=first)
        return float(loss.detach())


def _kind(tensor: Any) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
