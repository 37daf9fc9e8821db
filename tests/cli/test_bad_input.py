"""What a user gets wrong: every problem at its place with its value, exit code 2, no traceback, nothing written."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from andon.cli.app import _run, guarded
from andon.config.source import loading
from andon.console.messages import Exit, InputError
from andon.inspection import doctor
from andon.launch import context as preemption
from andon_contracts.record import Broken
from andon_falsify.report.document import write_json
from tests.cli.command import PATIENCE_S, Ended, cli, tree
from tests.falsify.reports import campaign
from tests.inspection.ledgers import whole_run, write
from tests.training.runs import SMALL, STEPS, Runs, records, write_jsonl

SETS = [part for each in (*SMALL, "training.max_steps=2", "run.backend=inline") for part in ("--set", each)]


def refused(ended: Ended, *expected: str) -> None:
    """The command ended with 2 and said exactly `expected` besides its choices, one line each, each a part of it."""
    assert ended.code == 2, ended.said
    assert ended.out == []
    said = [line for line in ended.said if not line.startswith("andon: auto: ")]
    assert len(said) == len(expected), ended.said
    for line, part in zip(said, expected, strict=True):
        assert line.startswith("andon: ")
        assert part in line


def test_an_unknown_option_that_names_a_setting_is_answered_with_how_to_set_it() -> None:
    wanted = {
        "--lr=1e-4": "No such option '--lr'. Use --set optimizer.lr=VALUE.",
        "--num-epochs=3": "No such option '--num-epochs'. Use --set training.epochs=VALUE.",
        "--bf16": "No such option '--bf16'. model.dtype=bfloat16 is for the frozen weights",
        "--worker=3": "No such option '--worker'. Did you mean '--workers'?",
    }
    for option, said in wanted.items():
        ended = cli("train", option)
        assert ended.code == 2
        assert said in " ".join(ended.said)


def test_data_with_many_faults(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_bytes(
        b'{"text": "a", "label": "x"}\n{"text": "", "label": "x"}\nnot json\n{"text": "b"}\n{"text": "c", "label": 3}\n'
    )
    rows = [
        f"{data}{each}" for each in (":2: text is empty", ":3: malformed", ":4: has no column 'label'", ":1: label 'x'")
    ]
    refused(cli("train", "--data", data, "--run-dir", tmp_path / "run"), *rows)
    other = ("--eval-data", tmp_path / "other.csv", "--model", "./none", "--set", "seed=x")
    others = ("--set seed: must be an integer", "folder './none' does not exist", "other.csv: no such file")
    refused(cli("train", "--data", data, *other, "--run-dir", tmp_path / "run"), *others, *rows)
    assert tree(tmp_path) == {"train.jsonl"}


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_a_run_that_does_not_exist(tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir()
    data = [tmp_path / "none.csv"] if command == "eval" else []
    refused(cli(command, tmp_path / "no", *data, stdin=b"\xff\n"), f"{tmp_path / 'no'}: no such run")
    refused(cli(command, tmp_path / "empty", *data, stdin=b"\xff\n"), "holds no run of andon")


LONG = "a" * 300


@pytest.mark.parametrize(
    "command",
    [
        *(("eval", LONG, "none.csv"), ("diff", LONG, LONG), ("replay", LONG, "--steps", "1")),
        *(("train", flag, LONG, "--backend", "inline") for flag in ("--run-dir", "--model")),
        *((name, LONG) for name in ("predict", "show", "explain", "init", "check")),
    ],
)
def test_a_path_that_is_too_long(tmp_path: Path, command: tuple[str, ...]) -> None:
    refused(cli(*command, folder=tmp_path), "cannot be read: File name too long")
    assert tree(tmp_path) <= {"runs"}


class PanicException(BaseException):
    __module__ = "pyo3_runtime"


def _panicking() -> int:
    raise PanicException("index out of bounds")


def test_a_panic_of_native_code_is_one_line_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(_panicking) == 2
    assert capsys.readouterr().err == "andon: PanicException: index out of bounds\n"
    said = r"^model\.base: cannot load 'FOLDER': index out of bounds$"
    with pytest.raises(InputError, match=said), loading("FOLDER", "model.base"):
        _panicking()

    def interrupted() -> int:
        raise preemption.Interrupted(signal.SIGTERM)

    with pytest.raises(preemption.Interrupted):
        guarded(interrupted)

    def cancelled() -> int:
        raise asyncio.CancelledError("by nobody")

    assert guarded(cancelled) == Exit.CRASHED  # nobody's input is at fault
    assert capsys.readouterr().err == "andon: CancelledError: by nobody\n"


def test_init_writes_over_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    refused(cli("init", tmp_path), "config.yaml: already exists")
    refused(cli("init", tmp_path / "config.yaml"), "config.yaml")
    assert (tmp_path / "config.yaml").read_text() == "mine"
    assert cli("init", tmp_path / "c.yaml").out[0] == f"wrote {tmp_path / 'c.yaml'}"
    assert (tmp_path / "c.yaml").is_file()


def test_a_target_that_matches_nothing(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "train.jsonl")
    targets = ("--set", "adapter.targets=[q_proj, v_prj, nothing]", "--backend", "gloo", "--workers", "2")
    ended = cli("train", *SETS, "--data", data, "--run-dir", tmp_path / "run", *targets)
    refused(ended, "adapter.targets: 'v_prj' matches no Linear module; did you mean 'v_proj'?", "'nothing' matches no")
    assert tree(tmp_path) == {"train.jsonl"}


def test_a_full_disk(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "train.jsonl")
    runs = Runs(data)
    sets = [part for each in runs.overrides("run.backend=inline") for part in ("--set", each)]
    ended = cli("train", *sets, "--run-dir", tmp_path / "run", largest_file=6000)
    assert ended.code == 2
    assert "Traceback" not in "\n".join(ended.said)
    assert any("cannot be written: the file would be larger than the limit" in line for line in ended.said)
    assert 0 < len(records(tmp_path / "run", "step")) < STEPS
    none = cli("train", *sets, "--run-dir", tmp_path / "none", largest_file=10)
    refused(none, f"{tmp_path / 'none' / '.lock'}: cannot be written: the file would be larger than the limit")
    assert not (tmp_path / "none").exists()  # though its lock was cut in the middle
    assert runs.train(tmp_path / "run", resume="auto") == 0
    assert not [name for name in tree(tmp_path) if "andon-tmp" in name]


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>/dev/full"])
def test_a_message_that_cannot_be_written_changes_no_exit_code(tmp_path: Path, streams: str) -> None:
    command = f'exec "$0" -m andon check missing.yaml {streams}'
    ended = subprocess.run(["sh", "-c", command, sys.executable], cwd=tmp_path, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2


FULL = [
    ("--help",),
    ("--version",),
    ("show", "{ledger}"),
    ("diff", "{ledger}", "{ledger}"),
    ("verify", "{ledger}"),
    ("explain", "{ledger}"),
    ("falsify", "--report", "{report}"),
    ("doctor", "{folder}", "--json"),
    ("init", "{folder}/new"),
]


@pytest.mark.parametrize("arguments", FULL, ids=lambda given: given[0])
def test_a_full_standard_output_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    broken = Broken("finite", 2, (1,), "w", "NaN", {})
    ledger = write(tmp_path / "l.jsonl", [*whole_run()[:3], broken])
    write_json(campaign(), tmp_path / "report.json")
    names = {"ledger": str(ledger), "report": str(tmp_path / "report.json"), "folder": str(tmp_path)}
    monkeypatch.setattr(sys, "argv", ["andon", *(each.format(**names) for each in arguments)])
    monkeypatch.setattr(doctor, "examine", lambda folder, timeout: [])
    with open("/dev/full", "w", encoding="utf-8") as full, suppress(OSError):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", full)
            assert guarded(_run) == (70 if arguments[0] in ("verify", "falsify") else 2)
        full.close()
    assert capsys.readouterr().err == "andon: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_reader_who_goes_away_is_no_error(tmp_path: Path, command: str) -> None:
    ledger = write(tmp_path / "l.jsonl", whole_run())
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        words = [sys.executable, "-m", "andon", command, str(ledger)]
        done = subprocess.run(words, stdout=gone, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
