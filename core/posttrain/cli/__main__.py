"""`python -m posttrain.cli`: the same as `posttrain`."""

from __future__ import annotations

from posttrain.cli.main import command

command()
