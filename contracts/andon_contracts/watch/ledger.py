"""The ledger of a watched loop: rank 0 writes one line for each update.

It needs no collective: its values are those that the ranks exchange for the checks, and what the loop reported.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from andon_contracts.agree import real_of
from andon_contracts.digest import join
from andon_contracts.fields import Real
from andon_contracts.fingerprint import environment, fingerprint
from andon_contracts.laws.law import Observations, hexadecimal
from andon_contracts.ledger import LedgerError, LedgerFile
from andon_contracts.observe import flat_digest
from andon_contracts.record import (
    WATCH_DIGESTS,
    Broken,
    End,
    Evaluation,
    LineTooLong,
    Plan,
    RankPart,
    Record,
    Resume,
    Saved,
    Start,
    Step,
    StepDigests,
)
from andon_contracts.violation import Halted, Violation
from andon_contracts.watch.judging import say
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.values import layout_digest, text_digest

_WRITER = "watch"
_written: set[Path] = set()
"""The ledgers that watches of this process have begun to write."""


@dataclass(frozen=True)
class UpdateRows:
    """The rows of one update: ids of each rank, contents in the order of `union`, and the place in the epoch."""

    ids: tuple[tuple[int, ...], ...] = ()
    contents: tuple[int, ...] = ()
    epoch: int | None = None
    position: int | None = None

    @property
    def union(self) -> tuple[int, ...]:
        """The ids of all ranks, in order of rank."""
        return tuple(row for part in self.ids for row in part)


def ledger_path(given: str | os.PathLike[str] | None, writer: int) -> Path | None:
    """The path that the watch of this process writes to: `given`, else what the environment names, else None.

    All watches of a script share the environment's name. A later watch of this process gets a numbered name next to a
    ledger that an earlier one has begun. A watch whose rank 0 is another rank `writer` of the world has that rank
    in the name.
    """
    if given is not None:
        return Path(given)
    named = os.environ.get("ANDON_LEDGER")
    if not named:
        return None
    path = Path(named)
    stem = f"{path.stem}-rank{writer}" if writer else path.stem
    path, number = path.with_name(stem + path.suffix), 1
    while path in _written:
        number += 1
        path = path.with_name(f"{stem}-{number}{path.suffix}")
    return path


def open_ledger(path: Path, start: int) -> LedgerFile:
    """Open the ledger at `path` for this process alone.

    A ledger with lines is continued only after `start` > 0 updates or a restart by torch's launcher. Raises
    `ValueError` if it belongs to another run, is damaged, is being written, or the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = LedgerFile(path, exclusive=True)
    except LedgerError as error:
        what = "is another file, or a ledger that was changed; name one that is not there yet; it was left as it is"
        raise ValueError(f"ledger: {path} {what} ({error})") from None
    except BlockingIOError:
        raise ValueError(f"ledger: {path} is being written by another process") from None
    except OSError as error:
        raise ValueError(f"ledger: {path} cannot be written: {error.strerror}") from None
    if file.head[0] and not start and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        file.close()
        raise ValueError(f"ledger: {path} holds a run already; name another, or say start= where this one goes on")
    return file


class Recorder:
    """Writes the lines of one watch.

    If the disk refuses, another program changes the file, or an update has more rows than a line can hold, the ledger
    ends with a warning; the loop goes on.
    """

    def __init__(self, file: LedgerFile | None, subject: ModelProbe, held: Mapping[str, bool]) -> None:
        """file: None writes nothing. held: if all ranks should hold the same "weights", "gradient", "optimizer"."""
        self.lost = ""
        self._file = file
        self._subject = subject
        self._held = held
        self._violations = 0
        self._last: tuple[int, dict[str, str]] = (0, {})

    def opened(self, world: int, optimizers: Sequence[torch.optim.Optimizer], rows: int | None, start: int) -> None:
        """The watch opened after `start` updates: writes a start line, or a resume line if the file has lines."""
        if self._file is None:
            return
        digests = {"weights": hexadecimal(flat_digest(self._subject.trainable.values()))}
        self._last = (start, dict(digests))
        if self._subject.frozen:
            digests["base"] = hexadecimal(flat_digest(self._subject.frozen.values()))
        identity, machine = _origin(self._subject, optimizers)
        again = bool(self._file.head[0])
        if not again:
            plan = Plan(rows=rows, batch_size=None, micro_batches=None, seed=None, epochs=None, steps=None)
            name = Path(sys.argv[0] if sys.argv else "").name or _WRITER
            self._append(Start(name, machine, identity, plan, digests, world, _backend(), _WRITER, WATCH_DIGESTS))
        if again or start:
            torn = self._file.torn if again else 0
            self._append(Resume(start, identity, machine, digests, world, _backend(), "the loop's own", torn))

    def loaded(self, step: int, name: str, world: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The loop loaded a checkpoint and goes on after `step` updates."""
        if self._file is not None:
            digests = {"weights": hexadecimal(flat_digest(self._subject.trainable.values()))}
            identity, machine = _origin(self._subject, optimizers)
            self._append(Resume(step, identity, machine, digests, world, _backend(), name))

    def step(
        self, before: Observations, after: Observations, told: UpdateRows, *, step: int, index: int | None, draws: str
    ) -> None:
        """One update, from the values of all ranks before and after it and the rows that the loop reported.

        draws: the modules that draw random numbers in its forward passes; "" if no module does or nothing was checked.
        """
        if self._file is None:
            return
        reduced = any(o.values["reduced seen"] for o in before)
        skipped = any(o.values["skipped"] for o in before)
        by_rank = {
            "gradient": [hexadecimal(o.values["reduced" if reduced else "gradient"]) for o in before],
            "weights": [hexadecimal(o.values["weights"]) for o in after],
            "optimizer": [hexadecimal(o.values["optimizer"]) for o in after],
        }
        # Ranks that hold different shards have no digest of their own in the line, and one digest together.
        whole = {
            name: digests[0]
            if self._held[name]
            else hexadecimal(join({f"rank {rank}": int(digest, 16) for rank, digest in enumerate(digests)}))
            for name, digests in by_rank.items()
        }
        ranks = []
        for rank in range(len(after)):
            held = {name: digests[rank] if self._held[name] else None for name, digests in by_rank.items()}
            ranks.append(RankPart(rank, (), told.ids[rank] if told.ids else (), **held))
        ids, rows = told.union, sum(o.values["loss rows"] for o in before)
        content = hexadecimal(text_digest(sorted(zip(ids, told.contents, strict=True)))) if told.contents else None
        self._last = (step, {"weights": whole["weights"], "optimizer": whole["optimizer"]})
        self._append(
            Step(
                step=step,
                epoch=told.epoch,
                position=told.position,
                ids=ids,
                count=len(ids) or rows or None,
                lr=Real.of(real_of(before[0].values["rate"])),
                loss=Real.of(sum(real_of(o.values["loss sum"]) for o in before) / rows) if rows else None,
                grad_norm=None if skipped else self._norm(before),
                correct=None,
                world=len(after),
                backend=_backend(),
                digests=StepDigests(content, whole["gradient"], whole["weights"], whole["optimizer"]),
                ranks=tuple(ranks),
                weights_norm=self._norm(after),
                gradient_at=None if reduced else "optimizer",
                optimizer_index=index,
                skipped=skipped or None,
                draws=draws or None,
            )
        )

    def _norm(self, observations: Observations) -> Real:
        return Real.of(self._subject.norm_of_all([real_of(o.values["norm share"]) for o in observations]))

    def violation(self, found: Violation, action: str, applied: bool) -> None:
        self._violations += action != "suspected"
        at = found.finding
        details = dict(at.details)
        self._append(Broken(found.clause, at.step, at.ranks, at.tensor, at.seen, details, action, applied or None))

    def saved(self, step: int, name: str, digests: Mapping[str, int]) -> None:
        self._append(Saved(step, name, hexadecimal(join({key: value % (1 << 64) for key, value in digests.items()}))))

    def evaluated(self, step: int, rows: int, scores: Mapping[str, float]) -> None:
        self._append(Evaluation(step, None, rows, {name: Real.of(score) for name, score in scores.items()}))

    def close(self, reason: str) -> None:
        """Writes the last line, with `reason`, and closes the file."""
        if self._file is None:
            return
        step, digests = self._last
        self._append(End(step, reason, digests, None, self._violations))
        try:
            self._file.close()
        except (OSError, LedgerError) as error:
            self._lose(error)

    def closing_line(self) -> str:
        """The path of the ledger with its head, or why it ends early; "" if none is written."""
        if self._file is None:
            return ""
        count, digest = self._file.head
        return f"  ledger {self._file.path}: {self.lost or f'{count} lines, digest of the last {digest}'}"

    def _append(self, record: Record) -> None:
        if self._file is None or self.lost:
            return
        _written.add(self._file.path)
        try:
            self._file.append(record)
        except (OSError, LedgerError, LineTooLong) as error:
            self._lose(error)

    def _lose(self, error: OSError | ValueError) -> None:
        if self.lost:
            return
        why = f"the disk refuses: {error.strerror}" if isinstance(error, OSError) else str(error)
        self.lost = f"it ends before its time, since {why}"
        say(f"andon.watch: ledger: {self.lost}")


def reason_of(error: BaseException | None) -> str:
    """The reason of an end line: "finished", "violation" or "failed", by the exception in flight if there is one."""
    if isinstance(error, Violation) and not isinstance(error, Halted):
        return "violation"
    # `sys.exit(0)` in the loop, and `close` of a generator that contains the loop, end it without a failure.
    ended = (
        error is None
        or isinstance(error, GeneratorExit | StopIteration)
        or (isinstance(error, SystemExit) and not error.code)
    )
    return "finished" if ended else "failed"


def _origin(subject: ModelProbe, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[str, dict[str, str]]:
    """What a watch knows of the identity of a run on any number of ranks, and the fingerprint of this machine."""
    shown = [layout_digest(subject.trainable), layout_digest(subject.frozen)]
    identity = hashlib.sha256(repr([shown, [type(each).__name__ for each in optimizers]]).encode()).hexdigest()
    machine = fingerprint(environment(torch.get_num_threads(), subject.accelerators()))
    return identity, machine | {"digests": _WRITER}  # a watch digests other bytes than the trainer


def _backend() -> str:
    return str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else "inline"
