"""The sampler of mutants draws the same places wherever a function stands, and changes just these."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
from pathlib import Path

import pytest

mutants = pytest.importorskip("benchmarks.source_mutants", reason="benchmarks/ is in the checkout only")

WHOLE = '''"""A module."""


def limited(x: int | None, most: int = 3) -> bool:
    """Whether x is small."""
    if not x and most > 0:  # none at all
        return True
    return x < most + 1
'''
ELSEWHERE = WHOLE.replace("Whether x is small.", "See limited.").replace("int | None", "int") + "\n\nUNUSED = 1\n"
"""The same function in another module: with another docstring, annotation and neighbour."""
CALLED = """from andon.limits import limited


def test_it() -> None:
    assert [limited(x) for x in (0, 3, 4)] == [True, True, False]
"""


def checkout(folder: Path, module: str, text: str) -> Path:
    """A repository with one module and a test of it."""
    package = folder / "core" / "andon"
    (folder / "tests").mkdir(parents=True)
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / f"{module}.py").write_text(text)
    (folder / "tests" / "test_limits.py").write_text(CALLED.replace("limits", module))
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
    return folder


def test_a_function_that_moved_gives_the_same_sample(tmp_path: Path) -> None:
    """Its name within the module and its body make it what it is; one that only one checkout has is not drawn."""
    one = checkout(tmp_path / "one", "limits", WHOLE + "\n\ndef only_here(x):\n    return x + 1\n")
    other = checkout(tmp_path / "other", "bounds", ELSEWHERE)
    drawn = mutants.sample(one, other, 100, 1), mutants.sample(other, one, 100, 1)
    assert [site.id for site in drawn[0]] == [site.id for site in drawn[1]]
    assert {site.name for site in drawn[0]} == {"limited"}
    assert {site.path for site in drawn[1]} == {"core/andon/bounds.py"}
    assert {(site.was, site.becomes) for site in drawn[0]} == {
        ("3", "4"),
        ("not x and most > 0", "not x or most > 0"),
        ("not x and most > 0", "not (not x and most > 0)"),
        ("not x", "x"),
        ("most > 0", "most >= 0"),
        ("0", "1"),
        ("True", "False"),
        ("x < most + 1", "x <= most + 1"),
        ("most + 1", "most - 1"),
        ("1", "2"),
    }


def test_nothing_else_of_the_module_changes(tmp_path: Path) -> None:
    """A mutant is the text with the one place replaced: comments, docstring and all else to the byte as they were."""
    for site in mutants.sample(checkout(tmp_path / "one", "limits", WHOLE), None, 100, 1):
        text = mutants.mutated(WHOLE, site)
        assert text != WHOLE
        assert text.replace(f"({site.becomes})", site.was) == WHOLE
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(WHOLE))


def test_a_mutant_that_the_tests_see_is_told_from_one_that_they_do_not(tmp_path: Path) -> None:
    """Both are tried on a copy that is whole again afterwards; the checkout is never written to."""
    one = checkout(tmp_path / "one", "limits", WHOLE)
    by_change = {site.becomes: site for site in mutants.sample(one, None, 100, 1)}
    (tmp_path / "copy").mkdir()
    bench = mutants.Bench(one, tmp_path / "copy", files=3, seconds=60.0)
    seen, unseen = bench.attempt(by_change["x <= most + 1"]), bench.attempt(by_change["most >= 0"])
    assert (seen.outcome, seen.test) == (mutants.KILLED, "tests/test_limits.py::test_it")
    assert (unseen.outcome, unseen.test) == (mutants.SURVIVED, "")
    for folder in (one, tmp_path / "copy"):
        assert (folder / "core" / "andon" / "limits.py").read_text() == WHOLE


def test_several_at_a_time_give_what_one_at_a_time_does(tmp_path: Path) -> None:
    """Each is tried once, in a copy of its own, and kept; what an earlier call kept is not tried again."""
    one = checkout(tmp_path / "one", "limits", WHOLE)
    drawn = [site for site in mutants.sample(one, None, 100, 1) if site.line == 8]
    benches = [mutants.Bench(one, tmp_path / str(job), files=3, seconds=60.0) for job in range(2)]
    results = tmp_path / "results.jsonl"
    found = mutants.try_all(drawn, benches, results, lambda: True)
    assert [(trial.becomes, trial.outcome) for trial in found] == [(site.becomes, mutants.KILLED) for site in drawn]
    assert len(drawn) == len(results.read_text().splitlines()) == 3
    assert mutants.try_all(drawn, benches, results, lambda: False) == found


def test_a_checkout_in_which_pytest_cannot_start_is_no_bench(tmp_path: Path) -> None:
    """Nothing would be seen there: its plugin is one that it has not."""
    one = checkout(tmp_path / "one", "limits", WHOLE)
    (one / "pyproject.toml").write_text('[project.entry-points.pytest11]\nandon_falsify = "andon.gone"\n')
    subprocess.run(["git", "-C", one, "add", "."], check=True)
    with pytest.raises(subprocess.CalledProcessError):
        mutants.Bench(one, tmp_path / "copy", files=3, seconds=60.0)


def test_a_copy_is_installed_as_its_checkout_would_be(tmp_path: Path) -> None:
    """Its tests look for its own version in what it says, not for that of an Andon beside it."""
    one = checkout(tmp_path / "one", "limits", WHOLE)
    (one / "pyproject.toml").write_text('[project]\nname = "andon"\nversion = "7.1"\n')
    subprocess.run(["git", "-C", one, "add", "."], check=True)
    copy = mutants.Bench(one, tmp_path / "copy", files=3, seconds=60.0).folder
    (found,) = importlib.metadata.distributions(path=[str(copy / "contracts")])
    assert (found.name, found.version) == ("andon", "7.1")
