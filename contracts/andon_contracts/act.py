"""What a violation does: a message that keeps fact, inference and scope apart, a bundle, and the error itself."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from andon_contracts.violation import Finding, Violation

_BETWEEN_RANKS = frozenset(
    {
        "replicas-agree",
        "optimizers-agree",
        "gradients-agree",
        "buffers-agree",
        "hyperparameters-agree",
        "modes-agree",
        "collectives-agree",
        "scaler-agrees",
        "trees-agree",
    }
)

LIKELY: Mapping[str, str] = {
    "replicas-agree": "something changed the weights on one rank only, or each rank started from its own",
    "optimizers-agree": "the optimizer state of one rank was restored, reset or corrupted alone",
    "gradients-agree": "the gradients were not reduced, only some of them were, or one copy was changed afterwards",
    "hyperparameters-agree": "a rank-local scheduler decision",
    "buffers-agree": "running statistics that nothing broadcasts",
    "collectives-agree": "the order of the collectives depends on the rank",
    "scaler-agrees": "one rank skipped an update that the others made",
    "parameters-kept": "the model was changed after it was wrapped or after the optimizer was made",
    "gradient-fresh": "zero_grad is missing",
    "gradient-present": "the parameter is detached from the loss, or not used",
    "update-applied": "the optimizer holds other parameters than the model, or the precision is too low",
    "precision-sufficient": "the adapter was cast together with its base",
    "samples-once": "a sampler that pads, drops or repeats rows",
    "content-planned": "ranks whose data sets are in a different order, or a collate function that shifts rows",
    "gradient-law": "a factor too much or too few between loss, accumulation and reduction",
    "clip-once": "a norm taken of other gradients than those that are applied",
    "learning-rate-planned": "a scheduler that is stepped at another place than the optimizer",
    "checkpoint-whole": "a part of the state that was not saved or not loaded",
    "randomness-declared": "one seed on all ranks, or a draw on one rank only",
}
"""What usually is the cause, by clause: an inference, and shown as one."""


@dataclass(frozen=True)
class Scene:
    """What is known besides the finding. `last_equal`: the last update after which all weights were seen equal."""

    world: int = 1
    applied: bool = False
    last_equal: int | None = None
    before: str = ""
    element: str = ""
    tensors: int = 0
    bundle: str = ""


def violation(clause: str, finding: Finding, scene: Scene) -> Violation:
    """The error for `finding`, with the whole message."""
    return Violation(message(clause, finding, scene), clause=clause, finding=finding)


def message(clause: str, finding: Finding, scene: Scene) -> str:
    """Several lines: what is broken and where are facts, `likely` is an inference, `state` and `bundle` the scope."""
    rows = [
        ("where", _where(finding, scene)),
        ("seen", finding.seen),
        ("before", scene.before),
        ("likely", f"{LIKELY[clause]}  [inference, not proof]" if clause in LIKELY else ""),
        ("state", _state(finding, scene)),
        ("bundle", f"{scene.bundle}  explain: andon explain {scene.bundle}" if scene.bundle else ""),
        ("silence", f'andon.watch(..., allow={{"{clause}": "<reason>"}})'),
    ]
    head = f"{clause} broken {_when(finding, scene)}: {_who(clause, finding, scene.world)}."
    return "\n".join([head, *(f"  {name:<8} {text}" for name, text in rows if text)])


def _when(finding: Finding, scene: Scene) -> str:
    if not finding.step:
        return "at the start"
    return f"after step {finding.step}" if scene.applied else f"at step {finding.step}, before its update"


def _who(clause: str, finding: Finding, world: int) -> str:
    if world == 1:
        return "seen in the one process"
    noun = "rank" if len(finding.ranks) == 1 else "ranks"
    shown = f"{noun} {', '.join(map(str, finding.ranks))} of {world}"
    if clause not in _BETWEEN_RANKS:
        return f"seen on {shown}" if finding.ranks else "seen on all ranks"
    if not finding.ranks:
        return "ranks 0 and 1 differ" if world == 2 else "the ranks differ, with no majority"
    others = [rank for rank in range(world) if rank not in finding.ranks]
    verb = "differs" if len(finding.ranks) == 1 else "differ"
    return f"{shown} {verb} from {'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"


def _where(finding: Finding, scene: Scene) -> str:
    if not finding.tensor:
        return ""
    count = f" ({len(finding.details)} of {scene.tensors} tensors)" if finding.details and scene.tensors else ""
    return f"{finding.tensor}{count}{', ' + scene.element if scene.element else ''}"


def _state(finding: Finding, scene: Scene) -> str:
    done = (
        f"step {finding.step} was {'applied' if scene.applied else 'not applied'}"
        if finding.step
        else "no step was applied"
    )
    known = "" if scene.last_equal is None else f"; last state known equal: step {scene.last_equal}"
    return done + known


def write_bundle(folder: Path, found: Violation, scene: Scene, facts: Mapping[str, object]) -> Scene:
    """Write what is needed to look into `found` to `folder`/STEP/bundle.json; the scene with its place.

    A disk that refuses hides no violation: the scene then says why there is no bundle.
    """
    place = folder / str(found.step)
    finding = found.finding
    body = {
        "clause": found.clause,
        "step": finding.step,
        "ranks": finding.ranks,
        "world": scene.world,
        "tensor": finding.tensor,
        "seen": finding.seen,
        "applied": scene.applied,
        "last_equal": scene.last_equal,
        "element": scene.element,
        "digests": dict(finding.details),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "system": platform.platform()},
        **facts,
    }
    try:
        place.mkdir(parents=True, exist_ok=True)
        text = json.dumps(body, indent=2, sort_keys=True, default=repr) + "\n"
        (place / f"{found.clause}.json").write_text(text, encoding="utf-8")
    except OSError as error:
        return replace(scene, bundle=f"none ({error})")
    return replace(scene, bundle=str(place))
