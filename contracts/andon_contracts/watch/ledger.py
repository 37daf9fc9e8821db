"""The ledger of a watched loop: rank 0 writes one line for each update.

It needs no collective: its values are those that the ranks exchange for the checks, and the loop's reports.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from andon_contracts import record
from andon_contracts.agree import real_of
from andon_contracts.digest import hex64, join
from andon_contracts.fields import Real
from andon_contracts.fingerprint import environment, fingerprint
from andon_contracts.laws.law import Observations
from andon_contracts.observe import flat_digest
from andon_contracts.record import LedgerError, LedgerFile, read_lines
from andon_contracts.violation import Halted, Violation
from andon_contracts.watch.judging import print_message
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.settings import Settings
from andon_contracts.watch.values import layout_digest, text_digest

_WRITER = "watch"
_ALGORITHMS = dict.fromkeys(("weights", "gradient", "optimizer", "base"), "flat-digest") | {"content": "text-digest"}
_written: set[Path] = set()
"""The ledgers to which watches of this process have written."""


@dataclass(frozen=True)
class UpdateRows:
    """The rows of one update: ids of each rank, contents in the order of `union`, and the position in the epoch."""

    ids: tuple[tuple[int, ...], ...] = ()
    contents: tuple[int, ...] = ()
    epoch: int | None = None
    position: int | None = None

    @property
    def union(self) -> tuple[int, ...]:
        """The ids of all ranks, in order of rank."""
        return tuple(row for part in self.ids for row in part)


def open_ledger(settings: Settings, writer: int) -> LedgerFile | None:
    """Open the ledger of a watch at `settings.ledger`, else at a path from the variable ANDON_LEDGER, else return None.

    All watches of a script share the variable. Later ones of this process write to numbered names, and the name has the
    rank `writer` of the world that is rank 0 of the watch, if it is not 0. A ledger with lines is continued by the same
    script, after `start` > 0 updates, and after a restart by torch's launcher. Raises `ValueError` if it belongs to
    another run, is damaged or in use by another process, or if the disk refuses.
    """
    variable, given = os.environ.get("ANDON_LEDGER"), settings.ledger
    if given is None and not variable:
        return None
    path, number = Path(variable or "" if given is None else given), 1
    if given is None:
        stem, suffix = f"{path.stem}-rank{writer}" if writer else path.stem, path.suffix
        path = path.with_name(stem + suffix)
        while path in _written:
            number += 1
            path = path.with_name(f"{stem}-{number}{suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = LedgerFile(path, exclusive=True)
    except LedgerError as error:
        what = "is not a ledger or was changed, so the watch does not write to it; name a new file"
        raise ValueError(f"ledger: {path} {what} ({error})") from None
    except BlockingIOError:
        raise ValueError(f"ledger: {path} is being written by another process; name another file") from None
    except OSError as error:
        raise ValueError(f"ledger: {path} cannot be written: {error.strerror}") from None
    first = next((line for line, _ in read_lines(path)), None) if file.head[0] else None
    other = first is not None and not (isinstance(first, record.Start) and first.run == _run())
    if other and not settings.start and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        file.close()
        or_start = "" if settings.by_command else ", or pass start= to continue it"
        raise ValueError(f"ledger: {path} already contains another run; name another file{or_start}")
    return file


class Recorder:
    """Writes the lines of one watch.

    The ledger ends early, with a warning, if the disk refuses, another program changes the file, or an update has more
    rows than a line can hold. The loop continues.
    """

    def __init__(self, file: LedgerFile | None, subject: ModelProbe, *, replicated: bool) -> None:
        """file: None writes nothing. replicated: whether all ranks hold the same weights."""
        self._file = file
        self._subject = subject
        self._replicated = replicated
        self._failure = ""
        self._violations = 0
        self._last: tuple[int, dict[str, str]] = (0, {})
        self.earlier = file.path if file is not None and file.head[0] else None  # if it had lines before this process
        self._resume: record.Resume | None = None  # written before the next line, unless that tells it too
        self.left: dict[str, str] = {}  # what the present update leaves for a resume, besides its digests

    def opened(self, world: int, optimizers: Sequence[Optimizer], rows: int | None, start: int) -> None:
        """Write a start line, and if the run goes on a resume line. start: the updates before the watch opened."""
        if self._file is None:
            return
        digests = self._weights()
        self._last = (start, dict(digests))
        if self._subject.frozen:
            digests["base"] = hex64(flat_digest(self._subject.frozen.values()))
        identity, machine = self._origin(optimizers)
        if self.earlier is None:
            plan = record.Plan(rows, None, None, None, None, None)
            by = _backend(), _WRITER, _ALGORITHMS
            self._append(record.Start(_run(), machine, identity, plan, digests, world, *by, self.trained()))
        if self.earlier is not None or start:
            name = "the loop's own" if start else None
            self._resume = record.Resume(start, identity, machine, digests, world, _backend(), name, self._file.torn)

    def loaded(self, step: int, name: str, world: int, optimizers: Sequence[Optimizer]) -> None:
        """Write that the loop loaded checkpoint `name` and continues after `step` updates."""
        if self._file is not None:
            torn, self._resume = 0 if self._resume is None else self._resume.torn, None
            self._append(record.Resume(step, *self._origin(optimizers), self._weights(), world, _backend(), name, torn))

    def _weights(self) -> dict[str, str]:
        return {"weights": hex64(flat_digest(self._subject.trainable.values()))}

    def _origin(self, optimizers: Sequence[Optimizer]) -> tuple[str, dict[str, str]]:
        layouts = [layout_digest(self._subject.trainable), layout_digest(self._subject.frozen)]
        names = [type(optimizer).__name__ for optimizer in optimizers]
        machine = fingerprint(environment(torch.get_num_threads(), self._subject.accelerators()))
        machine["digests"] = _WRITER  # a watch digests other bytes than the trainer
        return hashlib.sha256(repr([layouts, names]).encode()).hexdigest(), machine

    def step(
        self, before: Observations, after: Observations, rows: UpdateRows, *, step: int, index: int | None, draws: str
    ) -> None:
        """Write an update, from the values of all ranks before and after it and its rows.

        draws: the modules that draw random numbers in its forward passes; "" if no module does or nothing was checked.
        """
        if self._file is None:
            return
        reduced = any(o.values["reduced seen"] for o in before)
        skipped = any(o.values["skipped"] for o in before)
        by_rank = {
            "gradient": [o.values["reduced" if reduced else "gradient"] for o in before],
            "weights": [o.values["weights"] for o in after],
            "optimizer": [o.values["optimizer"] for o in after],
        }
        whole = {name: self.whole(digests) for name, digests in by_rank.items()}
        parts: list[dict[str, str | None]] = [{"weights": None} for _ in after]
        if self._replicated:
            parts = [{name: hex64(digests[rank]) for name, digests in by_rank.items()} for rank in range(len(after))]
        self._last = (step, {"weights": whole["weights"], "optimizer": whole["optimizer"]})
        ids, loss_rows = rows.union, sum(o.values["loss rows"] for o in before)
        loss = sum(real_of(o.values["loss sum"]) for o in before)
        own = rows.ids or ((),) * len(after)
        content = hex64(text_digest(sorted(zip(ids, rows.contents, strict=True)))) if rows.contents else None
        self._append(
            record.Step(
                step=step,
                epoch=rows.epoch,
                position=rows.position,
                ids=ids,
                count=len(ids) or loss_rows or None,
                lr=Real.of(real_of(before[0].values["rate"])),
                loss=Real.of(loss / loss_rows) if loss_rows else None,
                grad_norm=None if skipped else self._norm(before),
                correct=None,
                world=len(after),
                backend=_backend(),
                digests=record.StepDigests(content, **whole),
                ranks=tuple(record.RankPart(rank, (), own[rank], **part) for rank, part in enumerate(parts)),
                weights_norm=self._norm(after),
                gradient_at=None if reduced else "optimizer",
                optimizer_index=index,
                skipped=skipped or None,
                draws=draws or None,
                state=self.left or None,
            )
        )

    def whole(self, digests: Sequence[int]) -> str:
        """One digest from those of all ranks."""
        if self._replicated:
            return hex64(digests[0])
        # The ranks hold different shards: one digest of all of them.
        return hex64(join({f"rank {i}": digest % (1 << 64) for i, digest in enumerate(digests)}))

    def trained(self) -> dict[str, str]:
        """The dtype and shape of each trained tensor."""
        return {n: f"{p.dtype} {[*p.shape]}" for n, p in self._subject.trainable.items()}

    def _norm(self, observations: Observations) -> Real:
        shares = [real_of(o.values["norm share"]) for o in observations]
        return Real.of(math.hypot(*shares) if self._subject.sharded else shares[0])

    def sketched(self, sums: Sequence[float], bits: int) -> None:
        """Write the sketch of the first gradient beside the ledger. bits: the coarsest significand of the run."""
        if self._file is not None:
            Path(f"{self._file.path}.sketch").write_text(json.dumps({"bits": bits, "sums": sums}))

    def violation(self, error: Violation, action: str, applied: bool) -> None:
        self._violations += action != "suspected"
        self._append(record.Broken.of(error.clause, error.finding, action, applied or None))

    def saved(self, step: int, name: str, digests: Mapping[str, int]) -> None:
        words = {key: value % (1 << 64) for key, value in digests.items()}
        self._append(record.Saved(step, name, hex64(join(words))))

    def evaluated(self, step: int, rows: int, scores: Mapping[str, float]) -> None:
        self._append(record.Evaluation(step, None, rows, {name: Real.of(score) for name, score in scores.items()}))

    def close(self, reason: str) -> None:
        if self._file is not None:
            step, digests = self._last
            self._append(record.End(step, reason, digests, None, self._violations))
            try:
                self._file.close()
            except (OSError, LedgerError) as error:
                self._fail(error)

    def closing_line(self) -> str:
        if self._file is None:
            return ""
        count, digest = self._file.head
        return f"  ledger {self._file.path}: {self._failure or f'{count} lines, digest of the last {digest}'}"

    def _append(self, line: record.Record) -> None:
        resume, self._resume = self._resume, None
        if resume is not None:
            self._append(resume)
        if self._file is not None and not self._failure:
            _written.add(self._file.path)
            try:
                self._file.append(line)
            except (OSError, LedgerError, record.LineTooLong) as error:
                self._fail(error)

    def _fail(self, error: OSError | ValueError) -> None:
        if not self._failure:
            why = f"the file cannot be written: {error.strerror}" if isinstance(error, OSError) else str(error)
            self._failure = f"no further lines are written: {why}"
            print_message(f"andon.watch: ledger: {self._failure}")


def reason_of(error: BaseException | None) -> str:
    """The reason of an end line: "finished", "violation" or "failed", by the exception in flight if there is one."""
    if isinstance(error, Violation) and not isinstance(error, Halted):
        return "violation"
    # `sys.exit(0)` in the loop, and `close` of a generator that contains the loop, end it without a failure.
    if error is None or isinstance(error, GeneratorExit | StopIteration):
        return "finished"
    return "finished" if isinstance(error, SystemExit) and not error.code else "failed"


def _run() -> str:
    return Path(sys.argv[0] if sys.argv else "").name or _WRITER


def _backend() -> str:
    return str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else "inline"
