"""Each package stays as small as `budget.toml` says, and so does the README."""

from __future__ import annotations

import tomllib

import pytest

from tests.repository.sources import ROOT

BUDGET = tomllib.loads((ROOT / "tests" / "repository" / "budget.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("folder", BUDGET["lines"])
def test_a_package_has_no_more_lines_than_its_budget(folder: str) -> None:
    if not (ROOT / folder).is_dir():
        pytest.skip(f"{folder} is in the checkout only")
    lines = sum(path.read_bytes().count(b"\n") for path in (ROOT / folder).rglob("*.py"))
    assert lines <= BUDGET["lines"][folder]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= BUDGET["readme"]["lines"]
    assert len(text.split()) <= BUDGET["readme"]["words"]
