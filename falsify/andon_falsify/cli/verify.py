"""`andon verify`: the checkers, on the ledgers of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from andon_falsify.cli.falsify import USAGE, FalsifyCommand

if TYPE_CHECKING:
    from andon_falsify.verdict import Verdict

_SHOWN = 5

Runs = Annotated[list[Path], typer.Argument(help="Run folders or ledgers; several are compared with each other.")]


def verify(runs: Runs) -> None:
    """Check every claim that a ledger can decide; 0 all hold, 1 one is falsified, 2 one is unknown."""
    from andon_contracts.legible import legible_line
    from andon_falsify.claims.ledgers import ALL, read_run, recorded_violations, unfinished
    from andon_falsify.claims.ledgers import verify as judged
    from andon_falsify.verdict import closing_line, exit_code

    try:
        read = [read_run(path) for path in runs]
    except OSError as error:
        sys.stderr.write(legible_line(f"andon: {error.filename}: {error.strerror}") + "\n")
        raise typer.Exit(USAGE) from None
    verdicts = judged(read)
    statements = {claim.name: claim for claim in ALL}
    for verdict in verdicts:
        said = f"{verdict.claim} v{statements[verdict.claim].version}: {verdict.outcome.value}{_why(verdict)}"
        typer.echo(legible_line(said))
        for found in verdict.counterexamples[:_SHOWN]:
            typer.echo(legible_line(f"  {found}"))
        if len(verdict.counterexamples) > _SHOWN:
            typer.echo(f"  and {len(verdict.counterexamples) - _SHOWN} more")
    for run in read:
        told = recorded_violations(run)
        for line in (*told[:_SHOWN], *([f"{len(told) - _SHOWN} more"] if len(told) > _SHOWN else [])):
            typer.echo(legible_line(f"note: {run.path} records {line}"))
        if stops := unfinished(run):
            typer.echo(legible_line(f"note: {run.path} {stops}"))
    typer.echo(closing_line(verdicts, len(read)))
    raise typer.Exit(exit_code(verdicts))


verify.command_class = FalsifyCommand  # type: ignore[attr-defined]


def _why(verdict: Verdict) -> str:
    compared = f"{verdict.checked} comparisons" if verdict.checked else ""
    said = "; ".join(part for part in (compared, verdict.why) if part)
    return f" ({said})" if said else ""
