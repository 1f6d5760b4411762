"""What `mkdocs build` does beside rendering: the pages' Markdown goes along, for programs that read `llms.txt`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def on_post_build(config: Any, **_: Any) -> None:
    """Copies each page's source beside its HTML, and all of them into `llms-full.txt`."""
    source, site = Path(config.docs_dir), Path(config.site_dir)
    pages = sorted(source.rglob("*.md"))
    for page in pages:
        shutil.copyfile(page, site / page.relative_to(source))
    (site / "llms-full.txt").write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
