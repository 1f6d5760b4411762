"""Settings of the static site (`make docs`): Markdown through MyST, the furo theme, nothing fetched, warnings are errors."""

project = "posttrain"
html_title = "posttrain"
author = "the posttrain authors"
copyright = "the posttrain authors, Apache-2.0"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["examples", "_generate.py"]
myst_heading_anchors = 3

html_theme = "furo"
html_static_path: list[str] = []
html_show_sourcelink = False
html_copy_source = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
