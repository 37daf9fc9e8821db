"""Tokens that are kept: the same rows as those made anew, made once, and never trusted where they are damaged."""

from __future__ import annotations

import json
import os
import signal
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.config.load import load_config
from andon.console.exits import Exit
from andon.console.problems import InputError
from andon.data import surveyed
from andon.data.chat import EncodedRow, Encoding
from andon.data.conversations import read_conversations
from andon.data.origins import RowSelection
from andon.data.rows import repeated_texts, shared_texts
from andon.run.columns import key_of
from andon.run.folder import RunFolder
from andon.run.provenance import source_digest
from andon.training import surveys
from andon.training.material import prepare
from andon.training.surveys import Surveys
from andon.training.token_cache import _CODE, _LIBRARIES, Encode, in_memory, kept_tokens, key_of_tokens
from tests.support.ranks import run_ranks
from tests.training.runs import Runs, outcome, row

KEY = "k" * 64
SAID = Encoding("all tokens", (2, 7), ("a note",), ((1, "a.jsonl:2", "a fault"),))
TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)


def rows_of(tokens: list[list[int]]) -> list[EncodedRow]:
    """Rows of these tokens: every second one is trained, and some tokens of each were cut."""
    return [
        EncodedRow(place, array("i", ids), array("f", [float(each % 2) for each in range(len(ids))]), place, place // 2)
        for place, ids in enumerate(tokens)
    ]


def giving(rows: list[EncodedRow]) -> Encode:
    def encode(keep: Callable[[EncodedRow], None]) -> Encoding:
        for each in rows:
            keep(each)
        return SAID

    return encode


def never(*_: object) -> Encoding:
    raise AssertionError("they are made again")


@given(st.lists(TOKENS, min_size=1, max_size=5))
def test_what_is_kept_is_what_was_made(tmp_path_factory: pytest.TempPathFactory, tokens: list[list[int]]) -> None:
    folder, rows = tmp_path_factory.mktemp("cache") / "tokens", rows_of(tokens)
    for found in (kept_tokens(folder, KEY, giving(rows)), kept_tokens(folder, KEY, never), in_memory(giving(rows))):
        assert [found.rows.row(place) for place in range(len(rows))] == rows
        assert found.encoding == SAID
        assert found.rows.lengths.tolist() == [len(each) for each in tokens]
        assert found.rows.trained.tolist() == [len(each) // 2 for each in tokens]
    assert sorted(path.name for path in folder.iterdir()) == [".lock", KEY]


ROWS = rows_of([[5, 6, 7], [8], [9, 10]])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def foreign(path: Path) -> None:
    path.write_text('{"encoding": {}, "files": {}}')


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize("name", ["tokens", "weights", "ends", "trained", "cut", "cut_trained", "index.json"])
@pytest.mark.parametrize(
    "harm", [flip, foreign, linked, Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 2)]
)
def test_what_is_damaged_is_made_again(
    tmp_path: Path, name: str, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    kept_tokens(tmp_path, KEY, giving(ROWS))
    harm(tmp_path / KEY / name)
    found = kept_tokens(tmp_path, KEY, giving(ROWS))
    assert [found.rows.row(place) for place in range(3)] == ROWS
    assert f"what is kept in {tmp_path / KEY} is not used, and made again" in capfd.readouterr().err
    kept_tokens(tmp_path, KEY, never)


def killed_while_it_encodes(folder: Path) -> None:
    def encode(keep: Callable[[EncodedRow], None]) -> Encoding:
        keep(ROWS[0])
        keep(ROWS[1])
        os.kill(os.getpid(), signal.SIGKILL)
        return SAID

    kept_tokens(folder, KEY, encode)


def test_a_writer_that_is_killed_leaves_nothing_that_is_used(tmp_path: Path) -> None:
    (ended,) = run_ranks(1, killed_while_it_encodes, tmp_path)
    assert isinstance(ended.error, ChildProcessError)
    (half,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert half.name != KEY
    assert kept_tokens(tmp_path, KEY, giving(ROWS)).rows.row(2) == ROWS[2]
    assert not half.exists()


def made_at_once(folder: Path) -> tuple[list[int], bool]:
    """The tokens of the second row, and whether this rank made them."""
    made = []

    def encode(keep: Callable[[EncodedRow], None]) -> Encoding:
        made.append(True)
        return giving(ROWS)(keep)

    torch.distributed.barrier()
    return kept_tokens(folder, KEY, encode).rows.row(1).ids.tolist(), bool(made)


def test_of_several_processes_at_once_one_makes_them(tmp_path: Path) -> None:
    told = [each.get() for each in run_ranks(3, made_at_once, tmp_path)]
    assert [ids for ids, _ in told] == [[8]] * 3
    assert sum(made for _, made in told) == 1


def test_the_key_is_of_all_that_tokens_depend_on() -> None:
    given = {"data": "d", "tokenizer": "t", "max_length": 9, "train_on": "all"}
    keys = {key_of_tokens(**given), *(key_of_tokens(**{**given, name: "other"}) for name in given)}
    assert len(keys) == 5
    assert key_of((), code=source_digest(_CODE), **given) not in keys  # no libraries
    assert key_of(_LIBRARIES, **given) not in keys  # no code of ours
    assert key_of(_LIBRARIES, code=source_digest(_CODE), **given) in keys


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    path = tmp_path_factory.mktemp("talks") / "talk.jsonl"
    lines = [json.dumps({"prompt": text, "completion": label}) for text, label in map(row, range(45))]
    path.write_text("\n".join(lines) + "\n")
    return Runs(path)


def test_a_resume_makes_nothing_again_and_ends_with_the_same_bits(
    talks: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = tmp_path / "alone"
    assert talks.train(alone) == Exit.OK
    assert not RunFolder(alone).tokens.exists()
    folder = talks.stopped(tmp_path / "run", 3)
    kept = [path for path in RunFolder(folder).tokens.iterdir() if path.is_dir()]
    assert sorted((path / "tokens").exists() for path in kept) == [False, True]  # a survey, and tokens
    monkeypatch.setattr("andon.training.surveys.survey", never)
    monkeypatch.setattr("andon.training.material.encode_each", never)
    assert talks.train(folder, resume="auto") == Exit.OK
    assert outcome(folder) == outcome(alone)
    assert not RunFolder(folder).tokens.exists()


def test_a_folder_that_is_named_serves_later_runs(talks: Runs, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    one_step = (f"data.cache={place}", "training.max_steps=1")
    assert talks.train(tmp_path / "one", *one_step) == Exit.OK
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.parent != place}
    assert any(path.name == "tokens" for path in before)
    assert talks.train(tmp_path / "two", *one_step) == Exit.OK
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.parent != place} == before
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    assert talks.train(tmp_path / "three", *one_step, "model.max_length=100") == Exit.OK
    assert {path for path in place.rglob("*") if path.parent != place} > before.keys()


def test_nothing_stays_of_rows_that_cannot_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    rows = [{"prompt": "p" * 200, "completion": "q"}, {"prompt": "a", "completion": "b"}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(ValueError, match=r"talk.jsonl:1: no token of it would be trained"):
        Runs(path).train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_columns_are_mapped_and_not_held(tmp_path: Path) -> None:
    found = kept_tokens(tmp_path, KEY, giving(ROWS))
    assert found.rows.tensors(0)[0].dtype is torch.int64
    maps = Path("/proc/self/maps").read_text()
    assert all(str(tmp_path / KEY / name) in maps for name in ("tokens", "weights"))


# Conversations that are not held: a survey knows of them what reading them says

ROW = st.builds(
    lambda prompt, source: {"prompt": prompt, "completion": "c"} | ({} if source is None else {"source": source}),
    st.sampled_from(["a", "b", "ü c", "d\n"]),
    st.sampled_from([None, "s", "t"]),
)
FILES = st.lists(st.lists(ROW, min_size=1, max_size=7), min_size=1, max_size=3)


def files_of(folder: Path, files: Sequence[Sequence[dict[str, Any]]]) -> list[Path]:
    paths = []
    for number, rows in enumerate(files):
        lines = ["\n" * (place % 2) + json.dumps(each) + "\n" for place, each in enumerate(rows)]
        paths.append(folder / f"{number}.jsonl")
        paths[-1].write_text("".join(lines))
    return paths


@given(FILES, st.integers(1, 3), st.builds(RowSelection, st.just(True), st.none() | st.integers(1, 9)))
def test_a_survey_says_what_the_rows_say(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[dict[str, Any]]], at_once: int, selection: RowSelection
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    paths = files_of(folder, [[{"prompt": "no answer"}, *rows] for rows in files])
    held = read_conversations(*paths, selection=selection)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surveyed, "_ROWS_AT_ONCE", at_once)
        everyone = [Surveys(None, writes=False), *[Surveys(folder / "cache", writes=True)] * 2]
        found = [each.of(paths, selection) for each in everyone]
        assert everyone[-1].of(paths, RowSelection(True, 1)).ids == (0,)
    for known in found:
        assert (known.digest, known.form, known.ids, known.source) == (held.digest, held.form, held.ids, held.source)
        assert held.origins is not None
        assert [known.origins.where(id_) for id_ in held.ids] == [held.origins.where(id_) for id_ in held.ids]
        assert known.origins.sizes == held.origins.sizes
        assert (list(known.origins.skipped), known.origins.notes) == (list(held.origins.skipped), held.origins.notes)
        assert [known.source_of(id_) for id_ in held.ids] == [held.source_of(id_) for id_ in held.ids]
        assert [each.messages for each in known.rows] == [each.messages for each in held.rows]
        part = held.ids[::-2]
        assert known.subset(part).texts() == held.subset(part).texts()
        assert known.subset(part).fingerprints() == held.subset(part).fingerprints()
        assert repeated_texts(known) == len(held) - len(set(held.texts()))
        assert shared_texts(known, held.subset(part)) == len(part)
        assert known.told(part[0]) == held.told(part[0])
        assert known.told(len(held)) is None
        with pytest.raises(KeyError):
            known.subset([len(held)])


def test_a_survey_finds_all_that_is_wrong(tmp_path: Path) -> None:
    paths = files_of(tmp_path, [[{"prompt": "a", "completion": ""}, {"prompt": "b"}], [{"prompt": "c"}]])
    with pytest.raises(InputError) as said:
        read_conversations(*paths)
    for known in (Surveys(None, writes=False), Surveys(tmp_path / "cache", writes=True)):
        with pytest.raises(InputError) as caught:
            known.of(paths)
        assert caught.value.problems == said.value.problems
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_rows_that_change_between_two_looks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = files_of(tmp_path, [[{"prompt": "a", "completion": "b"}]])
    known = Surveys(tmp_path / "cache", writes=True).of([path])
    path.write_text(json.dumps({"prompt": "a", "completion": "c"}) + "\n")
    with pytest.raises(InputError, match="has changed while it was read"):
        list(known.rows)

    def meanwhile(*given: Any) -> Any:
        found = surveyed.survey(*given)
        path.write_text(json.dumps({"prompt": "a", "completion": "d"}) + "\n")
        return found

    monkeypatch.setattr(surveys, "survey", meanwhile)
    with pytest.raises(InputError, match="has changed while it was read"):
        Surveys(tmp_path / "cache", writes=True).of([path])


@pytest.mark.parametrize("packing", [False, True])
def test_conversations_that_only_the_tokenizer_shows_to_be_useless_are_in_no_batch(
    tmp_path: Path, packing: bool
) -> None:
    rows = [{"prompt": "x" * (200 if place % 5 == 3 else 5), "completion": str(place)} for place in range(30)]
    (path, other) = files_of(tmp_path, [rows[:20], rows[20:]])
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:5]))
    files = json.dumps([{"path": str(path), "weight": 2}, str(other)])
    said = [f"data.train={files}", f"data.eval={held_out}", f"training.packing={json.dumps(packing)}"]
    with pytest.raises(InputError, match="to skip such rows: --set"):
        prepare(load_config(None, said))
    config = load_config(None, [*said, "data.bad_rows=skip"])
    for material in (prepare(config), prepare(config, tmp_path / "cache"), prepare(config, tmp_path / "cache")):
        useless = {place for place in range(30) if place % 5 == 3}
        used = [row for id_ in material.plan.ids for row in (material.task.rows_of(id_) if packing else [id_])]
        times = Counter(material.rows.row_of(id_) for id_ in used)
        assert {*times} | {*material.rows.validation_ids} == {*range(30)} - useless
        assert packing or all(times[place] == 2 for place in times if place < 20)
        assert material.evaluation_ids == (0, 1, 2, 4)
        assert len(material.unusable) == len(useless) + 1
    (path.parent / "0.jsonl").write_text(json.dumps(rows[3]) + "\n" + json.dumps(rows[8]) + "\n")
    with pytest.raises(InputError, match="no row that can be used is left to train on"):
        prepare(load_config(None, [f"data.train={path}", "data.bad_rows=skip", "data.validation_fraction=0.5"]))
