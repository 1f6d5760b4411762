"""What must hold of a simulated run: at each event, after each life, and at its end against the run that nothing disturbed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from posttrain.data.dataset import PromptSampler, Source
from posttrain.loop.controller import Controller, slots
from posttrain.loop.stream import Stream

if TYPE_CHECKING:
    from posttrain.loop.sim.life import Life, Run
    from posttrain.types import Group


ALONE = ("bad_row", "stale", "timeout", "aborted", "unused")
"""Causes with which a draw ends outside of a batch."""


GRACE_S = 60.0
"""Virtual seconds in which what was cancelled has to end."""


class Violation(AssertionError):
    """The loop broke a law."""


def hold(condition: object, what: str) -> None:
    if not condition:
        raise Violation(what)


def at_the_start(life: Life, controller: Controller) -> None:
    """A resume goes on where the checkpoint is."""
    step = controller.state.step
    known = life.run.lineage.get(step)
    hold(known is None or known == life.policy.weights, f"resumed at step {step} with weights {life.policy.weights}, not {known}")


def of_a_dispatch(life: Life, drawn: set[str], samples: int) -> None:
    """drawn: prompts that this life has asked for.   samples: of training, in all engines now."""
    controller, config, world = life.controller, life.world.config, life.world
    assert controller is not None
    if world.order == "arrival":
        capacity = max(slots(config), config.rl.group_size)
        hold(samples <= capacity, f"{samples} samples in the engines, there are {capacity} slots")
    if not config.rl.min_informative_groups:
        most = (controller.versions.delivered + 1 + world.ahead - (controller.desk.first - 1)) * world.per_step
        if isinstance(controller.source, Stream):
            most += controller.source._extra  # in place of what was dropped
        hold(
            len(drawn) <= most, f"{len(drawn)} prompts asked for, {most} are allowed with version {controller.versions.delivered}"
        )


def of_a_step(life: Life, step: int, groups: Sequence[Group]) -> None:
    """The staleness of what trained."""
    world, config = life.world, life.world.config
    hold(step == (life.run.records.steps[-1][0] if life.run.records.steps else 0) + 1, f"step {step} is reported out of order")
    for group in groups:
        for t in group.trajectories:
            for version in set(t.weight_versions):
                lag = step - 1 - version
                if world.order == "logical":
                    wanted = max(0, step - 1 - world.ahead)
                    hold(version == wanted, f"step {step} trains {t.sample_id}, sampled by version {version}, not {wanted}")
                elif world.ahead == 0:
                    hold(lag == 0, f"step {step} trains {t.sample_id}, sampled by version {version}: it is to be on-policy")
                hold(0 <= lag <= max(config.rollout.max_off_policy_steps, world.ahead), f"{t.sample_id} lags by {lag} versions")


def of_an_update(life: Life, version: int, failed: bool) -> None:
    """No engine that is to go on is left paused, and those that go on have the version."""
    dropped = life.world.config.weights.on_failure == "drop_lane"
    for engine in life.fleet.engines:
        hold(not engine.paused or engine.invalid or engine.dead, f"{engine.label} is paused after the update to {version}")
        if not failed and not (dropped and (engine.invalid or engine.dead)):
            hold(engine.version == version, f"{engine.label} has version {engine.version} after the update to {version}")


def of_a_failure(life: Life) -> None:
    """Also a life that fails leaves nothing behind."""
    controller = life.controller
    if controller is not None:
        _nothing_left(life, controller)


def after_a_life(life: Life) -> None:
    """Of one that came to the end of the run."""
    controller = life.controller
    assert controller is not None
    hold(not life.odd, f"nobody asked for {life.odd}")
    hold(not life.parts.ledger.open, f"draws without an end: {sorted(life.parts.ledger.open)}")
    hold(not controller.prompts.waiting_again(), "prompts wait to be asked again")
    _nothing_left(life, controller)
    for version, weights in life.publisher.published.items():
        known = life.run.lineage.get(version, weights)
        hold(known == weights, f"version {version} was published as {weights}, after step {version} it is {known}")


def _nothing_left(life: Life, controller: Controller) -> None:
    hold(not controller.waits.open, f"waits are left: {controller.waits.open}")
    tasks = life.loop.settle(GRACE_S)
    hold(not tasks, f"tasks are left: {[task.get_name() for task in tasks]}")
    hold(not any(engine.load for engine in life.fleet.engines), "samples are left in an engine")
    if isinstance(controller.source, Stream):
        flights = controller.source.flights
        hold(flights.used == 0 and not flights.open, f"{flights.used} slots are still taken by {sorted(flights.open)}")


def ends(run: Run) -> dict[int, dict[str, Any]]:
    """How each draw ended, by its index. Raises Violation for one that ended twice."""
    lines = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = Counter(line["draw"] for line in lines)
    hold(not counts or max(counts.values()) == 1, f"draws ended twice: {sorted(draw for draw, n in counts.items() if n > 1)}")
    return {line["draw"]: line for line in lines}


def of_a_run(run: Run) -> dict[int, dict[str, Any]]:
    """Of all lives together. Returns how each draw ended, by its index."""
    world, config = run.world, run.world.config
    ended = ends(run)
    hold(sorted(ended) == list(range(len(ended))), f"draws are missing: {sorted(set(range(max(ended))) - set(ended))}")
    order = _order(run, len(ended))
    for index, line in ended.items():
        hold((line["epoch"], line["row"]) == order[index], f"draw {index} is {line['epoch']}, {line['row']}, not {order[index]}")
    steps = [step for step, _ in run.records.steps]
    hold(steps == list(range(1, config.rl.steps + 1)), f"steps {steps} were reported")
    for step, groups in run.records.steps:
        of_step = {
            index
            for index, line in ended.items()
            if line["step"] == step and line.get("cause") not in ("bad_row", "stale", "timeout", "aborted", "unused")
        }
        seen = {int(group.group_id.split(":")[0]) for group in groups}
        hold(of_step == seen, f"step {step} was made of {sorted(seen)}, the ledger has {sorted(of_step)}")
        trained = {index for index, line in ended.items() if line["step"] == step and line["state"] == "trained"}
        rows = {int(row.split(":")[0]) for row in run.rows.get(step, [])}
        hold(trained == rows, f"step {step} trained {sorted(rows)}, the ledger has {sorted(trained)}")
        if not config.rl.min_informative_groups:
            hold(len(seen) == world.per_step, f"step {step} has {len(seen)} groups")
    validated = [step for step, _ in run.records.validations]
    every, last = config.validation.every, config.rl.steps
    due = [v for v in range(last + 1) if config.validation.prompts and (v in (0, last) or (every and v % every == 0))]
    hold(validated == due, f"versions {validated} were validated, due are {due}")
    for version, versions in run.records.validations:
        hold(versions <= {version}, f"the validation of version {version} was sampled by {sorted(versions)}")
    return ended


def same(run: Run, ours: dict[int, Any], calm: Run, theirs: dict[int, Any]) -> None:
    """What the disturbed run shares with the calm one. ours, theirs: how draws ended."""
    if run.world.order == "logical":
        for step in range(1, run.world.config.rl.steps + 1):
            hold(
                run.lineage[step] == calm.lineage[step], f"the weights after step {step} differ from those of an undisturbed run"
            )
            hold(run.rows.get(step) == calm.rows.get(step), f"step {step} trained other rows than an undisturbed run")
        hold(ours == theirs, f"ends differ from those of an undisturbed run: {_difference(ours, theirs)}")
    elif run.world.exact:
        lost = {"stale", "timeout", "aborted"}
        if any(line.get("cause") in lost for line in (*ours.values(), *theirs.values())):
            return
        for index in sorted({*ours, *theirs}):
            mine, other = ours.get(index), theirs.get(index)
            hold(mine and other and _fate(mine) == _fate(other), f"draw {index} ended as {mine}, undisturbed as {other}")


def _fate(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["epoch"], line["row"], line["state"], line.get("cause")


def _difference(ours: dict[int, Any], theirs: dict[int, Any]) -> str:
    found = [f"{ours.get(i)} instead of {theirs.get(i)}" for i in sorted({*ours, *theirs}) if ours.get(i) != theirs.get(i)]
    return "; ".join(found[:3])


def _order(run: Run, count: int) -> list[tuple[int, str]]:
    """What an untouched sampler draws."""
    data = run.world.config.rl.data
    rows = [{"id": f"r{number}", "number": number} for number in range(run.world.rows)]
    sampler = PromptSampler([Source("sim", rows)], seed=run.world.config.seed, shuffle=data.shuffle, batch=run.world.per_step)
    return [(draw.epoch, draw.row_id) for draw in sampler.draw(count)]
