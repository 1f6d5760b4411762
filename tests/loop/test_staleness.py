"""How old the tokens of a batch are, counted over what trains, and the proof that none is of another version."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.errors import RunAborted
from posttrain.loop.staleness import refuse_off_policy, staleness_metrics
from posttrain.types import Group, Trajectory

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def sample(versions, mask=None, reward=1.0, **fields) -> Trajectory:
    n = len(versions)
    mask = mask or [version >= 0 for version in versions]
    return Trajectory([1], [2] * n, mask, [-0.5] * n, [*versions], "stop", reward, group_id="g", sample_id="g/0", **fields)


def test_lags_are_counted_from_the_version_that_the_batch_updates():
    rows = [sample([7, 8, 8]), sample([9] * 17)]  # batch step 10 updates version 9
    assert staleness_metrics(rows, 10) == {
        "staleness/mean": pytest.approx(4 / 20),
        "staleness/p95": 1.0,
        "staleness/max": 2.0,
        "staleness/oldest": 1.0,
    }


def test_only_tokens_that_train_count():
    environment = sample([3, -1, -1, 3], mask=[True, False, False, True])
    unscorable, cut = sample([0], reward=None), sample([0], info={"screening": {"filters": ["overlong"]}})
    assert staleness_metrics([environment, unscorable, cut], 4)["staleness/max"] == 0.0
    assert staleness_metrics([unscorable], 4) == {}


def test_what_came_with_the_data_has_no_age():
    given_ = sample([-1, -1], mask=[True, True])
    assert staleness_metrics([given_], 3) == {}
    refuse_off_policy([Group("g", {}, [given_])], 2)


def test_a_token_of_another_version_is_named():
    fine, mixed = sample([4, 4]), sample([4, -1, 5], mask=[True, False, True])
    refuse_off_policy([Group("g", {}, [fine, sample([9], reward=None)])], 4)  # an unscorable one trains nothing
    with pytest.raises(RunAborted) as caught:
        refuse_off_policy([Group("g", {}, [fine, mixed])], 4)
    exc = caught.value
    assert exc.code == "off-policy" and exc.message == "token 2 of sample g/0 was sampled by version 5, not by version 4"
    assert "nothing of this batch was trained on" in exc.cause and "events.jsonl" in exc.fix


@SETTINGS
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=5), st.integers(10, 14))
def test_laws(versions, step):
    found = staleness_metrics([sample(row) for row in versions], step)
    lags = sorted(step - 1 - version for row in versions for version in row)
    assert found["staleness/max"] == lags[-1] and found["staleness/mean"] == pytest.approx(sum(lags) / len(lags))
    assert sum(lag <= found["staleness/p95"] for lag in lags) >= 0.95 * len(lags)
    assert lags[0] <= found["staleness/mean"] <= found["staleness/oldest"] + 1e-9 or len(versions) > 1
    assert found["staleness/oldest"] <= found["staleness/max"]
