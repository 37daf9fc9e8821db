"""A loop of the falsifier's catalogue under a watch, which is told what the fault needs."""

from __future__ import annotations

import contextlib
import gc
import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import andon
from andon_contracts.observe import flat_digest
from andon_contracts.violation import Violation
from andon_contracts.watch.values import state_digest
from andon_falsify.loops.task import collate, dataset, model
from andon_falsify.peers.plain import PlainLoop
from falsify.power.looped.fault import WATCHED, Inside
from falsify.power.looped.right import Labelled, Scheduled
from falsify.power.planting import around
from tests.watch.clean import Seen, path_of_all_ranks, seen_by


@dataclass
class Trace:
    """What a run left at each update on this rank, and what its watch found: clauses and steps."""

    states: list[tuple[object, ...]] = field(default_factory=list)
    found: list[tuple[str, int]] = field(default_factory=list)
    said: str = ""


class Watched:
    """A loop of `kind` under a watch that collects. `run` trains it, once."""

    def __init__(self, kind: type[PlainLoop], inside: Inside) -> None:
        # Hide earlier objects from the watch, which scans all that the collector knows several times.
        gc.collect()
        gc.freeze()
        self._case, self._inside, self._lines = inside.case, inside, frozenset(inside.lines)
        self._kind, self.trace = kind, Trace()
        self._told: list[object] = []
        self._until: int | None = None
        self._plan = list(PlainLoop(self._case.but(max_steps=None))._batches())
        self._folder = None if inside.continued is None else path_of_all_ranks().parent
        self._begin()
        if inside.resumed == 0:
            self._resume()
        self._open()

    def _begin(self) -> None:
        # As under the falsifier: ranks that are equal only because they happened to draw the same are not equal.
        random.seed(f"{self._case.seed} {dist.get_rank()}")
        torch.manual_seed(1000 * self._case.seed + dist.get_rank())
        self.loop: Any = self._kind(self._case)
        if self._inside.at is not None:
            self.loop.at = self._inside.at
        around(self.loop, "_batches", lambda inner: islice(inner(), self._until))

    def run(self) -> Trace:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self._run()
        self.trace.said = said.getvalue()
        return self.trace

    def _run(self) -> None:
        if self._inside.continued is not None:
            self._until = self._inside.continued + 1
            self.loop.train(self)
            self.watch.close()
            dist.barrier()
            self._until = None
            self._begin()
            self.loop.load(self._folder)
            self._open()
        if self._inside.resumed:
            self._until = self._inside.resumed
            self.loop.train(self)
            self._until = None
            self._resume()
        self.loop.train(self)
        if "evaluated" in self._lines:
            self._evaluate()
        self.watch.close()

    def loss(self, value: float | Tensor) -> None:
        self._told.append(float(value))
        self.trace.states.append(self._state())
        if len(self.trace.states) == self._inside.continued:
            self.loop.done += 1
            self.loop.save(self._folder)

    def rows(self, ids: Sequence[int]) -> None:
        """See `Told.rows`."""

    def _open(self) -> None:
        # Before the watch has hooks of its own, since rows are told before the forward pass.
        if "content" in self._lines:
            self.loop.model.register_forward_pre_hook(self._tell_content, with_kwargs=True)
        if "evaluated" in self._lines:
            self.loop.model.register_forward_hook(self._hear_answers)
            around(self.loop, "_scores", self._scores)
        known = self._known()
        given = {name: known[name]() for name in self._lines & known.keys()}
        given |= {"every": 1} if "reference" in self._lines else {}
        # As the variable ANDON_LEDGER does for a new process.
        given |= {} if self._folder is None else {"ledger": self._folder / "ledger"}
        self.watch = andon.watch(self.loop.model, self.loop.optimizer, action=self._note, **given)
        around(self.loop, "_update", self._update)
        around(self.loop, "_loss_sum", self._loss_sum)
        around(self.loop, "_add_over_ranks", self._add_over_ranks)
        around(self.loop, "_apply", self._apply)

    def _note(self, found: Violation) -> None:
        if (found.clause, found.step) not in self.trace.found:
            self.trace.found.append((found.clause, found.step))

    def _known(self) -> Mapping[str, Callable[[], Any]]:
        case = self._case
        return {
            "plan": lambda: lambda update: self._plan[update - 1],
            "rows": lambda: len(case.rows),
            "contents": lambda: self._contents,
            "reference": lambda: self._reference,
            "clip": lambda: case.clip_norm,
            "groups": lambda: {name: self._settings(name) for name in self._trainable()},
            "schedule": lambda: self.loop.rate,
            "trainable": self._trainable,
            "tied": lambda: [self.loop.tied],
            "updates": lambda: case.updates(case.global_batch),
            "scaler": lambda: self.loop.scaler,
        }

    def _trainable(self) -> list[str]:
        return [name for name, parameter in model(self._case).named_parameters() if parameter.requires_grad]

    def _settings(self, name: str) -> dict[str, object]:
        decay = self.loop.decay(name) if hasattr(self.loop, "decay") else self._case.weight_decay
        return {"weight_decay": decay, "betas": (0.9, 0.999), "eps": 1e-8}

    def _contents(self, ids: Sequence[int]) -> list[tuple[list[int], int]]:
        rows = [self.loop.rows[row] for row in ids]
        return [(row["input_ids"], row["labels"]) for row in rows]

    def _reference(self, module: nn.Module, ids: Sequence[int]) -> tuple[Tensor, int]:
        rows = dataset(self._case)
        batch = collate([rows[row] for row in ids])
        labels = batch.pop("labels")
        return cross_entropy(module(**batch).logits, labels, self.loop.weights, reduction="sum"), len(ids)

    # the calls of the loop

    def _update(self, inner: Callable[..., Tensor], batch: list[int]) -> Tensor:
        if "expect" in self._lines:
            self.watch.expect("dropout", torch.get_rng_state(), "differ")
            if hasattr(self.loop, "stream"):
                self.watch.expect("order", self.loop.stream, "agree")
        return inner(batch)

    def _loss_sum(self, inner: Callable[..., Tensor], ids: Sequence[int]) -> Tensor:
        self._ids = ids
        if "batch" in self._lines and "content" not in self._lines:
            self.watch.batch(ids)
        loss = inner(ids)
        if "loss" in self._lines:
            self.watch.loss(loss.detach(), len(ids))
        poison = self._case.poison
        if poison is not None and (poison.step, 1) == (self.loop.done + 1, dist.get_rank()):
            loss = loss * float("nan")
        return loss

    def _tell_content(self, _: nn.Module, __: object, given: dict[str, Tensor]) -> None:
        if torch.is_grad_enabled() and "labels" in given:  # and the reference does not give them
            padded = zip(given["input_ids"], given["attention_mask"].bool(), given["labels"].tolist(), strict=True)
            self.watch.batch(self._ids, [(tokens[mask].tolist(), label) for tokens, mask, label in padded])

    def _add_over_ranks(self, inner: Callable[..., None], total: Tensor) -> None:
        inner(total)
        if "loss" in self._lines:
            self.watch.expect("loss", float(total), "mean")

    def _apply(self, inner: Callable[[], None]) -> None:
        if "reduced" in self._lines:
            self.watch.reduced()
        inner()

    # what comes between and after updates

    def _resume(self) -> None:
        path = path_of_all_ranks().parent
        self.loop.save(path)
        if "saved" in self._lines:
            self.watch.saved(path)
        dist.barrier()
        self.loop.model.load_state_dict(model(self._case).state_dict())
        self.loop.optimizer.state.clear()
        torch.manual_seed(99)
        self.loop.load(path)
        if "loaded" in self._lines:
            self.watch.loaded(path)

    def _evaluate(self) -> None:
        for _ in range(2):
            self._evaluated: list[int] = []
            self._answers: list[int] = []
            metrics = self.loop.evaluate()
            self._told.append((dict(metrics), self._answers))
            labels = [self._case.rows.labels[row] for row in self._evaluated]
            told = {"accuracy": metrics["accuracy"]}
            self.watch.evaluated(self._evaluated, self._answers, labels, told, rows=len(self._case.rows))
        self.trace.states.append(self._state())

    def _scores(self, inner: Callable[..., Tensor], ids: list[int]) -> Tensor:
        self._evaluated, self._answers = ids, []
        return inner(ids)

    def _hear_answers(self, _: nn.Module, __: object, out: Any) -> None:
        if not torch.is_grad_enabled():
            self._answers += out.logits.argmax(-1).tolist()

    def _state(self) -> tuple[object, ...]:
        groups = self.loop.optimizer.param_groups
        kept = [state_digest(self.loop.optimizer.state.get(p, {})) for group in groups for p in group["params"]]
        rates = [(group["lr"], group["weight_decay"]) for group in groups]
        tensors = [flat_digest(self.loop.model.parameters()), flat_digest(self.loop.model.buffers())]
        beside = getattr(self.loop, "average", None)
        tensors += [] if beside is None else [flat_digest(beside.parameters())]
        return (*tensors, tuple(kept), tuple(rates), repr(self._told))


class Declared(Scheduled, Labelled):
    """Right, with a schedule, and a model that is given the labels."""


def all_told(steps: int) -> Seen:
    """The right loop, telling its watch all that can be told."""
    once = ("plan", "rows", "contents", "reference", "clip", "groups", "schedule", "trainable")
    case = WATCHED.but(epochs=-(-steps // 5), max_steps=steps)
    watched = Watched(Declared, Inside("", 0, (*once, "batch", "content", "reduced", "loss"), case))
    watched.run()
    return seen_by(watched.watch)
