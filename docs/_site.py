"""What `mkdocs build` does beside rendering: tables of keys are marked, and the pages' Markdown goes along for `llms.txt`."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Marks tables of keys and of options, which `site.css` shows as a list on a narrow screen."""
    return re.sub(r"<table>(?=\s*<thead>\s*<tr>\s*<th>(Key|Option)</th>\s*<th>Type</th>)", r'<table data-rows="\1">', html)


def on_post_build(config: Any, **_: Any) -> None:
    """Copies each page's source beside its HTML, and all of them into `llms-full.txt`."""
    source, site = Path(config.docs_dir), Path(config.site_dir)
    pages = sorted(source.rglob("*.md"))
    for page in pages:
        shutil.copyfile(page, site / page.relative_to(source))
    (site / "llms-full.txt").write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
