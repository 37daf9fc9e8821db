"""A report in its forms: a JSON file, JUnit XML, and a page that shows what it is given as it is."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.messages import InputError
from andon_falsify.report.document import json_bytes, parse, read_json, write_json
from andon_falsify.report.findings import SCHEMA, Column, Report, Table
from andon_falsify.report.junit import write_junit
from andon_falsify.report.page import render, write_html
from andon_falsify.verdict import Counterexample
from tests.falsify.reports import NASTY, RATIO, REASON, campaign, finding, hostile
from tests.support.pages import Read

ANY_TEXT = st.text(st.integers(0, 0x10FFFF).map(chr), min_size=1)  # halves of surrogate pairs too


def plain_of(report: Report) -> Any:
    return json.loads(json_bytes(report))


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for report in (campaign(), hostile(NASTY.replace("\udc80", "")), Report("2026-01-02T03:04:05Z")):
        write_json(report, path)
        assert read_json(path) == report
        assert json.loads(path.read_bytes().decode("utf-8"))["schema"] == SCHEMA
    path.write_text(json.dumps(plain_of(campaign()) | {"later": 1}), encoding="utf-8")
    assert read_json(path) == campaign()


@given(ANY_TEXT)
def test_any_text_comes_back(text: str) -> None:
    """Also text that UTF-8 cannot hold, as an escape: no campaign is lost for a name in its report."""
    written = hostile(text.encode("utf-8", "backslashreplace").decode())
    assert parse(json_bytes(hostile(text)), "it") == written


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    odd = finding("gradient-law", outcome="falsified", counterexamples=(replace(RATIO, ratio=math.inf),))
    write_json(replace(campaign(), findings=(replace(odd, worst=math.nan),)), path)
    (written,) = json.loads(path.read_bytes())["findings"]
    assert (written["worst"], written["counterexamples"][0]["ratio"]) == (None, None)
    assert read_json(path).findings[0].worst is None


def spoil(plain: dict[str, Any]) -> None:
    plain["runs"] = "many"
    plain["findings"][0]["outcome"] = "maybe"
    plain["findings"][16]["counterexamples"][0]["ratio"] = True
    del plain["findings"][2]["claim"]


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "four at once": (
        spoil,
        [
            "runs must be a valid integer, not 'many'",
            "findings[0].outcome must be 'holds', 'unknown', 'falsified' or 'not applicable', not 'maybe'",
            "findings[2].claim is missing",
            "findings[16].counterexamples[0].ratio must be a valid number, not True",
        ],
    ),
    "contradiction": (
        lambda plain: plain["findings"][1].update(checked=0),
        ["findings[1] replicas-agree: nothing was compared, so nothing holds"],
    ),
    "schema": (lambda plain: plain.update(schema=1), ["is not a report of schema 2: its schema is 1"]),
    "no counterexample": (
        lambda plain: plain["findings"][16].update(counterexamples=[{}]),
        ["findings[16].counterexamples[0].what is missing"],
    ),
    "NaN": (
        lambda plain: plain["findings"][16]["counterexamples"][0].update(ratio=math.nan),
        ["is not a report of andon falsify --json: JSON does not have the number NaN"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_report_is_refused_with_every_reason(tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    plain = copy.deepcopy(plain_of(campaign()))
    change(plain)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        read_json(path)
    for problem, start in zip(refused.value.problems, said, strict=True):
        assert problem.where == str(path)
        assert problem.what.startswith(start)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"[" * 100_000, b"[1]"])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"r\.json"):
        read_json(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_json(tmp_path)


@pytest.mark.parametrize("write", [write_json, write_junit, write_html])
def test_a_report_is_there_whole_or_not_at_all(tmp_path: Path, write: Callable[[Report, Path], None]) -> None:
    with pytest.raises(InputError, match="cannot be written: the folder is gone"):
        write(campaign(), tmp_path / "gone" / "r")
    path = tmp_path / "r"
    write(campaign(), path)
    before = path.read_bytes()
    impossible = replace(campaign(), versions={"torch": [object()]})  # type: ignore[dict-item]
    if write is not write_html:
        with pytest.raises(TypeError):
            write(impossible, path)
    path.chmod(0o600)
    write(campaign(), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]


SHOWN = NASTY.translate({ord(sign): ascii(sign)[1:-1] for sign in "\x00\x1b\udc80\u202e"})


@pytest.fixture
def junit(tmp_path: Path) -> Callable[[Report], ElementTree.Element]:
    def written(report: Report) -> ElementTree.Element:
        write_junit(report, tmp_path / "r.xml")
        return ElementTree.parse(tmp_path / "r.xml").getroot()

    return written


Junit = Callable[[Report], ElementTree.Element]


def results(suite: ElementTree.Element) -> dict[str, str]:
    found = {}
    for case in suite.iter("testcase"):
        ended = [child for child in case if child.tag != "properties"]
        found[str(case.get("name"))] = str(ended[0].get("type")) if ended else "passed"
    return found


def test_one_test_case_for_each_claim_and_place_and_they_are_counted(junit: Junit) -> None:
    root = junit(campaign())
    found = {str(suite.get("name")): results(suite) for suite in root}
    assert (root.tag, list(found)) == ("testsuites", ["andon 1.0", "hf_trainer 5.23.0", "ddp 1.0"])
    assert Counter(found["andon 1.0"].values()) == {"passed": 5 * 3}
    assert found["hf_trainer 5.23.0"] == {
        "replicas-agree[gloo-2]": "passed",
        "samples-once[gloo-2]": "falsified",
        "gradient-law[gloo-1]": "passed",
        "gradient-law[gloo-2]": "falsified",
        "losses-close[gloo-2]": "unknown",
        "resume-equal[gloo-2]": "not applicable",
    }
    assert found["ddp 1.0"]["losses-close[gloo-2]"] == "unexpected pass"
    for part in [root, *root]:
        cases = list(part.iter("testcase"))
        tags = ("failure", "error", "skipped")
        counted = [len(cases), *(sum(case.find(tag) is not None for case in cases) for tag in tags)]
        assert [int(part.get(name, "")) for name in ("tests", "failures", "errors", "skipped")] == counted
    assert (root.get("failures"), root.get("errors")) == ("4", "1")


def test_a_failure_stands_alone(junit: Junit) -> None:
    cases = {(case.get("classname"), case.get("name")): case for case in junit(campaign()).iter()}
    failure = cases["hf_trainer", "gradient-law[gloo-2]"].find("failure")
    assert str(failure.get("message")).startswith("step 1: 29 of 29 tensors differ from the float64 reference")
    for said in (REASON, RATIO.equals, "gloo, world 2, accumulation 2", "andon falsify --subject"):
        assert said in str(failure.text)
    skipped = cases["hf_trainer", "resume-equal[gloo-2]"].find("skipped")
    assert skipped.get("message") == "the loop does not save"


def test_cases_of_one_place_are_one_test_case(junit: Junit) -> None:
    report = campaign()
    again = [replace(found, accumulation=3) for found in report.findings]
    cases = junit(replace(report, findings=(*report.findings, *again))).iter("testcase")
    names = Counter((case.get("classname"), case.get("name")) for case in cases)
    assert set(names.values()) == {1}
    assert len(names) == 25


def test_any_text_can_stand_in_it(junit: Junit) -> None:
    root = junit(hostile(NASTY))
    tags = ("testsuites", "testsuite", "testcase", "properties", "property", "failure", "error", "skipped")
    assert {element.tag for element in root.iter()} == {*tags}
    assert root[0].get("timestamp") == SHOWN


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
    page = Read(render(hostile(NASTY)))
    assert sum(SHOWN in text for text in page.text) > 40
    assert len(page.of("script")) == 1
    assert page.of("img") == []
    assert [name for _, attributes in page.elements for name in attributes if name.startswith("on")] == []
    assert "49" not in "".join(page.text)
    page.page.encode("utf-8")


def test_the_headline_says_how_many_fell() -> None:
    def headline(report: Report) -> str:
        return str(re.findall(r"<h1>(.*)</h1>", render(report))[0])

    def only(*subjects: str) -> Report:
        return replace(campaign(), findings=tuple(each for each in campaign().findings if each.subject in subjects))

    assert headline(campaign()) == "2 of 3 subjects break a claim"
    assert headline(only("andon", "ddp")) == "1 of 2 subjects breaks a claim"
    two = "hf_trainer 5.23.0 breaks 2 of 3 claims that could be checked, 1 of them as expected"
    assert headline(only("hf_trainer")) == two
    assert headline(only("andon")) == "andon 1.0 breaks none of 5 claims that could be checked"
    assert headline(only()) == "Nothing was judged"
    command = f"torchrun --nproc-per-node {{world}} -m andon watch src/ddp.py --batch {{local_batch}} {'--more ' * 9}"
    of_script = replace(campaign(), findings=(finding("samples-once", command, "holds", checked=1),))
    assert re.fullmatch(r"src/ddp\.py-[0-9a-f]{6} 1\.0 breaks none of 1 claim that .*", headline(of_script))
    known = [each for each in only("hf_trainer").findings if each.claim != "samples-once"]
    alone = headline(replace(campaign(), findings=tuple(known)))
    assert alone == "hf_trainer 5.23.0 breaks 1 of 2 claims that could be checked, as expected"


def test_many_or_long_counterexamples_stay_readable() -> None:
    many = tuple(Counterexample(f"row {number} is lost") for number in range(50))
    report = replace(campaign(), findings=(finding("samples-once", "ddp", "falsified", counterexamples=many),))
    page = Read(render(report))
    lost = [text for text in page.text if re.fullmatch(r"row \d+ is lost", text)]
    assert lost == ["row 0 is lost", *(f"row {number} is lost" for number in range(30))]
    assert "27 more counterexamples" in page.text
    assert "20 more are in the JSON report." in page.text
    long = (Counterexample("x" * 1_000_000),)
    text = render(replace(campaign(), findings=(finding("samples-once", "ddp", "falsified", counterexamples=long),)))
    assert len(text) < 100_000
    assert "… (996000 more characters)" in text


def test_a_subject_is_named_once_and_what_most_are_judged_on_comes_first() -> None:
    assert str(Column("andon", "0.1.0")) == "andon 0.1.0"
    assert str(Column("accelerate", "accelerate 1.15.0")) == "accelerate 1.15.0"
    assert str(Column("hf_trainer", "transformers 5.23.0")) == "hf_trainer (transformers 5.23.0)"
    assert str(Column("mine:make", "")) == "mine:make"
    found = (finding("own", "andon"), finding("both", "andon"), finding("both", "ddp"), finding("last", "ddp"))
    assert Table(replace(campaign(), findings=found)).claims == ("both", "own", "last")
