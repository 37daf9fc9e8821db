"""How a report is tabulated for its views."""

from __future__ import annotations

from dataclasses import replace

from andon_falsify.report.cells import Column, tabulate
from tests.falsify.reports import campaign, finding


def test_a_subject_is_named_once() -> None:
    """A version that names its library is not said to be one of the subject's own name."""
    assert str(Column("andon", "0.1.0")) == "andon 0.1.0"
    assert str(Column("accelerate", "accelerate 1.15.0")) == "accelerate 1.15.0"
    assert str(Column("hf_trainer", "transformers 5.23.0")) == "hf_trainer (transformers 5.23.0)"
    assert str(Column("mine:make", "")) == "mine:make"


def test_what_most_subjects_are_judged_on_comes_first() -> None:
    """Rows that are full stand above those that are not."""
    found = (finding("own", "andon"), finding("both", "andon"), finding("both", "ddp"), finding("last", "ddp"))
    assert tabulate(replace(campaign(), findings=found)).claims == ("both", "own", "last")
