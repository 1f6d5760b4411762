"""The evals of a run: at the version that the engines have, behind what trains, and never the reason why a run ends.

    evals = RunEvals(parts, waits)
    evals.due(20)              # also those that a run which this one resumes has not done
    await evals.run(20)        # while the engines keep version 20; files, metrics and a line for each
    evals.finish()             # the ledger is looked through, the table is written and told

An eval that fails (its environment raises, an engine is lost, a deadline passes) is told, and counted in `eval/<eval>/failed`.
Its samples are no draws: the ledger, the batches and the states of training know nothing of them.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from posttrain.evals.build import Eval
from posttrain.evals.heldout import Proof, ledger_proof
from posttrain.evals.result import FOLDER, Result, Results
from posttrain.evals.run import beside, run_eval
from posttrain.evals.table import write_table
from posttrain.tracking.rollouts import write_rollouts
from posttrain.weights.deadline import in_thread

if TYPE_CHECKING:
    from posttrain.loop.parts import Parts
    from posttrain.loop.rollouts import Rollouts
    from posttrain.loop.waits import Waits
    from posttrain.types import Group


class RunEvals:
    """parts: of the run. waits: of its controller, in which each piece of an eval is named and has a deadline."""

    def __init__(self, parts: Parts, waits: Waits) -> None:
        self._parts, self._waits, self._config = parts, waits, parts.config
        self._results = Results(parts.run_dir.path / FOLDER) if parts.evals else None
        self._failed: set[tuple[str, int]] = set()
        self._rollouts: Rollouts | None = beside(parts.rollouts, parts.evals) if parts.evals else None  # type: ignore[arg-type]

    def due(self, version: int) -> list[Eval]:
        """Those that are still to be asked of a version."""
        last = self._config.rl.steps
        return [one for one in self._parts.evals if one.due(version, last) and not self._done(one.label, version)]

    def _done(self, label: str, version: int) -> bool:
        return (label, version) in self._failed or (self._results is not None and self._results.has(label, version))

    async def run(self, version: int) -> None:
        """Everything that is due, one after the other. Raises RunInterrupted for a full disk."""
        for one in self.due(version):
            with self._parts.tracker.span("rollout", "eval", step=version, eval=one.label):
                try:
                    assert self._rollouts is not None
                    result, groups = await run_eval(one, self._rollouts, self._config, version, piece=self._bounded)
                    said, metrics = await in_thread(self._write, one, result, groups)
                except Exception as exc:
                    if getattr(exc, "code", "") == "disk_full":
                        raise
                    self._failed.add((one.label, version))
                    what = f"{type(exc).__name__}: {exc}".replace("\n", " ")
                    said, metrics, groups = f"eval {one.label} of step {version} failed, training goes on: {what}", {}, []
            self._parts.tracker.note(said)
            metrics = {f"eval/{one.label}/failed": 0.0 if metrics else 1.0} | metrics
            await self._parts.hooks.call("eval_end", step=version, label=one.label, metrics=metrics, groups=groups)

    async def _bounded(self, work: Awaitable[Any], name: str) -> Any:
        r = self._config.rollout
        return await self._waits.bounded(
            work, name=name, owner=f"rollout engine {r.engine}", timeout=r.generate_timeout_s, key="rollout.generate_timeout_s",
        )  # fmt: skip

    def _write(self, one: Eval, result: Result, groups: list[Group]) -> tuple[str, dict[str, float]]:
        """The files of a result; its line and its metrics. Runs in a thread."""
        assert self._results is not None
        if self._config.tracking.rollouts_every and groups:
            folder = self._results.folder / one.label
            folder.mkdir(parents=True, exist_ok=True)
            write_rollouts(folder, result.step, groups, decode=self._parts.tracker.decode, kind="completions")
        self._results.write(result)
        return line(result), result.metrics()

    async def finish(self) -> None:
        """Look for eval rows in the ledger, write the table, and tell both."""
        if self._results is None or not self._results.read():
            return
        self._parts.ledger.flush()
        for said in await in_thread(self._looked_through, self._results):
            self._parts.tracker.note(said)

    def _looked_through(self, results: Results) -> list[str]:
        """The lines about a run's evals, after a look at its ledger. Runs in a thread."""
        parts = self._parts
        assert parts.ledger.path is not None
        try:
            proof = ledger_proof(parts.ledger.path, parts.sampler, parts.evals, self._config, parts.environments)
        except Exception as exc:  # a run that is done does not fail because its data have gone
            proof = Proof(0, 0, 0, unknown=f"{type(exc).__name__}: {exc}".replace("\n", " "))
        results.note_checked(proof.plain())
        return [*write_table(results, proof.text()).splitlines(), f"evals: {proof.text()}"]


def line(result: Result) -> str:
    """`eval math of step 20: accuracy 0.412 [0.361, 0.464], 64 x 8, 3 without a reward`."""
    accuracy, causes = result.intervals["accuracy"], sum(result.causes.values())
    said = f"eval {result.label} of step {result.step}: accuracy {accuracy.mean:.3f} [{accuracy.low:.3f}, {accuracy.high:.3f}]"
    said += f", {len(result.rows)} x {result.settings['samples']}"
    return said + (f", {causes} without a reward (wrong)" if causes else "")
