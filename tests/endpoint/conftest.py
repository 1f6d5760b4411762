"""Lets the tests of this folder import the helpers beside them, and the chat templates of the packers' tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "datasets_and_packers")]
