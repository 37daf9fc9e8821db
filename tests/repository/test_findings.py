"""Findings in known projects: docs/findings.md says of each what the table has, and a line that moved is noticed."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.findings.__main__ import FINDINGS, look
from benchmarks.findings.checkout import Checkout, Gone
from benchmarks.findings.finding import Finding, Shown
from tests.repository.sources import ROOT

DOCUMENT = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
ENTRIES = {text.partition("\n")[0]: text for text in DOCUMENT.split("\n## ")[1:]}


def test_each_finding_is_documented_once() -> None:
    """The table and the document name the same findings, in the same order."""
    assert list(ENTRIES) == list(FINDINGS)
    assert len(re.findall(r"^## ", DOCUMENT, re.MULTILINE)) == len(FINDINGS)


@pytest.mark.parametrize("name", FINDINGS)
def test_an_entry_says_what_the_table_has(name: str) -> None:
    """Place, full commit (of what is installed, the release), evidence, severity, upstream and command."""
    finding, entry = FINDINGS[name], ENTRIES[name]
    assert re.fullmatch(r"[0-9a-f]{40}" if finding.paths else r"\d+\.\d+\.\d+", finding.commit)
    place = f"`{finding.file}:{finding.line}` of [{finding.repository}](https://github.com/{finding.repository})"
    assert f"{place} at `{finding.commit}`" in entry
    for field in ("Wrong", "Seen", "Severity", "Upstream"):
        assert entry.count(f"- **{field}:** ") == 1
    assert re.search(r"- \*\*Seen:\*\* .*[Ww]atch", entry), "says what a watch sees of it, or that it sees nothing"
    severity = entry.partition("- **Severity:** ")[2].partition(":")[0]
    assert severity in {"high", "medium", "low"}
    assert re.search(rf"^\| \[{name}\]\(#{name}\) \| .+ \| {severity} \| .+ \|$", DOCUMENT, re.MULTILINE)
    upstream = entry.partition("- **Upstream:** ")[2].partition("\n")[0]
    assert finding.issue in upstream if finding.issue else "no issue found" in upstream
    assert f"`python -m benchmarks.findings --mirror DIR {name}`" in entry


@pytest.fixture
def mirror(tmp_path: Path) -> tuple[Path, str]:
    """A folder with one project of one commit, and that commit."""
    project = tmp_path / "owner+name"
    project.mkdir()
    (project / "train.py").write_text("first\nsecond\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *identity, *words], cwd=project, check=True)
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=project, check=True, capture_output=True, text=True)
    return tmp_path, said.stdout.strip()


def seen(files: Checkout) -> Shown:
    """Stands as long as the file says what it said, whose lines a finding may change."""
    files.change("train.py", ("second", "changed"))
    return Shown("changed" in files.text("train.py"), ("looked at",))


def fails(files: Checkout) -> Shown:
    """A command that ends by an error, and so shows nothing."""
    return Shown(bool(files.python("-c", "raise SystemExit('no such library')").lines("it is there")), ())


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({}, 0, "it stands"),
        ({"line": 1}, 1, "gone, or not as it was: 'second' is not there"),
        ({"words": "third"}, 1, "gone, or not as it was: 'third' is not there"),
        ({"paths": ("other.py",)}, 1, "gone, or not as it was"),
        ({"repository": "owner/other"}, 2, "not looked at"),
        ({"show": lambda _files: Shown(False, ())}, 1, "it does not stand any more"),
        ({"show": fails}, 2, "not known, since a command failed:\n    no such library"),
    ],
)
def test_what_is_not_there_any_more_is_no_finding(
    mirror: tuple[Path, str], capsys: pytest.CaptureFixture[str], change: dict[str, object], code: int, said: str
) -> None:
    """A line that moved, words that are gone, a project that is not there, and a defect that was mended."""
    folder, commit = mirror
    finding = Finding("name", "owner/name", commit, "train.py", 2, "second", ("train.py",), seen)
    assert look(replace(finding, **change), folder, at_newest=False) == code  # type: ignore[arg-type]
    assert said in capsys.readouterr().out


def test_at_the_newest_commit_the_line_may_have_moved(mirror: tuple[Path, str]) -> None:
    """There only the words must be in the file."""
    finding = Finding("name", "owner/name", "0" * 40, "train.py", 1, "second", ("train.py",), seen)
    assert look(finding, mirror[0], at_newest=True) == 0


def test_a_line_that_is_to_be_changed_must_be_there(tmp_path: Path) -> None:
    """Otherwise a script would run unchanged, and nothing that it shows would mean anything."""
    (tmp_path / "train.py").write_text("first\n")
    with pytest.raises(Gone, match=r"train.py has no 'second' any more"):
        Checkout(tmp_path).change("train.py", ("second", "third"))
