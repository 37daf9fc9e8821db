"""Ledgers as evidence: every claim that they alone can decide, and what a run folder adds to them.

Where a run folder is given, its configuration gives the schedule, and its checkpoints and summary quote the ledger.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from andon.console.messages import InputError, Problem, command_line
from andon_falsify.checkers import CLAIMS, chain_intact, resume_equal, same_everywhere
from andon_falsify.claims.evidence import SCRIPT, Evidence
from andon_falsify.claims.statements import HEADS
from andon_falsify.claims.table import judged_by
from andon_falsify.history import Event, History, Unread, read_history
from andon_falsify.verdict import (
    Claim,
    Counterexample,
    Verdict,
    conclude,
    judge,
    merge,
    not_applicable,
    repeatable,
    unknown,
)

if TYPE_CHECKING:
    from andon.config.schema import Config

ALL: tuple[Claim, ...] = (*CLAIMS, HEADS)
"""Every claim that is said something of."""
_TOGETHER = (same_everywhere.CLAIM.name, resume_equal.CLAIM.name)
"""What all ledgers decide at once."""
_MADE_OF = {"data": "data", "base": "base model"}
"""What a job is made of besides its settings: the digests of a first line, and what they are called."""
_MOST_BYTES = 1 << 26
_DIGITS = 16
_DIGEST = re.compile(f"[0-9a-f]{{{_DIGITS}}}")


@dataclass(frozen=True)
class RecordedRun:
    """One ledger, with the run folder that it lies in where there is one."""

    path: Path
    history: History
    folder: Path | None

    def config(self) -> Config | None:
        """The configuration that lies in the folder, None where there is none. Raises `InputError`."""
        path = None if self.folder is None else self.folder / "config.yaml"
        if path is None or not path.exists():
            return None
        from andon.config.load import load_config

        if path.is_symlink():
            raise InputError([Problem(str(path), "is a link; put what it leads to in its place")])
        return load_config(path)

    def settings(self) -> Mapping[str, object]:
        """The configuration by dotted key; empty where there is none. Raises `InputError`."""
        config = self.config()
        found = {} if config is None else config.model_dump(mode="json")
        return {
            f"{part}.{key}": each
            for part, keys in found.items()
            if isinstance(keys, dict)
            for key, each in keys.items()
        }

    @property
    def evidence(self) -> Evidence:
        """The account of the accused, which is all that there is."""
        return Evidence(None, self.history, SCRIPT, configuration=self.settings)


def read_run(path: Path) -> RecordedRun:
    """The run at `path`: a folder with a ledger, or a ledger. Raises `OSError` where there is none."""
    folder = path if path.is_dir() else None
    ledger = path / "ledger.jsonl" if folder is not None else path
    if ledger.exists() and not ledger.is_file():  # to open a pipe is to wait for who writes to it
        raise OSError(errno.EINVAL, "is no file, but a pipe or a device", str(ledger))
    if folder is not None and ledger.is_symlink():
        raise OSError(errno.EINVAL, "is a link; put what it leads to in its place", str(ledger))
    return RecordedRun(path, read_history(ledger), folder)


def verify(runs: Sequence[RecordedRun]) -> tuple[Verdict, ...]:
    """One verdict for each claim of `ALL`, over all `runs`."""
    evidence = [run.evidence for run in runs]
    apart = next(filter(None, (_another_job(runs[0], run) for run in runs[1:])), "")
    command = command_line("andon", "verify", *(run.path for run in runs))
    found = []
    for claim in ALL:
        if claim is HEADS:
            verdict = merge(_named(judge(claim, _heads, run), run, runs) for run in runs)
        elif claim.name in _TOGETHER and apart:
            verdict = unknown(claim, f"not comparable: {apart}")
        elif claim.name in _TOGETHER:
            together = replace(evidence[0], others={"elsewhere": tuple(evidence[1:])})
            verdict = judged_by(claim, together)
        else:
            each = (judged_by(claim, one) for one in evidence)
            verdict = merge(_named(verdict, run, runs) for verdict, run in zip(each, runs, strict=True))
        found.append(repeatable(verdict, None, command))
    return tuple(found)


def _another_job(first: RecordedRun, other: RecordedRun) -> str:
    """How `other` is no run of the job of `first`: other settings, data or base model; "" where nothing says so."""
    starts = first.history.start, other.history.start
    if starts[0] is None or starts[1] is None:
        return ""
    ours, theirs = (start.fields for start in starts if start is not None)
    found = _other_settings(first, other) if ours.get("identity") != theirs.get("identity") else []
    for name, called in _MADE_OF.items():
        held = [_digest(fields, name) for fields in (ours, theirs)]
        if None not in held and held[0] != held[1]:
            found.append(called)
    return f"{other.path} is of another job than {first.path}, with other {', '.join(found)}" if found else ""


def _other_settings(first: RecordedRun, other: RecordedRun) -> list[str]:
    """The settings by which two runs differ, by key that both configurations have. Devices are compared elsewhere."""
    from andon.config.load import differences, identity

    try:
        configs = [run.config() for run in (first, other)]
    except InputError:
        configs = [None]
    known = [identity(config) for config in configs if config is not None]
    if len(known) < 2:
        return ["settings"]
    return [key for key, *_ in differences(known[0], known[1]) if key != "run.device_kind"]


def _digest(fields: Mapping[str, object], name: str) -> object:
    held = fields.get("digests")
    return held.get(name) if isinstance(held, Mapping) else None


def _named(verdict: Verdict, run: RecordedRun, runs: Sequence[RecordedRun]) -> Verdict:
    if len(runs) == 1 or not verdict.counterexamples:
        return verdict
    named = tuple(replace(each, where=f"{run.path}, {each.where}") for each in verdict.counterexamples)
    return replace(verdict, counterexamples=named)


def recorded_violations(run: RecordedRun) -> tuple[str, ...]:
    """Each finding that the ledger of `run` tells of, as `a violation: gradients-agree at step 2 on rank 1, warned`.

    A claim may hold all the same, as `halt-together` does where all ranks halted for it: no verdict says these. What
    was taken back for one is told after it.
    """
    said = {"violation": _broken, "retraction": _retracted}
    return tuple(said[event.kind](event) for event in run.history.events if event.kind in said)


def unfinished(run: RecordedRun) -> str:
    """Where the ledger of `run` stops, if that is not the end of the run; empty if it is, or has no first line."""
    last = run.history.events[-1] if run.history.events else None
    if last is None or run.history.runs[-1].finished:
        return ""
    done, planned = max(run.history.trajectory, default=0), run.history.plan.steps
    how = f"ended with {last.fields.get('reason')}" if last.kind == "end" else "without an end in its ledger"
    return f"is not finished: {done} of {planned} steps, {how}" if planned else f"is not finished: {done} steps, {how}"


def _broken(event: Event) -> str:
    found = event.fields
    ranks = found.get("ranks")
    named = f" on rank {', '.join(map(str, ranks))}" if isinstance(ranks, Sequence) and ranks else ""
    at = f"at step {event.step}" if event.step else "outside a step"
    action = found.get("action") or "raised"
    kind = "a suspicion" if action == "suspected" else "a violation"
    return f"{kind}: {found.get('clause')} {at}{named}, {action}"


def _retracted(event: Event) -> str:
    steps = f"steps {(event.step or 0) + 1} to {event.fields.get('last')}"
    return f"a retraction: {steps} no longer count, for {event.fields.get('clause')}"


def _heads(run: RecordedRun) -> Verdict:
    """What the folder quotes of the ledger against its lines, and what the ledger quotes against the folder's files."""
    if run.folder is None:
        return not_applicable(HEADS, "a ledger alone is quoted by nothing")
    lines = enumerate(run.history.lines(), start=1)
    digests = {number: line.digest for number, line in lines if not (isinstance(line, Unread) and line.torn)}
    found, checked = [], 0
    for place, count, digest in quoted(run.folder):
        checked += 1
        seen = digests.get(count, "no such line") if count else chain_intact.NO_LINE
        if seen != digest:
            found.append(Counterexample(f"{place} quotes another line {count}", f"line {count}", digest, seen))
    quotes = [event for event in run.history.of_kind("eval") if event.fields.get("confusion") is not None]
    checked += len(quotes)
    found += [wrong for event in quotes for wrong in _other_matrix(run.folder, event)]
    return conclude(HEADS, checked, found) if checked else not_applicable(HEADS, "no checkpoint and no summary yet")


def quoted(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Each (file, count of lines, digest of the last) that a checkpoint's manifest or the summary says."""
    for path in [*sorted(folder.glob("checkpoints/step-*/manifest.json")), folder / "summary.json"]:
        if path.exists():
            try:
                head = json.loads(_bytes_of(path))["ledger"]
                quote = int(head["count"]), str(head["digest"])
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                msg = f"{path} says nothing of the ledger: {error}"
                raise ValueError(msg) from error
            yield str(path.relative_to(folder)), *quote


def _other_matrix(folder: Path, event: Event) -> Iterator[Counterexample]:
    """Where the file of the confusion matrix that an evaluation quotes is not what the evaluation says."""
    quote, where = str(event.fields["confusion"]), f"line {event.line}, after step {event.step}"
    if not _DIGEST.fullmatch(quote):
        msg = f"line {event.line} quotes a confusion matrix by {quote[:_DIGITS]!r}, which is no digest"
        raise ValueError(msg)
    path = folder / "confusion" / f"{quote}.json"
    name = str(path.relative_to(folder))
    if not path.exists():
        yield Counterexample(f"{name}, the confusion matrix, is not there", where, quote, "no such file")
        return
    data = _bytes_of(path)
    seen = hashlib.sha256(data).hexdigest()[:_DIGITS]
    if seen != quote:
        yield Counterexample(f"{name} is not the confusion matrix that was quoted", where, quote, seen)
        return
    cells = json.loads(data)["cells"]
    rows = sum(count for _, _, count in cells)
    if rows != event.fields.get("rows"):
        yield Counterexample(
            f"{name} has other rows than the evaluation", where, str(event.fields.get("rows")), str(rows)
        )
    right = sum(count for actual, predicted, count in cells if actual == predicted)
    scores = event.fields.get("scores")
    told = scores.get("accuracy") if isinstance(scores, Mapping) else None
    share = right / rows if rows else 0.0
    if isinstance(told, Mapping) and told.get("hex") != share.hex():
        what = f"{name} gives another accuracy than the evaluation"
        yield Counterexample(what, where, str(told.get("value")), f"{share:.9g} ({right} of {rows})")


def _bytes_of(path: Path) -> bytes:
    """What the file holds: a pipe, which has no end, and a link, which leads anywhere, are none of a run's files."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        msg = f"{path} is a link, no regular file, or longer than {_MOST_BYTES} bytes"
        raise ValueError(msg)
    return path.read_bytes()
