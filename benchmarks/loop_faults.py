"""Which claim sees which fault of a foreign loop: `python -m benchmarks.loop_faults --write docs/loop-faults.md`.

Plants every fault of `andon_falsify.faults.looped`, one at a time, in a right hand-written loop on 2 ranks, judges all
that there is to judge of a loop, and prints the matrix of faults and claims. The exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from andon.run.atomic import write_whole
from andon_falsify.compliance.loop_power import LoopAttempt, LoopLaboratory, matrix
from andon_falsify.faults.looped import FAULTS
from andon_falsify.ranks.pool import RankPools

_INTRODUCTION = """# Faults of a loop and the claims that see them

Written by `python -m benchmarks.loop_faults --write docs/loop-faults.md`; do not edit.

Each fault is planted alone in a data-parallel loop written by hand (`andon_falsify.peers.plain`, or a right variant of
it that has what the fault needs: DDP, a schedule, dropout), on 2 ranks (gloo) with 2 micro-batches each and a ragged
last batch, and judged from outside as `andon falsify --subject` judges any loop. It must change what is seen, and the
claim named for it must fall with a counterexample that says why: **KILLED** stands under that claim, `fell` under every
other. Two controls: the same loop without the fault holds on every claim that applies, none being unknown; and what the
loop itself checks is no part of any verdict, so that a guard that is off changes nothing here. The same faults are
held to [what `andon.watch` catches](watch-faults.md). Scale hides behind AdamW and clipping: those faults are planted
with it, and with SGD without clipping.
"""


def main() -> int:
    """Try all faults; 0 if each changed something and fell by its claim for its reason, and nothing fell without it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shown = [fault for fault in FAULTS if not isinstance(fault.outside, str)]
    codes = sorted({fault.code for fault in shown})
    parser.add_argument("--fault", action="append", choices=codes, metavar="CODE", help="again for another; else all")
    parser.add_argument("--write", type=Path, help="the file to write, if all faults are tried")
    options = parser.parse_args()
    trials: list[LoopAttempt] = []
    with RankPools() as pools:
        laboratory = LoopLaboratory(pools, every_claim=True)
        for fault in shown:
            if options.fault is None or fault.code in options.fault:
                trials.append(laboratory.attempt(fault))
                print(f"{fault.name}: {'; '.join(trials[-1].problems) or 'killed'}", flush=True)
    held = sum(not trial.problems for trial in trials)
    entries = {trial.fault.code for trial in trials}
    closing = f"{held} of {len(trials)} faults killed, of {len(entries)} entries of the catalogue"
    left_out = "\n".join(f"- {fault.name}: {fault.outside}." for fault in FAULTS if isinstance(fault.outside, str))
    text = f"{_INTRODUCTION}\n{matrix(trials)}\n\n{closing}. No run of a loop shows:\n\n{left_out}\n"
    print(text)
    if options.write is not None and options.fault is None:
        write_whole(options.write, text.encode())
    return 0 if held == len(trials) else 1


if __name__ == "__main__":
    raise SystemExit(main())
