"""The laws of providers, for those of this machine, and for the one that the how-to shows."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from posttrain.sandbox import LocalProvider, Provider
from posttrain.sandbox.cage import BARE, BUBBLEWRAP
from posttrain.testing import SandboxContract

PAGE = Path(__file__).parents[2] / "docs/howto/sandboxes.md"


@pytest.mark.skipif(bool(BUBBLEWRAP.problem()), reason=f"bubblewrap: {BUBBLEWRAP.problem()}")
class TestBubblewrap(SandboxContract):
    @pytest.fixture
    def provider(self) -> Provider:
        return LocalProvider()


class TestBare(SandboxContract):
    @pytest.fixture
    def provider(self) -> Provider:
        return LocalProvider(allow_unisolated=True, cage=BARE)


class TestTheOneOfThePage(SandboxContract):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> Provider:
        text = re.search(r"^```python\n# my_sandboxes\.py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        assert text is not None
        (tmp_path / "my_sandboxes.py").write_text(text[1], encoding="utf-8")
        spec = importlib.util.spec_from_file_location("my_sandboxes_of_the_page", tmp_path / "my_sandboxes.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made: Provider = module.Mine()
        return made
