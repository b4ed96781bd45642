"""Tests of the documentation's site: it builds, its links lead somewhere, and it reads as on
GitHub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TAGS = ("table", "tr", "ul", "ol", "li", "pre", "img", "code", "details", "h2", "h3")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site in strict mode, in which a missing page, link or anchor ends the build, and
    return its folder."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [
            *(sys.executable, "-m", "mkdocs", "build", "--strict"),
            *("--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(folder)),
        ],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def html(site: Path, page: Path) -> str:
    """Return the HTML of the article for ``page``, without the navigation around it."""
    name = "" if page.stem == "index" else page.stem
    text = (site / name / "index.html").read_text()
    return re.split(r"<article[^>]*>|</article>", text)[1]


def tags(text: str) -> Counter[str]:
    return Counter(tag for tag in re.findall(r"<(\w+)", text) if tag in TAGS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_reads_as_on_github(page: Path, site: Path) -> None:
    """A page has the same elements on the site as on GitHub. A list right below a line of text used
    to be a list on GitHub, and part of that line on the site. Text within HTML is Markdown on the
    site only if an attribute of the HTML element says so."""
    expected = tags(MarkdownIt("commonmark").enable("table").render(page.read_text()))
    assert tags(html(site, page)) == expected


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_links_of_the_repository_s_front_lead_somewhere(name: str, site: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / name).read_text()):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        assert not anchor or f'id="{anchor}"' in html(site, ROOT / path), target
