"""What a loop can tell its watch of what came out: evaluations, checkpoints, the number of updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from andon_contracts.act import Scene
from andon_contracts.agree import bits_of, real_of
from andon_contracts.causes import first_line
from andon_contracts.laws.law import Law
from andon_contracts.laws.outcome import COUNTED, EVALUATED, RESTORED, Count, EvaluationTold, Restored
from andon_contracts.observe import flat_digest
from andon_contracts.watch.exchange import Exchange
from andon_contracts.watch.judging import Verdicts
from andon_contracts.watch.ledger import Recorder
from andon_contracts.watch.model_probe import ModelProbe
from andon_contracts.watch.optimizer_probe import OptimizerProbe
from andon_contracts.watch.restore import (
    live_digests,
    of_tensors,
    random_state,
    read_digests,
    updates_of,
    write_digests,
)
from andon_contracts.watch.rows import ids_of
from andon_contracts.watch.values import text_digest

_WRAP = 1 << 64
S = TypeVar("S")


class Outcomes:
    """Judges what is told seldom. All methods are collective, and refuse on all ranks or on none."""

    def __init__(
        self,
        exchange: Exchange,
        verdicts: Verdicts,
        probes: Sequence[OptimizerProbe],
        recorder: Recorder,
        subject: ModelProbe,
    ) -> None:
        self._exchange = exchange
        self._verdicts = verdicts
        self._probes = probes
        self._recorder = recorder
        self._subject = subject
        self._evaluated: dict[tuple[int, int], int] = {}
        self.norm_in_training = 0
        """Of the last forward pass without gradients since the last update, the batch norm in training mode."""

    def evaluated(
        self,
        ids: Sequence[int] | Tensor,
        predictions: Sequence[int] | Tensor,
        labels: Sequence[int] | Tensor,
        metrics: Mapping[str, float] | None = None,
        rows: int | None = None,
    ) -> None:
        """As `Watch.evaluated`."""
        table, problem = _table(ids, predictions, labels)
        self._refuse(problem)
        step = self._probes[0].updates
        seen = self._exchange(step, "evaluated", self._reported(metrics or {}, rows))
        parts = self._exchange.columns(step, table)
        triples = [row for part in parts for row in zip(*part, strict=True)]
        right = sum(p == y for _, p, y in triples)
        weights = text_digest([o.values["weights"] for o in seen])
        key = (weights, text_digest(sorted(row[0] for row in triples)))
        answers = text_digest(sorted(triples))
        told = EvaluationTold(
            step,
            tuple(tuple(part[0]) for part in parts),
            max(o.values["rows"] for o in seen) if all(o.values["rows known"] for o in seen) else None,
            {"accuracy": [real_of(o.values["accuracy"]) if o.values["tells accuracy"] else None for o in seen]},
            {"accuracy": right / max(len(triples), 1)},
            self._evaluated.setdefault(key, answers) == answers,
            tuple(self._subject.norm_name(o.values["norm in training"]) for o in seen),
        )
        self._recorder.evaluated(step, len(triples), {**told.counted, **(metrics or {})})
        self._judge_told(EVALUATED, told)

    def _reported(self, metrics: Mapping[str, float], rows: int | None) -> dict[str, int]:
        weights = flat_digest(p for probe in self._probes for p in probe.parameters.values())
        return {
            "weights": weights,
            "rows known": int(rows is not None),
            "rows": rows or 0,
            "tells accuracy": int("accuracy" in metrics),
            "accuracy": bits_of(metrics.get("accuracy", 0.0)),
            "norm in training": self.norm_in_training,
        }

    def saved(self, path: str | Path, read: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        """As `Watch.saved`."""
        probes = self._probes
        digests = live_digests(probes) | updates_of(probes)
        digests |= {name: by_rank[0] for name, by_rank in self._random(probes[0].updates).items()}
        self._write(Path(path), digests)
        self._recorder.saved(probes[0].updates, Path(path).name, digests)
        if read is not None:
            on_disk = self._exchange.spread(probes[0].updates, "on disk", self._read(read, probes))
            wanted = {n: d for n, d in digests.items() if n.removeprefix("weights ") in probes[0].subject.parameters}
            self._judge_restored(wanted, on_disk)

    def _write(self, path: Path, digests: Mapping[str, int]) -> None:
        """Let rank 0 write; when this returns, every rank can read it."""
        problem: OSError | None = None
        if self._exchange.rank == 0:
            try:
                write_digests(path, digests)
            except OSError as error:
                problem = error
        step = self._probes[0].updates
        seen = self._exchange(step, "saved", {"refused": int(problem is not None)})
        if problem is not None:
            raise problem
        if seen[0].values["refused"]:
            msg = f"rank 0 could not write the digests beside {path}"
            raise OSError(msg)

    def _read(self, read: Callable[[], Mapping[str, Tensor]], probes: Sequence[OptimizerProbe]) -> dict[str, int]:
        """The digests of what `read` gives; refused on every rank where it raises on any."""
        problem: Exception | None = None
        found: dict[str, int] = {}
        try:
            found = of_tensors(read(), probes)
        except Exception as error:  # noqa: BLE001 - it is raised again, once the others know
            problem = error
        try:
            self._refuse("" if problem is None else first_line(problem))
        except ValueError:
            if problem is not None:
                raise problem from None
            raise
        return found

    def loaded(self, path: str | Path) -> None:
        """As `Watch.loaded`."""
        probes = self._probes
        wanted, counts, problem = read_digests(Path(path), len(probes))
        self._refuse(problem)
        for probe, count in zip(probes, counts, strict=True):
            probe.updates = count
        updates = counts[0]
        self._recorder.loaded(
            updates, Path(path).name, self._exchange.world_size, [probe.optimizer for probe in probes]
        )
        found = self._exchange.spread(updates, "restored", live_digests(probes))
        if f"random state of rank {self._exchange.world_size}" in wanted:
            wanted = {name: digest for name, digest in wanted.items() if not name.startswith("random state")}
        else:
            found |= self._random(updates)
        self._judge_restored(wanted, found)

    def _random(self, updates: int) -> dict[str, tuple[int, ...]]:
        """The random state of each rank, by a name that says the rank; a state has one value wherever it is judged."""
        (states,) = self._exchange.spread(updates, "random", random_state()).values()
        return {f"random state of rank {rank}": (state,) * len(states) for rank, state in enumerate(states)}

    def _judge_restored(self, wanted: Mapping[str, int], found: Mapping[str, tuple[int, ...]]) -> None:
        step = self._probes[0].updates
        saved = {name: digest % _WRAP for name, digest in wanted.items()}
        # What was not digested at the save, as state that came since, was never to be brought back.
        live = {name: tuple(digest % _WRAP for digest in found[name]) for name in saved if name in found}
        self._judge_told(RESTORED, Restored(saved, live, step))

    def _judge_told(self, laws: Sequence[Law[S]], told: S) -> None:
        self._verdicts.judge(laws, told, Scene(self._exchange.world_size, applied=True))

    def _refuse(self, problem: str) -> None:
        """Raise `ValueError` on every rank where any rank has a `problem` with what it was told. Collective."""
        step = self._probes[0].updates
        seen = self._exchange(step, "told", {"problem": int(bool(problem))})
        others = [str(o.rank) for o in seen if o.values["problem"]]
        if others:
            raise ValueError(problem or f"rank {', '.join(others)} was told something wrong; its own message says what")

    def judge_count(self, made: int, *, over: bool) -> None:
        """Hold the number of updates to the planned one, if one was declared."""
        planned = self._verdicts.settings.updates
        if planned is not None:
            self._judge_told(COUNTED, Count(made, planned, over))


def _table(
    ids: Sequence[int] | Tensor, predictions: Sequence[int] | Tensor, labels: Sequence[int] | Tensor
) -> tuple[list[list[int]], str]:
    """The three columns, and what is wrong with them; "" where nothing is."""
    try:
        table = [ids_of(ids), [int(p) for p in predictions], [int(y) for y in labels]]
    except (TypeError, ValueError) as error:
        return [], str(error)
    lengths = [len(column) for column in table]
    return table, f"ids, predictions and labels have {lengths} rows" if len(set(lengths)) > 1 else ""
