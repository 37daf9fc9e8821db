"""Everything that Andon reads from a file, with what it may answer to a damaged one.

A surface writes one damaged input into an empty folder, has it read, and returns what went wrong: an error of another
kind than the promised one, or an input that was accepted and is not what was written. An empty string is fine.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from andon.config.load import load_config, to_yaml
from andon.config.schema import Config, Model
from andon.console.problems import InputError
from andon.data.readers import read
from andon.data.rows import DataSet
from andon.data.tokens import pretrained_tokenizer
from andon.inspection.explain import explain
from andon.inspection.recorded import open_recorded
from andon.inspection.show import overview
from andon.model.adapter import read_labels
from andon.model.build import ModelInterface, build_base
from andon.run.checkpoint import (
    MANIFEST,
    STATE,
    TENSORS,
    CheckpointError,
    load_checkpoint,
    newest_valid,
    save_checkpoint,
)
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerError, digested_ledger
from andon.run.provenance import read_provenance
from andon.run.summary import read_summary
from andon.training.existing import config_at_hand, progress_text
from andon_contracts.legible import legible_line
from andon_contracts.liveness.store_link import StrictReader
from andon_contracts.record import chain
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.report.document import read_json
from andon_falsify.verdict import Outcome

from . import conversations, folders
from .folders import attacked, guarded
from .mutations import damaged
from .samples import DATA_FILES, ledger_lines, messages, report_file, summary_file

Attempt = Callable[[random.Random, Path], str]


@dataclass(frozen=True)
class Surface:
    """One kind of input."""

    name: str
    attempt: Attempt
    prepare: Callable[[], object] = lambda: None
    """What is imported and made once, before the first case: its time is no case's."""


def config(draw: random.Random, folder: Path) -> str:
    """A configuration file: a `Config` that can be written and read again, or `InputError`."""
    path = folder / "config.yaml"
    path.write_bytes(damaged(draw, to_yaml(Config()).encode()))
    try:
        found = load_config(path)
    except InputError as error:
        return "" if str(error).strip() else "an empty message"
    again = folder / "again.yaml"
    again.write_text(to_yaml(found))
    return "" if load_config(again) == found else "read again it is another configuration"


def override(draw: random.Random, folder: Path) -> str:
    """`--set` on the command line: a `Config`, or `InputError`."""
    del folder
    key = draw.choice(("optimizer.lr", "training.epochs", "run.devices", "adapter.targets", "model.base", "data"))
    text = damaged(draw, f"{key}={draw.choice(('1e-3', '3', '[0, 1]', 'all-linear', '{a: 1}'))}".encode())
    try:
        load_config(None, [text.decode("utf-8", "surrogateescape")])
    except InputError as error:
        return "" if str(error).strip() else "an empty message"
    return ""


def data(draw: random.Random, folder: Path) -> str:
    """A data file: rows that can be trained on, or `InputError`."""
    name, content = draw.choice(DATA_FILES)
    path = folder / name
    path.write_bytes(damaged(draw, content))
    try:
        found = read(DataSet, path)
    except InputError as error:
        return "" if str(path) in str(error) else "the message does not name the file"
    if len(found.labels) < 2 or not found.rows:
        return "fewer than two classes, or no rows, were accepted"
    for place, row in enumerate(found.rows):
        if row.id != place or not row.text.strip() or "\x00" in row.text or not 0 <= row.label < len(found.labels):
            return f"row {place} was accepted as {row!r}"
    return ""


def checkpoint(draw: random.Random, folder: Path) -> str:
    """A checkpoint with one file damaged, exchanged, gone, a link, or beside a stranger: refused, always."""
    made = torch.Generator().manual_seed(draw.randrange(2**31))
    tensors = {"a": torch.randn(3, 5, generator=made), "b": torch.arange(4, dtype=torch.float64)}
    path = save_checkpoint(folder, 3, tensors, {"progress": {"step": 3}}, (7, "0123456789abcdef"))
    victim = path / draw.choice((TENSORS, STATE, MANIFEST))
    before = victim.read_bytes()
    how = draw.randrange(8)
    if how == 0:
        victim.unlink()
    elif how == 1:
        moved = folder / "elsewhere"
        victim.rename(moved)
        victim.symlink_to(moved)
    elif how == 2:
        other = save_checkpoint(folder, 4, {name: t + 1 for name, t in tensors.items()}, {"progress": {"step": 4}})
        victim.write_bytes((other / victim.name).read_bytes())
    elif how == 3:
        (path / "stranger").write_bytes(b"")
    else:
        victim.write_bytes(damaged(draw, before))
        if victim.read_bytes() == before:
            return ""
    try:
        load_checkpoint(path)
    except CheckpointError as error:
        return "" if str(path) in str(error) else "the message does not name the file"
    return f"{victim.name} was damaged ({how}) and the checkpoint accepted"


def ledger(draw: random.Random, folder: Path) -> str:
    """A ledger: refused, or the lines of the original as far as they go; a changed last line has another head."""
    lines = ledger_lines(draw)
    path = folder / "ledger.jsonl"
    path.write_bytes(damaged(draw, b"".join(lines)))
    try:
        heads = [digest for _, digest in digested_ledger(path)]
    except LedgerError as error:
        return "" if str(path) in str(error) else "the message does not name the file"
    count = len(heads)
    kept = [line + b"\n" for line in path.read_bytes().split(b"\n")[:count]]
    if kept == lines[:count]:
        return ""
    same_head = count == len(lines) and heads[-1] == chain(lines[-1].removesuffix(b"\n"))
    return "a changed ledger was accepted with the head of the original" if same_head else ""


def history(draw: random.Random, folder: Path) -> str:
    """A ledger as the checkers read it: never an error, and never `holds` of a chain that is broken."""
    lines = ledger_lines(draw)
    path = folder / "ledger.jsonl"
    path.write_bytes(damaged(draw, b"".join(lines)))
    verdicts = {verdict.claim: verdict for verdict in verify([read_run(path)])}
    failed = [verdict.why for verdict in verdicts.values() if "the checker failed" in verdict.why]
    if failed:
        return failed[0]
    kept = [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]]
    intact = verdicts["chain-intact"].outcome is Outcome.HOLDS
    # The last whole line is linked by nothing after it.
    if intact and kept[:-1] != lines[: max(0, len(kept) - 1)]:
        return "a broken chain holds"
    return ""


def summary(draw: random.Random, folder: Path) -> str:
    """A summary: read, or `ValueError`."""
    path = folder / "summary.json"
    path.write_bytes(damaged(draw, summary_file()))
    with contextlib.suppress(ValueError):
        read_summary(path)
    return ""


def model_folder(draw: random.Random, folder: Path) -> str:
    """A model's folder: a model with its tokenizer and labels, or `InputError`; nothing outside opened, no code run."""
    inside = folder / "model"
    with guarded(inside) as wrong:
        attacked(draw, inside, folders.model_folder())
        with contextlib.suppress(InputError):
            labels = read_labels(inside)
            tokenizer = pretrained_tokenizer(str(inside), local_only=True)
            interface = ModelInterface("classification", labels, tokenizer.vocab_size, tokenizer.pad_id)
            build_base(Model(base=str(inside)), interface, seed=0)
        return wrong()


def bundle(draw: random.Random, folder: Path) -> str:
    """A bundle as `andon explain` reads it: lines, or `InputError`."""
    inside = folder / "bundle"
    with guarded(inside) as wrong:
        attacked(draw, inside, folders.bundle_folder())
        with contextlib.suppress(InputError):
            for line in explain(inside):
                legible_line(line)
        return wrong()


def run_folder(draw: random.Random, folder: Path) -> str:
    """A run's folder as `show`, `verify`, `eval` and a resume look at it: each ends in words."""
    inside = folder / "run"
    with guarded(inside) as wrong:
        attacked(draw, inside, folders.run_folder())
        run = RunFolder(inside)
        looks: tuple[Callable[[], object], ...] = (
            run.state,
            lambda: list(overview(open_recorded(inside))),
            lambda: read_summary(run.summary),
            lambda: read_provenance(run.provenance),
            lambda: newest_valid(run.checkpoints),
            lambda: config_at_hand(run),
            lambda: progress_text(run),
        )
        for look in looks:
            with contextlib.suppress(InputError, ValueError):
                look()
        with contextlib.suppress(InputError, OSError):
            failed = [verdict.why for verdict in verify([read_run(inside)]) if "the checker failed" in verdict.why]
            unread = ("manifest.json", "summary.json", "config.yaml")  # a claim that needs one says that it has none
            if any(not any(name in why for name in unread) for why in failed):
                return failed[0]
        return wrong()


def report(draw: random.Random, folder: Path) -> str:
    """A campaign's report: read, or `InputError`."""
    path = folder / "report.json"
    path.write_bytes(damaged(draw, report_file()))
    with contextlib.suppress(InputError):
        read_json(path)
    return ""


def message(draw: random.Random, folder: Path) -> str:
    """A value in the ranks' store: one of its form, or dropped and counted; never an error in a guard."""
    del folder
    value, form = draw.choice(messages())
    raw, checked = damaged(draw, value), StrictReader()
    found = checked.read("key", raw, form)
    return "" if (found is None) == (checked.dropped == 1) else "it was neither read nor counted"


SURFACES: tuple[Surface, ...] = (
    Surface("config", config),
    Surface("--set", override),
    Surface("data file", data),
    Surface("conversations", conversations.conversations, conversations.prepare),
    Surface("chat template", conversations.template, conversations.prepare),
    Surface("checkpoint", checkpoint),
    Surface("ledger", ledger),
    Surface("history", history),
    Surface("summary", summary),
    Surface("model folder", model_folder, folders.model_folder),
    Surface("bundle", bundle, folders.bundle_folder),
    Surface("run folder", run_folder, folders.run_folder),
    Surface("report", report),
    Surface("message", message),
)
