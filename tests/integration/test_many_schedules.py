"""A thousand schedules of the loop in simulated time. `posttrain sim --seeds A:B` runs as many as one likes."""

import pytest

from posttrain.loop.sim.run import simulate
from posttrain.loop.sim.world import World


@pytest.mark.integration
@pytest.mark.parametrize("order", ["logical", "arrival"])
def test_no_schedule_of_a_thousand_breaks_a_law(order):
    for seed in range(10_000, 10_500):
        found = simulate(World.of(seed, order=order))
        assert not found.problem, f"posttrain sim --seed {seed} --order {order}: {found.problem}"
