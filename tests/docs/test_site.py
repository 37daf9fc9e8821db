"""The docs as a site: built without a warning, whole, and readable in a real browser as narrow as a telephone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from andon.config.schema import Config, Section
from tests.repository.sources import ROOT
from tests.support.browser import CHROMIUM, FAINT, Browser
from tests.support.pages import Read

pytest.importorskip("sphinx", reason="the site is built by Sphinx (dependency group docs)")
# Cheaper by default: tests/docs/test_pages.py (links, headings, navigation).
pytestmark = [pytest.mark.deep, pytest.mark.xdist_group("site")]
needs_chromium = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM} (Debian's chromium)")

OUTSIDE = """
(() => {
  const seen = document.documentElement.clientWidth;
  const out = each => each.checkVisibility() && each.getBoundingClientRect().right > seen + 1;
  const scrolled = each => {
    for (let at = each; at.tagName !== 'ARTICLE'; at = at.parentElement)
      if (['auto', 'scroll'].includes(getComputedStyle(at).overflowX) && !out(at)) return true;
    return false;
  };
  const wide = document.scrollingElement.scrollWidth > seen ? ['the page itself'] : [];
  const found = [...document.querySelectorAll('article *')].filter(each => out(each) && !scrolled(each));
  return wide.concat(found.map(each => each.tagName + ': ' + each.textContent.slice(0, 40)));
})()
"""
"""The elements of a page that stand outside its window and in no element with a scroll bar."""
FOUND = """
new Promise(done => {
  const look = () => /finished|did not match/.test(document.querySelector('.search-summary')?.textContent)
    ? done([...document.querySelectorAll('#search-results li > a')].map(each => each.textContent))
    : requestAnimationFrame(look);
  look();
})
"""
"""The titles of the results of a search that has ended."""


def build(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build as `tox -e docs` does."""
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT / "docs", folder)
    assert (built.returncode, built.stderr) == (0, "")
    return folder


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as opened:
        yield opened


def test_the_page_of_settings_is_whole(site: Path) -> None:
    """Every key of a configuration, and each word of its description."""
    parts = {name: field.default for name, field in Config.model_fields.items()}
    keys = [name for name, part in parts.items() if not isinstance(part, Section)]
    keys += [
        f"{name}.{key}" for name, part in parts.items() if isinstance(part, Section) for key in type(part).model_fields
    ]
    shown = Read((site / "settings.html").read_text(encoding="utf-8")).text
    assert [key for key in keys if key not in shown] == []
    assert any("<tool>" in each for each in shown)


def test_a_link_that_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    """Between pages, into a page, to a file of the repository."""
    (tmp_path / "conf.py").write_text("extensions = ['myst_parser']\nmyst_heading_anchors = 4\n")
    page = tmp_path / "index.md"
    for broken in ("[page](gone.md)", "[heading](#gone)", "[file](../gone.py)"):
        page.write_text(f"# Title\n\n{broken}\n")
        built = build(tmp_path, tmp_path / "built")
        assert built.returncode == 1, built.stderr
        assert "gone" in built.stderr


@needs_chromium
@pytest.mark.parametrize("width", [360, 500, 1200])
def test_no_page_is_wider_than_its_window(site: Path, browser: Browser, width: int) -> None:
    """A wide table or line of code has its own scroll bar. The last lines show that the test can fail."""
    browser.wide(width)
    outside = {}
    for page in sorted(site.rglob("*.html")):
        browser.open(page)
        if found := browser.value(OUTSIDE):
            outside[page.name] = found
    assert outside == {}
    browser.value(f"document.querySelector('article h1').style.width = '{width + 99}px'")
    assert [each for each in browser.value(OUTSIDE) if each.startswith("H1: ")] != []


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_read_without_the_network_in_either_light(site: Path, browser: Browser, scheme: str) -> None:
    """A page requests only files of the site, and every word has the contrast that WCAG requires."""
    browser.colours(scheme)
    for name in ("index", "settings", "symptoms", "watch", "architecture"):
        browser.open(site / f"{name}.html")
        assert [url for url in browser.requests() if not url.startswith((site.as_uri(), "data:"))] == []
        assert browser.complaints() == []
        seen, faint = browser.value(FAINT)
        assert seen > 50
        assert faint == []


@needs_chromium
def test_the_search_finds(site: Path, browser: Browser) -> None:
    """A word of one page leads to that page, and a word of no page to none."""
    browser.open(site / "search.html", "?q=max_length")
    assert "Settings" in browser.value(FOUND)
    browser.open(site / "search.html", "?q=xyzzyplugh")
    assert browser.value(FOUND) == []
