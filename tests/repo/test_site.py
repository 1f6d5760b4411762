"""The site: it builds without a warning, fetches nothing, and says the same as the Markdown does on GitHub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it: a warning is an error."""
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_fetches_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    fetching = re.compile(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="((?:https?:)?//[^"]+)"')
    assert not {address for page in pages for address in fetching.findall(page.read_text("utf-8"))}


def test_the_site_has_a_search_index_and_the_sources(site: Path) -> None:
    assert "GRPO" in (site / "search/search_index.js").read_text("utf-8")
    assert (site / "llms.txt").read_text("utf-8") == (DOCS / "llms.txt").read_text("utf-8")
    listed = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text("utf-8"))
    assert len(listed) > 15 and all((site / page).exists() for page in listed)


def test_a_page_stands_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    listed = re.findall(r": ([\w/-]+\.md)$", text, flags=re.MULTILINE)
    assert len(listed) == len(set(listed)), [page for page in listed if listed.count(page) > 1]


class Shape(HTMLParser):
    """How many blocks of each kind the article of a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.feed(text[text.index("<article") : text.index("</article>")])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        style = dict(attributes).get("class") or ""
        if tag in BLOCKS.values() and style != "headerlink":
            self.counts[tag] += 1
        elif tag == "div" and "admonition" in style:  # what both make of a quote that begins with [!NOTE]
            self.counts["blockquote"] += 1


BLOCKS = {
    "list_item_open": "li", "table_open": "table", "tr_open": "tr", "fence": "pre", "code_block": "pre",
    "blockquote_open": "blockquote", "link_open": "a", "image": "img", "strong_open": "strong",
}  # fmt: skip


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_a_page_has_the_same_blocks_on_the_site_as_on_github(page: Path, site: Path) -> None:
    """Lists, tables, code and links are what CommonMark with tables makes of the text: the two differ in what they forgive."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text("utf-8"))
    flat = [one for token in tokens for one in (token, *(token.children or ()))]
    expected = Counter(BLOCKS[one.type] for one in flat if one.type in BLOCKS)
    name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
    assert Shape((site / page.parent.relative_to(DOCS) / name).read_text("utf-8")).counts == expected
