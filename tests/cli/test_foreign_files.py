"""Files of a run folder, a bundle or a configuration that somebody else made (SECURITY.md), read by each in turn.

Each ends in words: no pipe is waited for, no link followed, nothing fetched, no size believed. `falsify.nemesis.fuzz`
goes on where these end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from andon.config.load import load_config
from andon.console.problems import InputError
from andon.inspection.difference import read_side
from andon.inspection.explain import explain
from andon.inspection.recorded import open_recorded
from andon.inspection.replaying import replay_run
from andon.model.build import ModelSpec, build_base, build_shape
from andon.run.checkpoint import load_checkpoint, newest_valid, save_checkpoint
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerWriter, read_ledger
from andon.run.provenance import read_provenance
from andon.run.summary import read_summary
from andon.training.existing import how_far, require_task
from andon.training.inference import load_run
from andon.training.journal import MetricsWriter
from andon_contracts.bundle import Evidence, write_account, write_part
from andon_contracts.record import Step
from andon_contracts.untrusted import read_regular
from andon_contracts.violation import Finding
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.history import read_history
from andon_falsify.verdict import Outcome
from tests.inspection.ledgers import whole_run, write
from tests.training.runs import Runs, write_jsonl


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs on one data set."""
    return Runs(write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl"))


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runs.train(folder, "training.max_steps=3", "training.checkpoint_every=1") == 0
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be tampered with."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _link_to_pipe(path: Path) -> None:
    pipe = path.parents[3] / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    path.symlink_to(pipe)


def _elsewhere(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def _holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "provenance": ("provenance.json", read_provenance),
    "summary": ("summary.json", read_summary),
    "ledger": ("ledger.jsonl", lambda path: open_recorded(path.parent)),
    "manifest": ("checkpoints/step-00000003/manifest.json", lambda path: load_checkpoint(path.parent)),
    "tensors": ("checkpoints/step-00000003/tensors.safetensors", lambda path: load_checkpoint(path.parent)),
}


@pytest.mark.parametrize("put", [_pipe, _link_to_pipe, _elsewhere, _holes], ids=lambda put: put.__name__.strip("_"))
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_plain_file_is_refused_at_once(run: Path, reader: str, put: Callable[[Path], None]) -> None:
    name, read = READERS[reader]
    (run / name).unlink()
    put(run / name)
    with pytest.raises(ValueError, match=re.escape(str(run / name))):
        read(run / name)


@pytest.mark.parametrize("put", [_pipe, _link_to_pipe, _holes], ids=lambda put: put.__name__.strip("_"))
def test_what_only_says_where_a_run_is_waits_for_nothing(run: Path, put: Callable[[Path], None]) -> None:
    folder = RunFolder(run)
    folder.ledger.unlink()
    put(folder.ledger)
    assert how_far(folder) == "before its first step"


CONFIGURED: dict[str, Callable[[Path], object]] = {
    "report and diff": read_side,
    "predict and eval": lambda run: load_run(RunFolder(run)),
    "replay": lambda run: replay_run(run, "1", 1, "inline"),
    "verify": lambda run: read_run(run).settings(),
    "a command for one task": lambda run: require_task(RunFolder(run), (), "eval"),
}


@pytest.mark.parametrize("reader", CONFIGURED)
def test_a_link_in_the_place_of_the_configuration_is_followed_by_no_reader(run: Path, reader: str) -> None:
    """Even where it leads to a configuration: its keys would be shown as those of the run."""
    config = RunFolder(run).config
    config.symlink_to(config.rename(run.parent / "elsewhere.yaml"))
    with pytest.raises(InputError, match=r"config\.yaml: is a link"):
        CONFIGURED[reader](run)


def test_a_line_without_end_ends_what_a_checker_reads(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    _holes(ledger)
    (line,) = read_history(ledger).lines()
    assert line.line == 1


def test_metrics_that_are_none_are_dropped_by_a_resume(tmp_path: Path) -> None:
    metrics, line = tmp_path / "metrics.jsonl", b'{"step": 1}\n'
    nested = b"[" * 100_000 + b"\n"
    metrics.write_bytes(line + b'{"step": Infinity}\n' + nested + b'{"step": 3}\n')
    with metrics.open("ab") as file:
        file.truncate(1 << 42)
    MetricsWriter(metrics, 2).close()
    assert metrics.read_bytes() == line


def test_manifests_that_are_pipes_are_not_waited_for(run: Path) -> None:
    """`heads-quoted` says of which file it knows nothing."""
    manifest = run / "checkpoints" / "step-00000003" / "manifest.json"
    manifest.unlink()
    _link_to_pipe(manifest)
    (verdict,) = [each for each in verify([read_run(run)]) if each.claim == "heads-quoted"]
    assert verdict.outcome is Outcome.UNKNOWN
    assert str(manifest) in verdict.why


def test_a_regular_file_is_read_whole_and_a_larger_one_not_at_all(tmp_path: Path) -> None:
    """The bound is exact, and a link is read where a user named it."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    assert read_regular(path, 5) == read_regular(link, 5, follow=True) == b"12345"
    with pytest.raises(OSError, match="its 5 bytes are more than the 4 allowed"):
        read_regular(path, 4)
    with pytest.raises(OSError, match="it is a link"):
        read_regular(link, 5)


def _bundle(folder: Path) -> Path:
    for rank in (0, 1):
        tensors = {"w": torch.full((2,), float(rank))}
        evidence = Evidence(folder, rank, 2, lambda: [5], lambda _, held=tensors: iter(held.items()))  # type: ignore[misc]
        assert write_part(folder / "4", "replicas-agree", evidence, {"step": 4}, "w") == ""
    assert write_account(folder / "4", "replicas-agree", Finding("they differ", 4, (1,), "w"), {}) == ""
    return folder / "4"


def test_a_bundle_reads_no_tensors_outside(tmp_path: Path) -> None:
    place = _bundle(tmp_path / "bundles")
    assert any("differs  w: 2 of 2 elements" in line for line in explain(place))
    for rank, said in (("0", "/../../../stolen-0"), ("1", "/../../../stolen-1")):
        part = place / "replicas-agree" / f"rank-{rank}.json"
        part.write_text(json.dumps(json.loads(part.read_text()) | {"rank": said}))
        (place / "replicas-agree" / f"rank-{rank}.safetensors").rename(tmp_path / f"stolen-{rank}.safetensors")
    (place / "replicas-agree" / "rank-").mkdir()
    lines = list(explain(place))
    assert "  differs  w" in lines  # and not in how many elements: no copy was read


ODD: dict[str, object] = {
    "threads": [7, {"frames": 8}, None],
    "ids": 9,
    "tensors": {"left out": 3},
    "digests": {"w": {"a": [1]}, "v": 2},
    "collectives": "",
    "rank": [[]],
}


@pytest.mark.parametrize("field", ODD)
def test_a_bundle_of_odd_values_is_shown_as_far_as_it_goes(tmp_path: Path, field: str) -> None:
    place = _bundle(tmp_path / "bundles")
    part = place / "replicas-agree" / "rank-1.json"
    part.write_text(json.dumps(json.loads(part.read_text()) | {field: ODD[field]}))
    account = place / "replicas-agree.json"
    account.write_text(json.dumps(json.loads(account.read_text()) | {"element": 3, "cause": [1], "versions": 4}))
    assert "  seen     they differ" in list(explain(place))


def test_parts_that_are_pipes_are_not_waited_for(tmp_path: Path) -> None:
    """Neither a rank's part nor its record of collectives."""
    place = _bundle(tmp_path / "bundles")
    for name in ("rank-1.json", "rank-0.collectives.json"):
        (place / "replicas-agree" / name).unlink(missing_ok=True)
        os.mkfifo(place / "replicas-agree" / name)
    assert "  rank-1   cannot be read: it is not a regular file" in list(explain(place))


def test_nothing_is_fetched_for_a_folder(run: Path) -> None:
    config = RunFolder(run).config
    config.write_text(config.read_text().replace("base: null", "base: nobody/has-this"))
    with pytest.raises(InputError, match=r"no folder here and not in the hub's cache; fetch it first: hf download"):
        load_run(RunFolder(run))
    with pytest.raises(InputError, match="not in the hub's cache"):
        replay_run(run, "1", 1, "inline")


@pytest.mark.parametrize(
    "setting",
    [
        *("run.workers=1000000000", "model.num_hidden_layers=100000000", "model.hidden_size=4000000000"),
        *("adapter.r=10000000000", "training.micro_batches=1000000000000", "training.epochs=1000000000000000000000"),
    ],
)
def test_numbers_that_nobody_means_are_refused(setting: str) -> None:
    with pytest.raises(InputError, match=rf"{setting.partition('=')[0]}: must be at most"):
        load_config(None, ["training.batch_size=1000000000000", setting])


def test_an_embedded_model_larger_than_the_machine_is_refused() -> None:
    spec = ModelSpec(2, ("a", "b"), 300, 0, hidden_size=1 << 15, num_hidden_layers=900, intermediate_size=1 << 17)
    with pytest.raises(InputError, match=r"its sizes ask for [0-9.]+ GiB of weights"):
        build_base(spec)
    small = replace(spec, num_hidden_layers=1, hidden_size=64, intermediate_size=128)
    assert sum(p.numel() for p in build_shape(small).parameters()) == sum(
        p.numel() for p in build_base(small).parameters()
    )


def _resealed(run: Path, **state: object) -> None:
    last = load_checkpoint(run / "checkpoints" / "step-00000003")
    save_checkpoint(run / "checkpoints", 3, last.tensors, last.state | state, last.head)
    RunFolder(run).summary.unlink()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"identity": None}, "does not say what run it is of"),
        ({"progress": None}, "no usable progress"),
        ({"progress": {"step": 2}}, "no usable progress: it is of step 2"),
        ({"progress": {"step": 3, "wings": 2}}, "no usable progress"),
    ],
)
def test_a_checkpoint_sealed_anew_is_refused_in_words(
    runs: Runs, run: Path, state: dict[str, object], said: str
) -> None:
    _resealed(run, **state)
    with pytest.raises(InputError, match=said):
        runs.train(run, "training.max_steps=3", "training.checkpoint_every=1", resume="auto")


@pytest.mark.parametrize("lacking", ["optimizer/exp_avg_sq", "optimizer/step", "weights"])
def test_a_checkpoint_without_a_part_of_the_state_is_refused(runs: Runs, run: Path, lacking: str) -> None:
    last = load_checkpoint(run / "checkpoints" / "step-00000003")
    kept = {name: tensor for name, tensor in last.tensors.items() if not name.startswith(lacking)}
    assert len(kept) < len(last.tensors)
    save_checkpoint(run / "checkpoints", 3, kept, last.state, last.head)
    RunFolder(run).summary.unlink()
    with pytest.raises(InputError, match="is missing"):
        runs.train(run, "training.max_steps=3", "training.checkpoint_every=1", resume="auto")


def test_names_of_checkpoints_are_plain_digits(run: Path) -> None:
    for name in ("step-²", "step-0000000²", "step-٠٠٠٠٠٠٠٤", f"step-{'9' * 4000}"[:200]):
        shutil.copytree(run / "checkpoints" / "step-00000003", run / "checkpoints" / name)
    found, rejected = newest_valid(run / "checkpoints")
    assert (found is not None and found.step, rejected) == (3, [])
    assert "step-00000002" in str(replay_run(run, "3", 1, "inline").lines)


def test_a_step_beyond_the_plan_is_not_replayed(run: Path) -> None:
    ledger = RunFolder(run).ledger
    records = list(read_ledger(ledger))
    last = next(record for record in reversed(records) if isinstance(record, Step))
    ledger.unlink()
    with LedgerWriter(ledger) as writer:
        for record in [*records, replace(last, step=10**15)]:
            writer.append(record)
    with pytest.raises(InputError, match="it has a step 1000000000000000 of a run of 3"):
        replay_run(run, str(10**15), 1, "inline")


def test_a_key_twice_is_no_line(tmp_path: Path) -> None:
    ledger = write(tmp_path / "ledger.jsonl", whole_run())
    lines = ledger.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'{"', b'{"world":9,"', 1)
    ledger.write_bytes(b"".join(lines))
    assert any(getattr(line, "why", "").endswith("stands twice in one object") for line in read_history(ledger).lines())
