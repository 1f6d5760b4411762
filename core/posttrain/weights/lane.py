"""The state of one lane, as pure data: which update is open, how far it came, what is committed, what is broken.

    idle → open → staging → voted → applying → committed      any but idle and committed → aborted; applying → invalid

`abort` before `applying` leaves the engine as it was; from `applying` on the weights in place are unknown and the lane is
invalid until it is rebuilt. Acknowledgements of an update that is no longer open are ignored. The lane does no work itself
(`receiver.Receiver` does); it says what may be done next, and refuses the rest with the documented messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from posttrain.errors import WeightSyncError, error
from posttrain.weights.failure import PeerFailure
from posttrain.weights.plan import BucketPlan

State = Literal["idle", "open", "staging", "voted", "applying", "committed", "aborted", "invalid"]

_UNDER_WAY: tuple[State, ...] = ("open", "staging", "voted", "applying")


@dataclass
class Lane:
    """epoch: the last one begun, never reused     version: of the weights in place, None before the first commit"""

    name: str = "rollout-0"
    state: State = "idle"
    epoch: int = 0
    version: int | None = None
    plan: BucketPlan | None = None
    cause: str = ""
    _next: int | None = None
    _staged: set[int] = field(default_factory=set)

    @property
    def under_way(self) -> bool:
        """Whether an update is open."""
        return self.state in _UNDER_WAY

    @property
    def serving(self) -> bool:
        """Whether the weights in place are those of `version`."""
        return self.version is not None and self.state not in ("applying", "invalid")

    def set_bucket_plan(self, plan: BucketPlan) -> None:
        """Take a plan; an update that is open before `applying` is superseded."""
        self._refuse_invalid()
        if self.state == "applying":
            raise WeightSyncError(f"lane {self.name}: a new plan while epoch {self.epoch} is being applied")
        if self.under_way:
            self.abort(f"superseded by plan {plan.digest}")
        self.plan = plan

    def begin_weight_update(self, epoch: int, version: int) -> None:
        """Open update `epoch`, which brings `version`. Raises E27 unless the epoch advances."""
        self._refuse_invalid()
        if epoch <= self.epoch:
            raise error("E27", epoch=epoch, last=self.epoch)
        if self.under_way:
            raise WeightSyncError(f"lane {self.name}: begin_weight_update({epoch}) while epoch {self.epoch} is open")
        if self.plan is None:
            raise WeightSyncError(f"lane {self.name}: begin_weight_update({epoch}) before set_bucket_plan")
        if self.version is not None and version <= self.version:
            raise WeightSyncError(f"lane {self.name}: version {version} does not advance past {self.version}")
        self.state, self.epoch, self._next, self.cause = "open", epoch, version, ""
        self._staged.clear()

    def stage(self, epoch: int, bucket: int) -> bool:
        """Bucket `bucket` of update `epoch` lies digested in staging. False: late or repeated, ignored."""
        if self.state not in ("open", "staging") or epoch != self.epoch or bucket in self._staged:
            return False
        if self.plan is None or not 0 <= bucket < len(self.plan.buckets):
            raise WeightSyncError(f"lane {self.name}: the plan has no bucket {bucket}")
        self._staged.add(bucket)
        self.state = "staging"
        return True

    def vote(self, epoch: int) -> None:
        """Say that everything is staged and proved. Raises WeightSyncError naming what is not."""
        self._expect(epoch, "staging")
        assert self.plan is not None
        absent = [b for b in self.plan.buckets if b.index not in self._staged]
        if absent:
            names = ", ".join(sorted({p.name for bucket in absent for p in bucket.pieces}))
            raise PeerFailure(
                f"lane {self.name}: epoch {epoch} lacks {names}", peer=self.name, phase="stage", bucket=absent[0].index,
                where=", ".join(f"bucket {b.index} of policy rank {b.rank}" for b in absent),
                cause="its arrival was not acknowledged in this epoch",
            )  # fmt: skip
        self.state = "voted"

    def apply(self, epoch: int) -> None:
        """From here on the weights in place are being overwritten."""
        self._expect(epoch, "voted")
        self.state = "applying"

    def finish_weight_update(self, epoch: int) -> int:
        """Commit: the version advances. Raises E26 when no update is open, E25 when another one is."""
        if not self.under_way:
            raise error("E26")
        if epoch != self.epoch:
            raise error("E25", epoch=epoch, open=self.epoch)
        self._expect(epoch, "applying")
        assert self._next is not None
        self.state, self.version = "committed", self._next
        return self.version

    def abort(self, cause: str) -> None:
        """End the open update. Idempotent; after a commit it does nothing."""
        if self.state == "applying":
            self.state, self.cause = "invalid", cause
        elif self.under_way:
            self.state, self.cause = "aborted", cause
            self._staged.clear()

    def invalidate(self, cause: str) -> None:
        """The weights in place proved to be wrong: only a rebuild helps."""
        self.state, self.cause = "invalid", cause
        self._staged.clear()

    def rebuild(self) -> None:
        """The engine was rebuilt: placeholder weights, no plan; epochs go on counting."""
        self.state, self.version, self.plan, self.cause = "idle", None, None, ""
        self._staged.clear()

    def _expect(self, epoch: int, state: State) -> None:
        self._refuse_invalid()
        if epoch != self.epoch or self.state != state:
            raise WeightSyncError(f"lane {self.name} is {self.state}({self.epoch}), epoch {epoch} must be {state} for this")

    def _refuse_invalid(self) -> None:
        if self.state == "invalid":
            raise WeightSyncError(
                f"lane {self.name} is invalid: {self.cause}", cause="an update failed after it began to overwrite weights",
                fix="rebuild the engine, then sync", code="lane-invalid",
            )  # fmt: skip
