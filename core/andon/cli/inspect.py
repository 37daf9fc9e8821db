"""Show, explain, diff, replay, report: what a run has left, looked at afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer

from andon.cli import plugins
from andon.console.messages import put, say
from andon.console.problems import InputError, Problem
from andon.inspection.difference import compare, read_side
from andon.inspection.recorded import open_recorded
from andon.inspection.replay import ReplayFailed, replay_run
from andon.inspection.show import one_step, overview, texts_of

Run = Annotated[Path, typer.Argument(help="Run folder, or its ledger.jsonl.")]


def show(
    run: Run,
    number: Annotated[int | None, typer.Argument(metavar="[STEP]", help="The same as --step.")] = None,
    step: Annotated[int | None, typer.Option(help="Show this step: rows, losses, digests, ranks.")] = None,
) -> None:
    """Show a run from start to end, or one step of it, by its ledger."""
    if number is not None and step is not None:
        raise InputError([Problem("--step", f"is {step}, and the argument is {number}; give one of them")])
    step = number if step is None else step
    found = open_recorded(run)
    lines = overview(found) if step is None else one_step(found, step, texts_of(found.folder))
    for line in lines:
        put(line)


def diff(
    one: Annotated[Path, typer.Argument(help="Run folder, ledger, or configuration (.yaml).")],
    other: Annotated[Path, typer.Argument(help="Run folder, ledger, or configuration (.yaml).")],
) -> None:
    """Find where two runs part. Ends with 0 same, 1 different, 2 not comparable."""
    report = compare(read_side(one), read_side(other))
    for line in report.lines:
        put(line)
    raise typer.Exit(report.result.value)


def replay(
    run: Annotated[Path, typer.Argument(help="Run folder; nothing is written into it.")],
    steps: Annotated[str, typer.Option(help="Steps to do again, as in 3:7.")],
    workers: Annotated[
        int | None, typer.Option(help="Ranks on this machine; by default as in the run, if it has the cores.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="inline, gloo, nccl or mixed.")] = None,
) -> None:
    """Do steps of a run again and compare every digest. Ends with 0 same, 1 different, 2 neither."""
    try:
        report = replay_run(run, steps, workers, backend)
    except ReplayFailed as error:
        say(str(error))
        raise typer.Exit(int(error.ends_with)) from None
    for line in report.lines:
        put(line)
    raise typer.Exit(report.result.value)


def explain(
    path: Annotated[Path, typer.Argument(help="Bundle of a violation, its run, or the name of a clause.")],
) -> None:
    """Explain a violation. What was promised, what was seen, where, and how to look further."""
    from andon.inspection.explain import explain as explained

    for line in explained(path):
        put(line)


def report(
    run: Run,
    other: Annotated[Path | None, typer.Argument(help="A second one, to be shown beside it.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Where the page is written; RUN/report.html, or report-OTHER.html.")
    ] = None,
) -> None:
    """Make one HTML page of a run, or of two side by side. Curves, scores, verdict, what happened, where they part."""
    target = html if html is not None else _page_of(run, other)
    if target.suffix not in (".html", ".htm"):
        raise InputError([Problem("--html", f"{target} must end in .html, so that no file of a run is written over")])
    paths = [run] if other is None else [run, other]
    with ThreadPoolExecutor() as threads:  # each is a process, which reads the ledger while this one does
        asked = [threads.submit(plugins.said_by, "verify", "--verbose", "--", str(path)) for path in paths]
        from andon.inspection.report import write_page
        from andon.inspection.report.page import Page, Verdict
        from andon.inspection.report.run_view import load_run_view

        runs = [load_run_view(read_side(path)) for path in paths]
        verdicts = [None if (said := each.result()) is None else Verdict(*said) for each in asked]
    write_page(Page(runs, verdicts, compare(*(each.side for each in runs)) if other is not None else None), target)
    put(f"wrote {target}")


def _page_of(run: Path, other: Path | None) -> Path:
    """Where the page of a run is, or that of two: beside it, so that neither is written over the other."""
    beside = "" if other is None else f"-{other.resolve().name if other.is_dir() else other.stem}"
    return run / f"report{beside}.html" if run.is_dir() else run.with_name(f"{run.stem}{beside}.html")
