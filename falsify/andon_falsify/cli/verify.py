"""`andon verify`: judges the ledgers of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from click.exceptions import Exit as Ended

from andon.console.messages import put, say
from andon_contracts.legible import counted, legible_line
from andon_falsify.cli.falsify import USAGE, FalsifyCommand
from andon_falsify.verdict import Outcome, closing_line, exit_code

_SHOWN = 5


@click.command(cls=FalsifyCommand)
@click.argument(
    "runs", nargs=-1, type=Path, required=True, help="Run folders or ledgers; several are compared with each other."
)
@click.option("--verbose", "-v", is_flag=True, help="Say why claims do not apply.")
def verify(runs: tuple[Path, ...], verbose: bool) -> None:
    """Check every claim that a ledger can decide.

    Exit codes: 0 all claims hold, 1 one is falsified or a violation is recorded, 2 one is unknown, 64 wrong arguments.
    """
    try:
        lines, code = report(runs, verbose=verbose)
    except OSError as error:
        say(f"{error.filename}: {error.strerror}")
        raise Ended(USAGE) from None
    put(*lines)
    raise Ended(code)


def report(runs: Sequence[Path], *, verbose: bool = False) -> tuple[tuple[str, ...], int]:
    """The lines and the exit code for these runs. verbose: say why claims do not apply. Raises `OSError`."""
    # Not at the top: `andon --help` imports this module, and needs no claims.
    from andon_falsify.claims import ledgers

    read = [ledgers.read_run(path) for path in runs]
    verdicts = ledgers.verify(read)
    claims = {claim.name: claim for claim in ledgers.ALL}
    broken = {clause for run in read for clause in ledgers.standing_violations(run)}
    inapplicable = [each.claim for each in verdicts if each.outcome is Outcome.NOT_APPLICABLE and not verbose]
    lines = []
    for verdict in (each for each in verdicts if each.claim not in inapplicable):
        compared = counted(verdict.checked, "comparison") if verdict.checked else ""
        why = "; ".join(filter(None, (compared, verdict.why)))
        claim, outcome = claims[verdict.claim], verdict.outcome.value
        laws = {clause.name for clause in claim.clauses if clause.relation != "other"}
        if verdict.outcome is Outcome.HOLDS and laws & broken:
            outcome = "violated when it ran, see below; the lines that were written agree"
        lines.append(f"{claim.name} v{claim.version}: {outcome}" + (f" ({why})" if why else ""))
        lines += [f"  {found}" for found in verdict.counterexamples[:_SHOWN]]
        if len(verdict.counterexamples) > _SHOWN:
            lines.append(f"  and {len(verdict.counterexamples) - _SHOWN} more")
    if inapplicable:
        lines.append(f"not applicable: {', '.join(inapplicable)} (--verbose says why)")
    for run in read:
        recorded = ledgers.recorded_violations(run)
        more = [f"{len(recorded) - _SHOWN} more"] if len(recorded) > _SHOWN else []
        lines += [f"note: {run.path} records {line}" for line in (*recorded[:_SHOWN], *more)]
        if ledgers.standing_violations(run):
            lines.append(f"broken: {run.path} has a violation, and no later resume made its step again")
        if ending := ledgers.unfinished(run):
            lines.append(f"note: {run.path} {ending}")
    lines.append(closing_line(verdicts, len(read)))
    return tuple(map(legible_line, lines)), 1 if broken else exit_code(verdicts)


verify.report = report  # type: ignore[attr-defined]
