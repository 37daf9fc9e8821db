"""The suite's findings on every bundled trainer: `python -m benchmarks.scoreboard --write docs/scoreboard.md`.

One campaign for each subject, one after the other, as `andon falsify --subject NAME` runs it. It ends with 1 where a
verdict is not what `andon_falsify.peers.registry` expects: a claim that fell without a known reason, or that was to
fall and did not. `--json` and `--html` keep the same report; `--from` writes it again from that JSON, without a run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from andon.run.atomic import write_whole
from andon_falsify.campaign.budget import BUDGETS
from andon_falsify.campaign.findings import Report, joined
from andon_falsify.campaign.request import OURS, Options, understood
from andon_falsify.campaign.runner import run_campaign
from andon_falsify.peers.registry import PEERS
from andon_falsify.report.document import read_json, write_json
from andon_falsify.report.page import write_html
from andon_falsify.report.scoreboard import scoreboard

_INTRODUCTION = """# Scoreboard

Written by `python -m benchmarks.scoreboard --budget {budget} --write docs/scoreboard.md`; do not edit.

What the suite found of our trainer and of loops as the documentation of each library teaches them. A library does not
promise every claim: the table says what such a loop does on ragged batches and several ranks, with the versions named,
and below it what each does right.
"""


def campaigns(subjects: Sequence[str], budget: str, seed: str) -> Iterator[Report]:
    """The report of each subject that can be run here; why another cannot is printed."""
    for name in subjects:
        if name in PEERS and PEERS[name].missing:
            print(f"not judged: {PEERS[name].missing}", flush=True)
            continue
        report = run_campaign(understood(Options(subject=name, budget=budget, seed=seed)))
        print(f"{name}: {report.closing_line}", flush=True)
        yield report


def main() -> int:
    """Judge the subjects and print the scoreboard; 0 if every verdict is the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", action="append", choices=[OURS, *PEERS], help="again for another; else all")
    parser.add_argument("--budget", choices=list(BUDGETS), default="standard")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--from", dest="source", type=Path, help="a report in JSON, instead of a run")
    parser.add_argument("--write", type=Path, help="the Markdown file to write")
    parser.add_argument("--json", type=Path, help="the JSON file to write")
    parser.add_argument("--html", type=Path, help="the page to write")
    options = parser.parse_args()
    if options.source is not None:
        report = read_json(options.source)
    else:
        found = list(campaigns(options.subject or [OURS, *PEERS], options.budget, options.seed))
        if not found:
            parser.error("none of these subjects can be judged here")
        report = joined(found)
    text = f"{_INTRODUCTION.format(budget=options.budget)}\n{scoreboard(report)}"
    print(text)
    if options.write is not None:
        write_whole(options.write, text.encode())
    if options.json is not None:
        write_json(report, options.json)
    if options.html is not None:
        write_html(report, options.html)
    for surprise in report.surprises:
        print(f"unexpected: {surprise}")
    return 1 if report.surprises else 0


if __name__ == "__main__":
    raise SystemExit(main())
