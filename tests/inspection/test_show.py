"""`andon show` and `andon explain` print what a ledger and a bundle hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from andon.config.schema import CLASSIFICATION
from andon.console.messages import InputError
from andon.data.rows import DataSet, Row
from andon.inspection.explain import explain
from andon.inspection.recorded import open_recorded
from andon.inspection.show import Texts, one_step, overview, texts_of
from andon.training.rows import Rows
from andon_contracts.act import Evidence, Scene, with_bundle, write_cause
from andon_contracts.clauses import CLAUSES
from andon_contracts.fields import Real
from andon_contracts.fingerprint import environment
from andon_contracts.record import Broken, Plan, RankPart, Record
from andon_contracts.violation import Cause, Finding, Violation
from tests.inspection.ledgers import ROWS, digest, resumed_run, retracted_run, start, step, whole_run, write

NO_TEXTS = Texts(missing="no texts")


def test_the_overview_tells_a_run_in_order(tmp_path: Path) -> None:
    lines = list(overview(open_recorded(write(tmp_path / "l.jsonl", whole_run()))))
    kinds = [line.split()[0] for line in lines]
    assert kinds == [
        "ledger", "start", "plan", "machine", "step", "checkpoint", "step", "evaluation", "end", "head",
    ]  # fmt: skip
    assert "2 gloo workers" in lines[1]
    assert "loss 1, " in lines[4]
    assert "the best so far" in lines[5]
    assert "loss 0.5, " in lines[6]
    assert "accuracy 0.25" in lines[7]
    assert lines[-1].startswith("head        6 lines")


def test_a_resume_and_what_it_cut_off_are_told(tmp_path: Path) -> None:
    lines = list(overview(open_recorded(write(tmp_path / "l.jsonl", resumed_run(torn=17)))))
    (line,) = (line for line in lines if line.startswith("resume"))
    assert "after step 1 from step-00000001 on 1 inline worker" in line
    assert "17 bytes of a torn line" in line


def test_what_was_taken_back_is_told(tmp_path: Path) -> None:
    records = retracted_run()
    lines = list(overview(open_recorded(write(tmp_path / "l.jsonl", records))))
    assert "retraction  step 2 no longer counts, since base-frozen was broken after it: other weights" in lines
    found = open_recorded(tmp_path / "l.jsonl")
    assert found.trajectory[2].digests.weights == digest(23)
    before = open_recorded(write(tmp_path / "before.jsonl", records[:6]))
    assert list(before.trajectory) == [1]
    told = list(one_step(before, 2, NO_TEXTS))
    assert told[1] == "retraction  step 2 no longer counts, since base-frozen was broken after it: other weights"


def test_a_torn_tail_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", whole_run())
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    lines = list(overview(open_recorded(path)))
    assert lines[-1].startswith(f"torn        {len(last) + 1 - 9} bytes")
    assert not any(line.startswith("end") for line in lines)


def test_a_step_is_shown_with_rows_losses_digests_and_ranks(tmp_path: Path) -> None:
    found = open_recorded(write(tmp_path / "l.jsonl", whole_run()))
    data = DataSet((Row(2, "ls -l", 1), Row(0, "rm", 0)), ("unsafe", "safe"), "here")
    texts = Texts(Rows(CLASSIFICATION, data, None, data.ids, ()))
    text = "\n".join(one_step(found, 1, texts))
    for number in (11, 12, 13, 14):
        assert digest(number) in text
    assert (1.0).hex() in text
    assert "2  safe  'ls -l'" in text
    assert text.index("rank 0") < text.index("'ls -l'") < text.index("rank 1") < text.index("'rm'")


APART = replace(step(1, (2, 0)), ranks=(step(1, (2, 0)).ranks[0], RankPart(1, (1,), (0,), digest(99))))


@pytest.mark.parametrize(
    ("records", "number", "said"),
    [
        ([start(), APART], 1, [f"rank 1: micro-batches 1, differs: weights {digest(99)}"]),
        (resumed_run(), 2, ["computed 2 times"]),
        (
            [*whole_run()[:2], Broken("finite", 2, (1,), "loss", "the loss is not finite")],
            2,
            ["finite at step 2 on ranks 1 in loss: the loss is not finite", "was not applied"],
        ),
    ],
)
def test_a_step_that_did_not_simply_end_is_shown(
    tmp_path: Path, records: list[Record], number: int, said: list[str]
) -> None:
    text = "\n".join(one_step(open_recorded(write(tmp_path / "l.jsonl", records)), number, NO_TEXTS))
    assert [part for part in said if part not in text] == []


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_step_that_is_not_there_is_refused(tmp_path: Path, number: int) -> None:
    found = open_recorded(write(tmp_path / "l.jsonl", whole_run()))
    with pytest.raises(InputError, match=r"--step: -?\d is not in .*; it has steps 1 to 2"):
        list(one_step(found, number, NO_TEXTS))


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no run: it has no ledger.jsonl"):
        open_recorded(tmp_path)
    path = write(tmp_path / "l.jsonl", whole_run())
    path.write_bytes(path.read_bytes().replace(b'"loss"', b'"lost"', 1))
    with pytest.raises(InputError, match=r"l.jsonl:2: .*andon verify"):
        open_recorded(path)


def test_what_a_watch_wrote_is_shown_with_what_it_knows(tmp_path: Path) -> None:
    plan = Plan(rows=ROWS, batch_size=None, micro_batches=None, seed=None, epochs=None, steps=None)
    bare = step(
        1, (2, 0), epoch=None, position=None, count=None, loss=None, correct=None,
        gradient_at="optimizer", weights_norm=Real.of(1.5), optimizer_index=1,
    )  # fmt: skip
    bare = replace(bare, ids=(), ranks=(bare.ranks[0], RankPart(1, (), (0,), None)))
    broken = Broken("finite", 2, (1,), "", "NaN", action="warned")
    found = open_recorded(write(tmp_path / "l.jsonl", [start(plan=plan, writer="watch"), bare, broken]))
    text = "\n".join(overview(found))
    assert "2 gloo workers, written by a watch" in text
    assert f"plan        {ROWS} rows an epoch" in text
    assert "loss unknown" in text
    assert "NaN (warned)" in text
    text = "\n".join(one_step(found, 1, NO_TEXTS))
    assert text.startswith("step 1 of optimizer 1\n")
    assert f"grad_norm   2 ({(2.0).hex()}) as the optimizer got it" in text
    assert f"norm        1.5 ({(1.5).hex()}) of the trained weights" in text
    assert "rank 0: the digests above" in text
    assert "rank 1: no digests: no other rank has the same shard" in text
    assert "micro-batches" not in text
    assert "the ledger has no row numbers" in text
    assert "only the ids of rows" in texts_of(None).missing


FINDING = Finding("they differ (rank 0: aa, rank 1: bb)", 412, (1,), "lora_A.q_proj", (("lora_A.q_proj", "aa bb"),))


def _left_by(folder: Path, rank: int, tensors: dict[str, torch.Tensor], batch: list[int]) -> str:
    scene = Scene(world=2, applied=True, last_equal=411, before="weights agreed", element="first at [0, 1]")
    evidence = Evidence(folder, rank, 2, lambda: batch, lambda _: iter(tensors.items()))
    return with_bundle(Violation.of("replicas-agree", FINDING), scene, evidence, {}).bundle


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
    assert any("test_show.py" in line and "_left_by" in line for line in lines), "the stack of the main thread"
    assert any(line.startswith("    collectives not available: ") for line in lines)
    assert lines[-2].startswith("  versions andon ")
    assert f", torch {torch.__version__}" in lines[-2]
    assert lines[-1] == f"  device   2 ranks on {environment()['cpu']}"
    assert list(explain(Path(place) / "replicas-agree.json")) == lines


def test_the_folder_of_a_watch_lists_its_bundles_by_step(tmp_path: Path) -> None:
    evidence = Evidence(tmp_path, 0, 2)
    with_bundle(Violation.of("replicas-agree", FINDING), Scene(world=2), evidence, {})
    with_bundle(Violation.of("finite", Finding("NaN", 3)), Scene(world=2), evidence, {"suspicion": True})
    write_cause(Cause("failed", "text", 1, 20, seen="KeyError: 'x'"), evidence, {}, state=False, account=True)
    (tmp_path / "412" / "finite.json").write_text("{")
    lines = list(explain(tmp_path))
    assert lines[6].startswith(f"{tmp_path}/412/finite.json: is not a bundle: ")
    assert lines[:6] + lines[7:] == [
        "finite suspected at step 3 (a loop without a fault can look like this)",
        "  seen     NaN",
        f"  explain  andon explain {tmp_path}/3/finite.json",
        "no violation: a rank failed, at step 20",
        "  seen     KeyError: 'x'",
        f"  explain  andon explain {tmp_path}/20/halt-together.json",
        "replicas-agree broken at step 412",
        f"  seen     {FINDING.seen}",
        f"  explain  andon explain {tmp_path}/412/replicas-agree.json",
    ]


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
    broken = Broken("clip-once", 3, (), "loss", "the norm is not finite", {"rank 0": "nan"})
    write(run / "ledger.jsonl", [*whole_run()[:4], broken])
    lines = list(explain(run))
    assert lines[0] == "clip-once broken at step 3"
    assert "  ranks    all" in lines
    assert "  digests  rank 0: nan" in lines
    assert set(CLAUSES["clip-once"].explanation()) <= set(lines)
    assert f"  look     andon show {run} --step 3" in lines
    assert lines[-2].strip() == "step 3 was not recorded; the last recorded step is 2"
    assert lines[-1] == f"  repeat   andon replay {run} --steps 2"


@pytest.mark.parametrize(("name", "writer"), [("l.jsonl", None), ("l.jsonl", "watch"), ("ledger.jsonl", "watch")])
def test_no_replay_is_offered_where_none_can_be(tmp_path: Path, name: str, writer: str | None) -> None:
    broken = Broken("finite", 3, (), "loss", "the loss is not finite", {}, "suspected", likely="a zero")
    ledger = write(tmp_path / name, [start(writer=writer), *whole_run()[1:4], broken])
    path = tmp_path if name == "ledger.jsonl" else ledger
    first, *lines, last = explain(path)
    assert first.startswith("finite suspected at step 3")
    assert "  likely   a zero  [inference, not proof]" in lines  # as the message of the run said
    assert "suspicion   finite at step 3 in loss: the loss is not finite" in overview(open_recorded(path))
    assert last == f"  look     andon show {path} --step 3"


def test_what_explains_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no violation to explain"):
        list(explain(write(tmp_path / "l.jsonl", whole_run())))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"a": 1}))
    with pytest.raises(InputError, match="is not a bundle"):
        list(explain(other))
    other.write_text("{")
    with pytest.raises(InputError, match="is not a bundle"):
        list(explain(other))
    with pytest.raises(InputError, match="no such run"):
        list(explain(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no run and no bundle"):
        list(explain(tmp_path / "empty"))
    assert list(explain(Path("clip-once"))) == ["clip-once", *CLAUSES["clip-once"].explanation()]
    with pytest.raises(InputError, match="did you mean 'clip-once'"):
        list(explain(Path("clip-onec")))
