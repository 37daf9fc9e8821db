"""The outcomes that the loop reports: evaluations, checkpoints, and the number of its updates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from andon_contracts.agree import WRAP, bits_of, real_of
from andon_contracts.digest import digests_by_name
from andon_contracts.laws.law import Law, Observations, unless_all
from andon_contracts.laws.update import COUNTED, EVALUATED, RESTORED, Evaluation, not_restored
from andon_contracts.observe import flat_digest, plain
from andon_contracts.untrusted import read_json
from andon_contracts.violation import Finding
from andon_contracts.watch.check import Check, Context, Cover, OptimizerProbe, declared
from andon_contracts.watch.checks.reports import LoopReports, text_of
from andon_contracts.watch.values import ids_of, is_flattened, lenient_digest, state_digest, text_digest

S = TypeVar("S")
_STREAM, _UPDATES = "random state of rank ", "updates of optimizer "
_OTHER = "torch's random state is not the saved one, so dropout and shuffling draw other numbers"
_LIKELY = "the loop does not save and restore it on each rank, or draws numbers before `w.loaded`"
_RANDOM = (Law[Finding | None]("randomness-declared/restored", (), lambda found: found, suspicion=True),)


class Outcomes(Check):
    """Implements `Watch.evaluated`, `saved` and `loaded`: collective calls that raise on all ranks or on none."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._evaluated: dict[tuple[int, int], int] = {}
        modules = context.subject.inner.named_modules()
        self._batch_norms = [(n, m) for n, m in modules if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._batch_norm_in_training = 0
        """The number, from 1, of a batch norm in training mode in the last forward pass without gradients; 0: none."""

    def cover(self) -> Mapping[str, Cover]:
        return {
            "updates-planned": declared(self.context.settings.updates, "updates="),
            "evaluation-once": Cover("live", "if the loop calls w.evaluated"),
            "checkpoint-whole": Cover("live", "if the loop calls w.saved and w.loaded"),
        }

    def forward(self, module: object, args: object, kwargs: object) -> None:
        if not torch.is_grad_enabled():
            training = (number for number, (_, norm) in enumerate(self._batch_norms, 1) if norm.training)
            self._batch_norm_in_training = next(training, 0)

    def updated(self, probe: OptimizerProbe) -> None:
        self._batch_norm_in_training = 0

    def judge(self, probe: OptimizerProbe, said: Observations, aligned: Observations) -> None:
        if (planned := self.context.settings.updates) is not None:
            self._judge(COUNTED, (probe.updates, planned, False))

    def judge_close(self) -> None:
        if (planned := self.context.settings.updates) is not None:
            self._judge(COUNTED, (self.context.updates, planned, True))

    def _judge(self, laws: Sequence[Law[S]], seen: S, at: str = "") -> None:
        self.context.verdicts.judge(laws, seen, replace(self.context.scene(applied=True), at=at))

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
        table, problem = list[list[int]](), ""
        try:
            # One copy from a GPU, instead of one for each element.
            columns = [each.tolist() if isinstance(each, Tensor) else each for each in (predictions, labels)]
            table = [ids_of(ids), *([int(value) for value in column] for column in columns)]
            lengths = [len(column) for column in table]
            if len(set(lengths)) > 1:
                problem = f"ids, predictions and labels have different lengths: {lengths}"
        except (TypeError, ValueError) as error:
            problem = str(error)
        self._raise_on_all_ranks(problem)
        step, exchange, metrics = self._step, self.context.exchange, metrics or {}
        reported = {
            "weights": flat_digest(p for probe in self.context.probes for p in probe.members),
            "rows known": int(rows is not None),
            "rows": rows or 0,
            "tells accuracy": int("accuracy" in metrics),
            "accuracy": bits_of(metrics.get("accuracy", 0.0)),
            "norm in training": self._batch_norm_in_training,
        }
        seen = exchange(step, "evaluated", reported)
        parts = exchange.gather_columns(step, table)
        triples = [row for part in parts for row in zip(*part, strict=True)]
        counted = {"accuracy": sum(p == y for _, p, y in triples) / max(len(triples), 1)}
        weights = text_digest([o.values["weights"] for o in seen])
        evaluated_rows = text_digest(sorted(row for row, _, _ in triples))
        answers = text_digest(sorted(triples))
        norm_names = ["", *(name for name, _ in self._batch_norms)]
        evaluation = Evaluation(
            step,
            tuple(tuple(part[0]) for part in parts),
            max(o.values["rows"] for o in seen) if all(o.values["rows known"] for o in seen) else None,
            {"accuracy": [real_of(o.values["accuracy"]) if o.values["tells accuracy"] else None for o in seen]},
            counted,
            self._evaluated.setdefault((weights, evaluated_rows), answers) == answers,
            tuple(norm_names[o.values["norm in training"]] for o in seen),
        )
        self.context.recorder.evaluated(step, len(triples), {**counted, **metrics})
        self._judge(EVALUATED, evaluation)

    def saved(self, path: str | Path) -> None:
        step, probes = self._step, self.context.probes
        digests = _live_digests(probes)
        digests |= {f"{_UPDATES}{number}": probe.updates for number, probe in enumerate(probes, 1)}
        digests |= self._random(step)
        # Rank 0 writes. After this gather, every rank can read the file.
        problem = ""
        if self.context.exchange.rank == 0:
            words = {name: f"{digest:x}" for name, digest in digests.items()}
            words |= {name: f"{digest:x} {text}" for name, (digest, text) in _hyperparameters(probes).items()}
            try:
                Path(f"{path}.andon.json").write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                problem = f"cannot write the digests of the checkpoint: {error}"
        self._raise_on_all_ranks(problem, OSError)
        self.context.recorder.saved(step, Path(path).name, digests)

    def loaded(self, path: str | Path) -> None:
        probes, exchange = self.context.probes, self.context.exchange
        file, saved, texts, problem = Path(f"{path}.andon.json"), dict[str, int](), dict[str, str](), ""
        try:
            words = {name: text.partition(" ") for name, text in read_json(file).items()}
            saved = {name: int(digest, 16) % WRAP for name, (digest, *_) in words.items()}
            texts = {name: text for name, (*_, text) in words.items() if text}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            problem = f"cannot read the digests of the checkpoint from {file}: {error}"
        self._raise_on_all_ranks(problem)
        for number, probe in enumerate(probes, 1):
            probe.updates = saved.pop(f"{_UPDATES}{number}", 0)
        step, name = self._step, Path(path).name
        self.context.recorder.loaded(step, name, exchange.world_size, [probe.optimizer for probe in probes])
        random = {each: saved.pop(each) for each in [*saved] if each.startswith(_STREAM)}
        live = exchange.gather_named(step, "restored", _live_digests(probes))
        # A checkpoint does not restore state that the optimizer created after the save.
        current = {each: tuple(digest % WRAP for digest in live[each]) for each in saved if each in live}
        none = state_digest({}) % WRAP
        for lost in [each for each, own in current.items() if {*own} == {none} and saved[each] != none]:
            del current[lost]
        now = {each: text for each, (_, text) in _hyperparameters(probes).items() if len({*current.get(each, ())}) == 1}
        both = {each: (texts[each], now[each]) for each in texts.keys() & now.keys()}
        at = f"at the load of {name}, saved after step {step}"
        self._judge(RESTORED, not_restored(saved, current, step, both), at)
        states = self._random(step)
        if random.keys() == states.keys():  # another number of ranks has other random states
            odd = [rank for rank, each in enumerate(states) if (random[each] - states[each]) % WRAP]
            found = Finding(_OTHER, step, unless_all(odd, len(states)), likely=_LIKELY) if odd else None
            self.context.check(LoopReports).unreported.discard("randomness-declared")
            self._judge(_RANDOM, found, at)

    def _random(self, updates: int) -> dict[str, int]:
        own = {"random state": flat_digest([torch.get_rng_state()])}
        (states,) = self.context.exchange.gather_named(updates, "random", own).values()
        return {f"{_STREAM}{rank}": state for rank, state in enumerate(states)}

    def _raise_on_all_ranks(self, problem: str, kind: type[Exception] = ValueError) -> None:
        seen = self.context.exchange(self._step, "told", {"problem": int(bool(problem))})
        if any(o.values["problem"] for o in seen):
            texts = enumerate(self.context.exchange.gather_texts(self._step, problem))
            raise kind(problem or "; ".join(f"rank {rank}: {text}" for rank, text in texts if text))


def _live_digests(probes: Sequence[OptimizerProbe]) -> dict[str, int]:
    """The digests of weights, buffers, optimizer states and hyperparameters, by name. Collective if sharded."""
    subject = probes[0].context.subject
    # A part of a flat tensor of FSDP1 cannot be gathered, and depends on the number of ranks.
    flat = {name for name, p in subject.parameters.items() if id(p) in subject.shards and is_flattened(p)}
    whole = {name: p for name, p in subject.parameters.items() if name not in flat}
    digests = {f"weights {n}": d for n, d in digests_by_name(_dense(whole)).items()}
    digests |= {f"buffer {n}": d for n, d in digests_by_name(_dense(subject.buffers_by_name())).items()}
    for probe in probes:
        for name in (each for each in probe.names if each not in flat):
            state = probe.optimizer.state.get(probe.parameters[name], {})
            digests[f"optimizer state {name}"] = state_digest({key: _gathered(each) for key, each in state.items()})
    return digests | {name: digest for name, (digest, _) in _hyperparameters(probes).items()}


def _hyperparameters(probes: Sequence[OptimizerProbe]) -> dict[str, tuple[int, str]]:
    groups = enumerate(group for probe in probes for group in probe.optimizer.param_groups)
    items = ((f"parameter group {index}, {key}", value) for index, group in groups for key, value in group.items())
    return {name: (lenient_digest(value), text_of(value)) for name, value in items if ", param" not in name}


def _dense(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: plain(_gathered(tensor)) for name, tensor in tensors.items()}


def _gathered(value: Any) -> Any:
    """Gather a sharded tensor, so that its digest does not depend on the sharding. Returns other values unchanged."""
    gathered = getattr(value, "full_tensor", None)
    return value if gathered is None else gathered()
