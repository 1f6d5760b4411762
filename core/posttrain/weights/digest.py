"""Digests of buckets: what a policy rank holds, what a lane got and what an engine loaded are compared by them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import xxhash

Part = tuple[int, torch.Tensor, torch.dtype]
"""A part of a bucket: the bucket's index, the values, and the dtype in which they travel."""


def bucket_digest(buffer: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> str:
    """Digest of `(offset, nbytes)` ranges of a uint8 buffer, in order; of one on a GPU once it is written. Detects corruption,
    not malice."""
    digest = xxhash.xxh3_128()
    for offset, nbytes in ranges:
        _update(digest, buffer[offset : offset + nbytes])
    return digest.hexdigest()


class Digests:
    """Digests of the buckets that these parts make up, the parts of each in their order. They are made once, when they are first
    asked for, from the values as they are then: nothing may change those before that.

        digests = Digests(parts)
        digests.found()                        # {0: "…", 3: "…"}; any thread; raises whatever went wrong, again and again
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts, self._making = list(parts), threading.Lock()
        self._found: dict[int, str] = {}
        self._failure: Exception | None = None

    def found(self) -> dict[int, str]:
        with self._making:
            parts, self._parts = self._parts, []
            try:
                self._found |= _digested(parts)
            except Exception as exc:
                self._failure = exc
        if self._failure is not None:
            raise self._failure
        return self._found

    def settle(self) -> None:
        """Return when the values may change."""
        try:
            self.found()
        except Exception:
            return  # told to whoever wants the digests


def _digested(parts: Sequence[Part]) -> dict[int, str]:
    digests: dict[int, xxhash.xxh3_128] = {}
    for bucket, values, dtype in parts:
        _update(digests.setdefault(bucket, xxhash.xxh3_128()), values.detach().to(dtype).contiguous().view(torch.uint8))
    return {bucket: digest.hexdigest() for bucket, digest in digests.items()}


def _update(digest: xxhash.xxh3_128, part: torch.Tensor) -> None:
    host = part.cpu()  # host memory is not copied; a copy waits for what a GPU still writes
    digest.update(memoryview(host.numpy()))  # type: ignore[arg-type]
