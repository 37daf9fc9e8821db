"""The page of a run in a real browser: on a telephone and on a desk, by light and in the dark, by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from andon.inspection.difference import compare, read_side
from andon.inspection.report.page import Page, load_run_view, write_page
from tests.inspection.test_report import hostile_run
from tests.support.browser import CHROMIUM, FAINT, Browser

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM} (Debian's package chromium)")

OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.open = true; })"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNREACHED = """
[...document.querySelectorAll('.scroll')]
  .filter(each => each.scrollWidth > each.clientWidth && each.tabIndex < 0).length
"""


def test_it_is_read_at_every_width_by_light_and_in_the_dark(run: Path, tmp_path: Path) -> None:
    hostile = hostile_run(tmp_path / "hostile", {"a": 0.5})
    for paths in ((run,), (run, hostile)):
        runs = [load_run_view(read_side(path)) for path in paths]
        apart = compare(runs[0].side, runs[1].side) if len(runs) > 1 else None
        write_page(Page(runs, [None] * len(runs), apart), tmp_path / "page.html")
        with Browser(tmp_path / f"profile{len(paths)}") as browser:
            browser.scripting(False)
            for scheme in ("light", "dark"):
                browser.colours(scheme)
                for width in (1200, 500, 360):
                    browser.wide(width)
                    browser.open(tmp_path / "page.html")
                    browser.value(OPEN_ALL)
                    assert browser.value(OVERFLOW) <= 0, (scheme, width)
                    assert browser.value(UNREACHED) == 0
                    assert browser.requests() == [(tmp_path / "page.html").as_uri()]
                    assert browser.complaints() == []
                seen, faint = browser.value(FAINT)
                assert faint == []
                assert seen > 200


def test_a_picture_is_told_to_who_does_not_see_it(run: Path, tmp_path: Path) -> None:
    write_page(Page([load_run_view(read_side(run))], [None]), tmp_path / "page.html")
    with Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "page.html")
        told = [name for role, name in browser.outline() if role in ("image", "img", "graphics-document")]
        assert [name for name in told if name.startswith("Loss training: 12 numbers, first ")]
        for _ in range(20):
            browser.press("Tab")
            if browser.value("document.activeElement.tagName") == "svg":
                return
    pytest.fail("no picture is reached by the Tab key")
