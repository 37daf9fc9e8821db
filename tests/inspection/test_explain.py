"""`andon explain`: what was promised, what was seen, where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from andon.console.problems import InputError
from andon.inspection.explain import explain
from andon_contracts.act import Scene, conclude
from andon_contracts.bundle import Evidence
from andon_contracts.clauses import CLAUSES
from andon_contracts.record import Broken
from andon_contracts.violation import Finding, Violation
from tests.inspection.ledgers import start, whole_run, write

FINDING = Finding("they differ (rank 0: aa, rank 1: bb)", 412, (1,), "lora_A.q_proj", (("lora_A.q_proj", "aa bb"),))


def _left_by(folder: Path, rank: int, tensors: dict[str, torch.Tensor], batch: list[int]) -> str:
    """The folder of the bundle after `rank` of 2 has left its part."""
    scene = Scene(world=2, applied=True, last_equal=411, before="weights agreed", element="first at [0, 1]")
    evidence = Evidence(folder, rank, 2, lambda: batch, lambda _: iter(tensors.items()))
    return conclude(Violation.of("replicas-agree", FINDING), scene, evidence, {}).bundle


def test_a_bundle_is_explained(tmp_path: Path) -> None:
    one, other = torch.zeros(2, 3), torch.zeros(2, 3)
    other[0, 1], other[1, 2] = 0.25, -0.5
    place = _left_by(tmp_path, 1, {"weights lora_A.q_proj": other, "weights same": one}, [7])
    assert _left_by(tmp_path, 0, {"weights lora_A.q_proj": one, "weights same": one}, [5, 6]) == place
    lines = list(explain(Path(place)))
    assert lines[0] == "replicas-agree broken at step 412"
    for line in (
        f"  promise  {CLAUSES['replicas-agree'].statement}",
        "  ranks    1 of 2",
        "  where    lora_A.q_proj, first at [0, 1]",
        "  before   weights agreed",
        "  digests  lora_A.q_proj: aa bb",
        "  state    step 412 was applied",
        "  equal    last at step 411",
        "    batch       rows 5 6",
        "    batch       rows 7",
        "  differs  weights lora_A.q_proj: 2 of 6 elements, by up to 0.5",
    ):
        assert line in lines
    assert not any("weights same" in line for line in lines)
    assert any("test_explain.py" in line and "_left_by" in line for line in lines), "the stack of the main thread"
    assert any(line.startswith("    collectives not available: ") for line in lines)
    assert any(line.startswith("  torch: ") for line in lines)
    assert list(explain(Path(place) / "replicas-agree.json")) == lines


def test_a_damaged_part_hides_no_other(tmp_path: Path) -> None:
    place = Path(_left_by(tmp_path, 0, {"weights lora_A.q_proj": torch.ones(2)}, [5]))
    (place / "replicas-agree" / "rank-1.json").write_text('{"rank": 1')
    (place / "replicas-agree" / "rank-0.safetensors").write_bytes(b"\xff" * 20)
    lines = list(explain(place))
    assert "    batch       rows 5" in lines
    assert any(line.startswith("  rank-1   cannot be read: ") for line in lines)


def test_a_run_is_explained_by_its_ledger(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    broken = Broken("finite", 3, (), "loss", "the loss is not finite", {"rank 0": "nan"})
    write(run / "ledger.jsonl", [*whole_run()[:4], broken])
    lines = list(explain(run))
    assert lines[0] == "finite broken at step 3"
    assert "  ranks    not attributable" in lines
    assert "  digests  rank 0: nan" in lines
    assert lines[-2:] == [f"  look     andon show {run} --step 3", f"  repeat   andon replay {run} --steps 2"]


@pytest.mark.parametrize(("name", "writer"), [("l.jsonl", None), ("l.jsonl", "watch"), ("ledger.jsonl", "watch")])
def test_no_replay_is_offered_where_none_can_be(tmp_path: Path, name: str, writer: str | None) -> None:
    broken = Broken("finite", 3, (), "loss", "the loss is not finite", {})
    ledger = write(tmp_path / name, [start(writer=writer), *whole_run()[1:4], broken])
    path = tmp_path if name == "ledger.jsonl" else ledger
    assert list(explain(path))[-1] == f"  look     andon show {path} --step 3"


def test_what_explains_nothing_is_refused(tmp_path: Path) -> None:
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
