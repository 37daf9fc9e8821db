"""A nemesis is judged by what it did and by what the run then did: every part of a promise can be found broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import permutations
from pathlib import Path
from pkgutil import resolve_name
from random import Random
from shutil import copytree

import psutil
import pytest

from falsify.nemesis import hosts, judging, processes, tracing
from falsify.nemesis import run as runs
from falsify.nemesis.__main__ import verdict
from falsify.nemesis.bench import NEMESES, Bench
from falsify.nemesis.fuzz.__main__ import fuzz
from falsify.nemesis.fuzz.mutations import MUTATIONS, Mutation
from falsify.nemesis.fuzz.samples import ledger_lines
from falsify.nemesis.fuzz.surfaces import SURFACES
from falsify.nemesis.hosts import Host
from falsify.nemesis.language import Fault, Guard, Nemesis, Phase, Place, Promise, Row
from falsify.nemesis.left_behind import Undisturbed
from falsify.nemesis.network import both_ways
from falsify.nemesis.planting import ClosingError, NotStruckError, Plant, Planting, Struck, UnavailableError, idle
from falsify.nemesis.plants import TARGETS
from falsify.nemesis.run import Ending, Launch, Run
from falsify.nemesis.table import line, summary

PROMISE = Promise((71,), ("rank 1", "SIGKILL|SIGTERM"), 2.0, at_once=True, heal_says=("rejected",))
KEPT = Phase(
    Struck(0.0, 5, "SIGKILL to rank 1"),
    Ending((71,), "andon: rank 1 of 3 was killed by SIGTERM", seconds=1.5),
    healing=Ending((0,), "resume: rejected step-00000008"),
)
BROKEN = {
    "exit 0 instead of 71": {"ending": replace(KEPT.ending, codes=(0,))},
    "over after 2.10 s, promised were 2": {"ending": replace(KEPT.ending, seconds=2.1)},
    "not said: 'rank 1'": {"ending": replace(KEPT.ending, output="SIGKILL")},
    "not said: 'SIGKILL|SIGTERM'": {"ending": replace(KEPT.ending, output="rank 1 is gone")},
    "3 processes left": {"ending": replace(KEPT.ending, left=3)},
    "not over 9.0 s after it began": {"ending": replace(KEPT.ending, hung=True, seconds=9.0, codes=(-9,))},
    "a traceback": {"ending": replace(KEPT.ending, output=f"{KEPT.ending.output}\nTraceback (most recent call last):")},
    "accepted after the fault at step 5: step-00000008": {"newer": ("step-00000008",)},
    "accepted, but the undisturbed run has no such: step-00000004": {"other": ("step-00000004",)},
    "healing: other bits: a where b belongs": {"result": "a where b belongs"},
    "healing: exit 71: rank 0 died": {"healing": Ending((71,), "rejected\nrank 0 died")},
    "healing: not said: 'rejected'": {"healing": Ending((0,), "")},
    "healing: 1 processes left": {"healing": Ending((0,), "rejected", left=1)},
    "healing: it was not resumed": {"healing": None},
    "nothing was started": {"ending": replace(KEPT.ending, codes=())},
}


def named(name: str) -> Nemesis:
    return next(each for each in NEMESES if each.name == name)


@pytest.mark.parametrize("said", BROKEN)
def test_each_part_of_a_promise_can_be_found_broken(said: str) -> None:
    assert judging.wrong(PROMISE, KEPT) == ()
    assert judging.wrong(PROMISE, replace(KEPT, **BROKEN[said])) == (said,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"skipped": "no namespaces", "phase": None, "without_fault": None, "unguarded": None}, True),
        ({"wrong": ("exit 0 instead of 71",)}, False),
        ({"without_fault": ("exit 71",)}, False),
        ({"unguarded": ()}, False),
        ({"unguarded": None}, False),
        ({"without_fault": None}, False),
        ({"phase": None}, False),
        ({"doubt": "never acted: guards:no_reports"}, False),
        ({"failed": "the run ended before"}, False),
    ],
)
def test_a_row_is_good_only_with_both_of_its_controls(changes: dict[str, object], good: bool) -> None:
    row = replace(Row(named("rank killed"), phase=KEPT, without_fault=(), unguarded=("other bits",)), **changes)  # type: ignore[arg-type]
    assert row.good is good
    assert line(row).startswith("skip" if row.skipped else "ok" if good else "BAD")


def test_nemeses_have_names_and_a_guard_or_a_reason() -> None:
    assert len({each.name for each in NEMESES}) == len(NEMESES)
    assert all(each.guard.finds if isinstance(each.guard, Guard) else each.guard for each in NEMESES)
    (unseen,) = judging.wrong(PROMISE, replace(KEPT, healing=None))  # so a control that was not healed is left
    guarded = [each for each in NEMESES if isinstance(each.guard, Guard)]
    assert [each.name for each in guarded if not judging.doubt(KEPT, (unseen,), each.guard)] == []


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_what_a_plant_replaces_exists(target: str) -> None:
    assert callable(resolve_name(target))


def save(run: Path, step: int, tensors: bytes = b"weights", position: int = 0) -> None:
    files = {"tensors.safetensors": tensors, "state.json": json.dumps({"progress": position}).encode()}
    facts = {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    folder = run / "checkpoints" / f"step-{step:08}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in {**files, "manifest.json": json.dumps({"files": facts}).encode()}.items():
        (folder / name).write_bytes(data)


def log(run: Path, steps: Sequence[int], rate: str = "0x0p+0") -> None:
    numbers = {name: {"hex": rate} for name in ("loss", "grad_norm", "lr")}
    lines = [json.dumps({"kind": "step", "step": step, "ids": [], **numbers}) for step in steps]
    (run / "ledger.jsonl").write_text("".join(f"{line}\n" for line in lines))


def end(run: Path, steps: int) -> None:
    (run / "summary.json").write_text(json.dumps({"weights_digest": "w", "final_loss": {"hex": "1"}, "steps": steps}))


def left_in(run: Path) -> Undisturbed:
    for step in (1, 2, 3):
        save(run, step)
    log(run, (1, 2, 3))
    end(run, 3)
    return Undisturbed(run)


DIFFERENCES: dict[str, Callable[[Path], object]] = {
    "": lambda run: copytree(run / "checkpoints" / "step-00000001", run / "checkpoints" / "step-1.part"),
    "it is not finished": lambda run: (run / "summary.json").unlink(),
    "('w', '1', 2) where ('w', '1', 3) belongs": lambda run: end(run, 2),
    "the result is the same, but not step-00000002": lambda run: save(run, 2, b"moments"),
    "the result is the same, but not step-00000001": lambda run: save(run, 1, position=1),
    "the result is the same, but not step-00000004": lambda run: save(run, 4),
    "the result is the same, but not ledger line of step 4": lambda run: log(run, (1, 2, 3, 4)),
    "the result is the same, but not ledger line of step 2": lambda run: log(run, (2,), "0x1p-1"),
    "the result is the same, but the ledger lacks the updates 2": lambda run: log(run, (1, 3)),
    "the result is the same, but step-00000003 is not there, whole": lambda run: (
        run / "checkpoints" / "step-00000003" / "state.json"
    ).write_bytes(b"{}"),
}


@pytest.mark.parametrize("said", DIFFERENCES)
def test_what_a_run_left_is_compared_with_the_undisturbed_one(tmp_path: Path, said: str) -> None:
    whole = left_in(tmp_path / "whole")
    assert left_in(tmp_path / "run").lacking(3) == ""
    DIFFERENCES[said](tmp_path / "run")
    assert whole.differs(tmp_path / "run") == said


def test_what_is_accepted_after_the_fault_is_listed(tmp_path: Path) -> None:
    whole = left_in(tmp_path)
    assert whole.accepted(tmp_path, 3) == ((), ())
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").write_bytes(b"{")
    assert whole.accepted(tmp_path, 1) == (("step-00000003", "ledger line of step 2", "ledger line of step 3"), ())


def test_a_run_that_made_nothing_is_no_measure(tmp_path: Path) -> None:
    for updates, ledger, said in (
        (0, [], "0 of 2 updates are in its ledger, 0 in its summary"),
        (2, [1], "1 of 2 updates are in its ledger, 2 in its summary"),
        (2, [1, 2], "not whole: step-00000001, step-00000002"),
    ):
        end(tmp_path, updates)
        log(tmp_path, ledger)
        assert Undisturbed(tmp_path).lacking(2) == said


def test_a_process_in_a_session_of_its_own_is_seen_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "GONE_S", 0.5)
    whole = Undisturbed(tmp_path / "whole")
    run = Run(tmp_path, tmp_path / "run", tmp_path / "rows", tmp_path / "held", whole, Random(1))
    away = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    run.spawn([sys.executable, "-c", away], Launch())
    ending = run.end(60.0, time.monotonic())
    assert (ending.codes, ending.left, ending.hung) == ((0,), 1, False)
    assert ending.seconds > runs.GONE_S
    assert processes.marked(runs.OWNER, str(run.scratch)) == []


def test_a_nemesis_that_is_broken_itself_is_a_row_that_says_so(tmp_path: Path) -> None:
    shared = Bench(tmp_path, Undisturbed(tmp_path), tmp_path, tmp_path, 1)
    row = shared.play(Nemesis("blunt", "", PROMISE, Fault(lambda _: {}["chattr"], before_start=True), ""))
    assert (row.failed, row.good) == ("the nemesis failed: KeyError: 'chattr'", False)


class Sleeping(Place):
    def start(self, run: Run, launch: Launch) -> None:
        run.folder.mkdir(exist_ok=True)
        run.spawn(["sleep", "0.5"], launch)


def noted(*, before: bool) -> Fault:
    def note(run: Run, what: str) -> None:
        with (run.scratch / "done").open("a") as file:
            file.write(f"{what}, {len(run.commands)} started\n")

    def strike(run: Run) -> Struck:
        note(run, "strike")
        return Struck(time.monotonic(), 7, "noted")

    return Fault(strike, lambda run: note(run, "heal"), before_start=before)


@pytest.mark.parametrize("before", [True, False])
def test_a_fault_strikes_before_or_after_the_start_and_heals_after_the_end(tmp_path: Path, before: bool) -> None:
    shared = Bench(tmp_path, Undisturbed(tmp_path), tmp_path, tmp_path, 1)
    (phase,) = shared.disturbed(Nemesis("noted", "", Promise((0,)), noted(before=before), "", place=Sleeping()))
    (done,) = (path.read_text().splitlines() for path in tmp_path.glob("guarded-*/done"))
    assert done == [f"strike, {int(not before)} started", "heal, 0 started"]
    assert (phase.struck.step, phase.struck.proof, phase.ending.codes) == (7, "noted", (0,))
    assert phase.ending.seconds < 5.0


def test_nothing_measured_is_no_success() -> None:
    chosen = named("rank killed")
    good = Row(chosen, phase=KEPT, without_fault=(), unguarded=("other bits",))
    skipped, failed = Row(chosen, skipped="no namespaces"), Row(chosen, failed="it ended before")
    assert [verdict(rows) for rows in ([good], [good, skipped])] == [0, 0]
    assert [verdict(rows) for rows in ([skipped], [], [good, failed])] == [1] * 3
    assert summary([good, skipped, failed]) == "1 of 2 are as promised, 1 were skipped"


class Mounted(Place):
    @contextmanager
    def taken(self, run: Run) -> Iterator[None]:
        run.folder.mkdir()
        (run.folder / "mounted").touch()
        try:
            yield
        finally:
            (run.folder / "healed-0").rename(run.folder / "released")

    def start(self, run: Run, launch: Launch) -> None:
        run.spawn(["sleep", "600"], launch)


def asked_to_end(run: Run) -> Struck:
    run.closing.set()
    run.reach(5)
    raise AssertionError


def heal(run: Run) -> None:
    (run.folder / "mounted").rename(run.folder / f"healed-{len(processes.marked(runs.OWNER, str(run.scratch)))}")


HELD = Nemesis("held", "", PROMISE, Fault(asked_to_end, heal), "", place=Mounted())


def test_what_is_under_way_when_all_is_to_end_is_undone_and_released(tmp_path: Path) -> None:
    shared = Bench(tmp_path, Undisturbed(tmp_path), tmp_path, tmp_path, 1)
    with pytest.raises(ClosingError, match="this command was ended"):
        shared.play(HELD)
    assert [path.name for path in tmp_path.glob("guarded-*/run/*")] == ["released"]


FOUND, DUE = ("exit 0 instead of 70",), Guard("", "exit 0 instead of 70|healing: exit")


def test_a_control_that_never_acted_or_broke_shows_nothing(tmp_path: Path) -> None:
    off = (Plant("guards:deaf"), Plant("guards:blind"))
    Planting({}, tmp_path, "guards:deaf").acted()
    assert idle(off, tmp_path) == ("guards:blind",)
    assert judging.doubt(replace(KEPT, idle=idle(off, tmp_path)), FOUND, DUE) == "never acted: guards:blind"
    broke = Ending((1,), "Traceback (most recent call last):\nAttributeError: _record")
    for each in (replace(KEPT, ending=broke), replace(KEPT, healing=broke)):
        assert judging.doubt(each, FOUND, DUE) == "it ends with a traceback: AttributeError: _record"
    assert judging.doubt(replace(KEPT, ending=Ending((0,), "")), FOUND, DUE) == ""


LOG = """\
7 openat(AT_FDCWD</>, "{0}/new/a", O_WRONLY|O_CREAT, 0666) = 4<{0}/new/a>
7 write(4<{0}/new/a>, ""..., 6) = 6
7 fsync(4<{0}/new/a>)     = 0
7 write(5<{0}/log>, ""..., 3 <unfinished ...>
8 write(9</elsewhere/x>, ""..., 50) = 50
7 <... write resumed>) = 3
7 fsync(5<{0}/log>) = -1 EIO (Input/output error)
7 write(4<{0}/new/a>, ""..., 4) = 4
7 rename("{0}/new", "{0}/done") = 0
7 write(6<{0}/kept>, ""..., 2) = 2
7 fsync(6<{0}/kept>) = 0
"""


@pytest.mark.parametrize(("synced", "names"), [(False, True), (False, False), (True, True)])
def test_a_power_cut_takes_what_was_not_synced(tmp_path: Path, synced: bool, names: bool) -> None:
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "a").write_bytes(b"synced" + b"lost")
    (tmp_path / "log").write_bytes(b"old" + b"new")
    (tmp_path / "kept").write_bytes(b"ok")
    log = LOG.format(tmp_path) + f"7 fsync(8<{tmp_path}>) = 0\n" * synced
    proof = tracing.power_cut(log.splitlines(), tmp_path, names=names)
    place = "done" if synced or not names else "new"
    assert (tmp_path / place / "a").read_bytes() == b"synced"
    assert (tmp_path / "log").read_bytes() == b"old"
    assert (tmp_path / "kept").read_bytes() == b"ok"
    assert proof == f"7 bytes of 2 files and {int(place == 'new')} names that were not synced are gone"


SEED = 7


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.deep)])
@pytest.mark.parametrize("surface", SURFACES)
def test_damaged_input_ends_in_the_promised_error_or_is_right(surface: str, count: int) -> None:
    assert fuzz(surface, SURFACES[surface], SEED, range(count)) == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_each_mutation_changes_what_it_is_given(mutation: Mutation) -> None:
    data = b"".join(ledger_lines(Random(0)))
    changed = sum(mutation(Random(number), data) != data for number in range(100))
    assert changed >= 90


def test_an_error_of_another_kind_is_reported_with_its_case() -> None:
    def attempt(draw: Random, folder: Path) -> str:
        seen.append(folder)
        if len(seen) == 2:
            raise KeyError("label")
        return ""

    seen: list[Path] = []
    assert fuzz("broken", attempt, SEED, [5, 8, 9]) == [(8, "KeyError: 'label'")]


needs_hosts = pytest.mark.usefixtures("lan")
PATIENCE_S = 60.0
OWNER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background begins with it ignored
from falsify.nemesis.hosts import lan
with lan(2) as hosts:
    for host in hosts:
        job = subprocess.Popen(host.command(["sh", "-c", "echo; exec sleep 600"]), stdout=-1, start_new_session=True)
        job.stdout.readline()
    print(*(host.pid for host in hosts), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def lan() -> Iterator[tuple[Host, ...]]:
    try:
        with hosts.lan(3) as made:
            yield made
    except UnavailableError as error:
        pytest.skip(str(error))


def lost(lan: tuple[Host, ...]) -> set[tuple[int, int]]:
    pairs = permutations(range(len(lan)), 2)
    return {(one, other) for one, other in pairs if not lan[one].reaches(lan[other], 0.1)}


@needs_hosts
def test_what_is_dropped_does_not_arrive_and_all_else_does(lan: tuple[Host, ...]) -> None:
    first, second, third = lan
    first.drop(second)
    assert lost(lan) == {(0, 1)}
    first.undrop(second)
    third.set_link("down")
    assert lost(lan) == {(0, 2), (1, 2), (2, 0), (2, 1)}
    third.set_link("up")
    assert lost(lan) == set()


@needs_hosts
def test_two_of_three_hosts_are_cut_off_each_other_alone(lan: tuple[Host, ...], tmp_path: Path) -> None:
    cut = both_ways((1, 2))
    run = Run(tmp_path, tmp_path, tmp_path, tmp_path, Undisturbed(tmp_path), Random(1), hosts=lan)
    with pytest.raises(NotStruckError, match="datagrams from host1 to host2 arrive"):
        cut.proof(run)
    cut.make(run)
    proof = cut.proof(run)
    assert lost(lan) == {(1, 2), (2, 1)}
    cut.mend(run)
    cut.mend(run)
    assert proof == "no datagram arrives from host1 to host2, host2 to host1; all others do"
    assert lost(lan) == set()


@needs_hosts
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_hosts_whose_owner_is_gone(signum: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        firsts = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        spaces = {os.readlink(f"/proc/{first.pid}/ns/pid") for first in firsts}
        assert [space_of(pid) in spaces for pid in psutil.pids()].count(True) == 4
        owner.send_signal(signum)
        owner.wait(PATIENCE_S)
    assert psutil.wait_procs(firsts, PATIENCE_S)[1] == []
    assert spaces.isdisjoint(map(space_of, psutil.pids()))


def space_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def test_a_machine_without_the_tools_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    shared = Bench(tmp_path, Undisturbed(tmp_path), tmp_path, tmp_path, 1)
    assert shared.play(named("link cut")).skipped.startswith("no hosts in network namespaces: ")
