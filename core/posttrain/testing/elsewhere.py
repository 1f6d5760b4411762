"""What a plug-in is in another process: unpickled, with another hash seed, on the same `sys.path`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from posttrain.data.environment import Environment, Split

if TYPE_CHECKING:
    from posttrain.weights.transport import Transport

_CODE = """
import json, pickle, sys
sys.path[:] = json.loads(sys.argv[1])
env, splits, count = pickle.load(sys.stdin.buffer)
out, sys.stdout = sys.stdout.buffer, sys.stderr
rows = {}
for split in splits:
    data = env.dataset(split)
    rows[split] = [dict(data[i]) for i in range(min(len(data), count))]
pickle.dump(rows, out)
"""


_PULL = """
import json, pickle, sys
sys.path[:] = json.loads(sys.argv[1])
make, handle, pieces, nbytes = pickle.load(sys.stdin.buffer)
out, sys.stdout = sys.stdout.buffer, sys.stderr
from posttrain.weights.memory import private_region
lane, staging = make(), private_region(nbytes)
lane.register(staging)
lane.pull(handle, pieces, staging)
pickle.dump(bytes(staging.buffer[:nbytes].tolist()), out)
lane.close()
"""


def rows_elsewhere(env: Environment, splits: Sequence[Split], count: int) -> dict[str, list[dict[str, Any]]]:
    """The first `count` rows of each split in a fresh process. Fails with its output when they cannot be had there."""
    found: dict[str, list[dict[str, Any]]] = _elsewhere(_CODE, (env, tuple(splits), count), "the rows cannot be had")
    return found


def pulled_elsewhere(transport: Transport, handle: Any, pieces: Sequence[Any], nbytes: int) -> bytes:
    """The staging of a fresh process after it pulled one bucket. Fails with its output when it cannot."""
    make = partial(type(transport), transport.options)
    found: bytes = _elsewhere(_PULL, (make, handle, tuple(pieces), nbytes), "the slot cannot be pulled from")
    return found


def _elsewhere(code: str, given: tuple[Any, ...], problem: str) -> Any:
    import cloudpickle
    import pytest

    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path)],
        input=cloudpickle.dumps(given), capture_output=True, check=False, env={**os.environ, "PYTHONHASHSEED": "1234"},
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{problem} in another process:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return pickle.loads(done.stdout)
