"""Atomic files and folders: old or new at every point of a crash, and errors of the disk name the path."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from andon.console.problems import InputError
from andon.run.atomic import clean_leftovers, is_leftover, json_bytes, storage, whole_folder, write_json, write_whole
from tests.run.crash import Mode, every_failure


@pytest.mark.parametrize("mode", ["kill", "power cut", "disk full"])
def test_a_file_is_old_or_new_at_every_point(tmp_path: Path, mode: Mode) -> None:
    numbers = itertools.count()

    def make() -> Path:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        (folder / "file").write_bytes(b"old")
        return folder

    def check(folder: Path, finished: bool, error: Exception | None) -> None:
        assert (folder / "file").read_bytes() in ((b"new" * 100,) if finished else (b"old", b"new" * 100))
        others = [p.name for p in folder.iterdir() if p.name != "file"]
        assert all(map(is_leftover, others))
        if mode == "disk full":
            assert others == []
            assert finished or isinstance(error, InputError)
        assert clean_leftovers(folder) == sorted(others)
        assert [p.name for p in folder.iterdir()] == ["file"]

    assert every_failure(make, lambda folder: write_whole(folder / "file", b"new" * 100), mode, check) >= 5


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


def test_other_errors_are_not_renamed(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_whole(tmp_path / "file", "text")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_is_an_input_error(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource, sys\n"
        "from andon.console.problems import InputError\n"
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
    numbers = itertools.count()

    def fill(base: Path, text: str) -> None:
        with whole_folder(base / "adapter") as folder:
            handle = os.open(folder / "file", os.O_WRONLY | os.O_CREAT, 0o666)
            os.write(handle, text.encode())
            os.close(handle)

    def make() -> Path:
        base = tmp_path / str(next(numbers))
        base.mkdir()
        fill(base, "old")
        return base

    def check(base: Path, finished: bool, error: Exception | None) -> None:
        file = base / "adapter" / "file"
        if mode == "disk full":
            assert finished or isinstance(error, InputError)
            assert file.exists()
        if finished or file.parent.exists():
            assert file.read_text() in (("new",) if finished else ("old", "new"))

    assert every_failure(make, lambda base: fill(base, "new"), mode, check) >= 8


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
