"""Everything that Andon reads from a file, with the permitted answers to a damaged one.

A surface writes one damaged input into an empty folder and lets Andon read it. It returns what went wrong: an error of
another kind than the promised one, or an accepted input that differs from the written one. "" means that all is right.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from andon.config.load import load_config, to_yaml
from andon.config.schema import Config, Model
from andon.console.messages import InputError
from andon.data.chat import EncodedRow, encode_each
from andon.data.conversations import Conversation, ConversationSet, read_conversations
from andon.data.readers import read
from andon.data.rows import DataSet
from andon.data.tokens import Tokenizer, byte_tokenizer, pretrained_tokenizer
from andon.inspection.explain import explain
from andon.inspection.recorded import open_recorded
from andon.inspection.show import overview
from andon.model.adapter import read_labels
from andon.model.build import ModelInterface, build_base
from andon.run import checkpoint as checkpoints
from andon.run.folder import RunFolder
from andon.run.ledger import LedgerError, digested_ledger
from andon.run.summary import read_provenance, read_summary
from andon.training.existing import config_at_hand, progress_text
from andon_contracts.legible import legible_line
from andon_contracts.liveness.store_link import StrictReader
from andon_contracts.record import chain
from andon_falsify.claims.ledgers import read_run, verify
from andon_falsify.report.document import read_json
from andon_falsify.verdict import Outcome

from . import folders, samples
from .folders import under_attack
from .mutations import damaged

Attempt = Callable[[random.Random, Path], str]
_LONGEST = 400


def _written(draw: random.Random, path: Path, content: bytes) -> Path:
    path.write_bytes(damaged(draw, content))
    return path


def _not_named(path: Path, error: Exception) -> str:
    return "" if str(path) in str(error) else "the message does not name the file"


def config(draw: random.Random, folder: Path) -> str:
    """A configuration file: a `Config` that survives writing and reading, or `InputError`."""
    path, again = _written(draw, folder / "config.yaml", to_yaml(Config()).encode()), folder / "again.yaml"
    try:
        found = load_config(path)
    except InputError as error:
        return "" if str(error).strip() else "an empty message"
    again.write_text(to_yaml(found))
    return "" if load_config(again) == found else "read again it is another configuration"


def override(draw: random.Random, _folder: Path) -> str:
    """`--set` on the command line: a `Config`, or `InputError`."""
    key = draw.choice(("optimizer.lr", "training.epochs", "run.devices", "adapter.targets", "model.base", "data"))
    text = damaged(draw, f"{key}={draw.choice(('1e-3', '3', '[0, 1]', 'all-linear', '{a: 1}'))}".encode())
    try:
        load_config(None, [text.decode("utf-8", "surrogateescape")])
    except InputError as error:
        return "" if str(error).strip() else "an empty message"
    return ""


def data(draw: random.Random, folder: Path) -> str:
    """A data file: rows that can be trained on, or `InputError`."""
    name, content = draw.choice(samples.DATA_FILES)
    path = _written(draw, folder / name, content)
    try:
        found = read(DataSet, path)
    except InputError as error:
        return _not_named(path, error)
    if len(found.labels) < 2 or not found.rows:
        return "fewer than two classes, or no rows, were accepted"
    for place, row in enumerate(found.rows):
        if row.id != place or not row.text.strip() or "\x00" in row.text or not 0 <= row.label < len(found.labels):
            return f"row {place} was accepted as {row!r}"
    return ""


def checkpoint(draw: random.Random, folder: Path) -> str:
    """A checkpoint with one file damaged, exchanged, missing or a link, or with an extra file: always rejected."""
    made = torch.Generator().manual_seed(draw.randrange(2**31))
    tensors = {"a": torch.randn(3, 5, generator=made), "b": torch.arange(4, dtype=torch.float64)}
    path = checkpoints.save_checkpoint(folder, 3, tensors, {"progress": {"step": 3}}, (7, "0123456789abcdef"))
    victim = path / draw.choice((checkpoints.TENSORS, checkpoints.STATE, checkpoints.MANIFEST))
    before = victim.read_bytes()
    how = draw.randrange(8)
    if how == 0:
        victim.unlink()
    elif how == 1:
        victim.rename(folder / "elsewhere")
        victim.symlink_to(folder / "elsewhere")
    elif how == 2:
        larger = {name: tensor + 1 for name, tensor in tensors.items()}
        other = checkpoints.save_checkpoint(folder, 4, larger, {"progress": {"step": 4}})
        victim.write_bytes((other / victim.name).read_bytes())
    elif how == 3:
        (path / "stranger").write_bytes(b"")
    elif _written(draw, victim, before).read_bytes() == before:
        return ""
    try:
        checkpoints.load_checkpoint(path)
    except checkpoints.CheckpointError as error:
        return _not_named(path, error)
    return f"{victim.name} was damaged ({how}) and the checkpoint accepted"


def ledger(draw: random.Random, folder: Path) -> str:
    """A ledger: rejected, or the first lines of the original; a changed last line has another head."""
    lines = samples.ledger_lines(draw)
    path = _written(draw, folder / "ledger.jsonl", b"".join(lines))
    try:
        heads = [digest for _, digest in digested_ledger(path)]
    except LedgerError as error:
        return _not_named(path, error)
    count = len(heads)
    kept = [line + b"\n" for line in path.read_bytes().split(b"\n")[:count]]
    if kept == lines[:count]:
        return ""
    same_head = count == len(lines) and heads[-1] == chain(lines[-1].removesuffix(b"\n"))
    return "a changed ledger was accepted with the head of the original" if same_head else ""


def history(draw: random.Random, folder: Path) -> str:
    """A ledger for the checkers: they never fail, and never find that a broken chain `holds`."""
    lines = samples.ledger_lines(draw)
    path = _written(draw, folder / "ledger.jsonl", b"".join(lines))
    verdicts = {verdict.claim: verdict for verdict in verify([read_run(path)])}
    if failed := [verdict.why for verdict in verdicts.values() if "the checker failed" in verdict.why]:
        return failed[0]
    kept = [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]]
    # Nothing follows the last whole line, so the chain does not protect it.
    changed = kept[:-1] != lines[: max(0, len(kept) - 1)]
    return "a broken chain holds" if changed and verdicts["chain-intact"].outcome is Outcome.HOLDS else ""


def summary(draw: random.Random, folder: Path) -> str:
    """A summary: read, or `ValueError`."""
    with contextlib.suppress(ValueError):
        read_summary(_written(draw, folder / "summary.json", samples.summary_file()))
    return ""


def report(draw: random.Random, folder: Path) -> str:
    """A campaign's report: read, or `InputError`."""
    with contextlib.suppress(InputError):
        read_json(_written(draw, folder / "report.json", samples.report_file()))
    return ""


def message(draw: random.Random, _folder: Path) -> str:
    """A value in the ranks' store: parsed, or dropped and counted; never an error in a guard."""
    value, form = draw.choice(samples.messages())
    raw, checked = damaged(draw, value), StrictReader()
    found = checked.read("key", raw, form)
    return "" if (found is None) == (checked.dropped == 1) else "the message was neither read nor counted as dropped"


@cache
def _tokenizer(split_special_tokens: bool) -> Tokenizer:
    """The tokenizers of models recognize special tokens in a text; the byte tokenizer by default does not."""
    tokenizer = byte_tokenizer()
    if not split_special_tokens:
        tokenizer.base.split_special_tokens = False
    return tokenizer


def conversations(draw: random.Random, folder: Path) -> str:
    """A file of conversations: rows with at least one trained token, or `InputError` that names the file."""
    name, content = draw.choice(samples.CONVERSATION_FILES)
    path, tokenizer = _written(draw, folder / name, content), _tokenizer(True)
    try:
        found = read_conversations(path)
        rows = _encoded(tokenizer, found)
    except InputError as error:
        return _not_named(path, error)
    return _fault(found, rows, tokenizer)


def template(draw: random.Random, _folder: Path) -> str:
    """A model's chat template: it trains the answers, or `InputError` without control codes."""
    tokenizer = _tokenizer(False)
    chosen = draw.choice(samples.TEMPLATES)
    tokenizer.base.chat_template = damaged(draw, chosen.encode()).decode("utf-8", "replace")
    data = ConversationSet((Conversation(0, samples.TALK, "rows.jsonl:1"),), "rows.jsonl", "messages")
    try:
        rows = _encoded(tokenizer, data)
    except InputError as error:
        return "" if all(line.isprintable() for line in str(error).split("\n")) else "the message holds control codes"
    (row,) = rows
    answers = [each.content for each in samples.TALK if each.role == "assistant"]
    learned = str(tokenizer.base.decode([id_ for id_, weight in zip(row.ids, row.weights, strict=True) if weight]))
    if row.cut == 0 and not all(answer in learned for answer in answers):
        return f"an answer is not learned: {learned!r}"
    return _fault(data, rows, tokenizer)


def _encoded(tokenizer: Tokenizer, data: ConversationSet) -> list[EncodedRow]:
    rows: list[EncodedRow] = []
    encode_each(tokenizer, data.form, data.rows, _LONGEST, "assistant", rows.append)
    return rows


def _fault(data: ConversationSet, rows: list[EncodedRow], tokenizer: Tokenizer) -> str:
    """What is wrong with encoded rows."""
    if [row.id for row in rows] != [row.id for row in data.rows] or not rows:
        return "other rows were encoded than were read"
    for row in rows:
        if len(row.ids) != len(row.weights) or len(row.ids) > _LONGEST or row.weights[0] != 0.0:
            return f"row {row.id} has {len(row.ids)} ids, {len(row.weights)} weights"
        if not any(row.weights) or not all(0.0 <= weight < math.inf for weight in row.weights):
            return f"row {row.id} has the weights {[*row.weights]}"
        if not all(0 <= id_ < tokenizer.vocab_size for id_ in row.ids):
            return f"row {row.id} has an id that the vocabulary has not"
    return ""


def model_folder(draw: random.Random, folder: Path) -> str:
    """A model's folder: a model with tokenizer and labels, or `InputError`; no access outside, no code executed."""
    inside = folder / "model"

    def read() -> None:
        with contextlib.suppress(InputError):
            labels = read_labels(inside)
            tokenizer = pretrained_tokenizer(str(inside), local_only=True)
            interface = ModelInterface("classification", labels, tokenizer.vocab_size, tokenizer.pad_id)
            build_base(Model(base=str(inside)), interface, seed=0)

    return under_attack(draw, inside, folders.model_folder(), read)


def bundle(draw: random.Random, folder: Path) -> str:
    """A bundle for `andon explain`: lines, or `InputError`."""

    def read() -> None:
        with contextlib.suppress(InputError):
            for line in explain(folder / "bundle"):
                legible_line(line)

    return under_attack(draw, folder / "bundle", folders.bundle_folder(), read)


def run_folder(draw: random.Random, folder: Path) -> str:
    """A run folder for `show`, `verify`, `eval` and a resume: a result, or an error with a message."""
    run = RunFolder(folder / "run")
    readers: tuple[Callable[[], object], ...] = (
        run.state,
        lambda: list(overview(open_recorded(run.path))),
        lambda: read_summary(run.summary),
        lambda: read_provenance(run.provenance),
        lambda: checkpoints.newest_valid(run.checkpoints),
        lambda: config_at_hand(run),
        lambda: progress_text(run),
    )

    def read() -> str:
        for reader in readers:
            with contextlib.suppress(InputError, ValueError):
                reader()
        with contextlib.suppress(InputError, OSError):
            failed = [verdict.why for verdict in verify([read_run(run.path)]) if "the checker failed" in verdict.why]
            unread = ("manifest.json", "summary.json", "config.yaml")  # a claim that needs a missing file says so
            if any(not any(name in why for name in unread) for why in failed):
                return failed[0]
        return ""

    return under_attack(draw, run.path, folders.run_folder(), read)


SURFACES: dict[str, Attempt] = {
    "config": config,
    "--set": override,
    "data file": data,
    "conversations": conversations,
    "chat template": template,
    "checkpoint": checkpoint,
    "ledger": ledger,
    "history": history,
    "summary": summary,
    "model folder": model_folder,
    "bundle": bundle,
    "run folder": run_folder,
    "report": report,
    "message": message,
}
