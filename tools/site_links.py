"""Hook of MkDocs: makes a page that is written for the repository one of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```(\w+)[^\n]*$", re.MULTILINE)
TEXT = {"mermaid": "text"}  # the theme would load the renderer of these diagrams from a CDN


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrites links to files outside `docs/`, and leaves one word on the first line of a fenced block.

    These links lead to the repository, whose address is `repo_url`. Without it, they become plain text.
    """
    docs = Path(config["docs_dir"])
    folder = (docs / page.file.src_uri).parent

    def rewritten(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = Path(os.path.normpath(folder / target))
        if "://" in target or path.is_relative_to(docs) or not path.exists():
            return link[0]
        if not config["repo_url"]:
            return text
        kind = "tree" if path.is_dir() else "blob"
        return f"[{text}]({config['repo_url'].rstrip('/')}/{kind}/HEAD/{path.relative_to(docs.parent)}{anchor})"

    return LINK.sub(rewritten, FENCE.sub(lambda fence: f"```{TEXT.get(fence[1], fence[1])}", markdown))
