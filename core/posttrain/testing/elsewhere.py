"""What an environment is in another process: unpickled, with another hash seed, on the same `sys.path`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from posttrain.data.environment import Environment, Split

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


def rows_elsewhere(env: Environment, splits: Sequence[Split], count: int) -> dict[str, list[dict[str, Any]]]:
    """The first `count` rows of each split in a fresh process. Fails with its output when they cannot be had there."""
    import cloudpickle
    import pytest

    done = subprocess.run(
        [sys.executable, "-c", _CODE, json.dumps(sys.path)],
        input=cloudpickle.dumps((env, tuple(splits), count)), capture_output=True, check=False,
        env={**os.environ, "PYTHONHASHSEED": "1234"},
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"the rows cannot be had in another process:\n{done.stderr.decode(errors='replace')[-2000:]}")
    found: dict[str, list[dict[str, Any]]] = pickle.loads(done.stdout)
    return found
