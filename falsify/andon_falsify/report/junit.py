"""A report as JUnit XML, so that any continuous integration shows it: one test case for each claim and place.

Falsified and unknown are failures, a claim that does not apply is skipped with its reason, and so is one that falls
and is excused; a claim that was expected to fall and holds is a failure too. No times are written: none were measured
for a single claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from andon.run.atomic import write_whole
from andon_contracts.legible import legible
from andon_falsify.campaign.findings import Finding, Report
from andon_falsify.report.cells import Cell, Column, Mark, Table, tabulate
from andon_falsify.verdict import Outcome, merge


def write_junit(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` where that cannot be written."""
    write_whole(path, junit_bytes(report))


def junit_bytes(report: Report) -> bytes:
    """`report` as a `testsuites` element in UTF-8, with one suite for each subject in each of its versions."""
    table, root = tabulate(report), ElementTree.Element("testsuites", name="andon falsify")
    for subject in table.subjects:
        root.append(_suite(report, table, subject))
    _count(root, list(root.iter("testcase")))
    ElementTree.indent(root)
    text: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _suite(report: Report, table: Table, subject: Column) -> ElementTree.Element:
    suite = ElementTree.Element("testsuite", name=legible(str(subject)), timestamp=legible(report.started))
    left_out = {"not selected": ", ".join(report.not_selected)} if report.not_selected else {}
    unfinished = {"not all was tried": report.unfinished} if report.unfinished else {}
    about = {"subject": subject.name, "version": subject.version, **left_out, **unfinished}
    _properties(suite, {**report.versions, **report.machine, **about})
    for cell in table.of(subject):
        for (backend, world), findings in _by_place(cell).items():
            place = "-".join(str(part) for part in (backend, world) if part)
            name = legible(f"{cell.claim}[{place}]" if place else cell.claim)
            case = ElementTree.SubElement(suite, "testcase", classname=legible(subject.name), name=name)
            _properties(case, _numbers(findings))
            _result(case, cell, findings)
    _count(suite, suite.findall("testcase"))
    return suite


def _by_place(cell: Cell) -> dict[tuple[str, int], list[Finding]]:
    held: dict[tuple[str, int], list[Finding]] = {}
    for finding in cell.findings:
        held.setdefault((finding.backend, finding.world), []).append(finding)
    return held


def _numbers(findings: Sequence[Finding]) -> dict[str, str]:
    return {
        "claim version": ", ".join(dict.fromkeys(str(finding.version) for finding in findings)),
        "accumulation": ", ".join(dict.fromkeys(str(finding.accumulation) for finding in findings)),
        "seed": ", ".join(dict.fromkeys(str(finding.seed) for finding in findings)),
        "checked": str(sum(finding.checked for finding in findings)),
    }


def _properties(parent: ElementTree.Element, values: Mapping[str, str]) -> None:
    held = ElementTree.SubElement(parent, "properties")
    for name, value in values.items():
        ElementTree.SubElement(held, "property", name=legible(name), value=legible(value))


def _result(case: ElementTree.Element, cell: Cell, findings: Sequence[Finding]) -> None:
    verdict = merge(finding.verdict for finding in findings)
    reasons = [] if cell.reason is None else [f"expected to be falsified: {cell.reason}"]
    examples = [str(example) for example in verdict.counterexamples]
    if cell.excused and verdict.outcome is Outcome.FALSIFIED:
        said = f"{Mark.EXPECTED.value}: {cell.reason}; {examples[0]}"
        ElementTree.SubElement(case, "skipped", type="expected failure", message=legible(said))
    elif verdict.outcome is Outcome.NOT_APPLICABLE:
        ElementTree.SubElement(case, "skipped", type="not applicable", message=legible(verdict.why or "not applicable"))
    elif verdict.outcome is Outcome.HOLDS:
        if cell.mark is Mark.PASSED:
            _fail(case, Mark.PASSED.value, f"holds, but was {reasons[0]}", [str(verdict)])
    else:
        said = examples[0] if examples else verdict.why
        places = [f"{finding.place}: {finding.verdict}" for finding in findings]
        _fail(case, verdict.outcome.value, said or verdict.outcome.value, [*reasons, *places])


def _fail(case: ElementTree.Element, kind: str, message: str, lines: Sequence[str]) -> None:
    failure = ElementTree.SubElement(case, "failure", type=kind, message=legible(message))
    failure.text = legible("\n".join(lines))


def _count(parent: ElementTree.Element, cases: Sequence[ElementTree.Element]) -> None:
    parent.set("tests", str(len(cases)))
    parent.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    parent.set("errors", "0")
    parent.set("skipped", str(sum(case.find("skipped") is not None for case in cases)))
