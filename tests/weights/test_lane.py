from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from posttrain.errors import WeightSyncError
from posttrain.weights.lane import Lane
from posttrain.weights.plan import ParameterSpec, plan_buckets

PLAN = plan_buckets([ParameterSpec(f"p{i}", "float32", (4,)) for i in range(3)], bucket_bytes=16)


def open_lane(epoch: int = 1) -> Lane:
    lane = Lane()
    lane.set_bucket_plan(PLAN)
    lane.begin_weight_update(epoch, version=1)
    return lane


def staged_lane() -> Lane:
    lane = open_lane()
    for bucket in range(3):
        assert lane.stage(1, bucket)
    return lane


def test_the_way_of_an_update():
    lane = staged_lane()
    assert lane.version is None and not lane.serving
    lane.vote(1)
    lane.apply(1)
    assert lane.finish_weight_update(1) == 1
    assert lane.state == "committed" and lane.version == 1 and lane.serving


def test_e25_finish_of_another_epoch():
    lane = staged_lane()
    with pytest.raises(WeightSyncError) as caught:
        lane.finish_weight_update(7)
    assert caught.value.message == "finish_weight_update(7): the open update is epoch 1"
    assert caught.value.code == "E25" and lane.version is None


def test_e26_finish_without_begin():
    lane = Lane()
    with pytest.raises(WeightSyncError) as caught:
        lane.finish_weight_update(1)
    assert caught.value.message == "no update is open on this worker"
    assert caught.value.code == "E26"


def test_e27_begin_must_advance():
    lane = open_lane(epoch=5)
    lane.abort("test")
    for epoch in (5, 4):
        with pytest.raises(WeightSyncError) as caught:
            lane.begin_weight_update(epoch, version=1)
        assert caught.value.message == f"begin_weight_update({epoch}) does not advance past epoch 5"
        assert caught.value.code == "E27"


def test_finish_before_everything_is_applied_is_refused():
    lane = staged_lane()
    lane.vote(1)
    with pytest.raises(WeightSyncError, match="must be applying"):
        lane.finish_weight_update(1)
    assert lane.version is None


def test_a_vote_names_what_is_not_staged():
    lane = open_lane()
    lane.stage(1, 0)
    lane.stage(1, 2)
    with pytest.raises(WeightSyncError, match="lacks p1"):
        lane.vote(1)


def test_late_and_repeated_acknowledgements_are_ignored():
    lane = open_lane()
    assert lane.stage(1, 0) and not lane.stage(1, 0)
    lane.abort("slow")
    assert not lane.stage(1, 1)
    lane.begin_weight_update(2, version=1)
    assert not lane.stage(1, 2)
    with pytest.raises(WeightSyncError):
        lane.vote(2)


def test_a_plan_supersedes_an_open_update():
    lane = staged_lane()
    lane.set_bucket_plan(PLAN)
    assert lane.state == "aborted" and "superseded" in lane.cause
    lane.begin_weight_update(2, version=1)


def test_only_applying_leads_to_invalid_and_only_a_rebuild_out_of_it():
    lane = staged_lane()
    lane.vote(1)
    lane.apply(1)
    lane.abort("killed")
    assert lane.state == "invalid" and not lane.serving
    with pytest.raises(WeightSyncError, match="invalid: killed"):
        lane.begin_weight_update(2, version=2)
    lane.rebuild()
    lane.set_bucket_plan(PLAN)
    lane.begin_weight_update(2, version=1)


def test_abort_after_commit_does_nothing():
    lane = staged_lane()
    lane.vote(1)
    lane.apply(1)
    lane.finish_weight_update(1)
    lane.abort("too late")
    assert lane.state == "committed" and lane.version == 1


class LaneMachine(RuleBasedStateMachine):
    """Any order of calls, with any epochs and buckets: the lane is compared with a model of what must hold."""

    @initialize()
    def start(self) -> None:
        self.lane = Lane()
        self.lane.set_bucket_plan(PLAN)
        self.epochs: list[int] = [0]
        self.got: set[int] = set()
        self.applying = False
        self.versions: list[int] = []

    @rule(epoch=st.integers(0, 12), version=st.integers(0, 12))
    def begin(self, epoch: int, version: int) -> None:
        allowed = (
            not self.lane.under_way
            and self.lane.state != "invalid"
            and epoch > max(self.epochs)
            and (not self.versions or version > self.versions[-1])
        )
        try:
            self.lane.begin_weight_update(epoch, version)
        except WeightSyncError:
            assert not allowed
            return
        assert allowed
        self.epochs.append(epoch)
        self.got, self.next = set(), version

    @rule(late=st.integers(0, 2), bucket=st.integers(0, 2))
    def stage(self, late: int, bucket: int) -> None:
        epoch = self.epochs[max(0, len(self.epochs) - 1 - late)]
        counts = self.lane.stage(epoch, bucket)
        if counts:
            assert epoch == self.epochs[-1] and bucket not in self.got
            self.got.add(bucket)

    @rule()
    def vote(self) -> None:
        try:
            self.lane.vote(self.epochs[-1])
        except WeightSyncError:
            return
        assert self.got == {0, 1, 2}

    @precondition(lambda self: self.lane.state == "voted")
    @rule()
    def apply(self) -> None:
        self.lane.apply(self.epochs[-1])

    @rule(late=st.integers(0, 2))
    def finish(self, late: int) -> None:
        epoch = self.epochs[max(0, len(self.epochs) - 1 - late)]
        was = self.lane.state
        try:
            version = self.lane.finish_weight_update(epoch)
        except WeightSyncError as exc:
            assert exc.code in ("E25", "E26") or was != "applying"
            return
        assert was == "applying" and epoch == self.epochs[-1] and self.got == {0, 1, 2}
        self.versions.append(version)

    @rule()
    def abort(self) -> None:
        was = self.lane.state
        self.lane.abort("test")
        if was == "applying":
            assert self.lane.state == "invalid"
        elif was in ("idle", "committed", "aborted", "invalid"):
            assert self.lane.state == was
        else:
            assert self.lane.state == "aborted"

    @precondition(lambda self: self.lane.state == "invalid")
    @rule()
    def rebuild(self) -> None:
        self.lane.rebuild()
        self.lane.set_bucket_plan(PLAN)
        self.versions = []

    @invariant()
    def the_version_is_the_last_committed(self) -> None:
        assert self.lane.version == (self.versions[-1] if self.versions else None)
        assert self.versions == sorted(set(self.versions))
        assert not (self.lane.serving and self.lane.state in ("applying", "invalid"))


TestLaneMachine = LaneMachine.TestCase
TestLaneMachine.settings = settings(derandomize=True, max_examples=60, stateful_step_count=40, deadline=None)
