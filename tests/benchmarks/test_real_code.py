"""The table of real code keeps its own rules; none of these tests needs a repository of others or a network."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from andon_contracts.clauses import CLAUSES
from benchmarks.real_code.__main__ import main
from benchmarks.real_code.checkout import patch, repository, script, take_out
from benchmarks.real_code.row import Expected, Patch, Plant, Row
from benchmarks.real_code.running import Alarm, Ended, judged
from benchmarks.real_code.table import ROWS

LONGEST = 160
"""Characters of a line of others that a patch may name, in order to replace it."""
MOST = 14
"""Patches of a row."""


def patches_of(row: Row) -> list[Patch]:
    """Those of the row and of what is planted into it."""
    return [*row.patches, *(each for plant in row.plants for each in plant.patches)]


def broken_rules(row: Row) -> list[str]:
    """Which rules of the table a row breaks."""
    found = [] if re.fullmatch("[0-9a-f]{40}", row.commit) else ["a commit is named in full"]
    found += ["a row has few patches"] * (len(row.patches) > MOST)
    for each in patches_of(row):
        found += ["a patch names a part of one line"] * (
            len(each.old.strip("\n")) > LONGEST or "\n" in each.old.strip("\n")
        )
        found += ["a patch changes something"] * (each.old == each.new or not each.old.strip())
    for expected in row.expected:
        found += ["an expected alarm is a clause"] * (expected.clause not in CLAUSES)
        found += ["an expected alarm has its reason"] * (len(expected.reason.split()) < 3)
    for plant in row.plants:
        found += ["a planted mistake names clauses"] * (not plant.clauses or not set(plant.clauses) <= set(CLAUSES))
    found += ["what differs between runs is said"] * (row.unseeded == "yes")
    found += ["files of ours are short"] * any(text.count("\n") > 30 for text in row.files.values())
    return found


def row(**changes: object) -> Row:
    """A row of a repository that a test makes."""
    fields = {"name": "a/b/train", "repository": "a/b", "commit": "0" * 40, "path": "train.py", "family": "none"}
    return Row(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("each", ROWS, ids=lambda each: each.name)
def test_every_row_keeps_the_rules(each: Row) -> None:
    """A place at a full commit, few and short patches, a reason for each alarm that is right."""
    assert broken_rules(each) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"commit": "main"},
        {"patches": (Patch("x = 1\ny = 2", "x = 2"),)},
        {"patches": (Patch("x" * (LONGEST + 1), ""),)},
        {"patches": (Patch("x", "x"),)},
        {"patches": (Patch("x", "y"),) * (MOST + 1)},
        {"expected": (Expected("no-such-clause", "because it is so"),)},
        {"expected": (Expected("samples-once", ""),)},
        {"plants": (Plant("a mistake", (), ()),)},
        {"files": {"copied.py": "line\n" * 40}},
    ],
)
def test_a_rule_can_be_broken(changes: dict[str, object]) -> None:
    """Each rule sees what it is there for."""
    assert broken_rules(row(**changes)) != []


def test_rows_have_names_of_their_own_and_there_are_enough() -> None:
    """At least 25 scripts, of ten projects or more, outside of torch's examples more than inside."""
    assert len({each.name for each in ROWS}) == len(ROWS) >= 25
    assert len({each.repository for each in ROWS}) >= 10
    assert sum(each.repository != "pytorch/examples" for each in ROWS) > len(ROWS) / 2


def test_files_of_ours_are_python() -> None:
    """What is laid beside a script can be read by its interpreter."""
    for each in ROWS:
        for name, text in each.files.items():
            if name.endswith(".py"):
                ast.parse(text)


@pytest.mark.parametrize(("text", "times"), [("lr = 2", 0), ("lr = 1; lr = 1", 2)])
def test_a_patch_that_does_not_fit_exactly_once_is_refused(tmp_path: Path, text: str, times: int) -> None:
    """A script that changed is not run half patched."""
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"stands there {times} times"):
        patch(tmp_path, [Patch("lr = 1", "lr = 3")], "train.py")
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == text


def repository_with(tmp_path: Path, text: str) -> tuple[Path, str]:
    """A mirror with one repository `a/b`, whose train.py has `text`; and its commit."""
    place = tmp_path / "mirror" / "a+b"
    place.mkdir(parents=True)
    (place / "train.py").write_text(text, encoding="utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(place), *words], check=True)
    found = subprocess.run(["git", "-C", str(place), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return tmp_path / "mirror", found.stdout.strip()


def test_a_script_is_taken_out_at_its_commit_and_patched(tmp_path: Path) -> None:
    """What was committed later, or not at all, is not in it; what we lay beside it is."""
    mirror, commit = repository_with(tmp_path, "lr = 1\n")
    (mirror / "a+b" / "train.py").write_text("lr = 5\n", encoding="utf-8")
    made = row(commit=commit, patches=(Patch("lr = 1", "lr = 2"),), files={"data/few.txt": "a"})
    git = repository(mirror, made)
    assert git is not None
    take_out(git, made, tmp_path / "out")
    assert (tmp_path / "out" / "train.py").read_text(encoding="utf-8") == "lr = 2\n"
    assert (tmp_path / "out" / "data" / "few.txt").read_text(encoding="utf-8") == "a"
    with pytest.raises(ValueError, match="a/b/train"):
        take_out(git, row(commit="1" * 40), tmp_path / "elsewhere")


def test_a_module_is_a_file() -> None:
    """A script that is run by `-m` is patched by its path."""
    assert script(row(path="scripts.train", module=True)) == "scripts/train.py"


def ended(*alarms: Alarm, checksum: int = 7, code: int = 0) -> Ended:
    """A run of one rank with three updates."""
    return Ended(code, 1.0, "ValueError: no", ((3, checksum),), alarms)


KNOWN = Expected("samples-once", "all ranks draw alike", "one-seed")


@pytest.mark.parametrize(
    ("plain", "watched", "wrong"),
    [
        (ended(), ended(Alarm("samples-once", 2, False, 1)), []),
        (ended(), ended(), ["expected and not seen: samples-once"]),
        (ended(), ended(Alarm("samples-once", 2, True, 1)), ["FALSE suspicion: samples-once", "expected and not seen"]),
        (
            ended(),
            ended(Alarm("samples-once", 2, False, 1), Alarm("finite", 1, False, 3)),
            ["FALSE violation: finite at step 1, 3 times"],
        ),
        (ended(), ended(Alarm("samples-once", 2, False, 1), checksum=8), ["weights of plain and watched: different"]),
        (ended(), ended(Alarm("samples-once", 2, False, 1), code=1), ["watched: exit 1, not 0: ValueError: no"]),
    ],
    ids=["as expected", "missed", "only suspected", "another one", "other bits", "failed"],
)
def test_whatever_is_not_as_the_table_says_is_wrong(plain: Ended, watched: Ended, wrong: list[str]) -> None:
    """An alarm is true with its reason in the table, and false without."""
    found = judged(row(expected=(KNOWN,)), plain, watched).wrong
    assert len(found) == len(wrong)
    assert all(line.startswith(start) for line, start in zip(found, wrong, strict=True))


def test_a_row_that_cannot_be_run_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no success: nothing was run."""
    assert main(["--mirror", str(tmp_path), "--only", "karpathy/nanoGPT"]) == 2
    assert "left out, karpathy/nanoGPT is not in the mirror" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--mirror", "nowhere"], ["--mirror", ".", "--only", "nobody/nothing"]])
def test_what_the_user_gets_wrong_ends_with_2(wrong: list[str]) -> None:
    """A mirror that is none, a row that is none."""
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2


def test_a_line_of_the_table_that_does_not_fit_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says which, writes it, and ends with 1."""
    mirror, commit = repository_with(tmp_path, "lr = 1\n")
    monkeypatch.setattr("benchmarks.real_code.__main__.ROWS", (row(commit=commit, patches=(Patch("lr = 9", ""),)),))
    assert main(["--mirror", str(mirror), "--json", str(tmp_path / "r.json")]) == 1
    assert "stands there 0 times, not once" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))[0]["name"] == "a/b/train"
