"""Every fault of every peer at every bucket: named, in time, harmless before the vote, healed after it, and nothing left.

`python tests/weights/fault_table.py` runs the same cells and prints them as a table.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_matrix import Cell, Matrix, cells, sample
from fault_rig import own_files


def rig(transport: str) -> Iterator[Matrix]:
    matrix = Matrix(transport)
    yield matrix
    pids = matrix.close()
    assert not own_files(pids), "shared memory is left"


@pytest.fixture(scope="module", params=["inproc", "shm"])
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    yield from rig(request.param)


@pytest.fixture(scope="module")
def over_nixl() -> Iterator[Matrix]:
    pytest.importorskip("nixl")
    yield from rig("nixl")


@pytest.mark.parametrize("cell", cells(), ids=str)
def test_fault(matrix: Matrix, cell: Cell) -> None:
    matrix.run(cell)


@pytest.mark.integration
@pytest.mark.parametrize("cell", sample(), ids=str)
def test_fault_over_nixl(over_nixl: Matrix, cell: Cell) -> None:
    over_nixl.run(cell)
