"""Script mode: a command with places in it is run on layouts of one global batch, and its ledgers are held together."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import torch

from andon.console.messages import InputError
from andon_contracts.digest import hex64, mix64
from andon_falsify.campaign.script_bench import Command, ScriptBench, run
from andon_falsify.campaign.trial import LAW, RESUME, Trial
from andon_falsify.claims.evidence import SCRIPT, Evidence
from andon_falsify.claims.resume_equal import check_script as resumed
from andon_falsify.claims.rounding import measured
from andon_falsify.claims.same_everywhere import COMPARED, check, check_class, check_layouts
from andon_falsify.claims.samples_once import check_visits as samples
from andon_falsify.history import History, chain_digest, read_lines
from andon_falsify.ranks.processes import descendants
from andon_falsify.report.document import read_json
from andon_falsify.subjects.case import Case
from andon_falsify.verdict import Outcome, Verdict
from tests.falsify.written_runs import PLAIN, copying, lines

EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"


def ledger(*steps: dict[str, Any]) -> History:
    return read_lines(lines(*steps), "ledger")


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        ("--resume_from_checkpoint {folder}/x", ["--resume_from_checkpoint", "f g/x"]),
        ("--resume {folder}/step-*.pt", ["--resume", "f g/step-*.pt"]),
        ('--set \'{"from": {"world": {world}}}\'', ["--set", '{"from": {"world": 3}}']),
    ],
)
def test_words_for_resuming_may_have_places_and_braces(resume: str, words: list[str]) -> None:
    case = Case(batch_size=12, world=3, micro_batches=3)
    command = Command.read(f"run {{world}} {{local_batch}} --to {{folder}} {{resume:{resume}}} --last")
    assert command.words(case, "f g", resumed=True) == ["run", "3", "4", "--to", "f g", *words, "--last"]
    assert command.words(case, "f g") == ["run", "3", "4", "--to", "f g", "--last"]
    counted = Command.read("run {world} {local_batch} {accumulation}")
    assert counted.words(Case(batch_size=12, world=3, micro_batches=6), "f") == ["run", "3", "2", "2"]
    literal = Command.read("run {world} {local_batch} {{name}} ${HOME}")
    assert literal.words(case, "f") == ["run", "3", "4", "{name}", "${HOME}"]


def test_a_pattern_names_the_newest_that_there_is_to_resume(tmp_path: Path) -> None:
    for age, name in ((30, "step-9.pt"), (10, "step-10.pt"), (20, "step-8.pt")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    command = Command.read("run {world} {local_batch} {resume:--resume={folder}/step-*.pt --from {folder}/step-*.pt}")
    words = command.words(Case(), str(tmp_path), resumed=True)
    assert words[3:] == [f"--resume={tmp_path}/step-*.pt", "--from", str(tmp_path / "step-10.pt")]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("run {world} {local_batch} {folder} {resume:--resume {folder}/x", ["not closed"]),
        ("run", ["{world}", "{local_batch}"]),
        ("run {world} {local_batch} {resume:again}", ["{folder}"]),
        ("run {world} {local_batch} 'x", ["quotation"]),
        ("run {world} {local_batch} {folder} {resume --again}", ["{resume ...}", "did you mean {resume:WORDS}?"]),
        ("run {world} {local_batch} {foo}", ["{foo} is not a placeholder", "{folder}, {resume:", "write {{foo}}"]),
        ("run {world} {local_batch} {resumeany:x}", ["{resumeany:...}", "did you mean {resume_any:WORDS}?"]),
    ],
)
def test_a_command_without_its_places_is_refused(text: str, missing: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        Command.read(text)
    assert [word for word in missing if word not in str(refused.value)] == []


def same(base: History, other: History, accumulation: int = 1) -> Verdict:
    return check_layouts(base, other, {"world": 2, "accumulation": accumulation})


Fields = dict[str, Any]
KNOWN = {**PLAIN, "ids": [1, 2]}


@pytest.mark.parametrize(
    ("base", "other", "ratios"),
    [
        (PLAIN, {"grad_norm": 1.0 + SCRIPT.norm / 3}, []),
        (PLAIN, {"loss": 1.01}, [1.01]),
        (PLAIN, {"weights_norm": 0.9}, [0.9]),
        (PLAIN, {"lr": 0.7}, [0.7]),
        (PLAIN, {"lr": 0.7, "grad_norm": 1.063}, [0.7]),
        (KNOWN, {"grad_norm": 1.063}, [1.063]),
        *((PLAIN, {"grad_norm": of, "loss": 1.7, "weights_norm": 3.3}, [of]) for of in (2.0, 0.5, 4.0, 3.0, 1.5, 6.0)),
    ],
)
def test_a_number_that_differs_falls_with_its_ratio(base: Fields, other: Fields, ratios: list[float]) -> None:
    verdict = same(ledger(base), ledger({**base, **other}), accumulation=3)
    assert verdict.outcome is (Outcome.FALSIFIED if ratios else Outcome.HOLDS)
    assert [found.ratio for found in verdict.counterexamples] == list(map(pytest.approx, ratios))


OTHER = {"grad_norm": 1.063, "loss": 1.02}
DRAWN = {"draws": "dropout in drop (p = 0.1)"}
SAID = ["dropout in drop (p = 0.1). Switch dropout off (p = 0) while you compare runs"]


@pytest.mark.parametrize(
    ("base", "other", "said"),
    [
        (PLAIN, {"weights_norm": 0.98}, ["1.063, which no product of world 2 gives", "rows are not known", "one seed"]),
        (KNOWN, {}, ["although the rows are the same. Report the loss with w.loss"]),
        ({**PLAIN, **DRAWN}, {}, SAID),
        ({**KNOWN, **DRAWN}, {}, SAID),
        ({**KNOWN, "ids": [1, 2, 3]}, {"ids": [3, 1, 4]}, ["differ (expected 2, seen 4)", "use_seedable_sampler"]),
    ],
)
def test_a_gradient_of_other_rows_or_draws_proves_nothing(base: Fields, other: Fields, said: list[str]) -> None:
    verdict = same(ledger(base), ledger({**base, **OTHER, **other}))
    assert verdict.outcome is Outcome.UNKNOWN
    assert [words for words in said if words not in verdict.why] == []
    assert said is not SAID or "DistributedSampler" not in verdict.why
    assert ("dropout" in verdict.why) is (said is SAID)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"ids": [3, 1]}, "Draw the rows of every global batch"),
        ({"ids": [3, 3, 1]}, "Mend samples-once first"),
        ({**OTHER, "ranks": [{"rank": 0, "weights": "a"}, {"rank": 1, "weights": "b"}]}, "Mend replicas"),
    ],
)
def test_a_claim_that_fell_before_is_named_as_a_cause(other: Fields, said: str) -> None:
    alone = Evidence(None, ledger(KNOWN), "script", layout={"world": 1})
    found = Evidence(None, ledger({**KNOWN, **other}), "script", layout={"world": 2})
    found.others["alone"] = found.others["again"] = alone
    assert said in check(found).why


def test_rates_of_runs_of_other_lengths_differ_for_that_reason() -> None:
    """Rows that do not divide give one layout an update fewer, and its schedule other rates from the first one on."""
    long = [{**PLAIN, "lr": rate} for rate in (0.03, 0.02, 0.01)]
    short = [{**PLAIN, "lr": rate} for rate in (0.0299, 0.015)]
    found = same(ledger(*long), ledger(*short)).counterexamples
    assert (found[0].expected, found[0].seen, found[0].ratio) == ("3 updates", "2 updates", None)
    assert found[0].what.startswith("a different number of updates")
    assert [each.what for each in found[1:]] == ["the learning rate differs"]
    for step, outcome in ((KNOWN, Outcome.FALSIFIED), ({"grad_norm": 1.0}, Outcome.UNKNOWN)):
        assert same(ledger(step, step), ledger(step)).outcome is outcome


def test_the_first_uneven_update_is_named() -> None:
    even, uneven = ({"ids": list(range(count)), "grad_norm": 1.0} for count in (4, 5))
    wrong = {**uneven, "grad_norm": 1.1}
    (found,) = same(ledger(even, uneven), ledger(even, wrong)).counterexamples
    assert "5 rows on 2 ranks, the first batch that does not divide evenly: is a mean of per-rank" in found.what
    first = same(ledger(uneven, even), ledger(wrong, even))
    assert (first.outcome, "evenly" in first.why) == (Outcome.UNKNOWN, False)


@pytest.mark.parametrize(
    ("field", "outcome"), [("lr", Outcome.FALSIFIED), ("grad_norm", Outcome.HOLDS), ("weights_norm", Outcome.HOLDS)]
)
def test_later_updates_are_compared_by_rows_and_rates_and_the_verdict_says_so(field: str, outcome: Outcome) -> None:
    long = [KNOWN] * COMPARED
    verdict = same(ledger(*long, KNOWN, KNOWN), ledger(*long, KNOWN, {**KNOWN, field: 2.0}))
    said = f"losses and norms are compared in the first {COMPARED} of {COMPARED + 2} updates"
    assert (verdict.outcome, verdict.why) == (outcome, said if outcome is Outcome.HOLDS else "")
    other = same(ledger(*long, KNOWN), ledger(*long, {**KNOWN, "ids": [7, 8]}))
    assert f"step {COMPARED + 1}, ledger: the rows differ" in other.why


@pytest.mark.parametrize(
    ("batches", "outcome"),
    [
        ([[0, 1, 2], [3, 4], [4, 2, 0], [1, 3]], Outcome.HOLDS),
        ([[0, 1], [2, 3], [4, 0], [2, 0], [3, 1], [4, 2]], Outcome.FALSIFIED),
        ([[0, 1], [2, 3], [1, 4], [3, 0]], Outcome.HOLDS),
        ([[0, 1], [0, 2], [0, 1], [3, 2]], Outcome.FALSIFIED),
        ([[0, 1, 2], [3, 4], [0, 1]], Outcome.HOLDS),
        ([[], []], Outcome.NOT_APPLICABLE),
    ],
)
def test_rows_come_once_in_every_stretch(batches: list[list[int]], outcome: Outcome) -> None:
    assert samples(ledger(*({"ids": batch} for batch in batches))).outcome is outcome


TWICE = "falsified\n  epoch 0: in visits 1 to 8 of 8 rows some came more than once"
SHUFFLED, RISING = [3, 1, 4, 0, 5, 2, 6, 7], [*range(0, 8, 2), *range(1, 8, 2)]


@pytest.mark.parametrize(
    ("epochs", "said"),
    [
        ([SHUFFLED, SHUFFLED], "falsified\n  epoch 1: the rows have the order of epoch 0"),
        ([RISING, RISING], "holds (two epochs have the same rising order"),
        ([SHUFFLED, RISING], "holds"),
        ([SHUFFLED], "holds (orders of epochs were not compared"),
        ([SHUFFLED[:7], SHUFFLED], f"{TWICE}: some were left out and the next epoch began, or the last"),
        ([[3, *SHUFFLED[:7]], SHUFFLED], f"{TWICE}; expected each once, seen never 7, more than once 3 (2 times)"),
    ],
)
def test_epochs_are_judged_by_their_rows_and_orders(epochs: list[list[int]], said: str) -> None:
    steps = [{"ids": rows, "ranks": [{"rank": r, "ids": rows[4 * r : 4 * r + 4]} for r in (0, 1)]} for rows in epochs]
    assert str(samples(ledger(*steps))).startswith(f"samples-once: {said}")


def drawn(rows: list[int], size: int, reached: int, lr: float = 1.0) -> Fields:
    """An update with the state that a watch writes of the rows that a data loader drew."""
    mixed = int(mix64(torch.tensor(rows)).sum())
    return {**PLAIN, "lr": lr, "state": {"rows": hex64(mixed), "in pass": f"{reached}", "of": f"{size}"}}


OWN = [*range(12, 36), *range(12), *range(36, 48)]


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ([OWN, OWN[::-1]], "holds (rows as its data loader drew them)"),
        ([OWN, OWN], "falsified\n  epoch 1: the rows have the order of epoch 0"),
        ([sorted(OWN)] * 2, "holds (rows as its data loader drew them; two epochs have the same rising order"),
        ([OWN[1:] + OWN[1:2]] * 2, "not applicable"),
    ],
)
def test_rows_that_a_data_loader_draws_are_judged_by_their_sums(passes: list[list[int]], said: str) -> None:
    """The first update is unknown, as to `-m andon watch`, which begins in it."""
    steps = [drawn(rows[at : at + 12], 48, at + 12) for rows in passes for at in range(0, 48, 12)]
    assert str(samples(ledger(PLAIN, *steps[1:]))).startswith(f"samples-once: {said}")


def test_drawn_rows_show_a_mean_of_means_and_other_rows() -> None:
    first, last = drawn([3, 1, 2, 0], 9, 4), drawn([4, 5, 6, 7, 8], 9, 9)
    assert "5 rows on 2 ranks" in str(same(ledger(first, last), ledger(first, {**last, "grad_norm": 1.1})))
    other = {**drawn([4, 5, 6, 7, 0], 9, 9), "grad_norm": 1.1}
    assert "its data loader drew other rows" in same(ledger(first, last), ledger(first, other)).why


@pytest.mark.parametrize("ids", [True, False])
def test_the_last_rows_of_an_epoch_that_have_no_update_of_their_own_fall(ids: bool) -> None:
    """As reported, or as a data loader drew them: 10 rows in batches of 4, the last 2 together with the next 4."""

    def step(rows: list[int], reached: int, norm: float = 1.0) -> Fields:
        own = {**PLAIN, "ids": rows} if ids else drawn(rows, 10, reached)
        return {**own, "grad_norm": norm}

    first, last, again = step([4, 1, 2, 3], 4), step([9, 8], 10), step([0, 5, 9, 7], 4)
    base, right = ledger(first, last, again), ledger(first, last, again)
    assert same(base, right).outcome is Outcome.HOLDS
    merged, others = (ledger(first, step([9, 8, 0, 5, 9, row], 4, 2.5)) for row in (7, 6))
    assert "expected the rows of step 2, seen those of steps 2 and 3" in str(same(base, merged))
    assert same(base, others).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("clause", "action", "outcome"),
    [
        ("samples-once", "warned", Outcome.FALSIFIED),
        ("order-renewed", "warned", Outcome.FALSIFIED),
        ("samples-once", "suspected", Outcome.NOT_APPLICABLE),
        ("clip-once", "warned", Outcome.NOT_APPLICABLE),
    ],
)
def test_rows_that_come_again_at_the_data_loader_fall(clause: str, action: str, outcome: Outcome) -> None:
    (step,) = lines({"grad_norm": 1.0})
    seen = {"kind": "violation", "clause": clause, "action": action, "seen": "rows [1] came again", "step": 2, "v": 5}
    broken = json.dumps({"seq": 1, "prev": chain_digest(step.removesuffix(b"\n")), **seen}).encode() + b"\n"
    verdict = samples(read_lines([step, broken], "ledger"))
    assert verdict.outcome is outcome
    assert all("step 2, at its data loader: rows [1] came" in str(found) for found in verdict.counterexamples)


def steps(*weights: int) -> History:
    before = {"state": {"weights before": f"{weights[0] - 1:016x}"}} if weights else {}
    made = [{"digests": {"weights": f"{number:016x}", "gradient": "0" * 16}} for number in weights]
    return ledger(*({**step, **before} for step in made))


@pytest.mark.parametrize(
    ("between", "again", "outcome"),
    [
        (None, steps(3, 4), Outcome.HOLDS),
        (None, steps(2, 3, 4), Outcome.HOLDS),
        (None, steps(3, 9), Outcome.FALSIFIED),
        (None, steps(4), Outcome.FALSIFIED),
        (None, steps(1, 2, 3, 4), Outcome.FALSIFIED),
        (None, steps(), Outcome.UNKNOWN),
        (steps(2, 3), steps(4), Outcome.HOLDS),
        (steps(3), steps(3, 4), Outcome.HOLDS),
        (steps(3, 9), steps(4), Outcome.FALSIFIED),
        (steps(3), steps(2, 4), Outcome.FALSIFIED),
    ],
)
def test_a_resumed_run_ends_as_the_whole_one(between: History | None, again: History, outcome: Outcome) -> None:
    assert resumed(steps(1, 2, 3, 4), steps(1, 2), again, between).outcome is outcome


@pytest.mark.parametrize(
    ("scale", "across", "noise", "outcome", "said"),
    [
        (
            1.002,
            0.0,
            1e-3,
            Outcome.HOLDS,
            "noise of one bf16 rounding, measured in 4 runs: first gradient, factor 1.0020",
        ),
        (1.010, 0.0, 1e-3, Outcome.FALSIFIED, "ratio 1.010"),
        (1.010, 0.0, 3e-3, Outcome.HOLDS, "factor 1.0100 +- 0.0150"),
        (1.010, 0.0, 2e-2, Outcome.UNKNOWN, "changes the first gradient by 2.0%"),
        (2.000, 0.0, 2e-2, Outcome.FALSIFIED, "ratio 2.000"),
        (1.000, 1.0, 1e-3, Outcome.UNKNOWN, "the rest 20.00% of its norm"),
    ],
)
def test_a_gradient_in_bf16_is_judged_by_the_noise_that_was_measured(
    scale: float, across: float, noise: float, outcome: Outcome, said: str
) -> None:
    """A parallel gradient proves a wrong factor without rows; one in another direction may be of other rows."""
    runs = [(1.0, 0.0), (1 + noise, 0.0), (1 - noise, 0.0), (scale, across)]
    base, *others, run = (replace(ledger(PLAIN), sketch=(3 * by, 4 * by, rest), bits=8) for by, rest in runs)
    verdict = check_layouts(base, run, {"world": 2}, measured(base, others))
    assert (verdict.outcome, said in str(verdict)) == (outcome, True), verdict
    again = iter([base, *others, *others])
    assert check_class(base, run, {"world": 2}, lambda _: next(again)).outcome is outcome


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.5}, "the learning rate (0.5, not 1), which a schedule and an optimizer hold"),
        (drawn([7], 9, 1), "the position in the data"),
        ({"digests": {"gradient": "0" * 16, "weights": "9" * 16}}, "the state of the optimizer"),
        (
            {"state": {"random stream of torch": "9"}},
            "random streams (torch), from which the forward passes draw: dropout",
        ),
        ({}, "weights and buffers)"),
        ({"state": {}}, "weights and buffers, or other rows)"),
        ({"state": {"weights before": "0" * 16}}, "buffers, or other rows (weights are those of step 1))"),
    ],
)
def test_a_resume_that_goes_on_otherwise_names_what_it_may_not_restore(changes: Fields, said: str) -> None:
    state = {"random stream of torch": "1", "rows": "2"}
    whole = {**PLAIN, **DRAWN, "digests": {"gradient": "0" * 16, "weights": "0" * 16}, "state": state}
    again = {**whole, "digests": {"gradient": "9" * 16, "weights": "9" * 16}, **changes}
    (found,) = resumed(ledger(whole, whole), ledger(whole), ledger(again)).counterexamples
    assert f"(likely not restored: {said}" in found.what


def test_a_resume_that_repeats_its_epoch_is_told_from_a_start() -> None:
    over, epoch = (resumed(steps(1, 2, 3, 4), steps(1, 2), made) for made in (steps(1, 2, 3, 4), steps(3, 4, 5)))
    assert "was not resumed: it started over; expected at most 3 updates, seen 4" in str(over)
    assert "repeated updates after the resume: it began an epoch anew; expected at most 2 updates, seen 3" in str(epoch)


def test_a_script_that_is_not_seeded_is_not_judged_on_being_taken_up() -> None:
    verdict = resumed(steps(1, 2, 3, 4), steps(1, 7), steps(8, 9))
    assert verdict.outcome is Outcome.UNKNOWN
    assert "not seeded: two runs on 2 ranks differ, first in the weights at step 2" in verdict.why


@pytest.mark.parametrize(
    ("world", "norm", "outcome"),
    [
        (2, 1.0 + SCRIPT.norm / 3, Outcome.FALSIFIED),
        (3, 1.0 + SCRIPT.norm / 3, Outcome.HOLDS),
        (3, 1.0 + 3 * SCRIPT.norm, Outcome.FALSIFIED),
    ],
)
def test_sums_of_three_ranks_may_be_rounded_otherwise_after_a_start(world: int, norm: float, outcome: Outcome) -> None:
    """DDP lays its buckets out anew in its second update: another order of a ring's sums, which two ranks have not."""
    before, after = ({"world": world, "grad_norm": size, "digests": {"gradient": str(size)}} for size in (1.0, norm))
    assert resumed(ledger(before, before), ledger(before), ledger(after)).outcome is outcome


def test_a_script_may_promise_to_be_resumed_on_another_number_of_ranks() -> None:
    """Sums have another order there, and dropout draws other numbers. The second kill is aligned by its rows."""
    seen = [{"world": 2, "grad_norm": 1.0 + at, "ids": [at], "digests": {"gradient": f"{at:016x}"}} for at in range(6)]
    rounded, drawn = (1 + SCRIPT.norm / 3, {}, Outcome.HOLDS), (1.01, DRAWN, Outcome.UNKNOWN)
    for factor, draws, outcome in (rounded, drawn, (1.01, {}, Outcome.FALSIFIED)):
        whole = [{**step, **draws} for step in seen]
        other = [{**step, "world": 3, "grad_norm": factor * (1.0 + at), "digests": {}} for at, step in enumerate(whole)]
        found = resumed(ledger(*whole), ledger(*whole[:2]), ledger(*whole[3:]), ledger(*other[1:3]))
        assert found.outcome is outcome, found
    for words, then in (("{resume:again}", 0), ("{resume_any:again}", 3)):
        bench = ScriptBench(f"run {{world}} {{local_batch}} {{folder}} {words}", 1.0)
        assert bench.suited(Trial(RESUME, Case(world=2, micro_batches=2), then_world=3)).then_world == then


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with -9"),
        ("print('hello')", "left no ledger"),
        ("import time; time.sleep(60)", "did not end within 1 s"),
    ],
)
def test_a_command_that_gives_nothing_to_judge_says_why(program: str, said: str, tmp_path: Path) -> None:
    assert said in run([sys.executable, "-c", program], tmp_path, 1.0 if "60" in program else 30.0).error
    assert "cannot be started" in run(["no-such-program-here"], tmp_path, 5.0).error


LEFT = "rank 1 of 2 left at step 10, before its forward pass (not a contract violation): it ended"
LOGGED = "E1122 15:47:42.907000 3903 {}/distributed/elastic/api.py:1002] failed\n====="


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("ValueError: printed\nTraceback (most recent call last):\n  File x\nKeyError: 'real'", "KeyError: 'real'"),
        ("ValueError: all that was said", "ValueError: all that was said"),
        ("traceback : Signal 9 (SIGKILL) received by PID 7", "Signal 9 (SIGKILL) received by PID 7"),
        ("it printed\n[rank0]: a.b.BackendError: lost\nend", "[rank0]: a.b.BackendError: lost"),
        (f"OSError: b\ntraceback : {LEFT}.\n  state    it was {LEFT[:6]}\nOSError: c", f"{LEFT}; it was {LEFT[:6]}"),
        (f"why\n{LOGGED.format('torch')}", "why"),
        (f"why\n{LOGGED.format('/usr/lib/python3/torch')}", "why"),
    ],
)
def test_the_reason_is_what_ended_a_script(printed: str, reason: str, tmp_path: Path) -> None:
    said = run([sys.executable, "-c", f"print({printed!r}); raise SystemExit(3)"], tmp_path, 30.0).error
    assert said == f"the command ended with 3: {reason}"


def test_of_a_flood_of_output_only_the_end_is_kept(tmp_path: Path) -> None:
    program = "import os\nfor _ in range(1 << 10): os.write(1, b'x' * (1 << 14))\nraise KeyError('label')"
    done = run([sys.executable, "-c", program], tmp_path, 30.0)
    assert done.error == "the command ended with 1: KeyError: 'label'"
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 1 << 16


def waiting(pid: Path) -> str:
    return f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"


def over(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_a_command_leaves_running_is_named_and_ended(tmp_path: Path) -> None:
    """A daemon: its own session, no parent, and nothing of the command's environment."""
    pid = tmp_path / "pid"
    program = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-c", {waiting(pid)!r}], {{}})
    os._exit(0)
while not os.path.exists({str(pid)!r}) or not open({str(pid)!r}).read():
    pass
"""
    done = run([sys.executable, "-c", program], tmp_path / "run", 30.0)
    assert [stray.partition(" ")[0] for stray in done.stray] == [pid.read_text()]
    assert over(int(pid.read_text()))


def test_a_chain_of_processes_that_fork_and_leave_is_ended(tmp_path: Path) -> None:
    """While its processes are listed, each may end and leave another one."""
    program = """
import os, time
end = time.monotonic() + 60  # so that nothing stays if the test itself is killed
while time.monotonic() < end and os.fork() == 0:
    time.sleep(0.02)
os._exit(0)
"""
    run([sys.executable, "-c", program, str(tmp_path)], tmp_path / "run", 30.0)
    assert not [each.pid for each in descendants(1) if str(tmp_path) in each.command]


def test_a_campaign_that_is_terminated_ends_its_script_and_leaves_its_report(tmp_path: Path) -> None:
    pid, report, junit = tmp_path / "pid", tmp_path / "r.json", tmp_path / "r.xml"
    os.mkfifo(pid)
    command = shlex.join([sys.executable, "-c", waiting(pid)]) + " {world} {local_batch}"
    words = ["--script", command, "--name", "mine", "--json", str(report), "--junit", str(junit)]
    with subprocess.Popen(
        [sys.executable, "-m", "andon", "falsify", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as campaign:
        training = int(pid.read_text())  # which waits until the script has begun
        campaign.terminate()
        lines, said = campaign.communicate()
    assert (campaign.returncode, said) == (143, "andon: ended by SIGTERM\n")
    assert lines.startswith("mine on script; budget quick")
    assert over(training)
    assert read_json(report).unfinished == "ended by SIGTERM"
    assert {suite.attrib["name"] for suite in ElementTree.parse(junit).iter("testsuite")} == {"mine"}


def test_temporary_files_of_a_command_go_with_its_folder(tmp_path: Path) -> None:
    program = "import os, signal, tempfile; tempfile.mkdtemp(prefix='left-'); os.kill(os.getpid(), signal.SIGKILL)"
    run([sys.executable, "-c", program], tmp_path / "run", 30.0)
    assert [path.name[:5] for path in (tmp_path / "run" / "tmp").iterdir()] == ["left-"]


@pytest.mark.parametrize(
    ("norms", "outcome", "said", "runs"),
    [
        ({"1": 1.0, "2": 1.0}, Outcome.HOLDS, "", 2),
        ({"1": 1.0, "2": 2.0}, Outcome.FALSIFIED, "ratio 2.000", 3),
        ({"1": 1.0, "1.next": 1.5, "2": 2.0}, Outcome.UNKNOWN, "not seeded: two runs on one rank differ, first in", 3),
        ({"1": 1.0, "2": 1.063}, Outcome.UNKNOWN, "the rows are not known. Draw the rows of every global batch", 3),
    ],
    ids=["mean", "sum", "unseeded", "other rows"],
)
def test_runs_on_two_layouts_are_compared_where_a_third_shows_the_seed(
    norms: dict[str, float], outcome: Outcome, said: str, runs: int, tmp_path: Path
) -> None:
    bench = ScriptBench(copying(tmp_path, norms), 30.0)
    found = bench.attempt(bench.suited(Trial(LAW, Case(world=2, micro_batches=2))))["same-everywhere"]
    assert (found.outcome, bench.runs) == (outcome, runs), found
    assert said in str(found)


def test_a_run_that_fails_is_told_with_the_command_that_repeats_it_and_has_a_folder() -> None:
    """Without torch's warning of a missing NumPy, which the extra `judge` does not install."""
    code = "import os, sys, warnings as w; w.warn('Failed to initialize NumPy'); exit(3 + len(os.listdir(sys.argv[3])))"
    program = shlex.join([sys.executable, "-c", code])
    bench = ScriptBench(f"{program} {{world}} {{local_batch}} {{folder}}", 30.0)
    (said,) = {each.why for each in bench.attempt(bench.suited(Trial(LAW, Case(world=2, micro_batches=2)))).values()}
    assert said == f"the command ended with 3: it printed nothing. Repeat it with: {program} 2 6 run"
    (unsaid,) = bench.attempt(bench.suited(Trial(RESUME, Case()))).values()
    assert (unsaid.outcome, bench.runs) == (Outcome.NOT_APPLICABLE, 1)


def test_a_run_that_ends_before_it_can_be_killed_proves_nothing(tmp_path: Path) -> None:
    bench = ScriptBench(copying(tmp_path, {"2": 1.0}, "{folder} {resume:again}"), 30.0)
    (verdict,) = bench.attempt(bench.suited(Trial(RESUME, Case(world=2, micro_batches=2)))).values()
    assert verdict.outcome is Outcome.UNKNOWN
    assert "three times it ended before" in verdict.why
    assert bench.runs == 4


def test_reported_defects_are_seen_as_the_scorecard_says_and_their_repairs_are_not_accused() -> None:
    """The cheapest of `bugs/`, under the one line of a watch. The runner fails if a repaired version is accused."""
    root = EXAMPLES.parents[1]
    names = ["adapter-drawn-by-rank", "epoch-not-set", "label-mean", "memory-kept"]
    words = [sys.executable, "-m", "bugs", *names, "--tools", "line"]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads((root / "bugs" / "scorecard.json").read_text())
    for name in names:
        assert f"{name} line wrong {json.dumps(card[name]['line']['wrong'])}\n" in done.stdout
