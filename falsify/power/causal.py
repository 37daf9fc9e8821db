"""Faults of instruction tuning, planted in our trainer one at a time, and which of three checks must see each.

start: the model is held to giving packed rows the logits of each row alone, before training. inside: a law of the step
stops it. law: its gradient is not the float64 law's, which knows the rows as they were before any task had them; the
claim gradient-law compares the two.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

import andon.model.causal
import andon.tasks.sft
from andon.console.problems import InputError
from andon.data.chat import EncodedRow
from andon.model.build import backbone_of
from andon.step.task import Batch, LeafLoss
from andon.tasks.sft import SftTask
from andon_contracts.violation import Violation
from andon_falsify.checkers import gradient_law
from andon_falsify.verdict import Outcome

from .causal_subject import LONGEST, CausalCase, CausalLaw, CausalSubject
from .planting import patched

Check = Literal["start", "inside", "law"]
CHECKS: tuple[Check, ...] = ("start", "inside", "law")
FAR = 1e-3
"""A tensor's gradient this far from the law, as relative L2, is not rounding: rounding stays below 2e-6."""
_RESTARTED = CausalCase(lora=False, family="gpt2")


@dataclass(frozen=True)
class CausalFault:
    """A wrong, and the check that is named for it: others may see it too.

    reason: a regular expression that the text of the check must match. plant: undone when the stack closes.
    """

    name: str
    killer: Check
    reason: str
    plant: Callable[[ExitStack], None]
    case: CausalCase = field(default_factory=CausalCase)


def attempt(case: CausalCase, plant: Callable[[ExitStack], None] = lambda _: None) -> dict[Check, str]:
    """What each check said of one update with the fault planted: in words where it saw it, '' where it was silent.

    A check that could not look is left out: the law, behind a step that was stopped and for models it does not have.
    """
    found: dict[Check, str] = dict.fromkeys(("start", "inside"), "")
    with ExitStack() as stack:
        plant(stack)
        subject = CausalSubject(case)
        try:
            subject.start()
        except InputError as error:
            found["start"] = str(error)
        batch, before = subject.batch(1), subject.weights()
        try:
            _, gradients = subject.update(batch)
        except Violation as violation:
            found["inside"] = str(violation)
            return found
        if case.family == "qwen3":
            wanted = CausalLaw(subject)(before, subject, batch)[1]
            verdict = gradient_law.check(gradients, wanted, tolerance=FAR, where="step 1")
            said = "; ".join(map(str, verdict.counterexamples)) or verdict.why
            found["law"] = "" if verdict.outcome is Outcome.HOLDS else said
    return found


def problems(fault: CausalFault, control: Mapping[Check, str], planted: Mapping[Check, str]) -> list[str]:
    """What is wrong with the checks, or with the fault. control: what each said of the case without the fault."""
    found = [f"without the fault, {check} says: {said}" for check, said in control.items() if said]
    if fault.killer not in control:
        found.append(f"without the fault, {fault.killer} could not look")
    said = planted.get(fault.killer, "")
    if not said:
        found.append(f"not seen by {fault.killer}")
    elif not re.search(fault.reason, said):
        found.append(f"seen for another reason than {fault.reason!r}: {said}")
    return found


def _weighed(change: Callable[[Sequence[float]], Sequence[float]]) -> Callable[[ExitStack], None]:
    """Rows have the weights that `change` makes of theirs; once, since a task of packs is made of one of rows."""

    def plant(stack: ExitStack) -> None:
        build: Callable[..., None] = SftTask.__init__

        def changed(self: SftTask, rows: Sequence[EncodedRow], **named: Any) -> None:
            if named.get("packs") is None:
                rows = [replace(row, weights=array("f", change(row.weights))) for row in rows]
            build(self, rows, **named)

        patched(stack, SftTask, "__init__", changed)

    return plant


def _loss(change: Callable[[Batch, LeafLoss], LeafLoss], planned: int | None) -> Callable[[ExitStack], None]:
    """A micro-batch's loss is what `change` makes of it; planned: the terms of each pack, where they change too."""

    def plant(stack: ExitStack) -> None:
        inner = SftTask.loss_sum

        def changed(self: SftTask, model: nn.Module, batch: Batch) -> LeafLoss:
            return change(batch, inner(self, model, batch))

        patched(stack, SftTask, "loss_sum", changed)
        if planned is not None:
            patched(stack, SftTask, "planned_terms", lambda self, ids: (planned,) * len(ids))

    return plant


def _mean_of_each(batch: Batch, loss: LeafLoss) -> LeafLoss:
    assert loss.terms is not None
    packs = torch.tensor(len(batch["rows"]))
    return LeafLoss(loss.loss_sum / loss.terms * packs, loss.correct, packs)


def _counted(batch: Batch, count: int) -> torch.Tensor:
    return torch.tensor(count, device=batch["rows"].device)


def _hidden(change: Callable[[Callable[..., torch.Tensor], nn.Module, Batch], torch.Tensor]) -> Any:
    def plant(stack: ExitStack) -> None:
        inner = andon.model.causal.hidden_of
        patched(stack, andon.model.causal, "hidden_of", lambda model, batch: change(inner, model, batch))

    return plant


def _mask_of_ones(inner: Callable[..., torch.Tensor], model: nn.Module, batch: Batch) -> torch.Tensor:
    return inner(model, {**batch, "rows": torch.ones_like(batch["rows"])})


def _default_cache(_: Callable[..., torch.Tensor], model: nn.Module, batch: Batch) -> torch.Tensor:
    backbone: Any = backbone_of(model)
    output = backbone(input_ids=batch["input_ids"], position_ids=batch["positions"], use_cache=True)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def _running_positions(stack: ExitStack) -> None:
    inner = andon.model.causal.collate_packs

    def changed(*arguments: Any) -> Mapping[str, torch.Tensor]:
        batch = inner(*arguments)
        running = torch.arange(batch["rows"].shape[1]).expand_as(batch["rows"]).contiguous()
        return {**batch, "positions": running}

    for module in (andon.model.causal, andon.tasks.sft):
        patched(stack, module, "collate_packs", changed)


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
    CausalFault("rows of a pack see each other: a mask of ones", "start", _QWEN, _hidden(_mask_of_ones)),
    CausalFault("rows of a pack see each other: the default cache", "start", _QWEN, _hidden(_default_cache)),
    CausalFault("padded tokens counted", "inside", r"micro-batch \d+ sums \d+ terms, but its rows have \d+",
                _loss(lambda batch, loss: replace(loss, terms=_counted(batch, batch["rows"].numel())), None)),
    CausalFault("padded tokens counted, and planned", "law", r"step 1: .*ratio 0\.674",
                _loss(lambda batch, loss: replace(loss, terms=_counted(batch, LONGEST * len(batch["rows"]))), LONGEST)),
    CausalFault("positions that do not restart", "start", _GPT, _running_positions, _RESTARTED),
)  # fmt: skip
CONTROLS = (CausalCase(), CausalCase(packed=False), _RESTARTED)
