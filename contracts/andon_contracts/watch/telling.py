"""What a loop can tell its watch of each step: rows, losses, random streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from andon_contracts.act import Scene
from andon_contracts.agree import bits_of
from andon_contracts.judge import Observations
from andon_contracts.told_clauses import (
    STREAMS,
    BatchTold,
    judge_contents,
    judge_data,
    judge_rows,
)
from andon_contracts.violation import Violation
from andon_contracts.watch.judging import Check
from andon_contracts.watch.ledger import Told
from andon_contracts.watch.outcomes import Outcomes
from andon_contracts.watch.reading import flat_digest, text_digest
from andon_contracts.watch.rows import Rows, contents_of, ids_of
from andon_contracts.watch.values import value_digest

_MUST = {"agree": 1, "differ": 2}
_SAMPLE = 256
"""About so many rows are compared at the start."""
_DATA = (Check("content-planned", judge_data),)


class Telling(Outcomes):
    """The methods of a watch with which a loop tells it what hooks cannot see. All ranks must tell alike."""

    _rows: Rows

    def __init__(self) -> None:
        super().__init__()
        self._told_rows = Told()
        self._epochs = 0
        self._streams: dict[str, tuple[int, int]] = {}
        self._untold = {"loss-reported", "randomness-declared"}
        self._epoch: set[int] = set()
        self._contents: dict[int, int] = {}

    @property
    def violations(self) -> int:
        """How many findings so far are violations: neither suspicions nor silenced."""
        return self._verdicts.counts.total()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose updates are watched."""
        return [parameter for lane in self._lanes.values() for parameter in lane.parameters.values()]

    def batch(self, ids: Sequence[int] | Tensor, content: Sequence[object] | None = None) -> None:
        """The rows that this rank is about to train on; once for each micro-batch.

        ids: [rows] integers. content: [rows] what the model is given for each, tensors or values.
        Raises `ValueError` for ids or content of a wrong form, and on a closed watch.
        """
        self._demand_open()
        found = ids_of(ids)
        contents = [] if content is None else contents_of(content, len(found))
        for lane in self._lanes.values():
            lane.taps.backward_seen = False
        self._rows.add(found, contents)

    def loss(self, loss: float | Tensor, count: int, reported: float | None = None) -> None:
        """loss: the sum over `count` rows of this rank; reported: what the loop logs as the mean loss of the update."""
        self._demand_open()
        self._untold.discard("loss-reported")
        self._rows.loss_sum += float(loss)
        self._rows.loss_rows += count
        self._rows.reported = reported

    def reduced(self) -> None:
        """The gradients are reduced and unscaled now, and not clipped yet; for loops that clip by hand."""
        self._demand_open()
        for lane in self._lanes.values():
            lane.reduced()

    def rng(self, name: str, must: Literal["differ", "agree"], state: object = None) -> None:
        """A random stream that must differ between ranks, or agree; tell it before anything is drawn from it.

        state: a tensor, array, `torch.Generator` or plain values (`random.getstate()`); None: torch's on the CPU.
        Raises `ValueError` for a fifth stream, for another word than "differ" and "agree", and for a state that holds
        what cannot be compared.
        """
        self._demand_open()
        if must not in _MUST:
            raise ValueError(f"must is 'differ' or 'agree', not {must!r}")
        if name not in self._streams and len(self._streams) == STREAMS:
            raise ValueError(f"{name!r} is one random stream more than {STREAMS}")
        self._untold.discard("randomness-declared")
        found = torch.get_rng_state() if state is None else state
        if isinstance(found, torch.Generator):
            found = found.get_state()
        digest = flat_digest([found]) if isinstance(found, Tensor) else value_digest(found, f"the state of {name!r}")
        self._streams[name] = (_MUST[must], digest)

    def _look_at_data(self) -> None:
        """Hold the ranks' data sets to each other at the start, in a sample of their rows."""
        contents, rows = self.settings.contents, self.settings.rows
        if contents is not None and rows is not None:
            ids = range(0, rows, max(rows // _SAMPLE, 1))
            found = text_digest(contents_of(contents(ids), len(ids)))
            seen = self._exchange(0, "data", {"data": found})
            self._verdicts.judge(_DATA, seen, {}, Scene(self._exchange.world_size))

    def _told(self) -> dict[str, int]:
        """The integers of a step that come from what was told."""
        rows = self._rows
        values = {
            "rows": len(rows.ids),
            "windows passed": len(rows.passed),
            "with content": int(len(rows.contents) == len(rows.ids)),
            "loss sum": bits_of(rows.loss_sum),
            "loss rows": rows.loss_rows,
            "reports": int(rows.reported is not None),
            "reported": bits_of(rows.reported or 0.0),
        }
        streams = [self._streams[name] for name in sorted(self._streams)]
        streams += [(0, 0)] * (STREAMS - len(streams))
        for index, (must, digest) in enumerate(streams):
            values |= {f"stream {index} must": must, f"stream {index}": digest}
        return values

    def _judge_rows(self, observations: Observations, skipped: int) -> list[int]:
        """Gather the rows of this update, hold them to the plan and to the data, return them in order of rank.

        skipped: how many updates were left out before it, each with the rows that were planned for it.
        """
        self._told_rows = Told()
        step = observations[0].step
        if any(o.values["windows passed"] for o in observations):
            self._mark_passed(step)
        if not any(o.values["rows"] for o in observations):
            return []
        contents = self._rows.contents if all(o.values["with content"] for o in observations) else []
        own = contents or [0] * len(self._rows.ids)
        parts = self._gather_rows(step, [self._rows.ids, own])
        ids = tuple(tuple(part[0]) for part in parts)
        union = [row for part in ids for row in part]
        self._told_rows = Told(
            ids, tuple(content for part in parts for content in part[1]) if contents else (), *self._place(union)
        )
        plan, rows = self.settings.plan, self.settings.rows
        told = BatchTold(
            step,
            ids,
            tuple(tuple(part[1]) for part in parts) if contents else ((),) * len(ids),
            None if plan is None else tuple(plan(step + skipped)),
            frozenset(self._epoch),
            rows,
            self._expected(step, union) if contents else None,
        )
        scene = Scene(self._exchange.world_size)
        for clause, judge in (("samples-once", judge_rows), ("content-planned", judge_contents)):
            if clause == "content-planned" and not contents:
                continue
            self._verdicts.evaluations[clause] += 1
            try:
                judge(told)
            except Violation as found:
                self._verdicts.take(found, scene)
        self._remember(told, union)
        return union

    def _expected(self, step: int, union: Sequence[int]) -> dict[int, int]:
        """The content of each row by the data set, which must be one on all ranks; else by what was told before."""
        if self.settings.contents is None:
            return {row: self._contents[row] for row in union if row in self._contents}
        found = contents_of(self.settings.contents(union), len(union))
        seen = self._exchange(step, "data", {"data": text_digest(found)})
        self._verdicts.judge(_DATA, seen, {}, Scene(self._exchange.world_size))
        return dict(zip(union, found, strict=True))

    def _place(self, union: Sequence[int]) -> tuple[int | None, int | None]:
        """The epoch of an update with these rows, and how many rows of it were used before; None without `rows`."""
        if self.settings.rows is None:
            return None, None
        return (self._epochs + 1, 0) if self._epoch & set(union) else (self._epochs, len(self._epoch))

    def _remember(self, told: BatchTold, union: Sequence[int]) -> None:
        for ids, contents in zip(told.ids, told.contents, strict=True):
            for row, content in zip(ids, contents, strict=False):
                self._contents.setdefault(row, content)
        self._mark(union)

    def _mark_passed(self, step: int) -> None:
        """The rows of updates that were left out were used too, one update after the other."""
        passed = self._rows.passed
        windows = [window for window, ids in enumerate(passed) for _ in ids]
        parts = self._gather_rows(step, [[row for ids in passed for row in ids], windows])
        for window in sorted({window for part in parts for window in part[1]}):
            self._mark([row for part in parts for row, its in zip(*part, strict=True) if its == window])
        self._rows.passed = []

    def _mark(self, union: Sequence[int]) -> None:
        """These rows were used in the present epoch, or in one that they begin."""
        rows = self.settings.rows
        if rows is not None:
            if self._epoch & set(union):
                self._turn_epoch()
            self._epoch |= set(union)
            if len(self._epoch) >= rows:
                self._turn_epoch()

    def _turn_epoch(self) -> None:
        self._epoch.clear()
        self._epochs += 1
