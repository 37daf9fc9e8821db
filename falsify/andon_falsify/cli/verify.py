"""`andon verify`: the checkers, on the ledgers of runs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from andon.console.messages import put
from andon_contracts.legible import legible_line
from andon_falsify.cli.falsify import USAGE, FalsifyCommand
from andon_falsify.verdict import Outcome, Verdict, closing_line, exit_code

_SHOWN = 5

Runs = Annotated[list[Path], typer.Argument(help="Run folders or ledgers; several are compared with each other.")]


def verify(
    runs: Runs, verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say why claims do not apply.")] = False
) -> None:
    """Check every claim that a ledger can decide; 0 all hold, 1 one is falsified, 2 one is unknown."""
    try:
        lines, code = report(runs, verbose=verbose)
    except OSError as error:
        sys.stderr.write(legible_line(f"andon: {error.filename}: {error.strerror}") + "\n")
        raise typer.Exit(USAGE) from None
    put(*lines)
    raise typer.Exit(code)


def report(runs: Sequence[Path], *, verbose: bool = False) -> tuple[tuple[str, ...], int]:
    """The lines (verbose: with why claims do not apply) and the exit code for these runs. Raises `OSError`."""
    # The checkers are what `andon --help` does not need, and as much again as all that it loads.
    from andon_falsify.claims import ledgers

    # No event refers back to itself: to search for cycles again and again costs a tenth of a long ledger.
    collects = gc.isenabled()
    gc.disable()
    try:
        read = [ledgers.read_run(path) for path in runs]
        verdicts = ledgers.verify(read)
    finally:
        if collects:
            gc.enable()
    statements = {claim.name: claim for claim in ledgers.ALL}
    lines = []
    moot = [] if verbose else [each.claim for each in verdicts if each.outcome is Outcome.NOT_APPLICABLE]
    for verdict in (each for each in verdicts if each.claim not in moot):
        lines.append(f"{verdict.claim} v{statements[verdict.claim].version}: {verdict.outcome.value}{_why(verdict)}")
        lines += [f"  {found}" for found in verdict.counterexamples[:_SHOWN]]
        if len(verdict.counterexamples) > _SHOWN:
            lines.append(f"  and {len(verdict.counterexamples) - _SHOWN} more")
    if moot:
        lines.append(f"not applicable: {', '.join(moot)} (--verbose says why)")
    for run in read:
        told = ledgers.recorded_violations(run)
        for line in (*told[:_SHOWN], *([f"{len(told) - _SHOWN} more"] if len(told) > _SHOWN else [])):
            lines.append(f"note: {run.path} records {line}")
        if stops := ledgers.unfinished(run):
            lines.append(f"note: {run.path} {stops}")
    lines.append(closing_line(verdicts, len(read)))
    return tuple(map(legible_line, lines)), exit_code(verdicts)


verify.command_class = FalsifyCommand  # type: ignore[attr-defined]
verify.report = report  # type: ignore[attr-defined]


def _why(verdict: Verdict) -> str:
    compared = f"{verdict.checked} comparisons" if verdict.checked else ""
    said = "; ".join(part for part in (compared, verdict.why) if part)
    return f" ({said})" if said else ""
