"""`python -m posttrain.cli`: the same as `posttrain`."""

from __future__ import annotations

import sys

from posttrain.cli.main import main

sys.exit(main())
