"""Verdicts, what is made of them in a campaign's report, what a ratio equals, and claims beside clauses."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from andon_contracts.clauses import CLAUSES
from andon_falsify.campaign.findings import diagnosed, explain, held_by_rest, mistake
from andon_falsify.campaign.request import read_request
from andon_falsify.claims import CHECKS, CLAIMS, judged_by
from andon_falsify.claims.clauses import ALIASES, NO_CLAIM, claims_table, clauses_table
from andon_falsify.claims.evidence import Evidence
from andon_falsify.cli.campaign import ReportFiles, show
from andon_falsify.ranks.pool import root_cause
from andon_falsify.report.document import json_bytes, parse
from andon_falsify.report.findings import Expected, Finding, Report, reasons, verdict_lines
from andon_falsify.subjects.case import Case, make_rows
from andon_falsify.verdict import (
    Claim,
    Counterexample,
    Outcome,
    Quantity,
    Verdict,
    closing_line,
    conclude,
    exit_code,
    merge,
    not_applicable,
    unknown,
)
from benchmarks.scoreboard import joined, surprises

CLAIM = Claim("sums-right", 1, "1 + 1 = 2")
FOUND = Counterexample("3", "step 1", "2", "3", 1.5, "1.500 = 3 / 2")
HOLDS = conclude(CLAIM, 3, [])
FALSIFIED = conclude(CLAIM, 1, [FOUND])
UNKNOWN = unknown(CLAIM, "no rows")
INAPPLICABLE = not_applicable(CLAIM, "one rank")
ALL = (HOLDS, FALSIFIED, UNKNOWN, INAPPLICABLE)
ANY = st.lists(st.sampled_from(ALL), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("checked", "found", "missing", "outcome"),
    [
        (1, [], "", Outcome.HOLDS),
        (0, [], "", Outcome.UNKNOWN),
        (5, [], "rank 1 is silent", Outcome.UNKNOWN),
        (5, [FOUND], "rank 1 is silent", Outcome.FALSIFIED),
        (0, [FOUND], "", Outcome.FALSIFIED),
    ],
)
def test_conclusions(checked: int, found: list[Counterexample], missing: str, outcome: Outcome) -> None:
    assert conclude(CLAIM, checked, found, missing).outcome is outcome


def test_a_verdict_that_contradicts_itself_cannot_be_made() -> None:
    for outcome, checked, found in ((Outcome.HOLDS, 0, ()), (Outcome.FALSIFIED, 1, ()), (Outcome.HOLDS, 1, (FOUND,))):
        with pytest.raises(ValueError, match=CLAIM.name):
            Verdict(CLAIM.name, outcome, (), checked, found)


@given(ANY)
def test_merging_keeps_the_gravest(verdicts: list[Verdict]) -> None:
    merged = merge(verdicts)
    outcomes = {verdict.outcome for verdict in verdicts}
    order = (Outcome.FALSIFIED, Outcome.UNKNOWN, Outcome.HOLDS, Outcome.NOT_APPLICABLE)
    assert merged.outcome is next(outcome for outcome in order if outcome in outcomes)
    assert len(merged.counterexamples) == verdicts.count(FALSIFIED)
    assert merged.checked == sum(verdict.checked for verdict in verdicts)


def test_merging_keeps_the_reasons_of_the_outcome_and_needs_one_claim() -> None:
    other = unknown(CLAIM, "no steps")
    assert merge([UNKNOWN, INAPPLICABLE, other, HOLDS, UNKNOWN]).why == "no rows; no steps"
    for verdicts in ([], [HOLDS, unknown(Claim("other", 1, ""), "why")]):
        with pytest.raises(ValueError, match="one claim"):
            merge(verdicts)


def test_a_checker_that_throws_says_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Evidence) -> Verdict:
        raise ZeroDivisionError("of 3")

    monkeypatch.setitem(CHECKS, CLAIM.name, broken)
    evidence = Evidence(None, None, "ledger")
    assert judged_by(CLAIM, evidence) == unknown(CLAIM, "the checker failed: ZeroDivisionError: of 3")
    monkeypatch.setitem(CHECKS, CLAIM.name, lambda _: HOLDS)
    assert judged_by(CLAIM, evidence) == HOLDS


def test_the_closing_line_counts() -> None:
    assert closing_line(ALL, runs=7, not_selected=2) == "checked 2 of 6 claims, 7 runs, 1 not applicable, 1 unknown"
    assert closing_line([], runs=0) == "checked 0 of 0 claims, 0 runs, 0 not applicable, 0 unknown"


def test_exit_codes() -> None:
    expected = {(): 2, (HOLDS,): 0, (INAPPLICABLE,): 2, (UNKNOWN,): 2, (FALSIFIED,): 1}
    expected |= {(HOLDS, INAPPLICABLE): 0, (HOLDS, UNKNOWN): 2, ALL: 1}
    for verdicts, code in expected.items():
        assert {exit_code(order) for order in permutations(verdicts)} == {code}
        found = [finding(str(place), each.outcome) for place, each in enumerate(verdicts)]
        known = report(*found, expected=tuple(Expected("mine", each.claim, "known") for each in found))
        assert known.exit_code == code
        assert any("(exit code 1)" in line for line in verdict_lines(known)) == (code == 1)


def test_a_counterexample_reads_as_a_sentence() -> None:
    assert str(replace(FOUND, seed=42, repro="andon falsify --seed 42")) == (
        "step 1: 3; expected 2, seen 3; ratio 1.500 = 3 / 2; seed 42; repeat with: andon falsify --seed 42"
    )
    assert str(Counterexample("lost", seen="", expected="row 3")) == "lost; expected row 3, seen nothing"
    assert str(Counterexample("odd", seen="x", ratio=0.5)) == "odd; expected nothing, seen x; ratio 0.500"
    assert str(Counterexample("bare")) == "bare"
    assert str(FALSIFIED).splitlines() == ["sums-right: falsified", f"  {FOUND}"]
    assert str(UNKNOWN) == "sums-right: unknown (no rows)"


def test_claims_have_names_of_their_own_and_statements_in_words() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS) == 19
    code = r"\b(?:[A-Z]+-)*[A-Z]+-?\d+\b|\b(?:seed|issue|faults) [A-Z]?\d"
    for claim in CLAIMS:
        assert claim.version >= 1
        for statement in (claim.statement, *claim.statements.values()):
            assert statement.endswith(".")
            assert re.findall(code, statement) == [], claim.name


SMALLEST = Counterexample(
    "off the law", "step 1", "1", "4", 4.0, "4.000 = accumulation 2 x world 2", 7, "andon falsify 1"
)


def finding(claim: str = "gradient-law", outcome: Outcome = Outcome.HOLDS, **changes: object) -> Finding:
    found = (SMALLEST,) if outcome is Outcome.FALSIFIED else ()
    plain: dict[str, object] = {"checked": 3, "counterexamples": found, "seed": 7, "reasons": ("because",)}
    at = {"version": 1, "subject": "mine", "subject_version": "1.0", "backend": "gloo", "world": 2, "accumulation": 2}
    return Finding(claim, outcome, **(at | plain | changes))  # type: ignore[arg-type]


def report(*findings: Finding, **changes: object) -> Report:
    plain: dict[str, object] = {"versions": {"torch": "2.13.0"}, "findings": findings, "runs": 5}
    return Report("2026-01-01T00:00:00+00:00", **(plain | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("excused", "other", "unfinished", "code"),
    [
        (Outcome.FALSIFIED, Outcome.HOLDS, "", 0),
        (Outcome.FALSIFIED, Outcome.NOT_APPLICABLE, "", 0),
        (Outcome.FALSIFIED, Outcome.UNKNOWN, "", 2),
        (Outcome.FALSIFIED, Outcome.FALSIFIED, "", 1),
        (Outcome.HOLDS, Outcome.HOLDS, "", 3),
        (Outcome.UNKNOWN, Outcome.HOLDS, "", 2),
        (Outcome.FALSIFIED, Outcome.HOLDS, "interrupted", 2),
        (Outcome.FALSIFIED, Outcome.FALSIFIED, "interrupted", 1),
    ],
)
def test_what_is_excused_fails_by_holding(excused: Outcome, other: Outcome, unfinished: str, code: int) -> None:
    known = (Expected("mine", "a", "padded", excused=True),)
    found = report(finding("a", excused), finding("b", other), expected=known, unfinished=unfinished)
    assert (found.exit_code, parse(json_bytes(found), "file").exit_code) == (code, code)


def test_a_surprise_is_a_fall_unannounced_or_one_that_did_not_happen() -> None:
    whole = report(
        finding("fell", Outcome.FALSIFIED),
        finding("announced", Outcome.FALSIFIED),
        finding("held"),
        finding("stood"),
        expected=tuple(Expected(*each) for each in (("mine", "announced", ""), ("mine", "stood", ""), ("x", "y", ""))),
    )
    assert [text.partition(",")[0] for text in surprises(whole)] == ["mine: fell is falsified", "mine: stood is holds"]


def test_reports_of_several_subjects_are_joined() -> None:
    other = report(finding(), versions={"torch": "2.14.0"}, runs=2)
    both = joined([report(finding()), other])
    assert (both.runs, both.versions["torch"], len(both.findings)) == (7, "2.13.0 or 2.14.0", 2)
    with pytest.raises(ValueError, match="no report to join"):
        joined([])


LARGER = replace(SMALLEST, where="step 9", repro="andon falsify 2")


def fallen(world: int, accumulation: int, *found: Counterexample, **changes: object) -> Finding:
    at = {"version": 2, "world": world, "accumulation": accumulation, "reasons": ()}
    return finding("sum", Outcome.FALSIFIED, counterexamples=found, **(at | changes))


def lines(*findings: Finding) -> list[str]:
    return list(verdict_lines(report(*findings)))


def test_one_counterexample_stands_for_all_and_places_beyond_three_are_counted() -> None:
    assert lines(fallen(2, 1, SMALLEST, LARGER), fallen(3, 2, LARGER), fallen(2, 2, LARGER)) == [
        "sum v2: falsified at gloo, world 2, accumulation 1 and 2; gloo, world 3, accumulation 2",
        "  step 1: off the law; expected 1, seen 4; ratio 4.000 = accumulation 2 x world 2",
        "  repeat with: andon falsify 1",
        "  and 3 more (in the file of --json)",
    ]


def test_a_file_that_was_not_asked_for_is_not_pointed_at(capsys: pytest.CaptureFixture[str]) -> None:
    for option, rest in (("--json", "in the file of --json"), ("--html", "--json FILE writes them")):
        show(report(fallen(2, 1, SMALLEST, LARGER)), ReportFiles({option: Path("r")}))
        assert f"  and 1 more ({rest})" in capsys.readouterr().out.splitlines()
    plain = Counterexample("off the law")
    assert lines(fallen(2, 1, plain, reasons=("same forward, not independent",))) == [
        "sum v2: falsified at gloo, world 2, accumulation 1 (same forward, not independent)",
        "  off the law",
    ]
    (first, *_) = lines(*(fallen(world, 1, SMALLEST) for world in range(2, 7)))
    assert first.endswith("gloo, world 4, accumulation 1; and 2 more places")


def test_what_keeps_all_claims_from_being_judged_is_said_once() -> None:
    why = "rank 0: no model"
    first = finding("sum", Outcome.UNKNOWN, version=2, accumulation=1, reasons=(why,))
    second = replace(first, claim="mean")
    assert lines(first, second) == [
        "no claim can be judged at gloo, world 2, accumulation 1: rank 0: no model",
        "unknown (2): sum, mean",
    ]
    assert "(rank 0: no model)" in lines(first, replace(second, reasons=("another",)))[0]
    assert "(rank 0: no model)" in lines(first)[0]


def laid_out(world: int, accumulation: int, local: int = 2) -> Case:
    batch = world * accumulation * local
    return Case(rows=make_rows(2 * batch + 1), batch_size=batch, micro_batches=world * accumulation, world=world)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([(4.0, (2, 2))], "4.000 = accumulation 2 x world 2: the loss was not divided"),
        ([(2.0, (2, 2))], "2.000 = accumulation 2 or world 2"),
        ([(2.0, (2, 2)), (3.0, (3, 2))], "2.000 = world 2: summed over the ranks instead of averaged"),
        ([(2.0, (2, 2)), (2.0, (3, 2))], "2.000 = accumulation 2: summed over the micro-batches of a rank instead"),
        ([(0.5, (2, 2)), (1 / 3, (3, 2))], "0.500 = 1 / world 2: divided by the number of ranks once too often"),
        ([(8.0, (2, 2)), (12.0, (3, 2))], "8.000 = global batch 8: summed over the rows instead of averaged"),
        ([(-1.0, (2, 2))], "-1.000 = the sign"),
        ([(-2.0, (2, 1))], "-2.000 = -1 x world 2"),
        ([(1.37, (2, 2))], ""),
        ([(1.0, (2, 2))], ""),
        ([(2.0, (2, 2)), (-3.0, (3, 2))], ""),
        ([(float("nan"), (2, 2))], ""),
        ([], ""),
    ],
)
def test_ratios_are_explained_together(measured: list[tuple[float, tuple[int, int]]], said: str) -> None:
    pairs = [(ratio, laid_out(*place)) for ratio, place in measured]
    found = explain(pairs)
    shown = "" if found is None else found.of(*pairs[0])
    assert shown.startswith(said)
    assert bool(shown) == bool(said)


def test_what_a_judge_knows_of_a_ratio_stays_and_is_kept_by_a_smaller_case() -> None:
    equals, cause = "0.500 = 1 of 2 micro-batches", "a short window is divided as a full one"
    told = Counterexample("off the law", ratio=0.5, equals=f"{equals}: {cause}", cause=cause)
    case = laid_out(2, 2)
    assert diagnosed(told, case, explain([(0.5, case)])) == told
    assert mistake(told, case) == ("a short window is divided as a full one",)
    untold = Counterexample("off the law", ratio=0.5, equals="0.500 = 1 / world 2")
    assert diagnosed(untold, case, None).equals == "0.500 = 1 / accumulation 2 or 1 / world 2"
    assert mistake(untold, case) == ("accumulation", "world")
    assert mistake(Counterexample("off by 1.37", ratio=1.37, quantity="norm"), laid_out(2, 1)) == ("norm",)


def test_a_counterexample_is_explained_by_what_all_cases_say() -> None:
    two, three = laid_out(2, 2), laid_out(3, 2)
    common = explain([(2.0, two), (3.0, three)])
    assert "world 2" in diagnosed(Counterexample("off", ratio=2.0), two, common).equals
    assert "accumulation" not in diagnosed(Counterexample("off", ratio=2.0), two, common).equals
    product = diagnosed(Counterexample("off", ratio=4.0), two, common).equals
    assert product.startswith("4.000 = accumulation 2 x world 2")
    plain = Counterexample("off")
    assert diagnosed(plain, two, common) is plain


@pytest.mark.parametrize(
    ("quantity", "said"),
    [
        ("learning rate", "2.000 = world size 2"),
        ("loss", "2.000 = world size 2"),
        ("weights", "2.000 = world size 2"),
        ("gradient", "2.000 = world 2: summed over the ranks instead of averaged"),
    ],
)
def test_only_of_a_gradient_a_sum_is_blamed(quantity: Quantity, said: str) -> None:
    """A learning rate that is multiplied by the world size is summed by nobody."""
    found = Counterexample("it is another one", ratio=2.0, quantity=quantity)
    assert diagnosed(found, laid_out(2, 1, 3), None).equals == said


def test_what_held_rules_causes_out() -> None:
    """Two ranks without accumulation are right, so the world is not it; a case with other rows says nothing."""
    case = laid_out(2, 2)
    held = case.but(micro_batches=2)
    off, rest = Counterexample("off", ratio=2.0), held_by_rest([held])
    for found in (diagnosed(off, case, explain([(2.0, case)], rest)), diagnosed(off, case, None, rest)):
        assert found.equals == "2.000 = accumulation 2: summed over the micro-batches of a rank instead of averaged"
    stranger = held.but(rows=make_rows(3))
    told = diagnosed(off, case, None, held_by_rest([stranger])).equals
    assert "accumulation 2 or world 2" in told


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ({0: "RuntimeError: gloo: Connection closed by peer", 1: "the rank was killed by X"}, "rank 1 was killed"),
        ({0: "no answer in time (5 s); killed", 1: "ArithmeticError: no\nTraceback"}, "rank 1: ArithmeticError: no"),
        ({0: "RuntimeError: Timed out waiting 20000ms", 1: "no answer in time (5 s); killed"}, "rank 1: no answer"),
        (
            {0: "ValueError: bad", 1: "RuntimeError: socket\nit left processes behind, now ended: 7 (x)"},
            "rank 0: ValueError: bad; rank 1: it left processes behind, now ended: 7 (x)",
        ),
        ({2: ""}, "rank 2: an error without a text"),
    ],
)
def test_the_cause_is_named_and_not_its_echo(errors: dict[int, str], said: str) -> None:
    assert root_cause(errors).startswith(said)
    assert "\n" not in root_cause(errors)


def test_the_place_of_an_error_is_that_in_the_subjects_own_code() -> None:
    text = (
        "LoopError: ValueError: bad\n"
        '  File "/x/andon_falsify/loops/duty.py", line 3, in train\n'
        '  File "/x/mine.py", line 12, in train\n'
        '  File "/x/site-packages/torch/nn.py", line 9, in forward\n'
    )
    assert root_cause({0: text}) == "rank 0: ValueError: bad (raised at /x/mine.py:12 in train)"


def test_the_first_reasons_are_shown_and_the_others_counted() -> None:
    cut = root_cause({0: "x", 1: "y\nit left processes behind: z"})
    many = Verdict("sum", Outcome.UNKNOWN, (cut, "b", "c", "d; e"))
    assert reasons(many) == f"{cut}; b; c; and 1 more"
    assert reasons(Verdict("sum", Outcome.HOLDS, checked=1, worst=4e-7)) == "largest relative error 4.00e-07"


DOCS = Path(__file__).parents[2] / "docs" / "claims.md"


def test_every_clause_and_every_claim_is_in_the_map() -> None:
    kin = [clause for claim in CLAIMS for clause in claim.clauses]
    assert {clause.name for clause in kin} <= CLAUSES.keys()
    assert NO_CLAIM.keys() == CLAUSES.keys() - {clause.name for clause in kin}
    assert len(ALIASES) == len({clause.name for clause in kin if clause.name in ALIASES})


def test_one_name_is_one_law_or_the_map_says_that_it_is_not() -> None:
    named = {claim.name: claim for claim in CLAIMS}
    shared = [(claim, clause) for claim in CLAIMS for clause in claim.clauses if clause.name in named]
    assert all(claim.name == clause.name for claim, clause in shared)
    assert {claim.name for claim, clause in shared if clause.relation != "same"} == {"halt-together"}


def test_the_page_of_claims_and_clauses_is_current() -> None:
    """A claim or a clause that is added, renamed or reworded is on the page."""
    text = DOCS.read_text(encoding="utf-8")
    assert "\n".join(claims_table()) in text
    assert "\n".join(clauses_table()) in text


def test_the_page_says_which_clauses_a_watch_suspects() -> None:
    """By the laws of a process that runs nothing else. The trainer alone has a law of `memory-budget`."""
    program = "import gc, andon_contracts.watch.watcher; from andon_contracts.laws.law import Law"
    program += (
        "; print(*(f'{law.clause} {law.suspicion:d}' for law in gc.get_objects() if type(law) is Law), sep='\\n')"
    )
    laws = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    only, broken = ({line[:-2] for line in laws if line.endswith(end)} - {"memory-budget"} for end in (" 1", " 0"))
    listed = DOCS.read_text(encoding="utf-8").partition("A watch only suspects ")[2].partition(" These are ")
    for names, part in ((only - broken, listed[0]), (only & broken, listed[2].partition(".")[0])):
        assert set(re.findall("`(.+?)`", part)) == names


@pytest.mark.parametrize("module", ["claims.ledgers", "campaign.script_bench"])
def test_ledgers_and_scripts_are_judged_without_torch(module: str) -> None:
    """`andon verify` and script mode start as fast as they read: neither has tensors."""
    code = f"import sys, andon_falsify.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("clause", "claim"), ALIASES.items())
def test_a_claim_is_asked_for_by_the_name_of_its_clause_too(clause: str, claim: str) -> None:
    assert read_request(claims=(clause,)).claims == (claim,)
    assert read_request(claims=(claim,)).claims == (claim,)
    assert read_request(claims=("finite",)).claims == ("finite",)  # another law than `loss-finite`
