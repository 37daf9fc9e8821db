"""Folders that may be from anybody (SECURITY.md): right ones by their files, and what an attacker puts in their place.

Each is made once and kept as bytes; a case writes it anew and makes one to three changes. What lies outside of the
folder is a file that nobody may open, and code in the folder leaves a trace where it is run.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from andon.config.schema import Model
from andon.config.source import quiet_loading
from andon.data.tokens import byte_tokenizer
from andon.model.build import ModelInterface, build_base
from andon.run.checkpoint import save_checkpoint
from andon.run.provenance import environment, write_provenance
from andon_contracts.act import Evidence, Scene, with_bundle
from andon_contracts.violation import Finding, Violation

from .mutations import damaged
from .samples import run_files

Files = Mapping[str, bytes]
_HUGE = (1 << 40, 1 << 33, 1 << 31)
_opened: list[str] = []
_watching: list[str] = []


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _watching and isinstance(arguments[0], str | bytes):
        named, flags = os.fsdecode(arguments[0]), arguments[2]
        refused = isinstance(flags, int) and flags & os.O_NOFOLLOW and os.path.islink(named)
        if not refused and os.path.realpath(named) in _watching:
            _opened.append(named)


@cache
def _listen() -> None:
    sys.addaudithook(_note_open)


@contextmanager
def guarded(folder: Path) -> Iterator[Callable[[], str]]:
    """Inside, what is done with `folder` is looked at; what comes says what went wrong, and nothing where all is well.

    Beside the folder stands a file that must not be opened; what is run in it makes `folder/../ran`.
    """
    _listen()
    outside, ran = folder.parent / "outside.json", folder.parent / "ran"
    outside.write_text('{"labels": ["a secret", "another"]}')
    _opened.clear()
    _watching.append(os.path.realpath(outside))

    def wrong() -> str:
        _watching.clear()
        if ran.exists():
            return "code of the folder was run"
        if outside.read_text() != '{"labels": ["a secret", "another"]}':
            return "a file outside of the folder was written"
        return "a file outside of the folder was opened" if _opened else ""

    try:
        yield wrong
    finally:
        _watching.clear()


def _files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@cache
def model_folder() -> Files:
    """A small decoder with its tokenizer and labels."""
    tokenizer = byte_tokenizer()
    settings = Model(hidden_size=8, num_attention_heads=2, num_key_value_heads=2)
    interface = ModelInterface("classification", ("no", "yes"), tokenizer.vocab_size, tokenizer.pad_id)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = build_base(settings, interface, seed=0)
        with quiet_loading():
            model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer.save(folder)
        (folder / "labels.json").write_text(json.dumps({"labels": ["no", "yes"]}))
        return _files_of(folder)


@cache
def bundle_folder() -> Files:
    """What two ranks leave of a violation."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        finding = Finding("they differ", 4, (1,), "w", (("w", "aa bb"),))
        scene = Scene(world=2, applied=True, last_equal=3, before="they agreed", element="first at [0]")
        for rank in (1, 0):
            tensors = {"weights w": torch.full((2, 3), float(rank)), "b": torch.tensor([1 + rank])}
            evidence = Evidence(folder, rank, 2, lambda: [5, 6], lambda _, held=tensors: iter(held.items()))  # type: ignore[misc]
            with_bundle(Violation.of("replicas-agree", finding), scene, evidence, {})
        return _files_of(folder / "4")


@cache
def run_folder() -> Files:
    """A finished run: its ledger, configuration, provenance, summary, and a checkpoint."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, content in run_files().items():
            (folder / name).write_bytes(content)
        digests = dict.fromkeys(("data", "tokenizer", "base", "initial_weights"), "0" * 16)
        write_provenance(folder / "provenance.json", identity="0" * 64, digests=digests, environment=environment(1))
        (folder / "checkpoints").mkdir()
        state = {"progress": {"step": 1}, "identity": {}}
        save_checkpoint(folder / "checkpoints", 1, {"weights/a": torch.ones(3)}, state)
        return _files_of(folder)


class _Code:
    """What a pickle runs where it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (self.where,)

    def __init__(self, where: str) -> None:
        self.where = where


def attacked(draw: random.Random, folder: Path, files: Files) -> None:
    """Write `files` into `folder`, with one to three changes to their kinds, places and bytes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path = folder / draw.choice(sorted(files))
        change = draw.choice(CHANGES)
        if change is _damage or not path.is_dir():
            change(draw, path)


def _damage(draw: random.Random, path: Path) -> None:
    if _plain(path):
        path.write_bytes(damaged(draw, path.read_bytes()))


def _plain(path: Path) -> bool:
    """Whether no change before has made it what the fuzzer itself had better not read."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < _HUGE[-1]


def _gone(draw: random.Random, path: Path) -> None:
    del draw
    path.unlink(missing_ok=True)


def _replaced(path: Path) -> Path:
    path.unlink(missing_ok=True)
    return path


def _top(path: Path) -> Path:
    """The folder above all of the case's files."""
    return next(parent for parent in path.parents if (parent.parent / "outside.json").exists())


def _pipe(draw: random.Random, path: Path) -> None:
    del draw
    os.mkfifo(_replaced(path))


def _folder(draw: random.Random, path: Path) -> None:
    del draw
    _replaced(path).mkdir()


def _link(draw: random.Random, path: Path) -> None:
    outside = _top(path).parent / "outside.json"
    to = draw.choice((str(outside), os.path.relpath(outside, path.parent), "/dev/zero", "/dev/tty", path.name, "gone"))
    _replaced(path).symlink_to(to)


def _link_to_pipe(draw: random.Random, path: Path) -> None:
    del draw
    pipe = path.with_name("pipe")
    if not pipe.exists():
        os.mkfifo(pipe)
    _replaced(path).symlink_to(pipe.name)


def _holes(draw: random.Random, path: Path) -> None:
    with _replaced(path).open("wb") as file:
        file.truncate(draw.choice(_HUGE))


def _code(draw: random.Random, path: Path) -> None:
    top = _top(path)
    ran = str(top.parent / "ran")
    for name in ("evil.py", "adapter/evil.py"):
        if (top / name).parent.is_dir():
            (top / name).write_text(f"import os\nos.mkdir({ran!r})\n")
    if path.suffix == ".json" and _plain(path):
        try:
            found = json.loads(path.read_bytes())
        except ValueError:
            return
        if isinstance(found, dict):
            named = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", "evil.T"], "AutoModel": "evil.Model"}
            added = draw.choice(
                (
                    {"auto_map": named, "model_type": "of_nobody"},
                    {"_attn_implementation": "someone/kernel"},
                    {"attn_implementation": {"": "someone/kernel"}},
                    {"weight_map": {"a": "../outside.json"}},
                    {"trust_remote_code": True, "auto_map": named},
                )
            )
            path.write_text(json.dumps(found | added))
    elif path.suffix == ".safetensors":
        _replaced(path).with_name("pytorch_model.bin").write_bytes(pickle.dumps(_Code(ran)))


def _other_value(draw: random.Random, path: Path) -> None:
    """One value of a JSON file, however deep, is of another kind."""
    if path.suffix != ".json" or not _plain(path):
        return
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    places = list(_places(found))
    if places:
        draw.choice(places)(draw.choice(_ODD))
        path.write_text(json.dumps(found))


_TEXTS = ("", "x" * 5000, "../../outside.json", "../outside.json", "\x1b]0;t\x07", "step-²", "NaN")
_ODD: tuple[object, ...] = (None, True, -1, 0, 10**30, 1e308, [], {}, [[]], {"a": 1}, *_TEXTS)


def _places(value: Any) -> Iterator[Callable[[object], None]]:
    """What puts another value into each of the places of a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield functools.partial(value.__setitem__, key)
            yield from _places(inner)


CHANGES: tuple[Callable[[random.Random, Path], None], ...] = (
    *(_damage, _damage, _other_value, _other_value, _other_value),
    *(_gone, _pipe, _folder, _link, _link_to_pipe, _holes, _code),
)
