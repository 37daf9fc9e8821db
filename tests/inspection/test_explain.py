"""`andon explain`: what was promised, what was seen, where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from andon.inspection.explain import explain
from andon.problems import InputError
from andon_contracts.act import Scene, violation, write_bundle
from andon_contracts.clauses import CLAUSES
from andon_contracts.record import Broken
from andon_contracts.violation import Finding
from tests.inspection.ledgers import whole_run, write

FINDING = Finding("they differ (rank 0: aa, rank 1: bb)", 412, (1,), "lora_A.q_proj", (("lora_A.q_proj", "aa bb"),))


def test_a_bundle_is_explained(tmp_path: Path) -> None:
    """What `watch` wrote comes back: clause with its promise, step, rank, tensor, digests, batch, versions."""
    scene = Scene(world=4, applied=True, last_equal=411, element="first at [3, 881]")
    error = violation("replicas-agree", FINDING, scene)
    place = write_bundle(tmp_path, error, scene, {"batch": [5, 7]}).bundle
    lines = list(explain(Path(place)))
    assert lines[0] == "replicas-agree broken at step 412"
    assert f"  promise  {CLAUSES['replicas-agree'].statement}" in lines
    assert "  ranks    1 of 4" in lines
    assert "  where    lora_A.q_proj, first at [3, 881]" in lines
    assert "  digests  lora_A.q_proj: aa bb" in lines
    assert "  state    step 412 was applied" in lines
    assert "  equal    last at step 411" in lines
    assert "  batch: [5, 7]" in lines
    assert any(line.startswith("  torch: ") for line in lines)
    assert list(explain(Path(place) / "replicas-agree.json")) == lines


def test_a_run_is_explained_by_its_ledger(tmp_path: Path) -> None:
    """The violation record, and the commands that look further."""
    run = tmp_path / "run"
    run.mkdir()
    broken = Broken("finite", 3, (), "loss", "the loss is not finite", {"rank 0": "nan"})
    write(run / "ledger.jsonl", [*whole_run()[:4], broken])
    lines = list(explain(run))
    assert lines[0] == "finite broken at step 3"
    assert "  ranks    not attributable" in lines
    assert "  digests  rank 0: nan" in lines
    assert lines[-2:] == [f"  look     andon show {run} --step 3", f"  repeat   andon replay {run} --steps 2"]


def test_what_explains_nothing_is_refused(tmp_path: Path) -> None:
    """A clean run, a file that is no bundle, a path that is not there."""
    with pytest.raises(InputError, match="no violation to explain"):
        list(explain(write(tmp_path / "l.jsonl", whole_run())))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"a": 1}))
    with pytest.raises(InputError, match="is no bundle"):
        list(explain(other))
    other.write_text("{")
    with pytest.raises(InputError, match="is no bundle"):
        list(explain(other))
    with pytest.raises(InputError, match="there is no such run"):
        list(explain(tmp_path / "nothing"))
