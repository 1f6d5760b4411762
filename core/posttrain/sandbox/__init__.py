"""Sandboxes: where programs that a model wrote run, bounded. The contract, a pool, and those of this machine."""

from __future__ import annotations

from posttrain.sandbox.local import LocalProvider as LocalProvider
from posttrain.sandbox.options import Sandboxes as Sandboxes
from posttrain.sandbox.options import SandboxOptions as SandboxOptions
from posttrain.sandbox.pool import SandboxPool as SandboxPool
from posttrain.sandbox.provider import MIB as MIB
from posttrain.sandbox.provider import Limits as Limits
from posttrain.sandbox.provider import Provider as Provider
from posttrain.sandbox.provider import Ran as Ran
from posttrain.sandbox.provider import Sandbox as Sandbox
from posttrain.sandbox.provider import inside as inside
