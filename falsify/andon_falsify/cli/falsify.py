"""`andon falsify`: the attempt to prove a trainer wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from andon.console.messages import InputError, OutputError, Problem, say
from andon_falsify.cli.command import USAGE, FalsifyCommand


def falsify(
    subject: Annotated[
        str | None, typer.Option(help="A bundled name, or package.module:make; our own trainer by default.")
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="A command to train with, with {world}, {local_batch} and {accumulation} in it.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Names, as in inline,gloo; all that this machine has.")] = None,
    world: Annotated[str | None, typer.Option(help="Numbers of ranks, as in 2,3.")] = None,
    accumulation: Annotated[str | None, typer.Option(help="Micro-batches of a rank in an update, as in 1,2.")] = None,
    seed: Annotated[str, typer.Option(help="What cases are drawn from: a number, or several as in 0-199.")] = "0",
    budget: Annotated[str, typer.Option(help="quick, standard or deep.")] = "quick",
    claim: Annotated[list[str] | None, typer.Option(help="Only this claim; again for another.")] = None,
    case: Annotated[str | None, typer.Option(help="Exactly this case, as a counterexample gives it.")] = None,
    name: Annotated[str | None, typer.Option(help="What reports call the subject.")] = None,
    expected_failed: Annotated[
        list[str] | None, typer.Option(help='"CLAIM: REASON": it may fall, and fails nothing then; again for another.')
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="End after so many seconds, with what is known by then.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the report to this file, as JSON, again and again as trials end.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="Write it as JUnit XML, as often.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write it as one HTML page, at the end.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Try nothing: read this report of --json, and write the others of it.")
    ] = None,
) -> None:
    """Try to prove a trainer wrong; 0 all hold, 1 a claim is falsified, 2 one is unknown, 64 usage, 70 internal."""
    # All that a campaign needs, which `andon --help` does not: half of what it loads.
    from andon_falsify.cli import attempt

    paths = {"--json": json, "--junit": junit, "--html": html}
    options = attempt.Options(
        subject=subject,
        script=script,
        backend=backend,
        world=world,
        accumulation=accumulation,
        seed=seed,
        budget=budget,
        claims=tuple(claim or ()),
        case=case,
        name=name,
        expected_failed=tuple(expected_failed or ()),
    )
    try:
        if deadline is not None and not 0 < deadline < float("inf"):
            raise InputError([Problem("--deadline", f"must be seconds, more than 0, not {deadline:g}")])
        files = attempt.ReportFiles({option: path for option, path in paths.items() if path is not None})
        code = attempt.make(options, files, deadline) if report is None else attempt.read(report, files)
    except OutputError:
        raise
    except InputError as error:
        say(*map(str, error.problems))
        code = USAGE
    raise typer.Exit(code)


falsify.command_class = FalsifyCommand  # type: ignore[attr-defined]
