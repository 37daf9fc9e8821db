"""Folders from untrusted sources (SECURITY.md): correct ones, and the changes that an attacker makes.

A correct folder is made once. Each case writes it and makes one to three changes. The file outside of the folder must
not be opened, and code in the folder leaves a trace if it is executed.
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
from functools import cache
from pathlib import Path
from typing import Any

import torch

from andon.config.schema import Model
from andon.config.source import quiet_loading
from andon.data.tokens import byte_tokenizer
from andon.model.build import ModelInterface, build_base
from andon.run.checkpoint import save_checkpoint
from andon.run.summary import environment, write_provenance
from andon_contracts.act import Evidence, Scene, with_bundle
from andon_contracts.violation import Finding, Violation

from .mutations import damaged
from .samples import run_files

Files = Mapping[str, bytes]
Change = Callable[[random.Random, Path, Path], object]
"""Changes a file of a folder, its last argument."""
_HUGE = (1 << 40, 1 << 33, 1 << 31)
_SECRET = '{"labels": ["a secret", "another"]}'
_opened: list[str] = []
_watching: list[str] = []


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _watching and isinstance(arguments[0], str | bytes):
        named, flags = os.fsdecode(arguments[0]), arguments[2]
        refused = isinstance(flags, int) and flags & os.O_NOFOLLOW and os.path.islink(named)
        if not refused and os.path.realpath(named) in _watching:
            _opened.append(named)


_listen = cache(lambda: sys.addaudithook(_note_open))


def under_attack(draw: random.Random, folder: Path, files: Files, read: Callable[[], str | None]) -> str:
    """Write attacked `files` into `folder` and read them. Returns what went wrong, as `read` does.

    `folder/../outside.json` must be neither opened nor written. Code of the folder creates `folder/../ran`.
    """
    _listen()
    outside, ran = folder.parent / "outside.json", folder.parent / "ran"
    outside.write_text(_SECRET)
    _attack(draw, folder, files)
    _opened.clear()
    _watching.append(os.path.realpath(outside))
    try:
        wrong = read()
    finally:
        _watching.clear()
    if ran.exists():
        return "code of the folder was run"
    if outside.read_text() != _SECRET:
        return "a file outside of the folder was written"
    return wrong or ("a file outside of the folder was opened" if _opened else "")


def _made(write: Callable[[Path], Path]) -> Callable[[], Files]:
    """Call `write` once, in a temporary folder, and cache the files of the folder that it returns."""

    @cache
    def files() -> Files:
        with tempfile.TemporaryDirectory() as made:
            folder = write(Path(made))
            return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return files


@_made
def model_folder(folder: Path) -> Path:
    tokenizer = byte_tokenizer()
    settings = Model(hidden_size=8, num_attention_heads=2, num_key_value_heads=2)
    model = build_base(
        settings, ModelInterface("classification", ("no", "yes"), tokenizer.vocab_size, tokenizer.pad_id), seed=0
    )
    with quiet_loading():
        model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save(folder)
    (folder / "labels.json").write_text(json.dumps({"labels": ["no", "yes"]}))
    return folder


@_made
def bundle_folder(folder: Path) -> Path:
    """The bundle of two ranks after a violation."""
    finding = Finding("they differ", 4, (1,), "w", (("w", "aa bb"),))
    scene = Scene(world=2, applied=True, last_equal=3, before="they agreed", element="first at [0]")
    for rank in (1, 0):
        tensors = {"weights w": torch.full((2, 3), float(rank)), "b": torch.tensor([1 + rank])}
        evidence = Evidence(folder, rank, 2, lambda: [5, 6], lambda _, held=tensors: iter(held.items()))  # type: ignore[misc]
        with_bundle(Violation.of("replicas-agree", finding), scene, evidence, {})
    return folder / "4"


@_made
def run_folder(folder: Path) -> Path:
    """A finished run: its ledger, configuration, provenance, summary, and a checkpoint."""
    for name, content in run_files().items():
        (folder / name).write_bytes(content)
    digests = dict.fromkeys(("data", "tokenizer", "base", "initial_weights"), "0" * 16)
    write_provenance(folder / "provenance.json", identity="0" * 64, digests=digests, environment=environment(1))
    (folder / "checkpoints").mkdir()
    state = {"progress": {"step": 1}, "identity": {}}
    save_checkpoint(folder / "checkpoints", 1, {"weights/a": torch.ones(3)}, state)
    return folder


class _Code:
    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (self.where,)


def _attack(draw: random.Random, folder: Path, files: Files) -> None:
    """Write `files` into `folder`, with one to three changes to their kinds, places and bytes."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        path = folder / draw.choice(sorted(files))
        change = draw.choice(CHANGES)
        if change is _damage or not path.is_dir():
            if change in _REPLACING:
                path.unlink(missing_ok=True)
            change(draw, path, folder)


def _damage(draw: random.Random, path: Path, _folder: Path) -> None:
    if _plain(path):
        path.write_bytes(damaged(draw, path.read_bytes()))


def _plain(path: Path) -> bool:
    """False if an earlier change made it a file that the fuzzer itself cannot read."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size < _HUGE[-1]


def _link(draw: random.Random, path: Path, folder: Path) -> None:
    outside = folder.parent / "outside.json"
    to = draw.choice((str(outside), os.path.relpath(outside, path.parent), "/dev/zero", "/dev/tty", path.name, "gone"))
    path.symlink_to(to)


def _link_to_pipe(_draw: random.Random, path: Path, _folder: Path) -> None:
    pipe = path.with_name("pipe")
    if not pipe.exists():
        os.mkfifo(pipe)
    path.symlink_to(pipe.name)


def _holes(draw: random.Random, path: Path, _folder: Path) -> None:
    with path.open("wb") as file:
        file.truncate(draw.choice(_HUGE))


def _code(draw: random.Random, path: Path, folder: Path) -> None:
    ran = str(folder.parent / "ran")
    for name in ("evil.py", "adapter/evil.py"):
        if (folder / name).parent.is_dir():
            (folder / name).write_text(f"import os\nos.mkdir({ran!r})\n")
    if path.suffix == ".json" and _plain(path):
        try:
            found = json.loads(path.read_bytes())
        except ValueError:
            return
        if isinstance(found, dict):
            path.write_text(json.dumps(found | draw.choice(_EVIL)))
    elif path.suffix == ".safetensors":
        path.unlink(missing_ok=True)
        path.with_name("pytorch_model.bin").write_bytes(pickle.dumps(_Code(ran)))


_NAMED = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", "evil.T"], "AutoModel": "evil.Model"}
_EVIL: tuple[dict[str, object], ...] = (
    {"auto_map": _NAMED, "model_type": "of_nobody"},
    {"_attn_implementation": "someone/kernel"},
    {"attn_implementation": {"": "someone/kernel"}},
    {"weight_map": {"a": "../outside.json"}},
    {"trust_remote_code": True, "auto_map": _NAMED},
)


def _other_value(draw: random.Random, path: Path, _folder: Path) -> None:
    """Replace one value of a JSON file, at any depth."""
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
    """The setters of all places in a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield functools.partial(value.__setitem__, key)
            yield from _places(inner)


_REPLACING: tuple[Change, ...] = (
    lambda draw, path, folder: None,
    lambda draw, path, folder: os.mkfifo(path),
    lambda draw, path, folder: path.mkdir(),
    *(_link, _link_to_pipe, _holes),
)
"""Changes before which the file is removed."""
CHANGES = (_damage, _damage, _other_value, _other_value, _other_value, *_REPLACING, _code)
