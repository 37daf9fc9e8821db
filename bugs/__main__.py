"""The scorecard: which tool sees which case.

`python -m bugs` runs all cases, each as reported and repaired, under Andon. It fails if a case lost its defect, a
repaired version is accused, or nothing sees a defect and `missed` does not say why. `--write` keeps the results in
scorecard.json, and writes the table in docs/findings.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import andon.cli.app
import andon_falsify.cli.falsify  # noqa: F401 - imported once, before the forks
from bugs.bench import GLOBAL_BATCH, Case, Job, as_expected, run_case
from bugs.cases import CASES

HERE = Path(__file__).parent
SCORECARD, PAGE = HERE / "scorecard.json", HERE.parent / "docs" / "findings.md"
BEGIN, END = "<!-- bugs -->", "<!-- end of bugs -->"
WATCH = ("line", "further")
ANDON = (*WATCH, "falsify")
OTHERS = {
    "ddp": "DDP's own checks (`TORCH_DISTRIBUTED_DEBUG=INFO`)",
    "torch-audit": "torch-audit 0.3.0, at every update",
    "torchtest2": "torchtest2 0.1.0, on the first batch",
}
Score = dict[str, Any]


def trial(name: str, tool: str, right: bool) -> Score:
    """What `tool` says of one version of a case. seen: clauses or claims. error: why the run says nothing."""
    case = CASES[name]
    folder = Path(tempfile.mkdtemp(prefix="andon-bugs-"))  # a forked process must not clear it away
    try:
        if tool == "falsify":
            return falsify(case, folder, right=right)
        accumulate = max(case.accumulates, 1)
        layout: dict[str, Any] = {
            "world": case.world,
            "batch": GLOBAL_BATCH // (case.world * accumulate),
            "accumulate": accumulate,
        }
        outcome = run_case(case, Job(right, tool, folder, **layout))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    score: Score = {"seen": outcome.clauses}
    if outcome.error and tool == "ddp":
        score["seen"] = [outcome.error.splitlines()[0][:200]]
    elif outcome.error:
        score["error"] = outcome.error.splitlines()[0][:200]
    elif not as_expected(outcome.value, case.right if right else case.wrong):
        score["error"] = f"returned {outcome.value}"
    return score


def falsify(case: Case, folder: Path, *, right: bool) -> Score:
    """`andon falsify --script` on the command of a version of a case, in a child process."""
    words = [sys.executable, "-m", "bugs.program", case.name, *(["--right"] if right else [])]
    command = f"{shlex.join(words)} --world {{world}} --batch {{local_batch}} --folder {{folder}}"
    command += " --accumulate {accumulation}" if case.accumulates else ""
    command += " {resume:--resumed}" if case.stops else ""
    report, said = folder / "report.json", folder / "said.txt"
    options = ["--name", case.name, "--world", "2", "--accumulation", str(max(case.accumulates, 1))]
    options += ["--json", str(report), "--script", command]
    # A resume is compared on its own layout. Without the other claims it needs no run on one rank.
    options += ["--claim", "resume-equal"] if case.stops else []
    process = multiprocessing.get_context("fork").Process(target=_andon, args=(["falsify", *options], said))
    process.start()
    process.join()
    if process.exitcode not in (0, 1, 2) or not report.exists():
        said_last = said.read_text()[-300:] if said.exists() else ""
        return {"seen": [], "error": f"andon falsify ended with {process.exitcode}: {said_last}"}
    findings = json.loads(report.read_text())["findings"]
    seen = sorted({each["claim"] for each in findings if each["outcome"] == "falsified"})
    unknown = {each["claim"]: " ".join(each["reasons"])[:300] for each in findings if each["outcome"] == "unknown"}
    return {"seen": seen, **({"unknown": unknown} if unknown else {})}


def _andon(words: Sequence[str], said: Path) -> None:
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        os.chdir(HERE.parent)
        sys.argv = ["andon", *words]
        code: object = 0
        try:
            andon.cli.app.main()
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 1)


def problems(card: dict[str, Score]) -> Iterator[str]:
    """What makes the runner fail."""
    for name, tools in card.items():
        for tool, score in tools.items():
            for version in ("wrong", "right") if tool in ANDON else ():
                if error := score[version].get("error"):
                    yield f"{name}, {version}, {tool}: {error}"
            if tool in ANDON and (alarms := score["right"]["seen"]):
                yield f"{name}, {tool}: the repaired version is accused of {', '.join(alarms)}"
        if {*ANDON} <= tools.keys() and not seen_by_andon(tools) and not CASES[name].missed:
            yield f"{name}: no command of Andon sees it, and the case does not say why"


def seen_by_andon(tools: Score) -> list[str]:
    return [tool for tool in ANDON if tool in tools and tools[tool]["wrong"]["seen"]]


def table(card: dict[str, Score]) -> str:
    """The scorecard for the page: the clauses and claims that see a case."""

    def cell(score: Score, mark: str = "") -> str:
        return ",".join(f"`{each}`{mark}" for each in score["wrong"]["seen"])

    lines = ["|case|report|watch|falsify|", "|---|---|---|---|"]
    for name, tools in sorted(card.items()):
        watch = cell(tools["line"]) or cell(tools["further"], "+") or "no"
        claims = cell(tools["falsify"]) or "no" if "falsify" in tools else "-"
        lines.append(f"|`{name}`|{CASES[name].report}|{watch}|{claims}|")
    lines += ["", "|tool of others|of the 40 it sees|", "|---|---|"]
    for tool, title in OTHERS.items():
        both = {name: tools[tool] for name, tools in sorted(card.items()) if tool in tools}
        seen = [f"`{name}`" for name, each in both.items() if each["wrong"]["seen"] and not each["right"]["seen"]]
        lines.append(f"|{title}|{len(seen)}{': ' * bool(seen)}{', '.join(seen)}|")
    return "\n".join(lines)


def main() -> int:
    """Run cases, compare them with what is expected, and print or write the scorecard."""
    parser = argparse.ArgumentParser(prog="python -m bugs", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases (default: all)")
    parser.add_argument("--tools", default=",".join(ANDON), help=f"of {', '.join([*ANDON, *OTHERS])}")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--write", action="store_true", help="keep the results")
    options = parser.parse_args()
    kept: dict[str, Score] = json.loads(SCORECARD.read_text()) if options.write and SCORECARD.exists() else {}
    names, tools = options.names or sorted(CASES), options.tools.split(",")
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        every = [(name, tool, right) for tool in tools for name in names for right in (False, True)]
        for (name, tool, right), score in zip(every, pool.map(trial, *zip(*every, strict=True)), strict=True):
            kept.setdefault(name, {}).setdefault(tool, {})["right" if right else "wrong"] = score
            print(name, tool, "right" if right else "wrong", json.dumps(score), flush=True)
            if options.write and right:
                SCORECARD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    whole = [name for name in kept if {*ANDON} <= kept[name].keys()]
    watched = all({*WATCH} <= kept.get(name, {}).keys() for name in CASES)
    if options.write and watched and BEGIN in (page := PAGE.read_text(encoding="utf-8")):
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(kept)}\n{END}{rest.split(END)[1]}")
    print(f"{sum(bool(seen_by_andon(kept[name])) for name in whole)} of {len(whole)} cases are seen by Andon")
    found = [*problems(kept)]
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
