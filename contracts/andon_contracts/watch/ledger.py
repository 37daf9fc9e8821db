"""The ledger of a watched loop: what a watch saw of every update, as one line, on rank 0 (issue 3 item 6).

Nothing is gathered for it: it is made of what the ranks tell each other anyway, and of what the loop told.
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

VARIABLE = "ANDON_LEDGER"
"""The environment variable that names a ledger where the loop does not."""
WRITER = "watch"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_taken: set[Path] = set()


@dataclass(frozen=True)
class Told:
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
    """Where the watch of this process writes: as given, else as the environment says.

    The environment's name holds for every watch of a script: a second one in this process, and one whose writing rank
    `writer` is another than 0, get a name of their own beside it.
    """
    if given is not None:
        return Path(given)
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    path = Path(named)
    stem = f"{path.stem}-rank{writer}" if writer else path.stem
    path = path.with_name(stem + path.suffix)
    number = 1
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}" if number > 1 else path.name)) in _taken:
        number += 1
    _taken.add(free)
    return free


def open_ledger(path: Path, start: int) -> LedgerFile:
    """The ledger at `path`, to be written by this process alone.

    One with lines is only gone on with: after `start` updates, or where torch's launcher restarted the ranks. Raises
    `ValueError` where it is another run's, is damaged, is being written, or the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = LedgerFile(path, alone=True)
    except LedgerError as error:
        what = "is another file, or a ledger that was changed; name one that is not there yet; it was left as it is"
        raise ValueError(f"ledger: {path} {what} ({error})") from None
    except BlockingIOError:
        raise ValueError(f"ledger: {path} is being written by another process") from None
    except OSError as error:
        raise ValueError(f"ledger: {path} cannot be written: {error.strerror}") from None
    if file.head[0] and not start and os.environ.get(_RESTARTS, "0") == "0":
        file.close()
        raise ValueError(f"ledger: {path} holds a run already; name another, or say start= where this one goes on")
    return file


class Recorder:
    """Writes the lines of one watch.

    A disk that refuses, a file that another program changed, and an update of more rows than a line takes end the
    ledger, with a warning, and never the loop.
    """

    def __init__(self, file: LedgerFile | None, subject: ModelProbe, held: Mapping[str, bool]) -> None:
        """file: None writes nothing. held: whether all ranks should hold one "weights", "gradient", "optimizer"."""
        self.lost = ""
        self._file = file
        self._subject = subject
        self._held = held
        self._violations = 0
        self._last: tuple[int, dict[str, str]] = (0, {})

    def opened(self, world: int, optimizers: Sequence[torch.optim.Optimizer], rows: int | None, start: int) -> None:
        """The watch began after `start` updates: a start line, or a resume line where there are lines already."""
        if self._file is None:
            return
        identity = _identity(self._subject, optimizers)
        digests = {"weights": hexadecimal(flat_digest(self._subject.trainable.values()))}
        if self._subject.frozen:
            digests["base"] = hexadecimal(flat_digest(self._subject.frozen.values()))
        self._last = (start, {"weights": digests["weights"]})
        machine = _fingerprint(self._subject)
        if self._file.head[0]:
            torn = self._file.torn
            self._append(Resume(start, identity, machine, digests, world, _backend(), "the loop's own", torn))
            return
        plan = Plan(rows=rows, batch_size=None, micro_batches=None, seed=None, epochs=None, steps=None)
        name = Path(sys.argv[0] if sys.argv else "").name or WRITER
        self._append(Start(name, machine, identity, plan, digests, world, _backend(), WRITER, WATCH_DIGESTS))
        if start:
            self._append(Resume(start, identity, machine, digests, world, _backend(), "the loop's own"))

    def step(
        self,
        before: Observations,
        after: Observations,
        told: Told,
        *,
        step: int,
        index: int | None,
        draws: str,
    ) -> None:
        """One update, from what all ranks saw before and after it and what was told of its rows.

        draws: what draws random numbers in its forward passes, "" where nothing does or nobody looked.
        """
        if self._file is None:
            return
        reduced = any(o.values["reduced seen"] for o in before)
        skipped = any(o.values["skipped"] for o in before)
        parts = {
            "gradient": [hexadecimal(o.values["reduced" if reduced else "gradient"]) for o in before],
            "weights": [hexadecimal(o.values["weights"]) for o in after],
            "optimizer": [hexadecimal(o.values["optimizer"]) for o in after],
        }
        whole = {name: self._one(name, digests) for name, digests in parts.items()}
        ranks = tuple(self._rank(rank, parts, told) for rank in range(len(after)))
        loss, count = _loss(before)
        contents = sorted(zip(told.union, told.contents, strict=True)) if told.contents else None
        content = None if contents is None else hexadecimal(text_digest(contents))
        self._last = (step, {"weights": whole["weights"], "optimizer": whole["optimizer"]})
        self._append(
            Step(
                step=step,
                epoch=told.epoch,
                position=told.position,
                ids=told.union,
                count=len(told.union) or count,
                lr=Real.of(real_of(before[0].values["rate"])),
                loss=loss,
                grad_norm=None if skipped else Real.of(self._norm(before, "norm share")),
                correct=None,
                world=len(after),
                backend=_backend(),
                digests=StepDigests(content, whole["gradient"], whole["weights"], whole["optimizer"]),
                ranks=ranks,
                weights_norm=Real.of(self._norm(after, "norm share")),
                gradient_at=None if reduced else "optimizer",
                optimizer_index=index,
                skipped=skipped or None,
                draws=draws or None,
            )
        )

    def _rank(self, rank: int, parts: Mapping[str, Sequence[str]], told: Told) -> RankPart:
        ids = told.ids[rank] if told.ids else ()
        weights, gradient, optimizer = (
            parts[name][rank] if self._held[name] else None for name in ("weights", "gradient", "optimizer")
        )
        return RankPart(rank, (), ids, weights, gradient, optimizer)

    def _one(self, name: str, digests: Sequence[str]) -> str:
        """The digest of all: rank 0's where every rank holds the same, else one of all ranks' parts."""
        if self._held[name]:
            return digests[0]
        return hexadecimal(join({f"rank {rank}": int(digest, 16) for rank, digest in enumerate(digests)}))

    def _norm(self, observations: Observations, name: str) -> float:
        return self._subject.norm_of_all([real_of(o.values[name]) for o in observations])

    def violation(self, found: Violation, action: str, applied: bool) -> None:
        """What did not hold, and what was done about it."""
        self._violations += action != "suspected"
        finding = found.finding
        self._append(
            Broken(
                found.clause,
                finding.step,
                finding.ranks,
                finding.tensor,
                finding.seen,
                dict(finding.details),
                action,
                applied or None,
            )
        )

    def saved(self, step: int, name: str, digests: Mapping[str, int]) -> None:
        """The loop saved a checkpoint."""
        self._append(Saved(step, name, hexadecimal(join({key: value % (1 << 64) for key, value in digests.items()}))))

    def loaded(self, step: int, name: str, world: int, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """The loop loaded a checkpoint and goes on after `step` updates."""
        if self._file is None:
            return
        digests = {"weights": hexadecimal(flat_digest(self._subject.trainable.values()))}
        identity, machine = _identity(self._subject, optimizers), _fingerprint(self._subject)
        self._append(Resume(step, identity, machine, digests, world, _backend(), name))

    def evaluated(self, step: int, rows: int, scores: Mapping[str, float]) -> None:
        """The loop evaluated."""
        self._append(Evaluation(step, None, rows, {name: Real.of(score) for name, score in scores.items()}))

    def close(self, reason: str) -> None:
        """The last line, for `reason`; the file is closed."""
        if self._file is None:
            return
        step, digests = self._last
        self._append(End(step, reason, digests, None, self._violations))
        try:
            self._file.close()
        except (OSError, LedgerError) as error:
            self._lose(error)

    def closing_line(self) -> str:
        """Where the ledger is, its head, and whether it is whole; empty where none is written."""
        if self._file is None:
            return ""
        count, digest = self._file.head
        return f"  ledger {self._file.path}: {self.lost or f'{count} lines, digest of the last {digest}'}"

    def _append(self, record: Record) -> None:
        if self._file is None or self.lost:
            return
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
    """Why a watch ends, from the error that is on its way if there is one."""
    if isinstance(error, Violation) and not isinstance(error, Halted):
        return "violation"
    # `sys.exit(0)` in the loop, and the `close` of a generator that holds it, are ways to end it and no failures.
    ended = error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
    return "finished" if ended else "failed"


def _loss(before: Observations) -> tuple[Real | None, int | None]:
    rows = sum(o.values["loss rows"] for o in before)
    if not rows:
        return None, None
    return Real.of(sum(real_of(o.values["loss sum"]) for o in before) / rows), rows


def _identity(subject: ModelProbe, optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """What makes two watched runs runs of one thing, as far as a watch can know: the layout and the optimizers."""
    shown = [layout_digest(subject.trainable), layout_digest(subject.frozen)]
    return hashlib.sha256(repr([shown, [type(each).__name__ for each in optimizers]]).encode()).hexdigest()


def _fingerprint(subject: ModelProbe) -> dict[str, str]:
    # The digests of a watch are of other things than the trainer's, so their ledgers are not to be compared.
    return fingerprint(environment(torch.get_num_threads(), subject.accelerators())) | {"digests": WRITER}


def _backend() -> str:
    return str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else "inline"
