"""A report as JUnit XML, read as continuous integration reads it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from andon_falsify.report.junit import write_junit
from tests.falsify.reports import NASTY, REASON, campaign, hostile


def suites(path: Path) -> dict[str, ElementTree.Element]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "testsuites"
    return {str(suite.get("name")): suite for suite in root}


def results(suite: ElementTree.Element) -> dict[str, str]:
    found = {}
    for case in suite.iter("testcase"):
        ended = [child for child in case if child.tag != "properties"]
        found[str(case.get("name"))] = str(ended[0].get("type")) if ended else "passed"
    return found


def test_one_test_case_for_each_claim_and_place(tmp_path: Path) -> None:
    write_junit(campaign(), tmp_path / "r.xml")
    found = suites(tmp_path / "r.xml")
    assert list(found) == ["andon 1.0", "hf_trainer 5.23.0", "ddp 1.0"]
    assert Counter(results(found["andon 1.0"]).values()) == {"passed": 5 * 3}
    assert results(found["hf_trainer 5.23.0"]) == {
        "replicas-agree[gloo-2]": "passed",
        "samples-once[gloo-2]": "falsified",
        "gradient-law[gloo-1]": "passed",
        "gradient-law[gloo-2]": "falsified",
        "losses-close[gloo-2]": "unknown",
        "resume-equal[gloo-2]": "not applicable",
    }
    assert results(found["ddp 1.0"])["losses-close[gloo-2]"] == "unexpected pass"


def test_the_numbers_are_those_of_the_test_cases(tmp_path: Path) -> None:
    write_junit(campaign(), tmp_path / "r.xml")
    root = ElementTree.parse(tmp_path / "r.xml").getroot()
    for part in [root, *root]:
        cases = list(part.iter("testcase"))
        counted = [len(cases), *(sum(case.find(tag) is not None for case in cases) for tag in ("failure", "skipped"))]
        assert [part.get(name) for name in ("tests", "failures", "skipped")] == [str(number) for number in counted]
        assert part.get("errors") == "0"
    assert root.get("failures") == "5"


def test_a_failure_stands_alone(tmp_path: Path) -> None:
    write_junit(campaign(), tmp_path / "r.xml")
    cases = {(case.get("classname"), case.get("name")): case for case in ElementTree.parse(tmp_path / "r.xml").iter()}
    failure = cases["hf_trainer", "gradient-law[gloo-2]"].find("failure")
    assert failure is not None
    assert str(failure.get("message")).startswith("step 1: 29 of 29 tensors are off the law")
    for said in (
        REASON,
        "4.000 = accumulation 2 x world 2",
        "gloo, world 2, accumulation 2",
        "andon falsify --subject",
    ):
        assert said in str(failure.text)
    skipped = cases["hf_trainer", "resume-equal[gloo-2]"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "the loop does not save"


def test_cases_of_one_place_are_one_test_case(tmp_path: Path) -> None:
    """Two accumulations on the same backend and world size share a name, which a reader takes for one test."""
    report = campaign()
    again = [replace(found, accumulation=3) for found in report.findings]
    write_junit(replace(report, findings=(*report.findings, *again)), tmp_path / "r.xml")
    names = Counter(
        (case.get("classname"), case.get("name")) for case in ElementTree.parse(tmp_path / "r.xml").iter("testcase")
    )
    assert set(names.values()) == {1}
    assert len(names) == 25


def test_any_text_can_stand_in_it(tmp_path: Path) -> None:
    """Controls and halves of surrogates, which XML cannot hold, are written out; markup is text."""
    write_junit(hostile(NASTY), tmp_path / "r.xml")
    root = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert {element.tag for element in root.iter()} == {
        *("testsuites", "testsuite", "testcase", "properties", "property", "failure", "skipped"),
    }
    shown = NASTY.replace("\x00", "\\x00").replace("\x1b", "\\x1b").replace("\udc80", "\\udc80")
    assert root[0].get("timestamp") == shown.replace("\u202e", "\\u202e")
