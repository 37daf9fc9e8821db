"""A report as JUnit XML: one test case for each claim, backend and world size.

Falsified, and an expected failure that holds, are failures. Unknown is an error, and so is a campaign that was cut
short. Not applicable, not tried and an excused failure are skipped. The time of a single claim is not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

from andon.run.atomic import write_whole
from andon_contracts.legible import legible
from andon_falsify.report.findings import Cell, Column, Finding, Mark, Report, Table, reasons
from andon_falsify.verdict import Outcome, merge


def write_junit(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` if the file cannot be written."""
    table, root = Table(report), ElementTree.Element("testsuites", name="andon falsify")
    for subject in table.subjects:
        _add_suite(root, report, subject, table.of(subject))
    for parent in (root, *root):
        cases = list(parent.iter("testcase"))
        parent.set("tests", str(len(cases)))
        for counted, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            parent.set(counted, str(sum(case.find(tag) is not None for case in cases)))
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    write_whole(path, text + b"\n")


def _add(parent: ElementTree.Element, tag: str, **attributes: str) -> ElementTree.Element:
    return ElementTree.SubElement(parent, tag, {name: legible(value) for name, value in attributes.items()})


def _add_suite(root: ElementTree.Element, report: Report, subject: Column, cells: Iterable[Cell]) -> None:
    suite = _add(root, "testsuite", name=str(subject), timestamp=report.started)
    about = {"subject": subject.name, "version": subject.version}
    about |= {"not selected": ", ".join(report.not_selected)} if report.not_selected else {}
    about |= {"incomplete": report.unfinished} if report.unfinished else {}
    _add_properties(suite, {**report.versions, **report.machine, **about})
    for cell in cells:
        by_world: dict[tuple[str, int], list[Finding]] = {}
        for finding in cell.findings:
            by_world.setdefault((finding.backend, finding.world), []).append(finding)
        for (backend, world), findings in by_world.items():
            place = "-".join(str(part) for part in (backend, world) if part)
            name = f"{cell.claim}[{place}]" if place else cell.claim
            case = _add(suite, "testcase", classname=subject.short, name=name)
            numbers = {
                "claim version": ", ".join(dict.fromkeys(str(finding.version) for finding in findings)),
                "accumulation": ", ".join(dict.fromkeys(str(finding.accumulation) for finding in findings)),
                "seed": ", ".join(dict.fromkeys(str(finding.seed) for finding in findings)),
                "checked": str(sum(finding.checked for finding in findings)),
            }
            _add_properties(case, numbers)
            _add_result(case, cell, findings, report.unfinished)
    if report.unfinished:
        campaign = _add(suite, "testcase", classname=subject.short, name="campaign")
        _add(campaign, "error", type="unfinished", message=f"incomplete: {report.unfinished}")


def _add_properties(parent: ElementTree.Element, values: Mapping[str, str]) -> None:
    properties = _add(parent, "properties")
    for name, value in values.items():
        _add(properties, "property", name=name, value=value)


def _add_result(case: ElementTree.Element, cell: Cell, findings: list[Finding], unfinished: str) -> None:
    verdict, expected = merge(findings), cell.expected
    known = [] if expected is None else [f"expected to be falsified: {expected.reason}"]
    example = next(map(str, verdict.counterexamples), reasons(verdict) or verdict.outcome.value)
    if verdict.outcome is Outcome.NOT_APPLICABLE:
        _add(case, "skipped", type="not applicable", message=reasons(verdict) or "not applicable")
    elif unfinished and not any(finding.place for finding in findings):
        _add(case, "skipped", type="not tried", message=f"not tried: {unfinished}")
    elif expected is not None and expected.excused and verdict.outcome is Outcome.FALSIFIED:
        message = f"{Mark.EXPECTED.value}: {expected.reason}; {example}"
        _add(case, "skipped", type="expected failure", message=message)
    elif verdict.outcome is not Outcome.HOLDS:
        tag = "error" if verdict.outcome is Outcome.UNKNOWN else "failure"
        failure = _add(case, tag, type=verdict.outcome.value, message=example)
        failure.text = legible("\n".join([*known, *(f"{finding.place}: {finding}" for finding in findings)]))
    elif cell.mark is Mark.UNEXPECTED_PASS:
        failure = _add(case, "failure", type=cell.mark.value, message=f"holds, but was {known[0]}")
        failure.text = legible(str(verdict))
