"""What a loop can tell its watch of each step: rows, losses, random streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from andon_contracts.act import Scene
from andon_contracts.agree import bits_of
from andon_contracts.laws.law import Observations, Seen
from andon_contracts.laws.loop import STREAMS
from andon_contracts.laws.rows import CONTENT_TOLD, DATA, SAMPLES_TOLD, BatchTold
from andon_contracts.observe import flat_digest
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.ledger import Told
from andon_contracts.watch.rows import Rows, contents_of, ids_of
from andon_contracts.watch.values import text_digest, value_digest

_MUST = {"agree": 1, "differ": 2}
_SAMPLE = 256
"""About so many rows are compared at the start."""


class UserReports:
    """What hooks cannot see and the loop tells, alike on all ranks: kept until the update that it belongs to."""

    def __init__(self, exchange: Exchange, verdicts: Verdicts, rows: Rows) -> None:
        self._exchange = exchange
        self._verdicts = verdicts
        self._settings = verdicts.settings
        self._rows = rows
        self.told_rows = Told()
        """What a ledger says of the rows of the update at hand."""
        self.untold = {"loss-reported", "randomness-declared"}
        """Clauses of which the loop has told nothing yet."""
        self._epochs = 0
        self._streams: dict[str, tuple[int, int]] = {}
        self._epoch: set[int] = set()
        self._resumed = verdicts.settings.start > 0
        self._lacked: frozenset[int] = frozenset()
        """What the epoch before lacked when it ended, until the next update is judged."""
        self._contents: dict[int, int] = {}

    def batch(self, ids: Sequence[int] | Tensor, content: Sequence[object] | None = None) -> None:
        """As `Watch.batch`."""
        found = ids_of(ids)
        contents = [] if content is None else contents_of(content, len(found))
        self._rows.add(found, contents)

    def loss(self, loss: float | Tensor, count: int, reported: float | None = None) -> None:
        """As `Watch.loss`."""
        self.untold.discard("loss-reported")
        self._rows.loss_sum += float(loss)
        self._rows.loss_rows += count
        self._rows.reported = reported

    def rng(self, name: str, must: Literal["differ", "agree"], state: object = None) -> None:
        """As `Watch.rng`."""
        if must not in _MUST:
            raise ValueError(f"must is 'differ' or 'agree', not {must!r}")
        if name not in self._streams and len(self._streams) == STREAMS:
            raise ValueError(f"{name!r} is one random stream more than {STREAMS}")
        self.untold.discard("randomness-declared")
        found = torch.get_rng_state() if state is None else state
        if isinstance(found, torch.Generator):
            found = found.get_state()
        digest = flat_digest([found]) if isinstance(found, Tensor) else value_digest(found, f"the state of {name!r}")
        self._streams[name] = (_MUST[must], digest)

    def look_at_data(self) -> None:
        """Hold the ranks' data sets to each other at the start, in a sample of their rows."""
        contents, rows = self._settings.contents, self._settings.rows
        if contents is not None and rows is not None:
            ids = range(0, rows, max(rows // _SAMPLE, 1))
            found = text_digest(contents_of(contents(ids), len(ids)))
            seen = self._exchange(0, "data", {"data": found})
            self._verdicts.judge(DATA, Seen(seen, None), Scene(self._exchange.world_size))

    def told(self) -> dict[str, int]:
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

    def judge_rows(self, observations: Observations, skipped: int) -> list[int]:
        """Gather the rows of this update, hold them to the plan and to the data, return them in order of rank.

        skipped: how many updates were left out before it, each with the rows that were planned for it.
        """
        self.told_rows = Told()
        step = observations[0].step
        if any(o.values["windows passed"] for o in observations):
            self._mark_passed(step)
        if not any(o.values["rows"] for o in observations):
            return []
        contents = self._rows.contents if all(o.values["with content"] for o in observations) else []
        own = contents or [0] * len(self._rows.ids)
        parts = self._exchange.columns(step, [self._rows.ids, own])
        ids = tuple(tuple(part[0]) for part in parts)
        union = [row for part in ids for row in part]
        self.told_rows = Told(
            ids, tuple(content for part in parts for content in part[1]) if contents else (), *self._place(union)
        )
        plan, rows = self._settings.plan, self._settings.rows
        told = BatchTold(
            step,
            ids,
            tuple(tuple(part[1]) for part in parts) if contents else ((),) * len(ids),
            None if plan is None else tuple(plan(step + skipped)),
            self._epoch,
            rows,
            self._expected(step, union) if contents else None,
            self._resumed,
            self._lacked,
        )
        laws = (SAMPLES_TOLD, CONTENT_TOLD) if contents else (SAMPLES_TOLD,)
        self._verdicts.judge(laws, told, Scene(self._exchange.world_size))
        self._remember(told, union)
        return union

    def _expected(self, step: int, union: Sequence[int]) -> dict[int, int]:
        """The content of each row by the data set, which must be one on all ranks; else by what was told before."""
        if self._settings.contents is None:
            return {row: self._contents[row] for row in union if row in self._contents}
        found = contents_of(self._settings.contents(union), len(union))
        seen = self._exchange(step, "data", {"data": text_digest(found)})
        self._verdicts.judge(DATA, Seen(seen, None), Scene(self._exchange.world_size))
        return dict(zip(union, found, strict=True))

    def _place(self, union: Sequence[int]) -> tuple[int | None, int | None]:
        """The epoch of an update with these rows, and how many rows of it were used before; None without `rows`."""
        if self._settings.rows is None:
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
        parts = self._exchange.columns(step, [[row for ids in passed for row in ids], windows])
        for window in sorted({window for part in parts for window in part[1]}):
            self._mark([row for part in parts for row, its in zip(*part, strict=True) if its == window])
        self._rows.passed = []

    def _mark(self, union: Sequence[int]) -> None:
        """These rows were used in the present epoch, or in one that they begin."""
        rows = self._settings.rows
        if rows is not None:
            self._lacked = frozenset()
            if self._epoch & set(union):
                self._lacked = frozenset() if self._resumed else frozenset(range(rows)) - self._epoch - set(union)
                self._turn_epoch()
            self._epoch |= set(union)
            if len(self._epoch) >= rows:
                self._turn_epoch()

    def _turn_epoch(self) -> None:
        self._epoch.clear()
        self._resumed = False
        self._epochs += 1
