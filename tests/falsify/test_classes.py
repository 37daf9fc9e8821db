"""A file of command lines that must train alike: its verdicts, its reports, and what is said of its mistakes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.falsify.test_campaign_command import falsify
from tests.falsify.written_runs import COPYING, PLAIN, lines

FILE = """command: {python} copying.py . {{flags}}
classes:
  - {{name: mine, alike: [a --batch 8, b --batch 4], {known}}}
  - alike: [a, a --again]
"""
TWICE, OTHER = {"grad_norm": 2.0}, {"grad_norm": 1.063}


@pytest.mark.parametrize(
    ("runs", "known", "code", "said"),
    [
        ({"a": {}, "b": {}}, "", 0, "holds (8 comparisons"),
        ({"a": {}, "b": TWICE}, "", 1, "ratio 2.000 = --batch 8/4 = 2 or world 2"),
        ({"a": {}, "b": TWICE}, "expected_failed: later", 0, "as expected: later"),
        ({"a": {}, "b": OTHER}, "", 1, "(the rows of this update are not known)"),
        ({"a": {}, "b": {**OTHER, "draws": "dropout in drop"}}, "", 2, "dropout in drop. Switch dropout off"),
        ({"a": {}, "a.next": TWICE, "b": TWICE}, "", 2, "not seeded: two runs of 'a --batch 8' differ"),
        ({"a": {}}, "", 2, "b --batch 4: the command ended with 1: FileNotFoundError"),
    ],
)
def test_members_of_a_class_are_compared_with_its_first(
    runs: dict[str, dict], known: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("copying.py").write_text(COPYING)
    for name, fields in runs.items():
        Path(name).write_bytes(b"".join(lines({**PLAIN, **fields}, {**PLAIN, **fields})))
    Path("f.yaml").write_text(FILE.format(python=shlex.quote(sys.executable), known=known))
    words = ("falsify", "f.yaml", "--only", "mine", "--seed", "3")
    ended, shown, _ = falsify(*words[1:], "--junit", "r.xml", "--markdown", "r.md")
    assert (ended, said in "".join(shown)) == (code, True), shown
    assert (f"  repeat with: andon {' '.join(words)}" in shown) == any(
        "step 1, b --batch 4" in line for line in shown[2:]
    )
    assert [each.get("name") for each in ElementTree.parse("r.xml").iter("testsuite")] == ["mine"]
    row = Path("r.md").read_text().splitlines()[2]
    assert (row.startswith("| mine | same-everywhere | "), row.count("expected to be falsified")) == (True, 0)


WRONG = """command: run {world} {flags}
seeds: x
values: {world: 1}
class: 3
classes:
  - {name: a, alike: [b], expected_failed: }
  - alike: [c, "c"]
"""


def test_every_mistake_of_a_file_is_said_with_its_line(tmp_path: Path) -> None:
    (file := tmp_path / "f.yaml").write_text(WRONG)
    code, _, said = falsify(str(file))
    wrong = ["6 classes.0.alike: needs at least 2 entries", "6 classes.0.expected_failed: is empty: give a value"]
    wrong.append("4 class: unknown key; did you mean 'classes'?")
    assert (code, said.splitlines()) == (64, [f"andon: {file}:{line}" for line in wrong])
    file.write_text(WRONG.replace("class: 3\n", "").replace("[b], expected_failed: ", '[{rank: 1}, {flags: "\'"}, 7]'))
    code, _, said = falsify(str(file), "--only", "d", "--budget", "big")
    assert (code, [line.replace(f"{file}:", "") for line in said.splitlines()]) == (
        64,
        [
            "andon: --budget: must be one of quick, standard, deep, not 'big'",
            "andon: 5 classes.0.alike.0: {rank} is not in the command",
            'andon: 5 classes.0.alike.1: cannot be split into words: no closing quotation ("run 1 \'")',
            "andon: 5 classes.0.alike.2: must be a text, or placeholders with their values, not 7",
            "andon: 6 classes.1.alike.1: 'c' is in this class already",
            "andon: 2 seeds: must be a number, or two as in 0-199, of at most 10000 seeds, not 'x'",
            "andon: --only: no class is 'd'",
        ],
    )
