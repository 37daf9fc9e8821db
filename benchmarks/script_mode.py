"""Scripts in the style of public tutorials, each once wrong and once mended: `python -m benchmarks.script_mode`.

Wrong, the suite must say so and name the reason; where layouts are not alike, that nothing is known, and why. Mended,
every claim that applies must hold.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from andon_falsify.report.document import read_json
from andon_falsify.verdict import Outcome
from benchmarks.runs import table

_EXAMPLES = Path(__file__).parents[1] / "examples" / "scripts"


@dataclass(frozen=True)
class Script:
    """An example with its command line, and what must be said of the one that is not mended: verdict and words."""

    name: str
    arguments: str
    reason: str
    watched: str = ""
    outcome: Outcome = Outcome.FALSIFIED


SCRIPTS = (
    Script("ddp_accumulation.py", "--accumulate {accumulation}", "= accumulation 2", "-m andon watch"),
    Script("all_reduce_by_hand.py", "", "= world"),
    Script("ragged_epoch.py", "--folder {folder} {resume:--resume}", "a mean of unequal means"),
    *(
        Script("unlike.py", f"--kind {kind}", reason, "-m andon watch", Outcome.UNKNOWN)
        for kind, reason in (
            ("unseeded", "your script is not seeded"),
            ("by-rank", "the rows are not known"),
            ("accelerate", "use_seedable_sampler=True"),
        )
    ),
)
_CODES = {Outcome.HOLDS: 0, Outcome.FALSIFIED: 1, Outcome.UNKNOWN: 2}


def main() -> int:
    """Print a row for each script, wrong and mended; 0 if all verdicts are as they must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", default="2,3")
    parser.add_argument("--at-once", type=int, default=2, help="commands that run at the same time")
    options = parser.parse_args()
    began, cases = time.perf_counter(), [(script, mended) for script in SCRIPTS for mended in (False, True)]
    with ThreadPoolExecutor(options.at_once) as pool:
        judged = list(pool.map(lambda case: _judged(case[0], options.world, mended=case[1]), cases))
    print(table(("script", "", "verdict", "what it says", "as it must be", "seconds"), [row for row, _ in judged]))
    print(f"\n{time.perf_counter() - began:.0f} s, {options.at_once} commands at a time")
    return 0 if all(right for _, right in judged) else 1


def _judged(script: Script, world: str, *, mended: bool) -> tuple[tuple[str, ...], bool]:
    """A row, and whether the verdict is as it must be: by the command's exit code, and by its report."""
    launch = f"{shlex.quote(sys.executable)} -m torch.distributed.run --standalone --nproc-per-node {{world}}"
    words = [launch, script.watched, shlex.quote(str(_EXAMPLES / script.name)), "--batch {local_batch}"]
    command = " ".join([*words, script.arguments, "--mended" if mended else ""])
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        falsify = [sys.executable, "-m", "andon", "falsify", "--script", command, "--world", world, "--json", str(file)]
        done = subprocess.run(falsify, capture_output=True, text=True, check=False)
        if not file.exists():
            return (script.name, "", f"exit {done.returncode}", done.stderr.strip(), "NO", ""), False
        report = read_json(file)
    seconds = f"{time.perf_counter() - began:.0f}"
    wanted = Outcome.HOLDS if mended else script.outcome
    decisive = [finding for finding in report.findings if finding.outcome is wanted]
    said = report.closing_line
    if decisive and not mended:
        said = decisive[0].why or str(decisive[0].counterexamples[0]).partition("; seed")[0]
    right = done.returncode == _CODES[wanted] and (mended or script.reason in said)
    verdict = {code: outcome.value for outcome, code in _CODES.items()}.get(done.returncode, f"exit {done.returncode}")
    kind = "mended" if mended else script.arguments if script.outcome is Outcome.UNKNOWN else "wrong"
    return (script.name, kind, verdict, said, "yes" if right else "NO", seconds), right


if __name__ == "__main__":
    raise SystemExit(main())
