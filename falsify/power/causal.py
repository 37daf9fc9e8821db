"""Faults of instruction tuning, planted in our trainer one at a time, and which of three checks must see each.

start: the model is held to giving packed rows the logits of each row alone, before training. inside: a law of the step
stops it. law: its gradient is not the float64 law's, which knows the rows as they were before any task had them; the
claim gradient-law compares the two.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

import andon.model.causal
import andon.tasks.sft
from andon.console.messages import InputError
from andon.data.chat import EncodedRow
from andon.model.build import backbone_of
from andon.step.micro_batch import Batch, LeafLoss
from andon.tasks.sft import SftTask
from andon_contracts.violation import Violation
from andon_falsify.checkers import gradient_law
from andon_falsify.subjects.trace import digest
from andon_falsify.verdict import Counterexample, Outcome, Verdict

from .causal_subject import LONGEST, CausalCase, CausalSubject
from .laboratory import Attempt, Observation
from .planting import patched

Check = Literal["start", "inside", "law"]
CHECKS: tuple[Check, ...] = ("start", "inside", "law")
FAR = 1e-3
"""A tensor's gradient this far from the law, as relative L2, is not rounding: rounding stays below 2e-6."""
_RESTARTED = CausalCase(lora=False, family="gpt2")


@dataclass(frozen=True)
class CausalFault:
    """A wrong, the check that must see it, and a regular expression that the check's text must match."""

    name: str
    check: Check
    reason: str
    plant: Callable[[ExitStack], None]
    case: CausalCase = field(default_factory=CausalCase)


@cache
def observe(case: CausalCase, plant: Callable[[ExitStack], None] | None = None) -> Observation:
    """What each check says of one update with the fault planted.

    The law is left out after a step that was stopped, and for models that it does not have.
    """
    said: dict[str, Verdict] = {name: Verdict(name, Outcome.HOLDS, checked=1) for name in ("start", "inside")}
    with ExitStack() as stack:
        if plant is not None:
            plant(stack)
        subject = CausalSubject(case)
        try:
            subject.start()
        except InputError as error:
            said["start"] = _falsified("start", error)
        batch, before = subject.batch(1), subject.weights()
        try:
            loss, gradients = subject.update(batch)
        except Violation as violation:
            said["inside"] = _falsified("inside", violation)
            return Observation(said, str(violation))
        if case.family == "qwen3":
            wanted = subject.law(before, batch)[1]
            said["law"] = gradient_law.check(gradients, wanted, tolerance=FAR, where="step 1")
    return Observation(said, f"{said['start']} {loss} {digest(gradients)}")


def _falsified(check: Check, error: Exception) -> Verdict:
    return Verdict(check, Outcome.FALSIFIED, checked=1, counterexamples=(Counterexample(str(error)),))


def attempt(fault: CausalFault) -> Attempt:
    """Plant `fault` in its case, and observe the case without it."""
    controls = {"without the fault": observe(fault.case)}
    return Attempt(fault.check, fault.reason, controls, observe(fault.case, fault.plant))


def _around(owner: Any, name: str, call: Callable[..., Any]) -> Callable[[ExitStack], None]:
    """call(original, *args, **kwargs) replaces a function of a module or class."""

    def plant(stack: ExitStack) -> None:
        inner = getattr(owner, name)
        patched(stack, owner, name, lambda *args, **named: call(inner, *args, **named))

    return plant


def _weighed(change: Callable[[Sequence[float]], Sequence[float]]) -> Callable[[ExitStack], None]:
    """Rows have the weights that `change` makes of theirs; once, since a task of packs is made of one of rows."""

    def build(inner: Callable[..., None], task: SftTask, rows: Sequence[EncodedRow], **named: Any) -> None:
        if named.get("packs") is None:
            rows = [replace(row, weights=array("f", change(row.weights))) for row in rows]
        inner(task, rows, **named)

    return _around(SftTask, "__init__", build)


def _loss(change: Callable[[Batch, LeafLoss], LeafLoss], planned: int | None) -> Callable[[ExitStack], None]:
    """A micro-batch's loss is what `change` makes of it; planned: the terms of each pack, where they change too."""

    def plant(stack: ExitStack) -> None:
        _around(SftTask, "loss_sum", lambda inner, task, model, batch: change(batch, inner(task, model, batch)))(stack)
        if planned is not None:
            patched(stack, SftTask, "planned_terms", lambda self, ids: (planned,) * len(ids))

    return plant


def _mean_of_each(batch: Batch, loss: LeafLoss) -> LeafLoss:
    assert loss.terms is not None
    packs = torch.tensor(len(batch["rows"]))
    return LeafLoss(loss.loss_sum / loss.terms * packs, loss.correct, packs)


def _counted(batch: Batch, count: int) -> torch.Tensor:
    return torch.tensor(count, device=batch["rows"].device)


def _mask_of_ones(inner: Callable[..., torch.Tensor], model: nn.Module, batch: Batch) -> torch.Tensor:
    return inner(model, {**batch, "rows": torch.ones_like(batch["rows"])})


def _default_cache(_: Callable[..., torch.Tensor], model: nn.Module, batch: Batch) -> torch.Tensor:
    backbone: Any = backbone_of(model)
    output = backbone(input_ids=batch["input_ids"], position_ids=batch["positions"], use_cache=True)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def _running_positions(stack: ExitStack) -> None:
    def collate(inner: Callable[..., Batch], *arguments: Any) -> Batch:
        batch = inner(*arguments)
        running = torch.arange(batch["rows"].shape[1]).expand_as(batch["rows"]).contiguous()
        return {**batch, "positions": running}

    for module in (andon.model.causal, andon.tasks.sft):
        _around(module, "collate_packs", collate)(stack)


_APART = "'{}' gives packed rows other logits than each row alone"
_QWEN, _GPT = _APART.format("Qwen3ForCausalLM"), _APART.format("GPT2LMHeadModel")
FAULTS = (
    CausalFault("loss over prompt tokens", "law", r"step 1: .*seen \S+up_proj\.lora_B\.weight 1\.43",
                _weighed(lambda weights: [1.0] * len(weights))),
    CausalFault("mean of the micro-batches' means", "law", r"step 1: .*seen \S+q_proj\.lora_B\.weight 0\.16",
                _loss(_mean_of_each, 1)),
    CausalFault("mask off by one", "law", r"step 1: .*seen \S+up_proj\.lora_B\.weight 1\.46",
                _weighed(lambda weights: [*weights[1:], 0.0])),
    CausalFault("stop token not trained", "law", r"step 1: .*seen \S+up_proj\.lora_B\.weight 1\.32",
                _weighed(lambda weights: [*weights[:-1], 0.0])),
    CausalFault("rows of a pack see each other: a mask of ones", "start", _QWEN,
                _around(andon.model.causal, "hidden_of", _mask_of_ones)),
    CausalFault("rows of a pack see each other: the default cache", "start", _QWEN,
                _around(andon.model.causal, "hidden_of", _default_cache)),
    CausalFault("padded tokens counted", "inside", r"micro-batch \d+ sums \d+ terms, but its rows have \d+",
                _loss(lambda batch, loss: replace(loss, terms=_counted(batch, batch["rows"].numel())), None)),
    CausalFault("padded tokens counted, and planned", "law", r"step 1: .*ratio 0\.674",
                _loss(lambda batch, loss: replace(loss, terms=_counted(batch, LONGEST * len(batch["rows"]))), LONGEST)),
    CausalFault("positions that do not restart", "start", _GPT, _running_positions, _RESTARTED),
)  # fmt: skip
CONTROLS = (CausalCase(), CausalCase(packed=False), _RESTARTED)
