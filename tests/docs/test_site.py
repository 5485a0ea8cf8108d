"""The site of the documentation: its navigation, its links out of docs/, and its build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.docs.pages import DOCS, ROOT
from tools.site_links import on_page_markdown


def nav() -> Any:
    """The navigation of mkdocs.yml, whose tags of environment variables PyYAML cannot read."""
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])


def pages_of(nav: Any) -> Iterator[str]:
    """The paths in a navigation, at every depth."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(item)


def rewritten(markdown: str, repo_url: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="decisions/page.md"))
    return on_page_markdown(markdown, page=page, config={"docs_dir": str(DOCS), "repo_url": repo_url}, files=None)


def test_every_page_is_in_the_navigation_once() -> None:
    """And nothing that does not exist."""
    assert sorted(pages_of(nav())) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_index_links_to_every_page_of_the_navigation() -> None:
    """Decisions are listed on a page of their own."""
    linked = set(re.findall(r"\]\(([^)#]+\.md)", (DOCS / "index.md").read_text()))
    decisions = {page for page in pages_of(nav()) if re.match(r"decisions/\d", page)}
    assert linked == set(pages_of(nav())) - decisions - {"index.md"}


def test_a_link_out_of_the_docs_leads_to_the_repository() -> None:
    """To a file or a folder, with its anchor. Links between pages and to other sites stay."""
    page = "[a](../../Makefile#b), [c](../../tests), [d](../api.md), [e](https://example.org/f)"
    site = "https://example.org/r"
    wanted = (
        f"[a]({site}/blob/HEAD/Makefile#b), [c]({site}/tree/HEAD/tests), [d](../api.md), [e](https://example.org/f)"
    )
    assert rewritten(page, f"{site}/") == wanted


def test_a_link_out_of_the_docs_is_plain_text_without_a_repository() -> None:
    """So that no link of the site is broken."""
    assert rewritten("see [the targets](../../Makefile#b)", "") == "see the targets"


def test_a_fence_has_one_word_on_the_site() -> None:
    """The marks of the tests are not shown, and a diagram is its text."""
    assert rewritten("```python no-run\nx = 1\n```\n\n```mermaid\na --> b\n```\n", "") == (
        "```python\nx = 1\n```\n\n```text\na --> b\n```\n"
    )


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """`mkdocs build --strict`, as `make docs` runs it. No page has a script, style, font or image of another site."""
    pytest.importorskip("material", reason="the site needs mkdocs-material, which needs Python 3.11")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environment.pop("REPOSITORY_URL", None)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(pages_of(nav()))) - 1
    loaded = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*"|url\(https?:[^)]*\)')
    assert {page.name: loaded.findall(page.read_text()) for page in pages if loaded.search(page.read_text())} == {}
