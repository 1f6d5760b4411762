"""`posttrain plan` as text: what is long is wrapped, and nothing is left out."""

from __future__ import annotations

import re
from types import SimpleNamespace

from posttrain.cli.plan import _batch, _section


def test_every_legal_value_is_printed_and_no_line_is_too_long() -> None:
    legal = [n for n in range(1, 55441) if 55440 % n == 0]
    batch = SimpleNamespace(batch=55440, groups=6930, group_size=8, smallest_batch=8, n_mini=1, mini=None, micro=None,
                            legal_minis=legal, legal_micros=legal[:3])  # fmt: skip
    lines = list(_section("batch", _batch(SimpleNamespace(batch=batch))))  # type: ignore[arg-type]
    text = " ".join(lines)
    minis = text.partition("rl.mini_batch_per_replica: ")[2].partition(" micro-batches")[0]
    assert [int(n) for n in re.findall(r"\d+", minis)] == legal and len(legal) == 120
    assert max(map(len, lines)) <= 100 and text.endswith("rl.micro_batch_per_replica: 1, 2, 3")
