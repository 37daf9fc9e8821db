"""The page as text: it is well formed, refers to nothing outside itself, and shows what it is given as it is."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from andon_falsify.campaign.findings import Report
from andon_falsify.report.cells import Column, tabulate
from andon_falsify.report.page.curve import HEIGHT, WIDTH, draw
from andon_falsify.report.page.render import render
from andon_falsify.verdict import Counterexample
from tests.falsify.reports import NASTY, campaign, finding, hostile
from tests.support.pages import Read

REPORTS = {"campaign": campaign(), "hostile": hostile(NASTY), "empty": Report("2026-01-02T03:04:05Z")}


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_is_closed_in_itself(name: str) -> None:
    page = Read(render(REPORTS[name]))
    given = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert set(given.values()) == {1}
    links = [attributes.get("href", "") for _, attributes in page.elements if "href" in attributes]
    assert [link for link in links if link.removeprefix("#") not in given and not link.startswith("data:image")] == []
    loading = {"src", "srcset", "action", "style", "data", "poster"}
    assert [attributes for _, attributes in page.elements if loading & attributes.keys()] == []
    assert re.findall(r"@import|url\(|//", re.findall(r"<style>(.*?)</style>", page.page, re.DOTALL)[0]) == []
    labels = {token for _, attributes in page.elements for token in attributes.get("aria-labelledby", "").split()}
    assert labels <= given.keys()


def test_the_browser_is_told_to_load_nothing() -> None:
    (policy,) = [each["content"] for each in Read(render(campaign())).of("meta") if "http-equiv" in each]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", rules[part]) for part in ("style-src", "script-src"))
    assert rules.keys() == {"default-src", "style-src", "script-src", "img-src", "base-uri", "form-action"}


def test_any_text_is_shown_as_it_is() -> None:
    """Tags, quotes and braces are text; what is invisible is written out; no element and no handler comes of it."""
    page = Read(render(hostile(NASTY)))
    shown = NASTY.replace("\x00", "\\x00").replace("\x1b", "\\x1b")
    shown = shown.replace("\udc80", "\\udc80").replace("\u202e", "\\u202e")
    assert sum(shown in text for text in page.text) > 40
    assert len(page.of("script")) == 1
    assert page.of("img") == []
    assert [name for _, attributes in page.elements for name in attributes if name.startswith("on")] == []
    assert "49" not in "".join(page.text)


def test_the_page_can_be_encoded() -> None:
    assert "\udc80" not in render(hostile(NASTY))
    render(hostile(NASTY)).encode("utf-8")


def test_the_headline_says_how_many_fell() -> None:
    def headline(report: Report) -> str:
        return str(re.findall(r"<h1>(.*)</h1>", render(report))[0])

    def only(*subjects: str) -> Report:
        return replace(campaign(), findings=tuple(each for each in campaign().findings if each.subject in subjects))

    assert headline(campaign()) == "2 of 3 subjects break a claim"
    assert headline(only("andon", "ddp")) == "1 of 2 subjects breaks a claim"
    assert (
        headline(only("hf_trainer"))
        == "hf_trainer 5.23.0 breaks 2 of 3 claims that could be checked, 1 of them as expected"
    )
    assert headline(only("andon")) == "andon 1.0 breaks none of 5 claims that could be checked"
    assert headline(only()) == "Nothing was judged"

    known = [each for each in only("hf_trainer").findings if each.claim != "samples-once"]
    alone = headline(replace(campaign(), findings=tuple(known)))
    assert alone == "hf_trainer 5.23.0 breaks 1 of 2 claims that could be checked, as expected"


def test_many_counterexamples_stay_readable() -> None:
    many = tuple(Counterexample(f"row {number} is lost") for number in range(50))
    report = replace(campaign(), findings=(finding("samples-once", "ddp", "falsified", counterexamples=many),))
    page = Read(render(report))
    lost = [text for text in page.text if re.fullmatch(r"row \d+ is lost", text)]
    assert lost[1:] == [f"row {number} is lost" for number in range(30)]
    assert lost[0] == "row 0 is lost"
    assert "27 more counterexamples" in page.text
    assert "20 more are in the JSON report." in page.text


def test_a_long_text_is_cut_and_counted() -> None:
    found = (Counterexample("x" * 1_000_000),)
    page = render(replace(campaign(), findings=(finding("samples-once", "ddp", "falsified", counterexamples=found),)))
    assert len(page) < 100_000
    assert "… (996000 more characters)" in page


def test_a_curve_lies_where_its_numbers_are() -> None:
    curve = draw(finding("gradient-law", curve=(1.0, 3.0, 2.0), curve_law=2.0))
    assert curve is not None
    assert len(curve.lines) == 1
    points = [tuple(map(float, point.split(","))) for point in curve.lines[0].split()]
    (left, low), (middle, high), (right, between) = points
    assert left < middle < right <= WIDTH
    assert right - middle == pytest.approx(middle - left, abs=0.11)
    assert 0 <= high < between < low <= HEIGHT
    assert between == pytest.approx((low + high) / 2, abs=0.11)
    assert curve.law == f"{between:.1f}"
    assert curve.words == ("one number an update: 3 numbers; first 1, last 2, lowest 1, highest 3; it should be 2")


def test_a_curve_breaks_where_a_number_is_not_finite() -> None:
    curve = draw(finding("gradient-law", curve=(1.0, 1.5, math.nan, 2.0, math.inf)))
    assert curve is not None
    assert len(curve.lines) == 1
    assert len(curve.dots) == 3
    assert curve.words.endswith("; 2 not finite")
    assert draw(finding("gradient-law", curve=(math.nan,))) is None
    assert draw(finding("gradient-law")) is None


@pytest.mark.parametrize("curve", [(0.0,), (4.0, 4.0), (1e300, -1e300), (5e-324, 0.0), (1e308, 1.7e308)])
def test_a_curve_of_any_numbers_is_in_its_picture(curve: tuple[float, ...]) -> None:
    drawn = draw(finding("gradient-law", curve=curve, curve_law=1.0))
    assert drawn is not None
    for x, y in drawn.dots:
        assert 0 <= float(x) <= WIDTH
        assert 0 <= float(y) <= HEIGHT


def test_a_subject_is_named_once() -> None:
    assert str(Column("andon", "0.1.0")) == "andon 0.1.0"
    assert str(Column("accelerate", "accelerate 1.15.0")) == "accelerate 1.15.0"
    assert str(Column("hf_trainer", "transformers 5.23.0")) == "hf_trainer (transformers 5.23.0)"
    assert str(Column("mine:make", "")) == "mine:make"


def test_what_most_subjects_are_judged_on_comes_first() -> None:
    found = (finding("own", "andon"), finding("both", "andon"), finding("both", "ddp"), finding("last", "ddp"))
    assert tabulate(replace(campaign(), findings=found)).claims == ("both", "own", "last")
