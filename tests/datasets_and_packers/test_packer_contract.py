"""The built-in packers keep the contract of DataPackers."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.data.packer import DataPacker
from posttrain.testing import DataPackerContract
from posttrain.testing.tiny_model import write_tiny_model
from posttrain_datapackers.decoder_only import DecoderOnlyPacker
from posttrain_datapackers.preference import PreferencePacker


class TestDecoderOnly(DataPackerContract):
    @pytest.fixture
    def packer(self, tmp_path: Path) -> DataPacker:
        write_tiny_model(tmp_path)
        return DecoderOnlyPacker().setup(str(tmp_path))


class TestPreference(DataPackerContract):
    @pytest.fixture
    def packer(self, tmp_path: Path) -> DataPacker:
        write_tiny_model(tmp_path)
        return PreferencePacker().setup(str(tmp_path))
