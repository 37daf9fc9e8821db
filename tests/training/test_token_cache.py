"""The token file: what the rows say, made once by one process, and never trusted if it is damaged."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from andon.config.load import load_config
from andon.console.messages import Exit, InputError
from andon.data.chat import EncodedRow, Encoding, encode_each
from andon.data.conversations import read_conversations
from andon.data.origins import ALL_ROWS, RowSelection
from andon.data.rows import TextRows, repeated_texts, shared_texts
from andon.data.tokens import byte_tokenizer
from andon.run.folder import RunFolder
from andon.tasks.text import EncodedRows
from andon.training import start, token_cache
from andon.training.material import prepare
from andon.training.rows import read_rows, task_of_run, with_task
from andon.training.token_cache import COLUMNS, TokenisedConversations, encoded_texts, tokenised
from tests.model.tiny import CPU
from tests.support.ranks import run_ranks
from tests.training.runs import Runs, outcome, row

TOKENS = byte_tokenizer(begins=True)


def files_of(folder: Path, files: Sequence[Sequence[dict[str, Any]]]) -> list[Path]:
    paths = []
    for number, rows in enumerate(files):
        lines = ["\n" * (place % 2) + json.dumps(each) + "\n" for place, each in enumerate(rows)]
        paths.append(folder / f"{number}.jsonl")
        paths[-1].write_text("".join(lines))
    return paths


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (found,) = files_of(tmp_path, [[{"prompt": text, "completion": "c" * 9} for text in ("a", "b", "long " * 7)]])
    return found


def made(path: Path, folder: Path | None, **values: Any) -> TokenisedConversations:
    selection = values.pop("selection", ALL_ROWS)
    given = {"max_length": 40, "train_on": "assistant"} | values
    return tokenised(folder, [path], selection, TOKENS, **given)


def ids_of(found: TokenisedConversations) -> list[list[int]]:
    return [found.tokens.row(place).ids.tolist() for place in found.ids]


def never(*_: object, **__: object) -> Any:
    raise AssertionError("they are read or made again")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


@pytest.mark.parametrize("name", [*COLUMNS, "index.json"])
@pytest.mark.parametrize("harm", [flip, linked, Path.unlink, lambda path: os.truncate(path, path.stat().st_size - 2)])
def test_what_is_damaged_is_made_again(
    path: Path, tmp_path: Path, name: str, harm: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cache"
    wanted = ids_of(made(path, folder))
    (key,) = (each for each in folder.iterdir() if each.is_dir())
    harm(key / name)
    assert ids_of(made(path, folder)) == wanted
    assert f"the cache in {key} cannot be used and is built again" in capfd.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "encode_each", never)
        assert ids_of(made(path, folder)) == wanted


def killed_while_it_encodes(path: Path, folder: Path) -> None:
    def end(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    token_cache.columns_of = end  # type: ignore[assignment]
    made(path, folder)


def test_a_writer_that_is_killed_leaves_nothing_that_is_used(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    (ended,) = run_ranks(1, killed_while_it_encodes, path, folder)
    assert isinstance(ended.error, ChildProcessError)
    (half,) = (each for each in folder.iterdir() if each.is_dir())
    assert ids_of(made(path, folder)) == ids_of(made(path, None))
    assert not half.exists()


def made_at_once(path: Path, folder: Path) -> tuple[list[list[int]], bool]:
    calls, usual = [], token_cache.encode_each

    def encode(*given: Any, **named: Any) -> Encoding:
        calls.append(True)
        return usual(*given, **named)

    token_cache.encode_each = encode
    torch.distributed.barrier()
    return ids_of(made(path, folder)), bool(calls)


def test_of_several_processes_at_once_one_makes_them(path: Path, tmp_path: Path) -> None:
    told = [each.get() for each in run_ranks(3, made_at_once, path, tmp_path / "cache")]
    assert [ids for ids, _ in told] == [ids_of(made(path, None))] * 3
    assert sum(made for _, made in told) == 1


@pytest.mark.parametrize("other", ["file", "max_length", "train_on", "selection", "tokenizer", "code", "libraries"])
def test_the_key_is_of_all_that_tokens_depend_on(
    path: Path, tmp_path: Path, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, values = tmp_path / "cache", {"max_length": 41, "train_on": "all", "selection": RowSelection(limit=2)}
    patches = {"tokenizer": (TOKENS, "digest"), "code": (token_cache, "source_digest")}
    patches["libraries"] = (token_cache, "_LIBRARIES")
    made(path, folder)
    if other == "file":
        path.write_text(path.read_text() + "\n")
    elif other in patches:
        monkeypatch.setattr(*patches[other], {"tokenizer": "other", "code": str, "libraries": ()}[other])
    made(path, folder, **({other: values[other]} if other in values else {}))
    assert len([each for each in folder.iterdir() if each.is_dir()]) == 2


def test_on_all_cores_the_file_is_the_same(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{place}" * (place % 7 + 1), "completion": "c" * (place % 60)} for place in range(1, 40)]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    monkeypatch.setattr(token_cache, "_BATCHES_ALONE", 1)
    monkeypatch.setattr("andon.data.chat._AT_ONCE", 3)
    skipping = RowSelection(skip_bad=True)
    several = made(path, None, selection=skipping)
    monkeypatch.setattr(token_cache, "on_all_cores", map)
    alone = made(path, None, selection=skipping)
    assert several.encoding == alone.encoding
    assert [several.tokens.row(id_) for id_ in several.ids] == [alone.tokens.row(id_) for id_ in alone.ids]


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
    monkeypatch.setattr(token_cache, "encode_each", never)
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


def test_nothing_stays_of_rows_that_cannot_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    rows = [{"prompt": "p" * 200, "completion": "q"}, {"prompt": "a", "completion": "b"}]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    with pytest.raises(ValueError, match=r"talk.jsonl:1: no token of it would be trained"):
        Runs(path).train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_columns_are_mapped_and_not_held(path: Path, tmp_path: Path) -> None:
    found = made(path, tmp_path / "cache")
    assert found.tokens.tensors(0)[0].dtype is torch.int64
    maps = Path("/proc/self/maps").read_text()
    assert all(re.search(rf"{tmp_path}/cache/\w+/{name}", maps) for name in ("tokens", "weights"))


ROW = st.builds(
    lambda prompt, source: {"prompt": prompt, "completion": "c"} | ({} if source is None else {"source": source}),
    st.sampled_from(["a", "b", "ü c", "d\n"]),
    st.sampled_from([None, "s", "t"]),
)
FILES = st.lists(st.lists(ROW, min_size=1, max_size=7), min_size=1, max_size=3)


@given(FILES, st.integers(1, 3), st.builds(RowSelection, st.just(True), st.none() | st.integers(1, 9)))
def test_a_token_file_says_what_the_rows_say(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[dict[str, Any]]], at_once: int, selection: RowSelection
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    paths = files_of(folder, [[{"prompt": "no answer"}, *rows] for rows in files])
    held = read_conversations(*paths, selection=selection)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "_ROWS_AT_ONCE", at_once)
        known = tokenised(folder / "cache", paths, selection, TOKENS, max_length=40, train_on="assistant")
    rows: list[EncodedRow] = []
    assert known.encoding == encode_each(TOKENS, held.form, held.rows, 40, "assistant", rows.append)
    assert [known.tokens.row(id_) for id_ in known.ids] == rows
    assert (known.digest, known.form, known.ids, known.source) == (held.digest, held.form, held.ids, held.source)
    assert held.origins is not None
    assert [known.origins.where(id_) for id_ in held.ids] == [held.origins.where(id_) for id_ in held.ids]
    assert known.origins.sizes == held.origins.sizes
    assert (list(known.origins.skipped), known.origins.notes) == (list(held.origins.skipped), held.origins.notes)
    assert known.sources == held.sources
    part = held.ids[::-2]
    assert known.subset(part).fingerprints() == held.subset(part).fingerprints()
    assert len(repeated_texts(known)) == len(held) - len(set(held.texts()))
    assert shared_texts(known, held.subset(part)) == len(part)


def test_the_pass_finds_all_that_is_wrong(tmp_path: Path) -> None:
    rows = [[{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}], [{"prompt": "c"}]]
    paths = files_of(tmp_path, rows)
    with pytest.raises(InputError) as said:
        read_conversations(*paths)
    for folder in (None, tmp_path / "cache"):
        with pytest.raises(InputError) as caught:
            tokenised(folder, paths, ALL_ROWS, TOKENS, max_length=40, train_on="assistant")
        assert caught.value.problems == said.value.problems
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_change_while_reading_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(*given: Any, **named: Any) -> Encoding:
        path.write_text(path.read_text() + "\n")
        return encode_each(*given, **named)

    monkeypatch.setattr(token_cache, "encode_each", meanwhile)
    with pytest.raises(InputError, match="has changed while it was read"):
        made(path, tmp_path / "cache")


def test_a_change_before_ranks_read_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ranks after their launch, and by the command before it."""
    config = load_config(None, [f"data.train={path}", f"run.dir={tmp_path / 'run'}"])
    payload = start.payload_of(config, tmp_path / "run", 0.0)
    path.write_text(path.read_text() * 2)
    with pytest.raises(InputError, match="has changed while it was read; start again"):
        start.train_rank(json.loads(json.dumps(payload)))
    monkeypatch.setattr(start, "is_tokenised_as_read", lambda _: bool(path.write_text(path.read_text() * 2)))
    with pytest.raises(InputError, match="has changed while it was read; start again"):
        start.start(config, 0.0)


@pytest.mark.parametrize("packing", [False, True])
def test_conversations_that_the_tokenizer_shows_to_be_useless_are_in_no_batch(tmp_path: Path, packing: bool) -> None:
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
    with pytest.raises(InputError, match="no usable row is left to train on"):
        prepare(load_config(None, [f"data.train={path}", "data.bad_rows=skip", "data.validation_fraction=0.5"]))


@pytest.mark.parametrize("task", ["classification", "multi-label", "regression", "token-classification"])
def test_rows_and_tokens_of_another_process_are_the_same_and_open_no_file(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = {"multi-label": lambda n: ["ü", "b"][: n % 3], "regression": lambda n: n / 3}.get(
        task, "abababab".__getitem__
    )
    rows: list[dict[str, Any]] = [{"text": f"ü {n}\n", "other": "o", "label": label(n)} for n in range(8)]
    if task == "token-classification":
        rows = [{"tokens": ["a", "b"][: n % 2 + 1], "tags": ["X", "O"][: n % 2 + 1]} for n in range(8)]
    paths = files_of(tmp_path, [rows[:5], rows[5:]])
    more = ["data.text_pair_column=other"] if task == "classification" else []
    config = load_config(None, [f"data.train={json.dumps([*map(str, paths)])}", f"task={task}", *more])
    read = read_rows(config)
    read_rows(config, folder=tmp_path / "cache", known=read)
    with monkeypatch.context() as patch:
        patch.setattr("andon.data.formats.numbered_lines", never)
        found = read_rows(config, folder=tmp_path / "cache")
    assert (found, found.digest) == (read, read.digest)
    assert [found.where(id_) for id_ in found.train_ids] == [read.where(id_) for id_ in read.train_ids]
    assert isinstance(read.train, TextRows)
    tokenizer, other = byte_tokenizer(), byte_tokenizer()
    for used in (tokenizer, other):
        stored = encoded_texts(tmp_path / "cache", read.train, used, 4)
        other.encode = never  # type: ignore[method-assign]
    held = encoded_texts(None, read.train, tokenizer, 4)
    assert [[*map(list, each)] for each in (stored.tokens, stored.firsts)] == [held.tokens, held.firsts]
    batches = [EncodedRows(each.tokens, None, pad_id=0, vocab_size=260).load([0, 7], CPU) for each in (stored, held)]
    assert all(torch.equal(one, batches[1][name]) for name, one in batches[0].items())
    assert {one.dtype for one in batches[0].values()} == {torch.int64}
    assert (stored.cut, stored.types, other.truncated) == (held.cut, held.types, len(held.cut))
    paths[0].write_text(paths[0].read_text() + "\n")
    with pytest.raises(InputError, match="has changed while it was read"):
        read_rows(config, folder=tmp_path / "cache", known=read)


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.jsonl"])
def test_a_file_is_opened_once_to_find_its_task_and_to_read_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = {"rows.csv": ",", "rows.tsv": "\t"}
    lines = [mark[name].join(row) for row in (("text", "label"), ("a", "x"), ("b", "y"))] if name in mark else []
    lines = lines or ['{"text": "a", "label": ["x"]}', '{"text": "b", "label": ["y"]}']
    path = tmp_path / name
    path.write_text("\n".join(lines))
    config = load_config(None, [f"data.train={path}"])
    opened: list[Path] = []
    opens = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *args, **how: opened.append(self) or opens(self, *args, **how))
    assert task_of_run(config) == ("classification" if name in mark else "multi-label")
    assert len(read_rows(with_task(config)).train) == 2
    assert opened == [path], "detected and read through one handle"
    path.write_text("\n".join([*lines, lines[-1]]))
    assert task_of_run(config) != "sft"
    path.write_text("\n".join([*lines, lines[-1], lines[-1]]))
    assert len(read_rows(config).train) == 4
