"""What several runs of one subject must have alike: the same run elsewhere, and a run that was cut off and taken up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from andon_falsify.checkers import resume_equal, same_everywhere
from andon_falsify.claims.evidence import Evidence
from andon_falsify.claims.layouts import gone_on_by_command, same_layouts
from andon_falsify.history import History
from andon_falsify.verdict import Outcome, Verdict, merge, not_applicable

if TYPE_CHECKING:
    from andon_falsify.subjects.trace import Trace


def everywhere(evidence: Evidence) -> Verdict:
    """The run against `others["elsewhere"]`, the same on other numbers of ranks: to the bit where that is promised.

    Our trainer promises it for devices of one kind. A loop may promise it; else it may differ by the measured noise. Of
    a script norms are compared. `others["alone"]` is the measure of all ranks where there is one.
    """
    alone, elsewhere = evidence.others.get("alone", ()), evidence.others.get("elsewhere", ())
    if evidence.of_script:
        return same_layouts(alone[0].told, evidence.told, evidence.layout)
    if evidence.of_loop:
        from andon_falsify.claims.alike import across

        return across([evidence.sightings, *(other.sightings for other in elsewhere)])
    if evidence.trace is not None:
        return same_bits(alone[0].sightings, evidence.trace, *(other.sightings for other in elsewhere))
    if not elsewhere:
        return not_applicable(same_everywhere.CLAIM, "one ledger; name others of the same run elsewhere")
    histories = [evidence.told, *(other.told for other in elsewhere)]
    if any(each.start is not None and each.start.watched for each in histories):
        why = "a watched loop promises no equal bits elsewhere; andon diff says where two of its runs part"
        return not_applicable(same_everywhere.CLAIM, why)
    return same_everywhere.check(histories)


def same_bits(base: Trace, *others: Trace) -> Verdict:
    """Rows, losses, gradients and states of every update, to the bit, where the devices allow it."""
    elsewhere = sorted({other.place for other in others} - {base.place, ""})
    if elsewhere and base.place:
        why = f"other kinds of device round otherwise: {' and '.join(elsewhere)} against {base.place}"
        return not_applicable(same_everywhere.CLAIM, why)
    return same_everywhere.check([base.seen, *(other.seen for other in others)])


def resumed(evidence: Evidence) -> Verdict:
    """The whole run against the one that was cut off (`others["cut"]`) and the one that took it up ("taken up").

    To the bit for our trainer, and where a loop says so; else within the noise of fp32. A ledger by itself is judged by
    the updates that it holds twice, and against `others["elsewhere"]` where one of them was never cut off.
    """
    cut, taken_up = evidence.others.get("cut", ()), evidence.others.get("taken up", ())
    if evidence.of_script:
        world = evidence.told.steps[0].world or 1
        return gone_on_by_command(evidence.told, cut[0].told, taken_up[0].told, world)
    if evidence.trace is None:
        return _of_ledgers([evidence, *evidence.others.get("elsewhere", ())])
    again = taken_up[0].sightings
    if not evidence.declares("to_the_bit"):
        from andon_falsify.claims.alike import taken_up_alike

        return taken_up_alike(resume_equal.CLAIM, evidence.trace, again)
    return _to_the_bit(evidence.trace, cut[0].sightings, again)


def _to_the_bit(whole: Trace, cut: Trace, taken_up: Trace) -> Verdict:
    """As seen from outside, and by its own ledger; not where other kinds of devices went on than before."""
    if whole.place and taken_up.place not in ("", whole.place):
        why = f"its ranks went on on {taken_up.place} after {whole.place}, and these round otherwise"
        return not_applicable(resume_equal.CLAIM, why)
    seen = History("resumed", cut.seen.events + taken_up.seen.events)
    found = [resume_equal.check(seen, whole.seen)]
    if taken_up.ledger is not None and whole.ledger is not None and whole.case.contracts:
        found.append(resume_equal.check(taken_up.ledger, whole.ledger))
    return merge(found)


def _of_ledgers(runs: Sequence[Evidence]) -> Verdict:
    """Each resumed run against itself and, where one is given, against the first that was not resumed."""
    histories = [run.told for run in runs]
    cut = [each for each in histories if any(run.resumed for run in each.runs) or resume_equal.disowned(each)]
    whole = [history for history in histories if history not in cut]
    if not cut:
        return not_applicable(resume_equal.CLAIM, "no run was resumed")
    found = []
    for history in cut:
        verdict = resume_equal.check(history, whole[0] if whole else None)
        if verdict.outcome is Outcome.UNKNOWN and not verdict.checked and not whole:
            why = "no step was done again; name the uninterrupted run as well, to compare with"
            verdict = not_applicable(resume_equal.CLAIM, why)
        found.append(verdict)
    return merge(found)
