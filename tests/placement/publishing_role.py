"""A policy rank without a policy, which stands still in its second publication: for whoever kills it there."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from posttrain.policy.rank import PolicyRank
from posttrain.weights.publication import LocalWeight, PublicationPool, whole
from posttrain.weights.publisher import LocalPublisher
from posttrain.weights.shm import ShmTransport


class Rank(PolicyRank):
    """Five parameters, a bucket each; `at`: the bucket at which it stands still."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at, self._streams = at, 0
        self._publisher = LocalPublisher(PublicationPool(ShmTransport(), bucket_bytes=8), self._weights)

    def _weights(self) -> Iterator[LocalWeight]:
        self._streams += 1  # once for the plan, and once for each publication
        for number, weight in enumerate(whole((f"w{i}", torch.full((2,), float(i))) for i in range(5))):
            if self._streams > 2 and number == self._at + 1:
                time.sleep(60)
            yield weight
