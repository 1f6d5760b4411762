"""The one place where random draws get their names.

Every draw of a run comes from a generator seeded by `derive_seed(seed, purpose, *names)`, so that a draw depends on what it
is for and not on what was drawn before it: order, retries, asynchrony and a resume change nothing.

    derive_seed(config.seed, "sampling", group_id, 0)      # the noise of one request, first turn
"""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(seed: int, purpose: str, *names: str | int) -> int:
    """A 63-bit seed for the draw called (`seed`, `purpose`, `names`). Equal names give equal seeds on every machine.

    Names are length-prefixed, so ("a", "bc") and ("ab", "c") differ; an int and its text are the same name.
    """
    digest = blake2b(digest_size=8, person=b"posttrain")
    for name in (seed, purpose, *names):
        data = str(name).encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1
