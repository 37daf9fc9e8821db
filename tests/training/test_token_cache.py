"""Tokens that are kept: the same rows as those made anew, made once, and never trusted where they are damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.config.load import load_config
from andon.console.exits import Exit
from andon.data.chat import EncodedRow, Encoding
from andon.launch.launcher import warm_up
from andon.run.columns import key_of
from andon.run.folder import RunFolder
from andon.run.provenance import source_digest
from andon.training import material
from andon.training.run import train
from andon.training.token_cache import _CODE, _LIBRARIES, Encode, in_memory, kept_tokens, key_of_tokens
from tests.training.runs import PRELOAD, Runs, outcome, row

warm_up(PRELOAD)

KEY = "k" * 64
SAID = Encoding("all tokens", (2, 7), ("a note",))
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)


def rows_of(tokens: list[list[int]]) -> list[EncodedRow]:
    """Rows of these tokens: every second one is trained, and some tokens of each were cut."""
    return [
        EncodedRow(place, array("i", ids), array("f", [float(each % 2) for each in range(len(ids))]), place, place // 2)
        for place, ids in enumerate(tokens)
    ]


def giving(rows: list[EncodedRow]) -> Encode:
    """Encodes to these."""

    def encode(keep: Callable[[EncodedRow], None]) -> Encoding:
        for each in rows:
            keep(each)
        return SAID

    return encode


def never(*_: object) -> Encoding:
    """For rows that are there."""
    raise AssertionError("they are made again")


@given(st.lists(TOKENS, min_size=1, max_size=5))
def test_what_is_kept_is_what_was_made(tmp_path_factory: pytest.TempPathFactory, tokens: list[list[int]]) -> None:
    """Rows, what was said of them, lengths and counts, whether made now, read again, or held in memory."""
    folder, rows = tmp_path_factory.mktemp("cache") / "tokens", rows_of(tokens)
    for found in (kept_tokens(folder, KEY, giving(rows)), kept_tokens(folder, KEY, never), in_memory(giving(rows))):
        assert [found.rows.row(place) for place in range(len(rows))] == rows
        assert found.encoding == SAID
        assert found.rows.lengths.tolist() == [len(each) for each in tokens]
        assert found.rows.trained.tolist() == [len(each) // 2 for each in tokens]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", KEY]


ROWS = rows_of([[5, 6, 7], [8], [9, 10]])


def flip(path: Path) -> None:
    """Change the lowest bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def foreign(path: Path) -> None:
    """Put something of somebody else in its place."""
    path.write_text('{"encoding": {}, "files": {}}')


def linked(path: Path) -> None:
    """Put a link to the same bytes in its place."""
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize("name", ["tokens", "weights", "ends", "trained", "cut", "cut_trained", "index.json"])
@pytest.mark.parametrize(
    "harm", [flip, foreign, linked, Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 2)]
)
def test_what_is_damaged_is_made_again(
    tmp_path: Path, name: str, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """And it is said; afterwards it is whole."""
    kept_tokens(tmp_path, KEY, giving(ROWS))
    harm(tmp_path / KEY / name)
    found = kept_tokens(tmp_path, KEY, giving(ROWS))
    assert [found.rows.row(place) for place in range(3)] == ROWS
    assert f"what is kept in {tmp_path / KEY} is not used, and made again" in capfd.readouterr().err
    kept_tokens(tmp_path, KEY, never)


_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.test_token_cache import KEY, ROWS
from andon.training import token_cache
token_cache._ROWS_AT_ONCE = 1
def encode(keep):
    keep(ROWS[0])
    keep(ROWS[1])
    os.kill(os.getpid(), signal.SIGKILL)
token_cache.kept_tokens(Path(sys.argv[1]), KEY, encode)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    """Half a folder has another name; the next one makes the whole, and clears it away."""
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    (half,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert half.name != KEY
    assert [found for found in [kept_tokens(tmp_path, KEY, giving(ROWS))] if found.rows.row(2) == ROWS[2]]
    assert not half.exists()


_MAKER = """
import os, sys
from pathlib import Path
from tests.training.test_token_cache import KEY, ROWS, SAID
from andon.training import token_cache
def encode(keep):
    with open(sys.argv[2], "a") as log:
        log.write(f"{os.getpid()}\\n")
    for row in ROWS:
        keep(row)
    return SAID
print("ready", flush=True)
sys.stdin.readline()
print(token_cache.kept_tokens(Path(sys.argv[1]), KEY, encode).rows.row(1).ids.tolist(), flush=True)
"""


def test_of_several_processes_at_once_one_makes_them(tmp_path: Path) -> None:
    """The others wait for it, and read what it made."""
    command = [sys.executable, "-c", _MAKER, str(tmp_path / "cache"), str(tmp_path / "log")]
    makers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for maker in makers:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "ready\n"
    told = [maker.communicate("go\n", timeout=120)[0] for maker in makers]
    assert told == ["[8]\n"] * 3
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_the_key_is_of_all_that_tokens_depend_on() -> None:
    """Whatever is given, and the libraries that tokenise."""
    given = {"data": "d", "tokenizer": "t", "max_length": 9, "train_on": "all"}
    keys = {key_of_tokens(**given), *(key_of_tokens(**{**given, name: "other"}) for name in given)}
    assert len(keys) == 5
    assert key_of((), code=source_digest(_CODE), **given) not in keys  # no libraries
    assert key_of(_LIBRARIES, **given) not in keys  # no code of ours
    assert key_of(_LIBRARIES, code=source_digest(_CODE), **given) in keys


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs on prompts with answers."""
    path = tmp_path_factory.mktemp("talks") / "talk.jsonl"
    lines = [json.dumps({"prompt": text, "completion": label}) for text, label in map(row, range(45))]
    path.write_text("\n".join(lines) + "\n")
    return Runs(path)


def test_a_resume_makes_no_tokens_and_ends_with_the_same_bits(
    talks: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in the run's folder until it ends; what they are of is checked there as ever."""
    alone, folder = tmp_path / "alone", tmp_path / "run"
    assert talks.train(alone, backend="gloo", workers=2) == Exit.OK
    assert not RunFolder(alone).tokens.exists()
    asked = iter([False, False, True])
    config = load_config(None, talks.overrides(), {"run.dir": str(folder), "run.backend": "inline"})
    assert train(config, RunFolder(folder), lambda: next(asked)) == Exit.PREEMPTED
    kept = [path for path in RunFolder(folder).tokens.iterdir() if path.is_dir()]
    assert sorted((path / "tokens").exists() for path in kept) == [False, True]  # a survey, and tokens
    monkeypatch.setattr(material, "encode_each", never)
    assert talks.train(folder, resume="auto") == Exit.OK
    assert outcome(folder) == outcome(alone)
    assert not RunFolder(folder).tokens.exists()


def test_a_folder_that_is_named_serves_later_runs(talks: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays when a run ends; other rows or another length are other tokens."""
    cache = f"data.cache={tmp_path / 'cache'}"
    assert talks.train(tmp_path / "one", cache) == Exit.OK
    monkeypatch.setattr(material, "encode_each", never)
    assert talks.train(tmp_path / "two", cache) == Exit.OK
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    with pytest.raises(AssertionError, match="made again"):
        talks.train(tmp_path / "three", cache, "model.max_length=100")


def test_nothing_stays_of_rows_that_cannot_be_encoded(tmp_path: Path) -> None:
    """The run's folder is as it was: not there."""
    path = tmp_path / "talk.jsonl"
    rows = [{"prompt": "p" * 200, "completion": "q"}, {"prompt": "a", "completion": "b"}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(ValueError, match=r"talk.jsonl:1: no token of it would be trained"):
        Runs(path).train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_columns_are_mapped_and_not_held(tmp_path: Path) -> None:
    """What is read of them is a file of the cache, by the kernel's own account."""
    found = kept_tokens(tmp_path, KEY, giving(ROWS))
    assert found.rows.tensors(0)[0].dtype is torch.int64
    maps = Path("/proc/self/maps").read_text()
    assert all(str(tmp_path / KEY / name) in maps for name in ("tokens", "weights"))
