"""A report as a JSON file: nothing is lost, and nothing is believed that is not a report."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon.console.problems import InputError
from andon_falsify.campaign.findings import Report
from andon_falsify.report.document import from_plain, json_bytes, read_json, to_plain, write_json
from andon_falsify.report.junit import write_junit
from andon_falsify.report.page import write_html
from tests.falsify.reports import NASTY, RATIO, campaign, finding, hostile

ANY_TEXT = st.text(st.integers(0, 0x10FFFF).map(chr), min_size=1)
"""Halves of surrogate pairs too: Python gives them for file names that are no UTF-8."""


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    for number, report in enumerate((campaign(), hostile(NASTY), Report("2026-01-02T03:04:05Z"))):
        path = tmp_path / f"{number}.json"
        write_json(report, path)
        assert read_json(path) == report
        assert json.loads(path.read_bytes().decode("utf-8"))["schema"] == 1


@given(ANY_TEXT)
def test_any_text_comes_back(text: str) -> None:
    """Also text that UTF-8 cannot hold: no campaign is lost for a name in its report."""
    report = hostile(text)
    assert from_plain(json.loads(json_bytes(report).decode("utf-8")), "it") == report


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    odd = finding("gradient-law", outcome="falsified", counterexamples=(replace(RATIO, ratio=math.inf),))
    write_json(replace(campaign(), findings=(replace(odd, curve=(1.0, math.nan, math.inf)),)), path)
    (written,) = json.loads(path.read_bytes())["findings"]
    assert (written["curve"], written["counterexamples"][0]["ratio"]) == ([1.0, None, None], None)
    first, *others = read_json(path).findings[0].curve
    assert first == 1.0
    assert [math.isnan(number) for number in others] == [True, True]


def spoil(plain: dict[str, Any]) -> None:
    plain["runs"] = "many"
    plain["findings"][0]["outcome"] = "maybe"
    plain["findings"][16]["counterexamples"][0]["ratio"] = True
    del plain["findings"][2]["claim"]


def contradict(plain: dict[str, Any]) -> None:
    plain["findings"][1]["checked"] = 0


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "four at once": (
        spoil,
        [
            "findings[0].outcome is 'maybe', none of holds, unknown, falsified, not applicable",
            "findings[2].claim is missing",
            "findings[16].counterexamples[0].ratio is True, not a number or null",
            "runs is 'many', not a whole number",
        ],
    ),
    "contradiction": (
        contradict,
        ["findings[1] contradicts itself: replicas-agree: nothing was compared, so nothing holds"],
    ),
    "schema": (lambda plain: plain.update(schema=2), ["is not a report of schema 1: its schema is 2"]),
    "no findings": (lambda plain: plain.pop("findings"), ["findings is missing"]),
    "no start": (lambda plain: plain.pop("started"), ["started is missing"]),
    "no counterexample": (
        lambda plain: plain["findings"][16].update(counterexamples=[{}]),
        ["findings[16].counterexamples[0].what is missing"],
    ),
    "no list": (lambda plain: plain.update(findings={}), ["findings is {}, not a list"]),
    "no object": (lambda plain: plain.update(findings=[7]), ["findings[0] is 7, not an object"]),
    "expected": (lambda plain: plain.update(expected=[{"subject": "a", "claim": "b"}]), ["expected[0].reason"]),
    "version": (lambda plain: plain["versions"].update(torch=2.13), ["versions.torch is 2.13, not text"]),
    "NaN": (
        lambda plain: plain["findings"][16]["counterexamples"][0].update(ratio=math.nan),
        ["is not JSON: NaN is no number of JSON"],
    ),
    "a boolean": (lambda plain: plain["findings"][0].update(world=True), ["findings[0].world is True, not a whole"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_report_is_refused_with_every_reason(tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    plain = copy.deepcopy(to_plain(campaign()))
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


def test_a_later_field_does_not_hinder(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(to_plain(campaign()) | {"later": 1}), encoding="utf-8")
    assert read_json(path) == campaign()


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
