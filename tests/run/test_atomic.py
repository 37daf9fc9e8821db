"""Atomic files and folders: old or new at every point of a crash, and errors of the disk name the path."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from andon.console.messages import InputError
from andon.run.atomic import clean_leftovers, is_leftover, json_bytes, storage, whole_folder, write_json, write_whole
from andon.run.checkpoint import newest_valid, prune
from andon.run.folder import RunFolder, State, new_folder
from andon.run.ledger import LedgerWriter
from andon_contracts.record import End
from tests.run.crash import Mode, every_failure


@pytest.mark.parametrize("mode", ["kill", "power cut", "disk full"])
def test_a_file_is_old_or_new_at_every_point(tmp_path: Path, mode: Mode) -> None:
    def old(folder: Path) -> None:
        (folder / "file").write_bytes(b"old")

    def check(folder: Path, finished: bool, error: Exception | None) -> None:
        assert (folder / "file").read_bytes() in ((b"new" * 100,) if finished else (b"old", b"new" * 100))
        others = [p.name for p in folder.iterdir() if p.name != "file"]
        assert all(map(is_leftover, others))
        if mode == "disk full":
            assert others == []
            assert finished or isinstance(error, InputError)
        assert clean_leftovers(folder) == sorted(others)
        assert [p.name for p in folder.iterdir()] == ["file"]

    assert every_failure(tmp_path, old, lambda folder: write_whole(folder / "file", b"new" * 100), mode, check) >= 5


@pytest.mark.parametrize("path", [Path("/proc/andon-run"), Path("/proc/andon-run/a/b")])
def test_a_folder_that_never_was_is_not_called_gone(path: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written: nothing of that name can be made in /proc"), storage(path):
        path.mkdir(parents=True)
    with pytest.raises(InputError, match="cannot be written: the folder is gone"):
        write_whole(tmp_path / "removed" / "file", b"")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.EUCLEAN, 12345])
def test_whatever_a_disk_answers_is_said_of_the_path(tmp_path: Path, number: int) -> None:
    with pytest.raises(InputError, match="file: cannot be written: the system refuses it"), storage(tmp_path / "file"):
        raise OSError(number, "its own words")
    with pytest.raises(BlockingIOError), storage(tmp_path / "file"):
        raise OSError(errno.EAGAIN, "another has it")


@pytest.mark.parametrize("place", ["none/file", "plain/file", "folder", "x" * 300])
def test_a_place_that_cannot_be_written_is_an_input_error(tmp_path: Path, place: str) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written") as caught:
        write_whole(tmp_path / place, b"x")
    assert str(tmp_path / place) in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "plain"]


def test_a_limit_on_file_sizes_is_an_input_error(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource, sys\n"
        "from andon.console.messages import InputError\n"
        "from andon.run.atomic import write_whole\n"
        "from andon.run.ledger import LedgerWriter\n"
        "from andon_contracts.record import Broken\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "writer = LedgerWriter(folder / 'ledger.jsonl')\n"
        "writer.append(Broken('finite', 1, (), '', 'short'))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "for act in (lambda: write_whole(folder / 'file', bytes(5000)),\n"
        "            lambda: writer.append(Broken('finite', 2, (), '', 'x' * 5000))):\n"
        "    try: act()\n"
        "    except InputError as error: print(error)\n"
        "writer.append(Broken('finite', 2, (), '', 'short too'))\n"
    )
    (tmp_path / "file").write_bytes(b"old")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == [
        str(tmp_path / "file"),
        str(tmp_path / "ledger.jsonl"),
    ]
    assert (tmp_path / "file").read_bytes() == b"old"
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["seen"] for line in lines] == ["short", "short too"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "ledger.jsonl"]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    for text in ("one", "two"):
        with whole_folder(target) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "file").write_text(text)
            assert is_leftover(folder.name)
        assert (target / "sub" / "file").read_text() == text

    def half() -> None:
        with whole_folder(target) as folder:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*file")] == ["adapter/sub/file"]
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("mode", ["kill", "power cut", "disk full"])
def test_no_folder_is_half(tmp_path: Path, mode: Mode) -> None:
    def fill(base: Path, text: str) -> None:
        with whole_folder(base / "adapter") as folder:
            handle = os.open(folder / "file", os.O_WRONLY | os.O_CREAT, 0o666)
            os.write(handle, text.encode())
            os.close(handle)

    def check(base: Path, finished: bool, error: Exception | None) -> None:
        file = base / "adapter" / "file"
        if mode == "disk full":
            assert finished or isinstance(error, InputError)
            assert file.exists()
        if finished or file.parent.exists():
            assert file.read_text() in (("new",) if finished else ("old", "new"))

    assert every_failure(tmp_path, lambda base: fill(base, "old"), lambda base: fill(base, "new"), mode, check) >= 8


def test_cleaning_removes_temporaries_only(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "file").touch()
    (tmp_path / "a.andon-tmp-1-2").mkdir()
    (tmp_path / "a.andon-tmp-1-2" / "file").touch()
    (tmp_path / "b.andon-tmp-1-2").symlink_to(tmp_path / "keep")
    (tmp_path / "c.tmp").touch()
    assert clean_leftovers(tmp_path) == ["a.andon-tmp-1-2", "b.andon-tmp-1-2"]
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["c.tmp", "keep", "keep/file"]


def test_json_is_strict_and_sorted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        write_json(tmp_path / "file", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []
    assert json_bytes({"b": 1, "a": "é"}) == json_bytes({"a": "é", "b": 1})
    write_json(tmp_path / "file", {"b": 1, "a": "é"})
    assert json.loads((tmp_path / "file").read_text(encoding="utf-8")) == {"a": "é", "b": 1}


# The run folder: one writer at a time, and only folders of runs are written to.


_OWNER = (
    "import pathlib, sys\n"
    "from andon.run.folder import RunFolder\n"
    "with RunFolder(pathlib.Path(sys.argv[1])).open_for_writing():\n"
    "    print('owned', flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.mark.parametrize("name", ["ledger.jsonl", "summary.json", "config.yaml", ".lock", ".launch"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    """Opening a pipe would wait for a writer. Neither a pipe nor a folder counts as a run that has begun."""
    run = RunFolder(tmp_path / "run")
    with run.open_for_writing():
        run.config.write_text("seed: 1\n")
    (run.path / name).unlink(missing_ok=True)
    make(run.path / name)
    assert not run.begun()
    with pytest.raises(InputError, match=f"{name}: is not a regular file, but a folder, a pipe or a device"):
        run.state()


def test_a_living_owner_keeps_others_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "x")
    command = [sys.executable, "-c", _OWNER, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "owned\n"
            with (
                pytest.raises(InputError, match=f"process {owner.pid} on {socket.gethostname()} since"),
                run.open_for_writing(),
            ):
                pytest.fail("two writers")
        finally:
            owner.kill()
            owner.wait()
    with run.open_for_writing():
        assert json.loads(run.lock.read_text())["pid"] == os.getpid()


def test_states(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "x")
    assert run.state() is State.EMPTY
    run.path.mkdir()
    assert run.state() is State.EMPTY
    run.lock.touch()
    assert run.state() is State.EMPTY
    with run.open_for_writing():
        assert run.state() is State.UNFINISHED
    for text in ("", "[", '{"finished": false}', '{"finished": 1}'):
        run.summary.write_text(text)
        assert run.state() is State.UNFINISHED
    run.summary.write_text('{"finished": true}')
    assert run.state() is State.FINISHED


def test_a_run_without_its_lock_is_known_by_its_ledger(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with closing(LedgerWriter(run.ledger)) as ledger:
        ledger.append(End(0, "finished", {}))
    assert run.state() is State.UNFINISHED


@pytest.mark.parametrize("name", ["config.yaml", "summary.json", "ledger.jsonl", "thesis.doc"])
def test_what_is_no_run_is_never_written_to(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"finished": true}\n')
    run = RunFolder(tmp_path)
    assert run.state() is State.FOREIGN
    with pytest.raises(InputError, match="not a run folder"), run.open_for_writing():
        pytest.fail("written to")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="file"), RunFolder(path).open_for_writing():
            pytest.fail("written to")
    with pytest.raises(InputError, match="file"):
        new_folder(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_place_is_an_input_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="no permission"), RunFolder(tmp_path / "x").open_for_writing():
            pytest.fail("written to")
    finally:
        tmp_path.chmod(0o700)


def test_the_owner_cleans_up(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.open_for_writing():
        (tmp_path / "summary.json.andon-tmp-1-ab").touch()
        (run.checkpoints / "step-00000001.andon-tmp-1-ab").mkdir()
    with run.open_for_writing():
        assert list(run.checkpoints.iterdir()) == []
        assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "checkpoints"]


def test_new_folders_do_not_collide(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert new_folder(tmp_path / "runs", now) == tmp_path / "runs" / "20260102-030405"
    for number in (2, 3):
        assert new_folder(tmp_path / "runs", now).name == f"20260102-030405-{number}"


def test_a_new_folder_is_one_processs_alone(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    together = threading.Barrier(8)

    def take(_: int) -> Path:
        together.wait()
        return new_folder(tmp_path, now)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(take, range(8)))) == 8


def test_a_lock_that_was_removed_meanwhile_owns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    lock = fcntl.flock

    def discarded_first(handle: int, how: int) -> None:
        run.lock.unlink()
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", discarded_first)
    with pytest.raises(InputError, match="removed"), run.open_for_writing():
        pytest.fail("two processes would own the folder")


def test_a_run_that_began_meanwhile_is_not_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder(tmp_path / "run")
    with run.open_for_writing():
        pass
    lock = fcntl.flock

    def begun_first(handle: int, how: int) -> None:
        with closing(LedgerWriter(run.ledger)) as ledger:
            ledger.append(End(1, "finished", {}))
        lock(handle, how)

    monkeypatch.setattr(fcntl, "flock", begun_first)
    run.discard_unbegun(before=None)
    assert run.begun()


READERS: dict[str, Callable[[Path], object]] = {
    "state": lambda folder: RunFolder(folder).state(),
    "newest_valid": newest_valid,
    "prune": lambda folder: prune(folder, keep=1),
    "clean_leftovers": clean_leftovers,
}


@pytest.mark.parametrize(("call", "reader"), [*(("scandir", name) for name in READERS), ("open", "state")])
def test_a_disk_that_fails_is_named_and_no_folder_is_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, reader: str
) -> None:
    """Otherwise a run would start from scratch, or a run with an unreadable lock would pass for a foreign folder."""
    with RunFolder(tmp_path).open_for_writing():
        pass
    (tmp_path / "config.yaml").touch()

    def failing(path: object, *_: object) -> object:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(InputError, match=r"cannot be read: .*[Ii]nput/output error"):
        READERS[reader](tmp_path)


def test_what_stood_there_before_is_not_discarded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    notes = run.path / "reports" / "thesis.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    before = run.names()
    with run.open_for_writing():
        run.environment.write_text("{}")
    run.discard_unbegun(before=before)
    assert {path.name for path in run.path.iterdir()} == {"reports"}
    assert notes.read_text() == "mine"


def test_a_run_whose_ledger_was_truncated_is_not_discarded(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with run.open_for_writing():
        run.ledger.touch()
        run.metrics.write_text('{"step": 1}\n')
    run.discard_unbegun(before=None)
    assert run.ledger.exists()
    assert run.metrics.exists()


@pytest.mark.parametrize("name", ["reports", "metrics.jsonl", "checkpoints", "ledger.jsonl"])
def test_a_folder_with_links_is_refused(tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path / "run")
    with run.open_for_writing():
        pass
    if (run.path / name).exists():
        (run.path / name).rmdir()
    (run.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"{name}: is a symbolic link"), run.open_for_writing():
        pytest.fail("it would be written through")
    assert not (tmp_path / "elsewhere").exists()
