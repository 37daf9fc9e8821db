"""Three scripts in the style of public tutorials, each once wrong and once mended: `python -m benchmarks.script_mode`.

Wrong, the suite must say so and name the reason; mended, every claim that applies must hold.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from andon_falsify.campaign.conduct import conduct
from andon_falsify.campaign.request import Options, understood
from andon_falsify.verdict import Outcome
from benchmarks.runs import table

_EXAMPLES = Path(__file__).parents[1] / "examples" / "scripts"


@dataclass(frozen=True)
class Script:
    """An example with its command line, and the words that a counterexample of the wrong one must have."""

    name: str
    arguments: str
    reason: str
    watched: str = ""


SCRIPTS = (
    Script("ddp_accumulation.py", "--accumulate {accumulation}", "= accumulation 2", "-m andon watch"),
    Script("all_reduce_by_hand.py", "", "= world"),
    Script("ragged_epoch.py", "--folder {folder} {resume:--resume}", "norm of the reduced gradient"),
)


def main() -> int:
    """Print a row for each script, wrong and mended; 0 if all verdicts are as they must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", default="2,3")
    options = parser.parse_args()
    rows, good = [], True
    for script in SCRIPTS:
        for mended in (False, True):
            row, right = _judged(script, options.world, mended=mended)
            rows.append(row)
            good = good and right
            print(row, flush=True)
    print(table(("script", "", "verdict", "what it says", "as it must be"), rows))
    return 0 if good else 1


def _judged(script: Script, world: str, *, mended: bool) -> tuple[tuple[str, ...], bool]:
    launch = f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node {{world}}"
    words = [launch, script.watched, shlex.quote(str(_EXAMPLES / script.name)), "--batch {local_batch}"]
    command = " ".join([*words, script.arguments, "--mended" if mended else ""])
    report = conduct(understood(Options(script=command, world=world)))
    fallen = [finding for finding in report.findings if finding.outcome is Outcome.FALSIFIED]
    said = str(fallen[0].counterexamples[0]).partition("; seed")[0] if fallen else report.closing_line
    right = report.exit_code == 0 if mended else report.exit_code == 1 and script.reason in said
    verdict = f"{fallen[0].claim} falsified" if fallen else ("holds" if report.exit_code == 0 else "unknown")
    return (script.name, "mended" if mended else "wrong", verdict, said, "yes" if right else "NO"), right


if __name__ == "__main__":
    raise SystemExit(main())
