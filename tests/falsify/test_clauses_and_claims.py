"""The map of clauses to claims names each of both, says where one name is two laws, and either name selects a claim."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from andon_contracts.clauses import CLAUSES
from andon_falsify.campaign.request import Options, understood
from andon_falsify.claims import of_loop, of_trainer
from andon_falsify.claims.clauses import ALIASES, ALONE, MAP, table
from andon_falsify.claims.ledgers import ALL
from andon_falsify.claims.table import CHECKERS

CLAIMS = {claim.name for claim in (*of_trainer.CLAIMS, *of_loop.CLAIMS, *ALL)}
DOCS = Path(__file__).parents[2] / "docs" / "clauses-and-claims.md"


def test_every_clause_and_every_claim_is_in_the_map() -> None:
    """Each clause once and in order; each claim beside a clause or among those that say why they have none."""
    assert [each.clause for each in MAP] == list(CLAUSES)
    assert {name for each in MAP for name in each.claims} | ALONE.keys() == CLAIMS
    assert not {name for each in MAP for name in each.claims} & ALONE.keys()
    assert all(bool(each.claims) is (each.relation != "none") for each in MAP)


def test_every_law_of_the_table_is_claimed_of_something() -> None:
    """A row that stands in no list of claims would be written, reviewed, and never judged."""
    assert CHECKERS.keys() <= CLAIMS


def test_one_name_is_one_law_or_the_map_says_that_it_is_not() -> None:
    """A clause and a claim of one name are the same law but for `halt-together`, whose note says what each is."""
    shared = {each.clause: each for each in MAP if each.clause in CLAIMS}
    assert {name for name, each in shared.items() if each.relation != "same"} == {"halt-together"}
    assert all(each.claims == (name,) for name, each in shared.items())
    assert all(each.note for each in MAP if each.relation in ("other", "none"))


def test_the_published_table_is_the_map() -> None:
    """What users read is made of what the command line goes by."""
    assert "\n".join(table()) in DOCS.read_text(encoding="utf-8")


def test_ledgers_are_judged_without_torch() -> None:
    """`andon verify` starts as fast as it reads: what needs tensors is not loaded where nobody has any."""
    code = "import sys, andon_falsify.claims.ledgers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("clause", "claim"), ALIASES.items())
def test_a_claim_is_asked_for_by_the_name_of_its_clause_too(clause: str, claim: str) -> None:
    """The same law is selected by either name; what is reported has the claim's."""
    assert understood(Options(claims=(clause,))).claims == (claim,)
    assert understood(Options(claims=(claim,))).claims == (claim,)


def test_the_name_of_another_law_is_no_alias() -> None:
    """`finite` is not `loss-finite`: who asks for it is told that there is no such claim."""
    assert "finite" not in ALIASES
    assert understood(Options(claims=("finite",))).claims == ("finite",)
