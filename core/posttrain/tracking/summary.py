"""What a run came to, read from its own files: held-out score before and after, steps, time by phase, where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.tracking.metric_names import HELD_OUT, SCORES, Score, score_of
from posttrain.tracking.metrics import read_metrics, read_validation
from posttrain.tracking.text import duration, near, number


@dataclass(frozen=True, slots=True)
class Summary:
    """The end of a run. Rewards are None where there was no validation; seconds are sums over all steps.

    Held-out values and rewards are those of `score`: the reward, or the margin where preference pairs came with the data.
    """

    run: Path
    outcome: str
    steps: int
    total_steps: int
    held_out_before: float | None
    held_out_after: float | None
    reward_first: float | None
    reward_last: float | None
    seconds: Mapping[str, float]
    generated_tokens: int
    score: Score = SCORES[0]
    held_out_accuracy: tuple[float, float] | None = None
    ahead: bool = False
    """Whether generation and training ran side by side."""

    def lines(self) -> list[str]:
        """The summary as the lines that a person reads."""
        total, name = self.seconds.get("step", 0.0), self.score.name
        out = [f"{self.outcome}: {self.steps} of {self.total_steps} batch steps in {duration(total)}"]
        if self.held_out_before is not None or self.held_out_after is not None:
            out.append(f"  held-out {name}   {number(self.held_out_before)} before → {number(self.held_out_after)} after")
        if self.held_out_accuracy is not None:
            before, after = self.held_out_accuracy
            out.append(f"  held-out accuracy {number(before)} before → {number(after)} after")
        if self.reward_first is not None:
            out.append(f"  training {name}   {number(self.reward_first)} at the start → {number(self.reward_last)} at the end")
        if total:
            split = {k: v for k, v in self.seconds.items() if k not in ("step", "validation") and (v or self.generated_tokens)}
            if not self.ahead:
                split["other"] = max(total - sum(split.values()), 0.0)
            whole = max(total, *split.values())  # generation goes on where no step counts, while a checkpoint is copied
            shares = [f"{name} {value / whole:.0%}" for name, value in split.items()]
            if self.ahead:
                shares[:2] = [f"{shares[0]} and {shares[1]}, side by side"]
            speed = f" · {number(self.generated_tokens / total)} tokens/s" if self.generated_tokens else ""
            out.append(f"  time              {' · '.join(shares)}{speed}")
        out += [f"  run               {near(self.run)}", f"  look at samples   posttrain show {near(self.run)}"]
        return out


def summarise(run: Path, total_steps: int, outcome: str = "Done") -> Summary:
    """Read the summary of a run from its metrics and validation files."""
    rows, held_out = read_metrics(run), read_validation(run)
    score = score_of(*rows[:1], *held_out[:1])
    rewards = [row[score.trained] for row in rows if isinstance(row.get(score.trained), int | float)]
    edge = max(len(rewards) // 10, 1)
    scores = [(row["step"], row[score.held_out]) for row in held_out if row.get(score.held_out) is not None]
    accuracies = [row[f"validation/{score.accuracy}"] for row in held_out if row.get(f"validation/{score.accuracy}") is not None]
    seconds = {name: _total(rows, f"time/{name}_s") for name in ("step", "rollout", "train", "sync")}
    return Summary(
        run=run,
        outcome=outcome,
        steps=max((row["step"] for row in rows), default=0),
        total_steps=total_steps,
        held_out_before=next((score for step, score in scores if step == 0), None),
        held_out_after=next((score for step, score in reversed(scores) if step > 0), None),
        reward_first=sum(rewards[:edge]) / edge if rewards else None,
        reward_last=sum(rewards[-edge:]) / edge if rewards else None,
        seconds={**seconds, "validation": _total(held_out, "validation/time_s")},
        generated_tokens=int(_total(rows, "tokens/generated")),
        score=score,
        held_out_accuracy=(accuracies[0], accuracies[-1]) if len(accuracies) > 1 else None,
        ahead=any(row.get("staleness/max") for row in rows),
    )


def zero_start_advice(held_out: Mapping[str, Any], first_step: Mapping[str, Any]) -> str | None:
    """What to say when neither the validation before step 1 nor step 1 itself scores anything; else None.

    Validation takes the likeliest answers: a model that is wrong there may be right often enough when it samples.
    """
    scores = held_out.get(HELD_OUT), first_step.get("reward/mean")
    if any(score is None or score > 0 for score in scores):
        return None
    cut = held_out.get("validation/truncated_share", 0.0)
    if cut > 0.5:
        hint = f"{cut:.0%} of the answers were cut off: raise rollout.max_tokens (and rollout.max_model_len) first"
    else:
        hint = "look at what it answers (posttrain show), check the prompt and the answer format, or take an easier task"
    return (
        "The model scores 0 on every held-out prompt before training. Nor did it score in step 1, and RL can only strengthen "
        f"what the model does at least sometimes, so this run may learn nothing: {hint}."
    )


def _total(rows: list[dict[str, Any]], name: str) -> float:
    return sum(float(row.get(name) or 0.0) for row in rows)
