"""What a plug-in is in another process: unpickled, with another hash seed, on the same `sys.path`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
lane = make()
staging = lane.staging(nbytes)
lane.register(staging)
lane.pull(handle, pieces, staging)
pickle.dump(bytes(staging.buffer[:nbytes].tolist()), out)
lane.close()
"""


_PUBLISH = """
import json, pickle, sys, time
sys.path[:] = json.loads(sys.argv[1])
make, nbytes = pickle.loads(sys.stdin.buffer.read())
out, sys.stdout = sys.stdout.buffer, sys.stderr
slot, handle = make().allocate(nbytes)
slot.buffer.fill_(7)
pickle.dump(handle, out)
out.flush()
time.sleep(600)
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


@contextmanager
def published_elsewhere(transport: Transport, nbytes: int) -> Iterator[tuple[Any, Callable[[], None]]]:
    """The handle of a slot full of sevens in a fresh process, and what kills that process."""
    import cloudpickle
    import pytest

    make = partial(type(transport), transport.options)
    with subprocess.Popen(
        [sys.executable, "-c", _PUBLISH, json.dumps(sys.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None

        def kill() -> None:
            process.kill()
            process.wait()

        try:
            process.stdin.write(cloudpickle.dumps((make, nbytes)))
            process.stdin.close()
            try:
                handle = pickle.load(process.stdout)
            except EOFError:
                pytest.fail(f"nothing can be published in another process:\n{process.stderr.read().decode()[-2000:]}")
            yield handle, kill
        finally:
            kill()


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
