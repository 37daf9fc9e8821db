"""What a violation causes: a message that separates fact, inference and scope, a bundle, and the error itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from andon_contracts.agree import Observation, minority, real_of
from andon_contracts.bundle import Evidence, explain_command, write_account, write_part
from andon_contracts.causes import row_lines
from andon_contracts.clauses import CLAUSES
from andon_contracts.violation import NOT_SEEN_REDUCED, OTHER_SHAPES, Finding, Violation, named_ranks

_OF_A_TREE = "trees-agree"
"""The clause of `assert_same`, which a script calls outside any update and watch."""


@dataclass(frozen=True)
class Scene:
    """What is known besides the finding.

    last_equal: the last update after which all weights were seen equal. unwritten: why the bundle is not whole.
    goes_on: the loop makes its update all the same, because nothing is raised. by_command: the command `andon watch`
    opened the watch, so its options silence a clause. also: other laws broken by the same observations, as effects.
    """

    world: int = 1
    applied: bool = False
    last_equal: int | None = None
    before: str = ""
    element: str = ""
    tensors: int = 0
    bundle: str = ""
    unwritten: str = ""
    goes_on: bool = False
    by_command: bool = False
    also: tuple[str, ...] = ()


def violation(clause: str, finding: Finding, scene: Scene) -> Violation:
    """The error for `finding`, with the whole message."""
    return Violation(message(clause, finding, scene), clause=clause, finding=finding, bundle=scene.bundle)


def with_bundle(found: Violation, scene: Scene, evidence: Evidence, facts: Mapping[str, object]) -> Violation:
    """The error for what all ranks found alike, after each of them has left its part of the bundle.

    All ranks have just answered, so that the lowest live one is the first; it writes the account.
    """
    place = evidence.bundle_folder(found.step)
    if place is None:
        return violation(found.clause, found.finding, scene)
    whole = violation(found.clause, found.finding, replace(scene, bundle=str(place)))
    at = {"step": found.step, "point": "after the update" if scene.applied else "before the update"}
    failed = write_part(place, found.clause, evidence, at, found.tensor)
    if evidence.rank == 0:
        likely = _likely(found.clause, found.finding, scene)
        known = {**asdict(scene), "cause": whole.cause, "message": str(whole), "likely": likely, **facts}
        failed = write_account(place, found.clause, found.finding, known, evidence.devices) or failed
    return violation(found.clause, found.finding, replace(scene, bundle=str(place), unwritten=failed))


def agreement(observations: Sequence[Observation], *, moments: bool) -> str:
    """What was equal on all ranks just before an update and what was not, as one line; "" of a single rank.

    moments: whether the optimizer states were seen equal after the update before.
    """
    if len(observations) == 1:
        return ""
    columns = ("weights", "gradient", "layout", "hyperparameters")
    same = {name for name in columns if len({o.values[name] for o in observations}) == 1}
    read = [bool(o.values["weights read"]) for o in observations]  # of some ranks alone: no one moment to name
    weights = ["weights"] * ("weights" in same)
    now = weights * all(read) + ["reduced gradient"] * ("gradient" in same)
    earlier = weights * (not any(read)) + ["moments"] * moments
    shown = [f"{_listed(now)} agreed"] if now else []
    if earlier:
        shown.append(f"{_listed(earlier)} agreed after step {observations[0].step - 1}, not read again since")
    rates = [real_of(o.values["rate"]) for o in observations]
    if len(set(rates)) > 1:
        odd = minority(rates)
        named = odd or range(len(rates))
        others = [] if not odd else [f"{next(r for i, r in enumerate(rates) if i not in odd)!r} on the others"]
        shown.append(f"lr differs: {', '.join([*(f'{rates[i]!r} on rank {i}' for i in named), *others])}")
    elif "layout" in same and "hyperparameters" not in same:
        shown.append("hyperparameters differ")
    return "; ".join(shown)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def message(clause: str, finding: Finding, scene: Scene) -> str:
    """Several lines: what is broken and where are facts, `likely` is an inference, `state` and `bundle` the scope."""
    tree = clause == _OF_A_TREE
    where, likely = finding.tensor, _likely(clause, finding, scene)
    if where and finding.details and scene.tensors:
        where += f" ({len(finding.details)} of {scene.tensors} {'leaves' if tree else 'tensors'})"
    if where and scene.element:
        where += f", {scene.element}"
    when, state = " at the start", "no step was applied"
    if finding.step:
        when = f" after step {finding.step}" if scene.applied else f" at step {finding.step}, before its update"
        before = "not applied yet, and the loop goes on" if scene.goes_on else "not applied"
        state = f"step {finding.step} was {'applied' if scene.applied else before}"
    if scene.last_equal is not None:
        state += f"; last state known equal: step {scene.last_equal}"
    allow = f"--allow {clause}=<reason>" if scene.by_command else f'andon.watch(..., allow={{"{clause}": "<reason>"}})'
    rows = [
        ("where", where),
        # Between ranks the bits of an element say it; the digests that are seen besides are in the bundle.
        ("seen", "" if scene.element and CLAUSES[clause].between_ranks else finding.seen),
        *(("also", each) for each in scene.also),
        ("before", scene.before),
        ("likely", f"{likely}  [inference, not proof]" if likely else ""),
        ("state", "" if tree else state),
        ("bundle", f"{scene.bundle}  explain: {explain_command(Path(scene.bundle))}" if scene.bundle else ""),
        ("but", f"not all of the bundle could be written: {scene.unwritten}" if scene.unwritten else ""),
        ("silence", "" if tree else allow),
    ]
    head = f"{clause} broken{'' if tree else when}: {_who(clause, finding, scene.world)}."
    return "\n".join([head, *row_lines(rows)])


def _likely(clause: str, finding: Finding, scene: Scene) -> str:
    """What usually is the cause of a broken clause, given what else was seen."""
    if OTHER_SHAPES in finding.seen or NOT_SEEN_REDUCED in finding.seen:
        return ""
    if clause in ("replicas-agree", "optimizers-agree") and "lr differs" in scene.before:
        return CLAUSES["hyperparameters-agree"].likely
    return finding.likely or CLAUSES[clause].likely


def _who(clause: str, finding: Finding, world: int) -> str:
    if world == 1:
        return "seen in the one process"
    shown = f"{named_ranks(finding.ranks)} of {world}"
    if not CLAUSES[clause].between_ranks:
        return f"seen on {shown}" if finding.ranks else "seen on all ranks"
    if finding.ranks:
        others = [rank for rank in range(world) if rank not in finding.ranks]
        return f"{shown} differ{'s' * (len(finding.ranks) == 1)} from {named_ranks(others)}"
    if world == 2:
        return "ranks 0 and 1 differ"
    # No party of ranks that agree among themselves is the larger half.
    digests = finding.details[0][1].split() if finding.details else []
    if len(digests) != world:
        return "the ranks differ, with no majority"
    parties = [[rank for rank in range(world) if digests[rank] == one] for one in dict.fromkeys(digests)]
    if len(parties) == world:
        return f"{named_ranks(range(world))} all differ"
    return f"{_listed(list(map(named_ranks, parties)))} differ, with no majority"
