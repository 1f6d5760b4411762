"""Every fault of every peer at every bucket: named, in time, harmless before the vote, healed after it, and nothing left.

`python tests/weights/fault_table.py` runs the same cells and prints them as a table.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_matrix import Cell, Matrix, cells
from fault_rig import own_files

TRANSPORTS = ["inproc", "shm"]


@pytest.fixture(scope="module", params=TRANSPORTS)
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    matrix = Matrix(request.param)
    yield matrix
    pids = matrix.close()
    assert not own_files(pids), "shared memory is left"


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_fault(matrix: Matrix, cell: Cell) -> None:
    matrix.run(cell)
