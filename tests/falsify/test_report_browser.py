"""The page in a real browser, as its readers meet it: by keyboard, without scripts, in the dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from andon_falsify.report.page import write_html
from tests.falsify.reports import RATIO, campaign
from tests.support.browser import CHROMIUM, FAINT, Browser

# By default test_report_forms.py holds what the page consists of.
pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM} (Debian's package chromium)"),
]

CELL = "gradient-law.hf_trainer"
CLIPBOARD = ("clipboardReadWrite", "clipboardSanitizedWrite")
OPEN = "[...document.querySelectorAll('.detail')].filter(each => each.checkVisibility()).map(each => each.id)"
FOCUS = "document.activeElement.id"
# What a screen reader is told once something was done.
SAID = """
new Promise(done => {
  const said = document.getElementById('said');
  const look = () => said.textContent ? done(said.textContent) : requestAnimationFrame(look);
  look();
})
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as opened:
        yield opened


@pytest.fixture
def page(tmp_path: Path) -> Path:
    write_html(campaign(), tmp_path / "page.html")
    return tmp_path / "page.html"


def tab_to(browser: Browser, wanted: str) -> None:
    for _ in range(80):
        if browser.value(FOCUS) == wanted:
            return
        browser.press("Tab")
    pytest.fail(f"{wanted} is not reached by the Tab key")


def test_without_scripts_the_table_is_read_and_opened_by_keyboard(browser: Browser, page: Path) -> None:
    browser.scripting(False)
    browser.open(page)
    told = browser.outline()
    claims = [name for role, name in told if role == "rowheader"]
    assert [name.split()[0] for name in claims] == list(campaign().statements)
    subjects = [name for role, name in told if role == "columnheader"]
    assert [name.split(" ")[0] for name in subjects] == ["claim", "andon", "hf_trainer", "ddp"]
    assert "1 falsified, as expected" in " ".join(subjects[2].split())
    assert ("link", "gradient-law on hf_trainer 5.23.0: falsified, as expected ratio 4.000") in told
    assert browser.value(OPEN) == []
    tab_to(browser, f"cell:{CELL}")
    browser.press("Enter")
    assert browser.value(OPEN) == [CELL]
    assert browser.value(FOCUS) == CELL
    assert browser.value("document.querySelector('.detail:target code:not(h2 code)').textContent") == RATIO.repro
    assert RATIO.equals in browser.value("document.querySelector('.detail:target').innerText")
    browser.press("Tab")
    browser.press("Enter")
    assert browser.value(OPEN) == []
    assert browser.value(FOCUS) == f"cell:{CELL}"


def test_an_address_opens_its_cell_and_the_command_is_copied(browser: Browser, page: Path) -> None:
    """What is shared is one counterexample: the address opens it, the button copies its command, Escape closes it."""
    for permissions, said, held in (
        ((), "The command is selected, to be copied by key.", "getSelection().toString()"),
        (CLIPBOARD, "The command was copied.", "navigator.clipboard.readText()"),
    ):
        browser.permit(*permissions)
        browser.open(page, f"#{CELL}")
        assert browser.value(OPEN) == [CELL]
        browser.value("document.querySelector('.detail:target .copy').focus()")
        browser.press("Enter")
        assert browser.value(SAID) == said
        assert browser.value(held) == RATIO.repro
    browser.press("Escape")
    assert browser.value(OPEN) == []
    assert browser.value(FOCUS) == f"cell:{CELL}"
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []


def test_everything_can_be_read_in_the_light_and_in_the_dark(browser: Browser, page: Path) -> None:
    for scheme, back in (("light", "rgb(246, 247, 248)"), ("dark", "rgb(18, 20, 23)")):
        browser.colours(scheme)
        browser.open(page, f"#{CELL}")
        seen, faint = browser.value(FAINT)
        assert faint == []
        assert seen > 120
        assert browser.value("getComputedStyle(document.body).backgroundColor") == back
