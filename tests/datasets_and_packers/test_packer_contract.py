"""The built-in packers keep the contract of DataPackers."""

from __future__ import annotations

from posttrain.testing import DataPackerContract


class TestDecoderOnly(DataPackerContract):
    plugin = "decoder_only"


class TestPreference(DataPackerContract):
    plugin = "preference"
