"""What the loop tells of its outcomes: evaluations, checkpoints, and the number of its updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from andon_contracts.agree import bits_of, real_of
from andon_contracts.causes import first_line
from andon_contracts.digest import digests_by_name
from andon_contracts.laws.law import Law, Observations
from andon_contracts.laws.outcome import COUNTED, EVALUATED, RESTORED, Count, EvaluationTold, Restored
from andon_contracts.observe import flat_digest, plain
from andon_contracts.untrusted import read_json
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, declared
from andon_contracts.watch.rows import ids_of
from andon_contracts.watch.values import lenient_digest, state_digest, text_digest

_WRAP = 1 << 64
S = TypeVar("S")


class Outcomes(Check):
    """`evaluated`, `saved` and `loaded` are collective: they refuse on all ranks or on none."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._evaluated: dict[tuple[int, int], int] = {}
        self._norm_in_training = 0
        """The batch norm that was in training mode in the last forward pass without gradients since an update."""

    def cover(self) -> Mapping[str, Cover]:
        return {
            "updates-planned": declared(self.context.settings.updates, "updates="),
            "evaluation-once": Cover("live", "where w.evaluated tells one"),
            "checkpoint-whole": Cover("live", "where w.saved and w.loaded tell one"),
        }

    def forward(self, module: object, args: object, kwargs: object) -> None:
        if not torch.is_grad_enabled():
            self._norm_in_training = self.context.subject.norm_in_training()

    def updated(self, probe: OptimizerProbe) -> None:
        self._norm_in_training = 0

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        self._judge_count(probe.updates, over=False)

    def judge_close(self) -> None:
        self._judge_count(self.context.updates, over=True)

    def _judge_count(self, made: int, *, over: bool) -> None:
        planned = self.context.settings.updates
        if planned is not None:
            self._judge(COUNTED, Count(made, planned, over))

    def _judge(self, laws: Sequence[Law[S]], told: S) -> None:
        self.context.verdicts.judge(laws, told, self.context.scene(applied=True))

    @property
    def _step(self) -> int:
        return self.context.probes[0].updates

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
        step, exchange, told = self._step, self.context.exchange, metrics or {}
        reported = {
            "weights": flat_digest(p for probe in self.context.probes for p in probe.members),
            "rows known": int(rows is not None),
            "rows": rows or 0,
            "tells accuracy": int("accuracy" in told),
            "accuracy": bits_of(told.get("accuracy", 0.0)),
            "norm in training": self._norm_in_training,
        }
        seen = exchange(step, "evaluated", reported)
        parts = exchange.columns(step, table)
        triples = [row for part in parts for row in zip(*part, strict=True)]
        counted = {"accuracy": sum(p == y for _, p, y in triples) / max(len(triples), 1)}
        weights, of_rows = (
            text_digest([o.values["weights"] for o in seen]),
            text_digest(sorted(r for r, _, _ in triples)),
        )
        answers = text_digest(sorted(triples))
        evaluation = EvaluationTold(
            step,
            tuple(tuple(part[0]) for part in parts),
            max(o.values["rows"] for o in seen) if all(o.values["rows known"] for o in seen) else None,
            {"accuracy": [real_of(o.values["accuracy"]) if o.values["tells accuracy"] else None for o in seen]},
            counted,
            self._evaluated.setdefault((weights, of_rows), answers) == answers,
            tuple(self.context.subject.norm_name(o.values["norm in training"]) for o in seen),
        )
        self.context.recorder.evaluated(step, len(triples), {**counted, **told})
        self._judge(EVALUATED, evaluation)

    def saved(self, path: str | Path, read: Callable[[], Mapping[str, Tensor]] | None = None) -> None:
        """As `Watch.saved`."""
        step, probes = self._step, self.context.probes
        digests = live_digests(probes)
        digests |= {_count_name(index): probe.updates for index, probe in enumerate(probes)}
        digests |= {name: by_rank[0] for name, by_rank in self._random(step).items()}
        self._write(Path(path), digests)
        self.context.recorder.saved(step, Path(path).name, digests)
        if read is not None:
            on_disk = self.context.exchange.spread(step, "on disk", self._read(read))
            parameters = self.context.subject.parameters
            self._judge_restored(
                {n: d for n, d in digests.items() if n.removeprefix("weights ") in parameters}, on_disk
            )

    def _write(self, path: Path, digests: Mapping[str, int]) -> None:
        """Let rank 0 write. When this returns, every rank can read the file."""
        problem: OSError | None = None
        if self.context.exchange.rank == 0:
            text = json.dumps({name: f"{digest:x}" for name, digest in digests.items()}, indent=1, sort_keys=True)
            try:
                _beside(path).write_text(text + "\n", encoding="utf-8")
            except OSError as error:
                problem = error
        seen = self.context.exchange(self._step, "saved", {"refused": int(problem is not None)})
        if problem is not None:
            raise problem
        if seen[0].values["refused"]:
            raise OSError(f"rank 0 could not write the digests beside {path}")

    def _read(self, read: Callable[[], Mapping[str, Tensor]]) -> dict[str, int]:
        """The digests of what `read` gives, by name. Raises on every rank if it raises on any."""
        problem: Exception | None = None
        found: dict[str, int] = {}
        try:
            known = self.context.subject.parameters
            found = {f"weights {n}": d for n, d in digests_by_name(_dense(read())).items() if n in known}
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
        probes, exchange = self.context.probes, self.context.exchange
        wanted, counts, problem = _read_digests(Path(path), len(probes))
        self._refuse(problem)
        for probe, count in zip(probes, counts, strict=True):
            probe.updates = count
        optimizers = [probe.optimizer for probe in probes]
        self.context.recorder.loaded(self._step, Path(path).name, exchange.world_size, optimizers)
        found = exchange.spread(self._step, "restored", live_digests(probes))
        if f"random state of rank {exchange.world_size}" in wanted:
            wanted = {name: digest for name, digest in wanted.items() if not name.startswith("random state")}
        else:
            found |= self._random(self._step)
        self._judge_restored(wanted, found)

    def _random(self, updates: int) -> dict[str, tuple[int, ...]]:
        """The random state of each rank by a name that says the rank: one value on whichever rank it is judged."""
        own = {"random state": flat_digest([torch.get_rng_state()])}
        (states,) = self.context.exchange.spread(updates, "random", own).values()
        return {f"random state of rank {rank}": (state,) * len(states) for rank, state in enumerate(states)}

    def _judge_restored(self, wanted: Mapping[str, int], found: Mapping[str, tuple[int, ...]]) -> None:
        saved = {name: digest % _WRAP for name, digest in wanted.items()}
        # State that came after the save was never to be restored.
        live = {name: tuple(digest % _WRAP for digest in found[name]) for name in saved if name in found}
        self._judge(RESTORED, Restored(saved, live, self._step))

    def _refuse(self, problem: str) -> None:
        """Raise `ValueError` on every rank if any rank has a `problem` with what it was told. Collective."""
        seen = self.context.exchange(self._step, "told", {"problem": int(bool(problem))})
        others = [str(o.rank) for o in seen if o.values["problem"]]
        if others:
            raise ValueError(problem or f"rank {', '.join(others)} was told something wrong; its own message says what")


def _table(
    ids: Sequence[int] | Tensor, predictions: Sequence[int] | Tensor, labels: Sequence[int] | Tensor
) -> tuple[list[list[int]], str]:
    """The three columns, and what is wrong with them; "" if nothing is."""
    try:
        # One copy for a tensor on a GPU, not one for each element.
        columns = [each.tolist() if isinstance(each, Tensor) else each for each in (predictions, labels)]
        table = [ids_of(ids), *([int(value) for value in column] for column in columns)]
    except (TypeError, ValueError) as error:
        return [], str(error)
    lengths = [len(column) for column in table]
    return table, f"ids, predictions and labels have {lengths} rows" if len(set(lengths)) > 1 else ""


def live_digests(probes: Sequence[OptimizerProbe]) -> dict[str, int]:
    """The digests of weights, buffers, optimizer states and hyperparameters, by name. Collective if sharded."""
    subject = probes[0].context.subject
    found = {f"weights {n}": d for n, d in digests_by_name(_dense(subject.parameters)).items()}
    found |= {f"buffer {n}": d for n, d in digests_by_name(_dense(subject.buffers_by_name())).items()}
    for probe in probes:
        for name, parameter in probe.parameters.items():
            state = probe.optimizer.state.get(parameter, {})
            found[f"optimizer state {name}"] = state_digest({key: _whole(each) for key, each in state.items()})
        for index, group in enumerate(probe.optimizer.param_groups):
            kept = {key: value for key, value in group.items() if not key.startswith("param")}
            found |= {f"group {index} {key}": lenient_digest(value) for key, value in kept.items()}
    return found


def _dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: plain(_whole(tensor)) for name, tensor in tensors.items()}


def _whole(value: Any) -> Any:
    """A sharded tensor gathered from all ranks, so that its digest does not depend on the sharding; else the value."""
    gathered = getattr(value, "full_tensor", None)
    return value if gathered is None else gathered()


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".andon.json")


def _count_name(index: int) -> str:
    return f"updates of optimizer {index + 1}" if index else "updates"


def _read_digests(path: Path, optimizers: int) -> tuple[dict[str, int], list[int], str]:
    """The digests beside the checkpoint at `path`, the updates of each optimizer, and why there are none.

    An optimizer that the file does not have made as many updates as the first one.
    """
    try:
        found = {name: int(text, 16) for name, text in read_json(_beside(path)).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return {}, [0] * optimizers, f"{_beside(path)} does not say what was saved: {error}"
    first = found.get("updates", 0)
    return found, [found.pop(_count_name(index), first) for index in range(optimizers)], ""
