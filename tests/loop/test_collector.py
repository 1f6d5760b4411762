import gc

import pytest

from posttrain.loop.collector import EACH, YOUNG, few_collections


def test_collections_are_fewer_within_and_as_before_after():
    before = gc.get_threshold()
    with pytest.raises(ValueError), few_collections():
        assert gc.get_threshold()[0] == YOUNG and gc.get_freeze_count() > 0
        raise ValueError
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_a_batch_in_flight_is_not_looked_at_while_it_grows():
    with few_collections(100_000):
        assert gc.get_threshold()[0] == 100_000 * EACH
    with few_collections(8):
        assert gc.get_threshold()[0] == YOUNG
