"""`andon falsify`: exit codes, the last line, what it says to bad input, and that what it prints can be repeated."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from andon.cli.commands import app
from andon_falsify.campaign.request import read_request
from andon_falsify.campaign.run import opened, plan
from andon_falsify.campaign.trial import LAW, RESUME, Trial
from andon_falsify.cli.campaign import Progress, _weight
from andon_falsify.report.document import read_json
from andon_falsify.report.findings import Report
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Counterexample, Outcome, Verdict, unknown
from tests.falsify.oracle import SUM, Oracle, Says, holds

SMALL = {"rows": [5, 0], "batch_size": 4, "hidden": 8, "heads": 1, "inner": 8, "rank": 1, "dropout": 0.0}
BROKEN = SMALL | {
    "fault": "falsify.power.registry:last shard not trained",
    "contracts": False,
    "optimizer": "sgd",
    "clip_norm": None,
}
HERE = ("--backend", "inline", "--world", "2", "--accumulation", "1")
FELL = Verdict("gradient-law", Outcome.FALSIFIED, checked=1, counterexamples=(Counterexample("it is off"),))
CLOSING = re.compile(r"checked \d+ of \d+ claims, \d+ runs?, \d+ not applicable, \d+ unknown")


def falsify(*words: str) -> tuple[int, list[str], str]:
    done = CliRunner().invoke(app, ["falsify", *words], standalone_mode=True)
    return done.exit_code, done.stdout.splitlines(), done.stderr


def exact(case: object, *more: str) -> tuple[int, list[str], str]:
    return falsify(*HERE, "--case", json.dumps(case), *more)


def test_0_where_every_claim_holds() -> None:
    code, lines, _ = exact(SMALL, "--claim", "gradient-law", "--claim", "replicas-agree")
    assert code == 0
    assert lines[0].startswith("andon 0.1.0 on inline; exactly one case, seed 0: 1 trial, 2 of 16 claims")
    assert "gradient-law v1: holds" in lines[2]
    assert lines[-2].startswith("not selected (14): samples-once, ")
    assert lines[-1] == "checked 2 of 16 claims, 1 run, 0 not applicable, 0 unknown"


def test_1_where_a_claim_is_falsified_and_its_command_repeats_it(tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    code, lines, _ = exact(BROKEN, "--seed", "3", "--claim", "gradient-law", "--json", str(report))
    assert code == 1
    (command,) = [line for line in lines if line.startswith("  repeat with: ")]
    words = shlex.split(command.partition(": ")[2])
    assert words[:2] == ["andon", "falsify"]
    assert falsify(*words[2:])[1] == lines
    (finding,) = read_json(report).findings
    assert (finding.outcome.value, finding.world, finding.seed) == ("falsified", 2, 3)
    assert CLOSING.fullmatch(lines[-1])


def test_2_where_a_backend_that_was_asked_for_could_not_be_tried() -> None:
    code, lines, _ = falsify("--backend", "nccl", "--claim", "schedule", "--world", "64", "--accumulation", "1")
    assert (code, lines[-1]) == (2, "checked 0 of 16 claims, 0 runs, 1 not applicable, 0 unknown")
    assert lines[-2].startswith("skipped nccl: nccl ")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str], str]]:
    def ask(says: Says, *words: str, world: str = "2") -> tuple[int, list[str], str]:
        monkeypatch.setattr("andon_falsify.cli.campaign.opened", lambda asked: nullcontext(plan(asked, Oracle(says))))
        return falsify("--backend", "gloo", "--world", world, "--accumulation", "1", "--claim", "sum", *words)

    return ask


Asked = Callable[..., tuple[int, list[str], str]]


@pytest.mark.parametrize("words", [["falsify", *HERE], ["verify", "run"]])
def test_70_where_it_fails_before_anything_is_tried(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise LookupError("lost")

    monkeypatch.setattr("andon_falsify.cli.campaign.opened", lost)
    monkeypatch.setattr("andon_falsify.claims.ledgers.read_run", lost)
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (70, "")
    assert "internal error: LookupError: lost" in done.stderr


def test_verdicts_are_shown_where_a_report_cannot_be_written(asked: Asked, tmp_path: Path) -> None:
    """A folder that is deleted meanwhile costs the file and the exit code, not what was found out."""
    (tmp_path / "gone").mkdir()

    def says(trial: Trial) -> Verdict:
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        return holds(trial)

    code, lines, said = asked(says, "--json", str(tmp_path / "gone" / "r.json"))
    assert code == 64
    assert "the folder is gone" in said
    assert "sum v1: holds" in lines[1]
    assert CLOSING.fullmatch(lines[-1])


def test_130_after_an_interruption_with_whole_reports(asked: Asked, tmp_path: Path) -> None:
    paths = {name: tmp_path / f"r.{name}" for name in ("json", "junit", "html")}
    seen: list[Report] = []

    def says(trial: Trial) -> Verdict:
        seen.append(read_json(paths["json"]))
        assert [case.get("name") for case in ElementTree.parse(paths["junit"]).iter("testcase")][1:] == ["campaign"]
        if trial.case.world == 3:
            raise KeyboardInterrupt
        return holds(trial)

    code, lines, said = asked(says, *(f"--{name}={path}" for name, path in paths.items()), world="2,3")
    last = read_json(paths["json"])
    first, *_, before = ((each.findings[0].outcome, each.unfinished) for each in seen)
    running = "the campaign is still running"
    assert (first, before) == ((Outcome.UNKNOWN, running), (Outcome.HOLDS, running))
    assert (last.findings[0].outcome, last.unfinished, last.exit_code) == (Outcome.HOLDS, "interrupted", 2)
    assert (code, lines[-2], said.strip()) == (130, "incomplete: interrupted", "andon: interrupted")
    assert CLOSING.fullmatch(lines[-1])
    assert "incomplete: interrupted" in paths["html"].read_text()
    assert [path.name for path in tmp_path.iterdir() if path not in paths.values()] == []


def test_a_campaign_whose_deadline_is_over_leaves_whole_reports(asked: Asked, tmp_path: Path) -> None:
    def endless(_: Trial) -> Verdict:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        threading.Event().wait()
        raise AssertionError

    said = "the deadline of 1000 s is over"
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)]
    junit, report = tmp_path / "r.xml", tmp_path / "r.json"
    found = asked(endless, "--json", str(report), "--junit", str(junit), "--deadline", "1000")
    assert (found[0], found[2].strip()) == (2, f"andon: {said}")
    assert found[1][1] == "not tried yet (1): sum"
    assert read_json(report).unfinished == said
    assert [case[-1].tag for case in ElementTree.parse(junit).iter("testcase")] == ["skipped", "error"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)] == handlers


def test_a_page_is_made_from_the_json_at_any_time(tmp_path: Path) -> None:
    report, page, again = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "again.html"
    words = ("--claim", "gradient-law", "--name", "my run", "--json", str(report), "--html", str(page))
    code, lines, _ = exact(BROKEN, *words)
    found = falsify("--report", str(report), "--html", str(again))
    assert (found[0], found[1][-1], code) == (0, lines[-1], 1)
    assert again.read_bytes() == page.read_bytes()
    assert read_json(report).findings[0].subject == "my run"
    assert falsify("--report", str(page))[0] == 64


def test_somebody_who_reads_a_log_sees_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line only after a trial has ended. The time that is left follows from the trials that ended."""

    class Ticks(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if (ended := next(trials, None)) == 1:
                progress.told(Trial("law", Case()), {"gradient-law": FELL})
            return ended is None

    monkeypatch.setattr(sys, "stderr", log := StringIO())
    trials, progress = iter((0, 1, 0, 0, 1, 0)), Progress()
    monkeypatch.setattr(progress, "_over", Ticks())
    with progress:
        progress.begin([1, 1, 1])
    line = r"andon: {} of 3 trials after \d+ s \(about \d+ s left\), falsified: gradient-law\n"
    assert re.fullmatch(line.format(1) + line.format(2), log.getvalue())


def test_somebody_at_a_terminal_sees_every_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: True)
    with Progress() as progress:
        trials = [Trial(kind, Case(backend="[red]", world=1, micro_batches=1)) for kind in (LAW, LAW, RESUME)]
        progress.begin([*map(_weight, trials)])
        progress._began -= 1000.0
        progress.told(trials[0], {"gradient-law": FELL})
    said = r"andon: law at \[red\], world 1, accumulation 1: 1 falsified; 1 of 3 trials after 1\d+ s \(about 5\d{3} s"
    assert re.match(said, screen.getvalue())


def test_what_a_subject_says_cannot_act_on_the_terminal(asked: Asked) -> None:
    nasty = "\x1b[2J\x00\u202e\u2066\x9b31m\rholds\nfake-claim v1: holds\U000e0041"

    def raises(_: Trial) -> Verdict:
        raise LookupError(nasty)

    for says in (lambda _: unknown(SUM, nasty), raises):
        code, lines, error = asked(says)
        assert [each for line in [*lines, error.replace("\n", "")] for each in line if not each.isprintable()] == []
        assert not [line for line in lines if line.startswith("fake-claim")]
    assert (code, lines[-1]) == (70, "checked 0 of 3 claims, 1 run, 0 not applicable, 1 unknown")
    assert "\\x1b[2J\\x00\\u202e\\u2066\\x9b31m\\x0dholds" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bogus"], "No such option '--bogus'"),
        (["--world", "0"], "--world: must be numbers from 1 to 64, as in 2,3; not '0'"),
        (["--seed", "9-3"], "--seed: must be a number, or two as in 0-199, of at most 10000 seeds, not '9-3'"),
        (["--seed", "9" * 5000], "--seed: must be a number"),
        (["--budget", "huge"], "--budget: must be one of quick, standard, deep, not 'huge'"),
        (["--subject", "plane"], "did you mean plain?"),
        (["--subject", "nope_of_all:make"], "--subject: there is no module 'nope_of_all', in the current folder"),
        (["--subject", "a:b", "--script", "x"], "exclude each other"),
        (["--script", " "], "--script: is empty; give"),
        (["--case", "{}"], "--case: needs exactly one value for each of"),
        (["--deadline", "0"], "--deadline: must be seconds, more than 0, not 0"),
        (["--name", " "], "--name: is empty"),
        (["--expected-failed", "gradient-law"], "--expected-failed: must be CLAIM: REASON, not 'gradient-law'"),
        (["--expected-failed", "gradient: x"], "--expected-failed: there is no claim 'gradient'; did you mean gradi"),
        (["--json", "/nowhere/at/all.json"], "--json: /nowhere/at is not a folder"),
        (["--backend", "glo"], "there is no backend 'glo'; did you mean gloo?"),
        (["--claim", "gradient"], "there is no claim 'gradient'; did you mean gradient-law?"),
        (
            ["--subject", "ddp", "--claim", "losses-close,layout-equal,chain-intact"],
            "no claim 'chain-intact' about this kind",
        ),
        (["--subject", "examples.mytrainer:nope"], "mytrainer.py defines no 'nope'; check the name"),
        ([*HERE, "--case", "[" * 100_000], "--case: is not JSON"),
    ],
)
def test_64_and_words_for_bad_input(words: list[str], said: str) -> None:
    """Never 2, which says that a claim is unknown, and never a traceback."""
    code, _, error = falsify(*words)
    assert code == 64
    assert said in error
    assert "Traceback" not in error
    for verify, refusal in (("--bogus", "No such option"), ("/nowhere/at/all", "/nowhere/at/all: No such file")):
        done = CliRunner().invoke(app, ["verify", verify])
        assert (done.exit_code, refusal in done.stderr) == (64, True)


def test_all_that_is_wrong_is_said_at_once() -> None:
    _, _, said = falsify(
        "--subject", "plane", "--world", "x", "--accumulation", "-1", "--seed", "one", "--budget", "big"
    )
    places = [line.split(": ")[1] for line in said.splitlines()]
    assert places == ["--world", "--accumulation", "--seed", "--budget", "--subject"]


def test_a_claim_by_name_is_tried_whatever_the_budget_leaves_out() -> None:
    with opened(read_request(claims=("memory-budget",), world="2", backend="inline")) as campaign:
        assert {trial.kind for trial in campaign.trials} == {"memory"}


def test_a_mistyped_option_is_answered_without_torch() -> None:
    """As a process: exit code 64 comes from the command itself, and before anything heavy is imported."""
    program = (
        "import sys; sys.argv = ['andon', 'falsify', '--world', 'x']\n"
        "from andon.cli.app import main\ntry: main()\n"
        "finally: sys.stderr.write(f\"torch: {'torch' in sys.modules}\")\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert done.stderr.endswith("torch: False")
