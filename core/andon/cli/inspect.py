"""Show, diff, replay: what a run has left, looked at afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(help="Run folder, or its ledger.jsonl.")]


def show(
    run: Run,
    step: Annotated[int | None, typer.Option(help="Show this step: rows, losses, digests, ranks.")] = None,
) -> None:
    """Show what a run's ledger says: the run from start to end, or one step."""
    from andon.inspection.recorded import open_recorded
    from andon.inspection.show import one_step, overview
    from andon.inspection.texts import texts_of

    found = open_recorded(run)
    lines = overview(found) if step is None else one_step(found, step, texts_of(found.folder))
    for line in lines:
        typer.echo(line)


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    for command in (show,):
        app.command()(command)
