"""Which check sees which fault of instruction tuning: `python -m benchmarks.causal_mutants --write docs/causal-mutants.md`.

Plants every fault of `andon_falsify.faults.causal`, one at a time, and none for the controls. The exit code is 1 where
one is missed by the check that is named for it, or a control is not clean.
"""  # noqa: E501

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from andon.run.atomic import write_whole
from andon_falsify.faults.causal import CHECKS, CONTROLS, FAULTS, Check, attempt
from benchmarks.runs import table

_INTRODUCTION = """# Faults of instruction tuning and the checks that see them

Written by `python -m benchmarks.causal_mutants --write docs/causal-mutants.md`; do not edit.

Each fault is planted alone in our trainer, on 2 ranks with 8 micro-batches of packed, ragged rows, and one update is
tried. `start` is the model held to giving packed rows the logits of each row alone, before training (`require_apart`);
`inside` a law of the step, which stops it before the update; `law` the gradient against the float64 law outside, which
knows the rows as they were before any task had them. **KILLED** stands under the check that is named for the fault,
`seen` under every other that saw it, `-` where a check could not look: the law behind a step that was stopped, and for
learned positions (GPT-2), which the fault of positions needs. Rotary positions are relative: rows that begin later are
the same rows to them.
"""


def _cells(said: Mapping[Check, str], killer: Check | None) -> list[str]:
    def cell(check: Check) -> str:
        if check not in said:
            return "-"
        return ("**KILLED**" if check == killer else "seen") if said[check] else ""

    return [cell(check) for check in CHECKS]


def main() -> int:
    """Try all faults and the controls; 0 if each was killed by its check, and no control was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the Markdown file to write")
    options = parser.parse_args()
    lines, killed, clean = [], 0, 0
    for fault in FAULTS:
        said = attempt(fault.case, fault.plant)
        killed += bool(said.get(fault.killer))
        lines.append([fault.name, *_cells(said, fault.killer)])
    for case in CONTROLS:
        said = attempt(case)
        clean += not any(said.values())
        lines.append([f"none: {case.family}, {'packed' if case.packed else 'rows'}", *_cells(said, None)])
    closing = f"{killed} of {len(FAULTS)} faults killed; {clean} of {len(CONTROLS)} controls clean."
    text = f"{_INTRODUCTION}\n{table(('fault', *CHECKS), lines)}\n\n{closing}\n"
    print(text)
    if options.write is not None:
        write_whole(options.write, text.encode())
    return 0 if killed == len(FAULTS) and clean == len(CONTROLS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
