"""`andon diff`: the first step and tensor at which two runs part, and what else differs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from andon.config.load import template
from andon.inspection.difference import Comparison, Differences, compare, read_side, tensors_apart
from andon.run.checkpoint import save_checkpoint
from andon_contracts.fields import Real
from andon_contracts.record import Record, Start, Step
from tests.inspection.ledgers import FINGERPRINT, resumed_run, start, step, whole_run, write
from tests.training.runs import Runs

SAME, DIFFERENT, INCOMPARABLE = Comparison.SAME, Comparison.DIFFERENT, Comparison.INCOMPARABLE


def of(tmp_path: Path, one: Sequence[Record], other: Sequence[Record]) -> Differences:
    folder = tmp_path / str(len([*tmp_path.iterdir()]))
    folder.mkdir()
    return compare(read_side(write(folder / "a.jsonl", one)), read_side(write(folder / "b.jsonl", other)))


def _but(kind: type, **changes: Any) -> list[Record]:
    return [replace(each, **changes) if isinstance(each, kind) else each for each in whole_run()]


QUIET = _but(Step, ids=(), count=None, loss=None, epoch=None, position=None)


@pytest.mark.parametrize(
    ("one", "other", "result", "said"),
    [
        (whole_run(), resumed_run(), SAME, "to the bit"),
        (whole_run(), _but(Start, world=9, backend="nccl"), SAME, "to the bit"),
        (whole_run(), QUIET, SAME, "skipped   ids: only the first run recorded it\n"),
        (whole_run(), whole_run()[:2], DIFFERENT, "steps     2 to 2 (1) are only in the first run"),
        ([start(), step(2, (1, 3))], whole_run(), SAME, "steps     1 to 1 (1) are only in the second run\nresult"),
        (
            whole_run(),
            [start(), step(1, (2, 0), weights=9)],
            DIFFERENT,
            "differ from step 1 on\nsteps     2 to 2 (1) are",
        ),
        (whole_run(), [start()], INCOMPARABLE, "place     2 gloo workers | unknown\n"),
        ([start()], whole_run(), INCOMPARABLE, "result    not comparable: the runs have no step in common"),
    ],
)
def test_runs_are_the_same_or_said_not_to_be(
    tmp_path: Path, one: list[Record], other: list[Record], result: Comparison, said: str
) -> None:
    report = of(tmp_path, one, other)
    text = "\n".join(report.lines)
    assert report.result is result
    assert said in text
    assert ("differ from step" in text) == ("differ from step" in said)


@pytest.mark.parametrize(
    ("field", "value"),
    [("ids", (9, 0)), ("loss", Real.of(7.0)), ("lr", Real.of(0.25)), ("grad_norm", Real.of(3.0)), ("correct", 2)],
)
def test_the_first_step_that_differs_is_named_with_its_field(tmp_path: Path, field: str, value: object) -> None:
    other = whole_run()
    other[3] = replace(step(2, (1, 3)), **{field: value})  # type: ignore[arg-type]
    report = of(tmp_path, whole_run(), other)
    text = "\n".join(report.lines)
    assert report.result is DIFFERENT
    assert "differ from step 2 on; steps 1 to 1 are the same to the bit" in text
    assert f"2: {field} differs first" in text


def test_other_versions_are_not_comparable_and_not_wrong(tmp_path: Path) -> None:
    other = whole_run()
    other[0] = start(fingerprint={**FINGERPRINT, "torch": "2.11.0", "cpu": "b"})
    report = of(tmp_path, whole_run(), other)
    text = "\n".join(report.lines)
    assert report.result is SAME
    assert "versions  torch: 2.13.0 | 2.11.0" in text
    assert "hardware  cpu: a | b" in text
    other[3] = step(2, (1, 3), weights=5)
    report = of(tmp_path, whole_run(), other)
    assert report.result is INCOMPARABLE
    assert "differ from step 2 on" in "\n".join(report.lines)
    assert "not comparable" in report.lines[-1]


def _configs(tmp_path: Path, **changes: str) -> list[Path]:
    text = template()
    paths = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    paths[0].write_text(text)
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    paths[1].write_text(text)
    return paths


def test_configurations_are_compared_before_a_run_starts(tmp_path: Path) -> None:
    one, other = _configs(tmp_path, **{"seed: 42": "seed: 43", "workers: auto": "workers: 3"})
    report = compare(read_side(one), read_side(other))
    assert report.result is DIFFERENT
    assert "config    seed: 42 | 43" in report.lines
    one, other = _configs(tmp_path, **{"workers: auto": "workers: 3"})
    report = compare(read_side(one), read_side(other))
    assert report.result is SAME
    assert report.lines[0].startswith("config    run.workers: 2 | 3 (does not affect")
    assert report.lines[-1].startswith("result    the same settings; data and model were compared by name")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"  train: null": "  train: a.csv", "  base: null": "  base: ./b"}, "different: data.train, model.base"),
        ({"  text_column: null": "  text_column: t"}, "different: data.text_column"),
        ({"backend: auto": "backend: nccl"}, "different: run.device_kind"),
    ],
)
def test_names_of_configurations_stand_for_other_things(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    """Without digests other data and another model are another run; devices of another kind give other bits."""
    report = compare(*map(read_side, _configs(tmp_path, **changes)))
    assert (report.result, report.lines[-1]) == (DIFFERENT, f"result    {said}")
    assert "digest" not in "\n".join(report.lines)


def test_a_run_and_a_ledger_are_compared_with_a_configuration(run: Path, tmp_path: Path) -> None:
    same, other = tmp_path / "same.yaml", tmp_path / "other.yaml"
    same.write_text((run / "config.yaml").read_text())
    other.write_text(re.sub(r"(?m)^  base: .*", "  base: ./b", re.sub(r"(?m)^seed: .*", "seed: 7", same.read_text())))
    assert compare(read_side(run), read_side(run / "ledger.jsonl")).result is SAME
    for side in (run, run / "ledger.jsonl"):
        assert compare(read_side(side), read_side(same)).result is SAME
        assert compare(read_side(other), read_side(side)).result is DIFFERENT
    assert compare(read_side(run), read_side(other)).lines[-1] == "result    different: model.base, seed"
    headless = write(tmp_path / "headless.jsonl", whole_run()[1:])
    assert compare(read_side(headless), read_side(same)).result is INCOMPARABLE


def test_a_name_counts_where_a_digest_is_missing(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    settings = re.sub(r"(?m)^  train: .*", "  train: a.csv", (run / "config.yaml").read_text())
    (other / "config.yaml").write_text(settings)
    assert compare(read_side(run), read_side(other)).result is SAME
    (other / "provenance.json").unlink()
    first = json.loads((run / "ledger.jsonl").read_text().splitlines()[0])
    del first["digests"]["data"]
    (other / "ledger.jsonl").write_text(json.dumps(first) + "\n")
    report = compare(read_side(run), read_side(other))
    assert report.result is DIFFERENT
    assert "digest" not in next(line for line in report.lines if "data.train" in line)


def _checkpoint(folder: Path, weight: torch.Tensor, moment: torch.Tensor) -> Path:
    folder.mkdir()
    return save_checkpoint(folder, 4, {"optimizer/exp_avg/w": moment, "weights/w": weight}, {})


def test_the_first_tensor_and_element_are_named(tmp_path: Path) -> None:
    weight, moment = torch.arange(12.0).view(3, 4), torch.zeros(5)
    changed = weight.clone()
    changed[1, 2], changed[2, 3] = 6.5, 0.0
    one = _checkpoint(tmp_path / "a", weight, moment)
    other = _checkpoint(tmp_path / "b", changed, moment + 1)
    (line,) = tensors_apart(one, other)
    assert line.startswith("weights/w differs first (2 of 2 tensors of step-00000004 do), at [1, 2]: ")
    assert f"{(6.0).hex()} | {(6.5).hex()} (2 of 12 elements)" in line
    assert list(tensors_apart(one, one)) == ["all 2 of step-00000004 are the same"]
    more = save_checkpoint(tmp_path, 4, {"weights/w": weight, "weights/v": weight, "weights/u": weight}, {})
    counts = "step-00000004: 1 only in the first run, 2 only in the second, 1 in both (equal)"
    assert list(tensors_apart(one, more)) == [counts]


def test_minus_zero_is_another_tensor(tmp_path: Path) -> None:
    """Bits are compared, not values: 0.0 == -0.0, and NaN is not itself."""
    zero, nan = torch.zeros(2), torch.full((2,), torch.nan)
    one = _checkpoint(tmp_path / "a", zero, nan)
    (line,) = tensors_apart(one, _checkpoint(tmp_path / "b", -zero, nan))
    assert line.startswith("weights/w differs first (1 of 2 tensors")


def test_two_real_runs_part_where_their_learning_rates_do(runs: Runs, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert runs.train(other, "schedule.warmup_fraction=0.5", workers=1) == 0
    report = compare(read_side(run), read_side(other))
    text = "\n".join(report.lines)
    assert report.result is DIFFERENT
    assert "config    schedule.warmup_fraction: 0.1 | 0.5" in report.lines
    assert "steps     differ from step 1 on" in report.lines
    alike = "epoch, position, ids, count, content, loss, correct, gradient, grad_norm, optimizer"
    assert f"lr differs first; equal: {alike}" in text
    assert "tensor    weights/" in text
    assert "place     2 inline workers | 1 inline worker" in report.lines


@pytest.mark.parametrize(
    ("kept", "line"), [(0, r"data      data: \w{16} \| f{16}"), (64, r"data      data \(evaluation\): none \| f{16}")]
)
def test_other_data_is_named(run: Path, tmp_path: Path, kept: int, line: str) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    said = json.loads((other / "provenance.json").read_text())
    said["digests"]["data"] = said["digests"]["data"][:kept] + "f" * 64
    (other / "provenance.json").write_text(json.dumps(said))
    report = compare(read_side(run), read_side(other))
    assert report.result is DIFFERENT
    assert any(re.fullmatch(line, each) for each in report.lines), report.lines
