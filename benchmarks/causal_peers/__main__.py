"""Peers on conversations against the law: `python -m benchmarks.causal_peers --write docs/scoreboard-causal.md`.

Each peer is run as real processes on 1, 2 and 3 ranks (gloo) with accumulation 1, 2 and 4, on one global batch, packed
where it packs by itself, with the loss on answers and on all tokens. Beside them loops that are right and wrong
on purpose. The exit code is 1 where one of those has another verdict than it must have, or a peer could not be judged.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from andon.run.atomic import write_whole
from andon_falsify.verdict import Outcome
from benchmarks.causal_peers.job import PACKS, ROWS, UPDATES, WORLDS, Layout, Seen, rows
from benchmarks.causal_peers.registry import PEERS, PLANTED, Peer
from benchmarks.causal_peers.running import run
from benchmarks.causal_peers.verdict import ALIKE, BOUND, Finding, apart, judge
from benchmarks.runs import table

_PLANTED = """
A place is ranks x accumulation. The last four loops are planted: `right` must hold, the others must fall.
"""
Runs = Mapping[Layout, Sequence[Seen]]

_INTRODUCTION = f"""# Scoreboard of causal language models

Written by `python -m benchmarks.causal_peers --write docs/scoreboard-causal.md`; do not edit.

Loops as the documentation of each library teaches them, the library unmodified, on {ROWS} ragged rows that are one
global batch, whatever the number of ranks and of accumulated micro-batches. So no layout can see other rows: only what
a token counts can differ. The loss of an update is to be the sum over all trained tokens of the global batch divided
once by their number; the gradient of the first update is held to that, computed in float64 row by row by code that
shares nothing with any library (relative L2 over all tensors at most {BOUND:.0e}). `same weights` asks whether all
nine layouts (1, 2, 3 ranks x accumulation 1, 2, 4; gloo) end {UPDATES} updates of SGD with the same weights, to
{ALIKE:.0e} of their movement. Packed is the library's own packing or flattening, on a CPU with torch's attention
(`sdpa`); TRL makes {PACKS} packs of the rows. Other data, settings and versions may say otherwise.
"""


def judged(peer: Peer) -> dict[Layout, list[Seen]]:
    """What `peer` did on every layout."""
    found: dict[Layout, list[Seen]] = {}
    for world in WORLDS:
        for _, some in groupby(peer.layouts(world), key=lambda layout: layout.packed):
            found.update(run(peer.name, list(some)))
            print(f"{peer.name}: {list(found)[-1]}", flush=True)
    return found


def grouped(runs: Runs) -> Iterator[tuple[tuple[bool, str], Runs]]:
    """By whether it is packed, and by what is trained."""
    keys = sorted({(layout.packed, layout.trained) for layout in runs}, key=lambda key: (key[1] == "all", key[0]))
    for key in keys:
        yield key, {layout: seen for layout, seen in runs.items() if (layout.packed, layout.trained) == key}


def verdict_of(findings: Mapping[Layout, Finding]) -> Outcome:
    """Falsified by one layout, unknown by one that could not be judged, else holds."""
    outcomes = {finding.outcome for finding in findings.values()}
    return next(
        (each for each in (Outcome.FALSIFIED, Outcome.UNKNOWN) if each in outcomes), Outcome.HOLDS
    )  # fmt: skip


def _places(layouts: Sequence[Layout]) -> str:
    return ", ".join(f"{layout.world}x{layout.accumulation}" for layout in layouts)


def lines_of(peer: Peer, runs: Runs) -> Iterator[tuple[tuple[str, ...], str]]:
    """A line of the table for each group, and what is said of it below."""
    for (packed, trained), group in grouped(runs):
        findings = {layout: judge(layout, seen) for layout, seen in group.items()}
        outcome, (distance, where) = verdict_of(findings), apart(group)
        fell = [layout for layout, one in findings.items() if one.outcome is not Outcome.HOLDS]
        same = (
            "-"
            if where is None
            else "holds"
            if distance <= ALIKE
            else f"falsified: {distance:.1e} at {_places([where])}"
        )
        held = [layout for layout in findings if layout not in fell]
        gradient = (
            "**holds** (9 of 9)"
            if not fell
            else f"{outcome.value} at {_places(fell)}; holds at {_places(held) or 'none'}"
        )
        name = f"{peer.name}, {trained}, {'packed' if packed else 'rows'}"
        yield (
            (peer.name, peer.versions, trained, "on" if packed else "off", gradient, same),
            _said(name, findings, group),
        )


def _said(name: str, findings: Mapping[Layout, Finding], group: Runs) -> str:
    fell = {layout: one for layout, one in findings.items() if one.outcome is not Outcome.HOLDS}
    if not fell:
        off = max(one.off for one in findings.values())
        return f"- {name}: every token counts alike on all {len(findings)} layouts; off the law by at most {off:.1e}."
    layout, one = max(fell.items(), key=lambda each: each[1].off)
    told = f"- {name}, world {layout.world}, accumulation {layout.accumulation}: "
    if one.outcome is Outcome.UNKNOWN:
        return f"{told}not judged: {one.says}"
    trained = [row.trained for row in rows(layout.trained)]
    counts = "; ".join(
        f"rank {rank}: " + " + ".join(str(sum(trained[row] for row in part)) for part in seen.forwards)
        for rank, seen in enumerate(group[layout])
    )
    return (
        f"{told}expected each of the {sum(trained)} trained tokens to count the same (relative L2 <= {BOUND:.0e}), "
        f"found {one.off:.2g}: {one.says}. Trained tokens of the micro-batches: {counts}."
    )


def _wrong(peer: Peer, runs: Runs) -> list[str]:
    """What a planted loop's verdict is that it must not be."""
    findings = {layout: judge(layout, seen) for layout, seen in runs.items()}
    must = Outcome.HOLDS if peer.name == "right" else Outcome.FALSIFIED
    return (
        []
        if verdict_of(findings) is must
        else [f"{peer.name} is to be {must.value}, and is {verdict_of(findings).value}"]
    )


def main() -> int:
    """Judge all, print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=[*PEERS, *PLANTED], help="again for another; else all")
    parser.add_argument("--write", type=Path, help="the Markdown file to write")
    options = parser.parse_args()
    problems: list[str] = []
    cells: list[tuple[str, ...]] = []
    said: list[str] = []
    for name in options.peer or [*PEERS, *PLANTED]:
        peer = {**PEERS, **PLANTED}[name]
        if peer.missing:
            print(f"not judged: {name} needs {', '.join(peer.missing)}", flush=True)
            problems.append(f"{name} could not be judged")
            continue
        runs = judged(peer)
        if name in PLANTED:
            problems += _wrong(peer, runs)
        for line, text in lines_of(peer, runs):
            cells.append(line)
            said.append(text)
    heading = ("loop", "versions", "loss on", "packing", "first gradient is the law's", "same weights")
    where = f"python {platform.python_version()}, torch {version('torch')}, {platform.system()} {platform.machine()}"
    text = "\n".join(
        (
            _INTRODUCTION,
            table(heading, cells),
            _PLANTED,
            "## What was seen\n",
            *said,
            f"\n{where}.\n",
        )
    )
    print(text)
    if options.write is not None:
        write_whole(options.write, text.encode())
    for problem in problems:
        print(f"unexpected: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
