"""Runs that are interrupted or have finished, and go on: the same bits as if nothing had happened, nothing done or
written twice, or a refusal that says why."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from andon.cli.train import run_training
from andon.config.load import load_config
from andon.config.schema import Config
from andon.console.messages import Exit, InputError
from andon.data.tokens import byte_tokenizer
from andon.model.adapter import save_base
from andon.model.masks import Masking
from andon.run.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from andon.run.folder import RunFolder
from andon.run.ledger import read_ledger
from andon.step.replica import restore_state
from andon.training.existing import require_same_as_finished
from andon.training.inference import load_run
from andon.training.run import resolved
from andon.training.trainer import read_history
from andon_contracts.digest import tree_digest
from andon_contracts.fields import Real
from andon_contracts.record import Broken, End, Evaluation, Record, Resume, Retraction, Saved, Step, StepDigests
from andon_contracts.violation import Violation
from andon_falsify.claims.resume_equal import disowned
from andon_falsify.history import read_history as ledger_of
from tests.inspection.ledgers import write
from tests.model import tiny
from tests.support.folders import Interrupted
from tests.training.runs import STEPS, Runs, checkpoints, outcome, records, summary

PATIENCE_S = 240


def measured(folder: Path) -> list[int]:
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in metrics if "lr" in line]


@pytest.mark.parametrize(("step", "backend", "workers"), [(1, "inline", 2), (6, "inline", 3), (9, "gloo", 2)])
def test_a_resumed_run_ends_with_the_same_bits(
    runs: Runs,
    interrupted: Interrupted,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    step: int,
    backend: str,
    workers: int,
) -> None:
    folder = interrupted(tmp_path / "run", step)
    assert checkpoints(folder)[-1] == f"step-{step:08d}"
    assert not summary(folder)["finished"]
    assert runs.train(folder, backend=backend, workers=workers, resume="auto") == 0
    if backend != "gloo":  # ranks write to the standard error that their fork server began with
        others = "" if workers == 2 else f", on 2 workers; now on {workers}"
        said = f"andon: resume: from step-{step:08d}, {step} of {STEPS} steps done{others}\n"
        assert said in capsys.readouterr().err
    assert outcome(folder) == outcome(whole)
    assert [s.step for s in records(folder, "step")] == list(range(1, STEPS + 1))
    (resumed,) = records(folder, "resume")
    assert (resumed.step, resumed.backend, resumed.world) == (step, backend, workers)
    assert measured(folder) == list(range(1, STEPS + 1))


def test_masks_are_tried_before_weights_are_restored(
    runs: Runs, interrupted: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = interrupted(tmp_path / "run", 3)
    tried: list[int] = []

    def noting(model: nn.Module, _: torch.device) -> Masking:
        tried.append(tree_digest({name: each for name, each in model.named_parameters() if each.requires_grad}))
        return Masking.TOKENS

    monkeypatch.setattr("andon.training.build.masking_of", noting)
    assert runs.train(tmp_path / "new", "training.max_steps=1", backend="inline", workers=1) == 0
    assert runs.train(folder, backend="inline", workers=1, resume="auto") == 0
    before, resumed = tried
    assert resumed == before


def test_without_a_checkpoint_it_starts_anew(
    runs: Runs, interrupted: Interrupted, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runs.train(tmp_path / "new", "training.max_steps=1", resume="auto") == 0
    assert "andon: resume: no checkpoint, starting anew\n" in capsys.readouterr().err
    folder = interrupted(tmp_path / "run", 3)
    for path in (folder / "checkpoints" / "step-00000003").iterdir():
        path.unlink()
    assert runs.train(folder, resume="auto") == 0
    assert outcome(folder) == outcome(whole)
    assert [s.step for s in records(folder, "step")] == [1, 2, 3, *range(1, STEPS + 1)]


def test_a_folder_alone_says_what_to_resume(runs: Runs, tmp_path: Path) -> None:
    folder = runs.stopped(tmp_path / "run", 6)
    flags = {"run.dir": str(folder), "run.resume": "auto", "run.backend": "inline", "run.workers": 2}
    assert run_training(None, [], flags) == Exit.OK
    assert summary(folder)["steps"] == STEPS


def test_resume_auto_without_a_folder_finds_the_run(
    runs: Runs,
    interrupted: Interrupted,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One of another rate or data, or a finished one, is not meant; one with a pipe in it is passed over by name."""
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.jsonl"
    other.write_bytes(runs.data.read_bytes().replace(b"thing number 3", b"thing number 9", 1))
    mine = interrupted(Path("runs/mine"), 2)
    interrupted(Path("runs/rate"), 2, "optimizer.lr=0.02")
    interrupted(Path("runs/data"), 2, f"data.train={other}")
    Path("runs/notes").mkdir()
    shutil.copytree(mine, "runs/odd", ignore=shutil.ignore_patterns("metrics.jsonl"))
    os.mkfifo("runs/odd/metrics.jsonl")
    flags = {"run.backend": "inline", "run.workers": 2, "run.resume": "auto"}
    assert run_training(None, runs.overrides(), flags) == 0
    said = capsys.readouterr().err
    assert f"andon: resume: {mine} is the newest unfinished run of this configuration" in said
    assert "resume: skipped runs/odd: runs/odd/metrics.jsonl: " in said
    assert "resume: from step-00000002" in said
    assert outcome(mine) == outcome(whole)
    before = set(Path("runs").iterdir())
    assert run_training(None, runs.overrides(), flags) == 0
    (new,) = set(Path("runs").iterdir()) - before
    assert f"no unfinished run of this configuration under runs/, starting anew in {new}" in capsys.readouterr().err
    assert len(records(new, "step")) == STEPS
    os.utime("runs/rate/ledger.jsonl")
    with pytest.raises(InputError, match=r"runs/rate, has data files; .*: andon train runs/rate/config\.yaml"):
        run_training(None, (), flags)


def test_a_corrupted_checkpoint_is_rejected_by_name(
    runs: Runs, interrupted: Interrupted, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = interrupted(tmp_path / "run", 7)
    newest = folder / "checkpoints" / "step-00000007" / "tensors.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)
    assert runs.train(folder, workers=2, resume="auto") == 0
    said = capsys.readouterr().err
    assert f"resume: rejected {newest}" in said
    assert "resume: from step-00000006" in said
    assert outcome(folder) == outcome(whole)
    assert [s.step for s in records(folder, "step")] == [*range(1, 8), *range(7, STEPS + 1)]
    assert measured(folder) == list(range(1, STEPS + 1))


def test_of_many_rejected_checkpoints_the_newest_are_named(
    runs: Runs, interrupted: Interrupted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = interrupted(tmp_path / "run", 2)
    for step in range(20, 40):
        (folder / "checkpoints" / f"step-{step:08d}").mkdir()
    assert runs.train(folder, resume="auto") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "resume: rejected" in line]
    assert ["step-00000039" in said[0], "step-00000035" in said[4]] == [True, True]
    assert said[5:] == [f"andon: resume: rejected 15 more of {folder / 'checkpoints'}"]


def test_a_checkpoint_with_weights_that_are_not_finite_is_refused_by_name(
    runs: Runs, interrupted: Interrupted, tmp_path: Path
) -> None:
    """Its digests are right, so it was written like that. The next loss would be NaN, and its rows would be blamed."""
    folder = interrupted(tmp_path / "run", 4)
    found = load_checkpoint(folder / "checkpoints" / "step-00000004")
    name = next(name for name in found.tensors if name.startswith("weights/"))
    found.tensors[name].view(-1)[0] = float("nan")
    save_checkpoint(found.path.parent, 4, found.tensors, found.state, found.head)
    with pytest.raises(InputError, match=rf"step-00000004: the tensor '{name}' is not finite: 1 of its"):
        runs.train(folder, resume="auto")


def test_a_checkpoint_that_changes_while_it_is_restored_is_refused(
    runs: Runs, interrupted: Interrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = interrupted(tmp_path / "run", 4)
    file = folder / "checkpoints" / "step-00000004" / "tensors.safetensors"

    def changing(*args: Any) -> None:
        restore_state(*args)
        with file.open("r+b") as opened:
            opened.seek(-5, os.SEEK_END)
            opened.write(bytes([file.read_bytes()[-5] ^ 1]))

    monkeypatch.setattr("andon.training.build.restore_state", changing)
    with pytest.raises(InputError, match="step-00000004: was changed while it was read; resume again"):
        runs.train(folder, backend="inline", workers=1, resume="auto")


def test_the_resolved_configuration_goes_on_from_anywhere(
    runs: Runs, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / runs.data.name).write_bytes(runs.data.read_bytes())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    runs.stopped(Path("run"), 2, f"data.train={runs.data.name}")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run_training(Path("../run/config.yaml"), (), {"run.resume": "auto"}) == 0
    assert outcome(tmp_path / "run") == outcome(whole)


def test_the_resolved_configuration_names_the_base_model_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("run"))
    assert resolved(load_config(None, ["model.base=base"]), folder).model.base == str(tmp_path / "base")
    assert resolved(load_config(None, ["model.base=owner/name"]), folder).model.base == "owner/name"


def test_a_run_of_a_revision_names_it_and_is_used_with_what_the_cache_has(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    kept, tokenizer = tmp_path / "models--me--tiny", byte_tokenizer()
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "v1").write_text("1" * 40)
    tokenizer.save(kept / "snapshots" / ("1" * 40))
    shape = tiny.changed(tiny.TINY, vocab_size=tokenizer.vocab_size, pad_id=tokenizer.pad_id, max_length=128)
    save_base(tiny.base_of(shape), kept / "snapshots" / ("1" * 40), tiny.LABELS)
    named = ("model.base=me/tiny", "model.revision=v1", "training.max_steps=1")
    assert runs.inline(tmp_path / "run", *named) == 0
    adapter = tmp_path / "run" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["revision"] == "v1"
    assert "--model me/tiny" in (card := (adapter / "README.md").read_text())
    assert "model.revision=" in card
    used = load_run(RunFolder(tmp_path / "run")).config.model
    assert (used.base, used.revision) == (str(kept / "snapshots" / ("1" * 40)), None)
    assert runs.train(tmp_path / "run", *named, resume="auto") == 0
    with pytest.raises(InputError, match=r"model\.revision: was 'v1' in the finished run"):
        require_same_as_finished(load_config(None, runs.overrides(named[0])), RunFolder(tmp_path / "run"))


@pytest.mark.parametrize("backend", ["inline", "gloo"])
def test_a_step_done_again_with_another_result_is_a_violation(
    runs: Runs, interrupted: Interrupted, tmp_path: Path, backend: str
) -> None:
    folder = interrupted(tmp_path / "run", 7)
    forge(folder, Step)
    for path in (folder / "checkpoints" / "step-00000007").iterdir():
        path.unlink()
    if backend == "inline":
        with pytest.raises(Violation) as caught:
            runs.train(folder, resume="auto")
        assert (caught.value.clause, caught.value.step) == ("resume-exact", 7)
    else:
        assert runs.train(folder, backend=backend, workers=2, resume="auto") == Exit.VIOLATION
        codes = [json.loads((folder / "reports" / f"rank-{rank}.json").read_text())["exit"] for rank in (0, 1)]
        assert codes == [Exit.VIOLATION] * 2
    assert summary(folder)["violations"] == 1
    assert summary(folder)["steps"] == 6
    assert checkpoints(folder)[-1] == "step-00000007"
    assert not list((folder / "checkpoints" / "step-00000007").iterdir())


@pytest.mark.parametrize("checkpoint", [True, False])
def test_what_defines_a_run_must_match(
    runs: Runs, interrupted: Interrupted, tmp_path: Path, *, checkpoint: bool
) -> None:
    folder = interrupted(tmp_path / "run", 2)
    for path in () if checkpoint else (folder / "checkpoints" / "step-00000002").iterdir():
        path.unlink()
    before = (folder / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError) as caught:
        runs.train(folder, "optimizer.lr=0.02", "training.batch_size=16", resume="auto")
    found = [str(problem) for problem in caught.value.problems]
    assert [text.split(":")[0] for text in found] == ["optimizer.lr", "training.batch_size"]
    assert "was 0.01" in found[0]
    assert "is 0.02" in found[0]
    assert (folder / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (
            lambda all_: [line.replace(b'"step":1', b'"step":5') for line in all_],
            r"ledger\.jsonl:3: .*cannot be resumed",
        ),
        (
            lambda lines: lines[: max(n for n, line in enumerate(lines) if b'"kind":"step"' in line)],
            r"step-00000002: line \d+ of ledger.jsonl differs from the line",
        ),
        (lambda lines: [b"mine\n"], r"ledger\.jsonl:1: "),
    ],
)
def test_a_ledger_that_is_not_the_checkpoints_is_refused_by_line(
    runs: Runs, interrupted: Interrupted, tmp_path: Path, harm: Callable[[list[bytes]], list[bytes]], said: str
) -> None:
    ledger = interrupted(tmp_path / "run", 2) / "ledger.jsonl"
    ledger.write_bytes(b"".join(harm(ledger.read_bytes().splitlines(True))))
    with pytest.raises(InputError, match=said):
        runs.train(tmp_path / "run", resume="auto")


def test_a_checkpoint_of_another_run_is_named_with_what_to_do(
    runs: Runs, interrupted: Interrupted, tmp_path: Path
) -> None:
    folder = interrupted(tmp_path / "run", 2)
    foreign = interrupted(tmp_path / "other", 3, "seed=7") / "checkpoints" / "step-00000003"
    put_in = folder / "checkpoints" / foreign.name
    shutil.copytree(foreign, put_in)
    with pytest.raises(InputError) as caught:
        runs.train(folder, resume="auto")
    (problem,) = caught.value.problems
    assert problem.where == str(put_in)
    assert "the checkpoint is of another run" in problem.what
    assert "move this checkpoint away, to resume from the one before it" in problem.what
    assert f"begin anew: andon train {folder / 'config.yaml'} --run-dir ANOTHER_FOLDER" in problem.what
    shutil.move(put_in, tmp_path)
    assert runs.train(folder, resume="auto") == 0


def test_what_a_checkpoint_quotes_outlives_a_power_cut(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, quoted = os.fsync, []
    synced: list[int] = []

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == "ledger.jsonl":
            synced.append(os.fstat(handle).st_size)
        elif path.name == "tensors.safetensors":
            quoted.append(synced[-1] == (tmp_path / "run" / "ledger.jsonl").stat().st_size)
        inner(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert runs.train(tmp_path / "run") == 0
    assert quoted == [True] * 4


def test_a_damaged_provenance_is_refused(runs: Runs, interrupted: Interrupted, tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run", 2)
    (folder / "provenance.json").write_text("{")
    with pytest.raises(InputError, match=r"\.json: is not the provenance of a run: .*; put it back .* remove it"):
        runs.train(folder, resume="auto")
    (folder / "provenance.json").unlink()
    assert runs.train(folder, resume="auto") == 0
    assert (folder / "provenance.json").exists()


PROGRAM = """
import json, sys
from andon.cli.app import guarded
from andon.cli.train import run_training
entry, overrides, flags = json.loads(sys.argv[1])
sys.exit(guarded(lambda: run_training(None, overrides, flags, entry=f"tests.training.entries:{entry}")))
"""


def start(runs: Runs, entry: str, folder: Path) -> subprocess.Popen[str]:
    """`andon train` on two gloo ranks, as a process and a group of its own."""
    asked = json.dumps([entry, runs.overrides(), {"run.dir": str(folder), "run.backend": "gloo", "run.workers": 2}])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, asked], text=True, start_new_session=True, **pipes)


def test_a_killed_launcher_leaves_a_run_that_goes_on(runs: Runs, whole: Path, tmp_path: Path) -> None:
    launcher = start(runs, "kill_launcher", tmp_path / "run")
    said, _ = launcher.communicate(timeout=PATIENCE_S)  # its end of file: every rank has ended, too
    assert launcher.returncode == -signal.SIGKILL, said
    assert runs.train(tmp_path / "run", workers=3, resume="auto") == 0
    assert outcome(tmp_path / "run") == outcome(whole)


def test_sigterm_ends_at_a_step_boundary(runs: Runs, whole: Path, tmp_path: Path) -> None:
    launcher = start(runs, "ask_to_end", tmp_path / "run")
    said, _ = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == Exit.PREEMPTED, said
    assert [line for line in said.splitlines() if not line.startswith(("andon: ", "validation after step 6: "))] == []
    assert "resume with: andon train" in said
    assert checkpoints(tmp_path / "run")[-1] == "step-00000007"
    assert runs.train(tmp_path / "run", resume="auto") == 0
    assert outcome(tmp_path / "run") == outcome(whole)


# Ranks that fail, and are started again: by the same command (`run.max_restarts`), or by others


ENDS = "tests.training.entries:ends_in_turn"


@pytest.mark.parametrize(
    ("ends", "most", "restarts", "code", "last"),
    [
        ("SIGKILL memory", 2, 2, Exit.OK, "next: andon predict"),
        ("SIGKILL memory", 1, 1, Exit.CRASHED, "MemoryError; run.max_restarts=1 allows no other restart"),
        ("SIGKILL", 0, 0, Exit.RANK_LOST, "resume with: andon train"),
        ("error error error", 9, 1, Exit.CRASHED, "the restart met the same error after the same step (6), so no oth"),
    ],
    ids=["killed and out of memory", "more failures than restarts", "none by default", "the same error again"],
)
def test_a_failed_run_restarts_from_its_last_checkpoint(
    runs: Runs,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ends: str,
    most: int,
    restarts: int,
    code: Exit,
    last: str,
) -> None:
    (tmp_path / "ends").write_text(ends)
    folder = tmp_path / "run"
    assert runs.train(folder, f"run.max_restarts={most}", backend="gloo", workers=2, entry=ENDS) == code
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition("; ")[2] for line in said if "; restart " in line] == [
        f"restart {number} of {most} from the last checkpoint" for number in range(1, restarts + 1)
    ]
    assert last in said[-1]
    assert [resumed.step for resumed in records(folder, "resume")] == [6] * restarts
    assert code != Exit.OK or outcome(folder) == outcome(whole)


def test_a_run_killed_on_2_and_3_workers_ends_on_1_with_the_same_bits(runs: Runs, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "ends").write_text("SIGKILL SIGKILL")
    for workers, code in ((2, Exit.RANK_LOST), (3, Exit.RANK_LOST), (1, Exit.OK)):
        assert runs.train(tmp_path / "run", backend="gloo", workers=workers, resume="auto", entry=ENDS) == code
    assert [resumed.world for resumed in records(tmp_path / "run", "resume")] == [3, 1]
    assert outcome(tmp_path / "run") == outcome(whole)


# After the last step


def cut(folder: Path, lines: int) -> None:
    run = RunFolder(folder)
    run.summary.unlink()
    kept = run.ledger.read_bytes().splitlines(True)
    run.ledger.write_bytes(b"".join(kept[: len(kept) - lines]))


def scored(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, RunFolder(folder).metrics.read_text().splitlines())
    return [line for line in lines if line.get("what") == "last validation"]


def without_counts(folder: Path) -> dict[str, Any]:
    return {
        name: value
        for name, value in summary(folder).items()
        if name not in ("wall_s", "updates", "contracts", "memory")
    }


@pytest.mark.parametrize(
    ("lines", "kinds", "workers"),
    [(0, ["eval", "end"], 3), (1, ["eval", "resume", "end"], 1), (2, ["resume", "eval", "end"], 1)],
)
def test_each_line_of_the_end_is_written_once(
    runs: Runs, whole: Path, copy: Path, lines: int, kinds: list[str], workers: int
) -> None:
    cut(copy, lines)
    assert runs.train(copy, workers=workers, resume="auto") == Exit.OK
    found = list(read_ledger(RunFolder(copy).ledger))
    assert [record.kind for record in found][-len(kinds) :] == kinds
    assert [records(copy, kind) for kind in ("eval", "end")] == [records(whole, kind) for kind in ("eval", "end")]
    assert outcome(copy) == outcome(whole)
    assert summary(copy)["ledger"]["count"] == len(found)
    assert scored(copy) == scored(whole)
    if not lines:
        assert without_counts(copy) == without_counts(whole)
        assert len(scored(copy)) == 1


@pytest.mark.parametrize("kind", [Evaluation, End])
def test_other_scores_than_before_are_a_violation(runs: Runs, copy: Path, kind: type[Evaluation | End]) -> None:
    cut(copy, 0)
    forge(copy, kind)
    with pytest.raises(Violation, match="resume-exact broken at step 12") as caught:
        runs.train(copy, resume="auto")
    assert ("scores: " in str(caught.value)) == (kind is Evaluation)
    assert summary(copy)["violations"] == 1
    assert isinstance(list(read_ledger(RunFolder(copy).ledger))[-2], Broken)


def forge(folder: Path, kind: type[Evaluation | End | Step]) -> None:
    """Other last scores, another last loss, or other weights of the last step, in a chain that fits."""
    ledger = RunFolder(folder).ledger
    found = list(read_ledger(ledger))
    last = max(place for place, record in enumerate(found) if isinstance(record, kind))
    found[last] = changed(found[last])
    ledger.unlink()
    write(ledger, found)


def changed(record: Record) -> Record:
    if isinstance(record, Step):
        return replace(record, digests=replace(record.digests, weights="0" * 15 + "1"))
    if isinstance(record, Evaluation):
        return replace(record, scores={**record.scores, "loss": Real.of(2 * record.scores["loss"].value)})
    if isinstance(record, End) and record.final_loss is not None:
        return replace(record, final_loss=Real.of(2 * record.final_loss.value))
    raise AssertionError(record)


def test_a_finished_run_has_nothing_to_do(runs: Runs, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert runs.train(whole, resume="auto") == 0
    assert "finished, nothing to do" in capsys.readouterr().err
    with pytest.raises(InputError, match="holds a finished run; name another folder"):
        runs.train(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_a_finished_run_is_not_taken_for_another(runs: Runs, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"training\.epochs: was"):
        runs.train(whole, "training.epochs=3", resume="auto")
    config = load_config(whole / "config.yaml")
    require_same_as_finished(config, RunFolder(whole))
    with pytest.raises(InputError, match="seed: was 42 in the finished run"):
        require_same_as_finished(config.model_copy(update={"seed": 7}), RunFolder(whole))
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(runs.data.read_bytes())
    require_same_as_finished(_with(config, "data", train=str(moved)), RunFolder(whole))
    moved.write_bytes(runs.data.read_bytes().rpartition(b'{"text"')[0])
    with pytest.raises(InputError, match="data: differs from the data of the finished run"):
        require_same_as_finished(_with(config, "data", train=str(moved)), RunFolder(whole))


def test_data_that_is_gone_or_unknown_is_no_other(runs: Runs, copy: Path, tmp_path: Path) -> None:
    gone, folder = tmp_path / "gone.jsonl", RunFolder(copy)
    folder.config.write_text(folder.config.read_text().replace(str(runs.data), str(gone)))
    config = load_config(folder.config)
    assert config.data.train == str(gone)
    require_same_as_finished(config, folder)
    for other, said in (
        (_with(config, "data", train=str(tmp_path / "elsewhere.jsonl")), "no such file"),
        (_with(config, "model", base="llama"), r"model\.base: was None .* is 'llama'"),
        (_with(config, "data", text_column="label"), r"data\.text_column: was"),
    ):
        with pytest.raises(InputError, match=said):
            require_same_as_finished(other, folder)
    folder.provenance.unlink()
    require_same_as_finished(_with(config, "data", train=str(runs.data)), folder)


def _with(config: Config, part: str, **values: object) -> Config:
    return config.model_copy(update={part: getattr(config, part).model_copy(update=values)})


# Which steps of a ledger a resumed run must repeat

HERE: Mapping[str, str] = {"cpu": "this"}
ELSEWHERE: Mapping[str, str] = {"cpu": "another"}
DIGEST = "0123456789abcdef"


def update(number: int, loss: float = 0.5) -> Step:
    one = Real.of(1.0)
    digests = StepDigests(DIGEST, DIGEST, DIGEST, DIGEST)
    return Step(number, 0, 0, (1,), 1, one, Real.of(loss), one, 0, 1, "inline", digests, ())


def resume(after: int, fingerprint: Mapping[str, str]) -> Resume:
    return Resume(after, "run", fingerprint, {}, 1, "inline")


def written(folder: Path, *records: Record) -> Path:
    return write(folder / "ledger.jsonl", records)


def repeated(ledger: Path, after: int, fingerprint: Mapping[str, str]) -> Mapping[int, Step]:
    """What a run that goes on from a checkpoint of step `after` has to repeat."""
    checkpoint = Checkpoint(ledger.parent, after, {}, {}, DIGEST, (after, DIGEST)) if after else None
    return read_history(ledger, fingerprint, checkpoint).steps


def test_the_last_record_of_each_later_step_counts(tmp_path: Path) -> None:
    path = written(tmp_path, resume(0, HERE), update(1), update(2), update(3), resume(1, HERE), update(2, loss=0.25))
    assert repeated(path, 1, HERE) == {2: update(2, loss=0.25), 3: update(3)}
    assert repeated(path, 3, HERE) == repeated(tmp_path / "none" / "ledger.jsonl", 0, HERE) == {}


def test_steps_of_another_machine_are_not_comparable(tmp_path: Path) -> None:
    """A step that was last done elsewhere need not be repeated, even if it was done here before that."""
    path = written(tmp_path, resume(0, HERE), update(1), update(2), resume(1, ELSEWHERE), update(2), update(3))
    assert repeated(path, 0, HERE) == {1: update(1)}
    assert repeated(path, 0, ELSEWHERE) == {2: update(2), 3: update(3)}


def violation(step: int) -> Broken:
    return Broken("base-frozen", step, (), "", "other weights")


def test_what_was_taken_back_is_not_repeated(tmp_path: Path) -> None:
    done = [resume(0, HERE), update(1), update(2), Saved(2, "step-00000002", DIGEST), update(3), violation(3)]
    told = write(tmp_path / "told.jsonl", [*done, Retraction(2, 3, "base-frozen", "other weights")])
    silent = write(tmp_path / "silent.jsonl", done)
    for path in (told, silent):
        assert repeated(path, 2, HERE) == {}
        assert repeated(path, 1, HERE) == {2: update(2)}
    assert read_history(told, HERE).retraction is None
    assert read_history(silent, HERE).retraction == Retraction(2, 3, "base-frozen", "other weights")


def test_what_is_done_after_a_retraction_counts(tmp_path: Path) -> None:
    taken_back = [resume(0, HERE), update(1), violation(1), Retraction(0, 1, "base-frozen", "other weights")]
    path = written(tmp_path, *taken_back, resume(0, HERE), update(1, loss=0.25), update(2))
    assert repeated(path, 0, HERE) == {1: update(1, loss=0.25), 2: update(2)}
    assert read_history(path, HERE).last == 2


def test_a_violation_of_a_resumed_run_takes_back_what_was_done_before_it(tmp_path: Path) -> None:
    """Killed after update 3, resumed after 1, broken at 2: neither account of 2 is known to be right, nor of 3."""
    killed = [resume(0, HERE), update(1), Saved(1, "step-00000001", DIGEST), update(2), update(3)]
    path = written(tmp_path, *killed, resume(1, HERE), violation(2))
    assert repeated(path, 1, HERE) == {}
    assert read_history(path, HERE).retraction == Retraction(1, 3, "base-frozen", "other weights")


def test_a_run_that_could_not_go_on_takes_back_all_that_stands(tmp_path: Path) -> None:
    """Written before there were retractions: broken at 4, resumed after 2, broken again as 3 came out otherwise."""
    begun = [resume(0, HERE), update(1), update(2), Saved(2, "step-00000002", DIGEST)]
    broken = [update(3), update(4), violation(4)]
    path = written(tmp_path, *begun, *broken, resume(2, HERE), update(3, loss=0.25), violation(4))
    found = read_history(path, HERE)
    assert found.retraction == Retraction(2, 4, "base-frozen", "other weights")
    assert found.last == 2
    write(path, [found.retraction, resume(2, HERE)])
    assert disowned(ledger_of(path)) == []
    assert read_history(path, HERE).retraction is None
    assert list(read_history(path, HERE).steps) == [1, 2]
