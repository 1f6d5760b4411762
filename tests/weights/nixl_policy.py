"""A policy's process for the tests of the nixl transport: it publishes, and damages what it published, when told to."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from weight_toys import trained

from posttrain.weights.nixl import NixlTransport
from posttrain.weights.publication import PublicationPool, whole

BUCKET_BYTES = 1024


def policy(pipe: Any, tls: str) -> None:
    os.environ["UCX_TLS"] = tls
    pool = PublicationPool(NixlTransport(), bucket_bytes=BUCKET_BYTES)

    def publish(version: int) -> Any:
        pool.plan_for(whole(trained(version).items()))
        publication = pool.publish(version, whole(trained(version).items()))
        pool.hold(version)
        pool.release(version)
        return publication, pool.digests(version)

    def overwrite(bucket: int, version: int | None) -> None:
        """One flipped bit, or the bytes of another version, in the slot that was published last."""
        assert pool.plan is not None
        slot = max(pool._slots, key=lambda s: s.publication.version if s.publication else -1)
        for piece in pool.plan.buckets[bucket].pieces:
            place = slot.region.buffer[piece.source : piece.source + piece.nbytes]
            if version is None:
                place[-1] ^= 1
                return
            place.copy_(trained(version)[piece.name].reshape(-1)[piece.start : piece.stop].view(torch.uint8))

    work: dict[str, Callable[..., Any]] = {"publish": publish, "overwrite": overwrite}
    while (request := pipe.recv()) is not None:
        pipe.send(work[request[0]](*request[1:]))
    pool.close()
