"""Diagnosis of other ranks: the state of their processes, one table of conclusions, causes, and the messages."""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError

from andon.console.messages import Exit
from andon_contracts.liveness import diagnosis
from andon_contracts.liveness.diagnosis import EndMessages, Patience, PeerStatus, Position, Symptoms, View
from andon_contracts.liveness.halt import PeerMonitor, PendingCollectives, StoreReport
from andon_contracts.liveness.process import Process, State, exit_text, kill_text, memory_kills
from andon_contracts.violation import Cause, Finding, Halted, Violation, consequence, first_line, kind_of

BY_HAND = "by hand or by another program: the kernel killed nothing for want of memory"


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[bytes], Process]]:
    program = "import json, dataclasses, sys; from andon_contracts.liveness.process import Process; "
    program += "print(json.dumps(dataclasses.asdict(Process.here())), flush=True); sys.exit(int(input()))"
    started = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout is not None
    yield started, Process(**json.loads(started.stdout.readline()))
    started.kill()
    started.communicate()


def test_a_process_says_what_others_see_of_it(child: tuple[subprocess.Popen[bytes], Process]) -> None:
    started, process = child
    assert (process.pid, process.machine) == (started.pid, Process.here().machine)
    assert process.local_state() == "runs"
    assert process.exit_code() is None
    assert started.stdin is not None
    started.stdin.write(b"7\n")
    started.stdin.flush()
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    assert process.exit_code() == 7


def test_a_stopped_process_is_told_from_a_gone_one(child: tuple[subprocess.Popen[bytes], Process]) -> None:
    started, process = child
    started.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, started.pid, os.WSTOPPED | os.WNOWAIT)
    assert (process.local_state(), process.state()) == ("stopped", "stopped")
    assert process.kill()
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    assert (process.local_state(), process.exit_code()) == ("gone", -signal.SIGKILL)
    assert not process.kill()
    assert process.state() == "gone"
    assert not process.send(signal.SIGKILL)
    started.wait()
    assert (process.local_state(), process.exit_code()) == ("gone", None)


def test_a_signal_to_a_process_that_ends_meanwhile_reached_nobody(
    child: tuple[subprocess.Popen[bytes], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, process = child

    def too_late(pid: int) -> int:
        started.kill()
        started.wait()
        raise OSError(errno.ENOSYS, "no handles of processes here")

    monkeypatch.setattr(os, "pidfd_open", too_late)
    assert not process.send(signal.SIGTERM)


@pytest.mark.parametrize(
    ("another", "state"),
    [({"started": 1}, "gone"), ({"machine": "another boot"}, "elsewhere"), ({"machine": ""}, "elsewhere")],
)
def test_a_process_of_another_time_or_machine_is_not_judged(
    child: tuple[subprocess.Popen[bytes], Process], another: dict[str, Any], state: State
) -> None:
    started, process = child
    other = replace(process, **another)
    assert other.local_state() == state
    assert not other.kill()
    assert started.poll() is None
    if state == "gone":
        assert other.state() == "gone"
        assert not other.send(signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "words"),
    [(None, "is gone"), (3, "ended with exit code 3"), (-2, "was killed by SIGINT"), (-99, "was killed by signal 99")],
)
def test_an_end_in_words(code: int | None, words: str) -> None:
    assert exit_text(code) == words
    assert exit_text(-9).startswith("was killed by SIGKILL (")


@pytest.mark.parametrize(
    ("before", "now", "limit", "words"),
    [
        ((0, 0), (1, 1), 3 << 30, "of its memory cgroup, whose limit is 3.0 GiB"),
        ((2, 5), (4, 7), None, "out of memory: the kernel killed 2 of the processes of its memory cgroup"),
        ((None, 0), (None, 1), None, "or killed by hand: the kernel killed 1 for want of memory on this machine"),
        ((0, 0), (0, 1), None, BY_HAND),
        ((None, 3), (None, 3), None, BY_HAND),
        ((None, None), (None, None), None, "out of memory, or killed by hand"),
    ],
)
def test_who_sent_a_kill(
    before: tuple[int | None, int | None], now: tuple[int | None, int | None], limit: int | None, words: str
) -> None:
    assert words in kill_text(before, now, limit)


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory/tasks", os.W_OK), reason="needs root and a memory cgroup")
def test_a_process_that_its_cgroup_has_killed_is_told_by_its_kernel() -> None:
    group = Path(f"/sys/fs/cgroup/memory/andon-{os.getpid()}")
    group.mkdir()
    code = f"""
import os, pathlib, subprocess, sys
pathlib.Path({str(group / "tasks")!r}).write_text(str(os.getpid()))
from andon_contracts.liveness.process import exit_text
child = subprocess.run([sys.executable, "-c", "b = bytearray(1 << 28); b[::4096] = b'1' * (1 << 16)"], check=False)
print(exit_text(child.returncode))
"""
    try:
        (group / "memory.limit_in_bytes").write_text(str(1 << 26))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    finally:
        group.rmdir()
    assert done.stdout.strip() == (
        "was killed by SIGKILL (out of memory: the kernel killed 1 of the processes of its memory cgroup, "
        "whose limit is 0.1 GiB)"
    )


def test_the_systems_own_count_of_memory_kills() -> None:
    known = "oom_kill " in Path("/proc/vmstat").read_text()
    assert (memory_kills() is not None) == known


# One table of conclusions, for heartbeats and watches.

PATIENCE = Patience(stopped_s=3.0, silent_s=5.0)
WORLD = 3


@pytest.mark.parametrize(
    ("seen", "conclusion"),
    [
        (Symptoms("runs"), "there"),
        (Symptoms("runs", behind=True), "behind"),
        (Symptoms("elsewhere", silent_s=4.9), "there"),
        (Symptoms("elsewhere", silent_s=5.0, behind=True), "silent"),
        (Symptoms("stopped", stopped_s=2.9), "there"),
        (Symptoms("stopped", stopped_s=3.0, silent_s=9.0), "stopped"),
        (Symptoms("gone", silent_s=9.0), "died"),
        (Symptoms("gone", exit=-9), "died"),
        (Symptoms("gone", exit=0), "left"),
        (Symptoms("gone", announced=True, exit=0), "left"),
        (Symptoms("stopped", announced=True, exit=0, stopped_s=9.0), "left"),
        (Symptoms("elsewhere", announced=True, exit=1), "failed"),
        (Symptoms("gone", announced=True, exit=diagnosis.NOTICED["lost"]), "followed"),
        (Symptoms("elsewhere", announced=True, exit=diagnosis.NOTICED["silent"], silent_s=9.0), "followed"),
    ],
)
def test_one_conclusion_from_what_was_seen(seen: Symptoms, conclusion: diagnosis.Conclusion) -> None:
    assert diagnosis.conclude(seen, PATIENCE) == conclusion


@pytest.mark.parametrize("state", ["runs", "stopped"])
def test_a_process_that_is_seen_need_not_be_heard(state: State) -> None:
    patience = Patience(silent_s=1.0, unseen=True)
    assert diagnosis.conclude(Symptoms(state, silent_s=9.0), patience) == "there"
    assert diagnosis.conclude(Symptoms("elsewhere", silent_s=9.0), patience) == "silent"


@dataclass(frozen=True)
class Peer:
    state: State
    code: int | None = None
    pid: int = 7
    host: str = "here"

    def local_state(self) -> State:
        return self.state

    def exit_code(self) -> int | None:
        return self.code


@dataclass
class FakeLink:
    """What a link knows: the processes of the others, and what the store says of all."""

    processes: Mapping[int, Peer]
    news: StoreReport | None
    silent_s: float = 0.0
    following: int = 1
    store_lost: bool = False
    store_host: int | None = None
    acknowledged: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()

    def report(self) -> StoreReport | None:
        return self.news


HERE = Position(4, "at its update")
BEFORE = Position(4, "before its forward pass")


def monitor(peer: Peer, *, at: Position = HERE, left: bool = False, silent_s: float = 0.0) -> PeerMonitor:
    news = StoreReport(frozenset({1}) if left else frozenset(), {0: HERE, 1: at, 2: HERE})
    link = FakeLink({1: peer, 2: Peer("runs")}, news, silent_s)
    return PeerMonitor(link, 0, PATIENCE.silent_s, PendingCollectives(range(WORLD)))  # type: ignore[arg-type]


def heard(sign: PeerStatus) -> str:
    here = PeerStatus(ticks=9, step=4, phase="update", waits=True, since_s=9.0, phase_s=9.0, state="runs")
    return diagnosis.explain_timeout(View(0, WORLD, {0: here, 1: sign, 2: here}, PATIENCE.silent_s))


class DistStoreError(RuntimeError):
    """As torch calls it where a store gave no answer."""


@pytest.mark.parametrize(
    ("watched", "beating", "said", "word"),
    [
        ({"peer": Peer("gone", -9)}, PeerStatus(ticks=9, state="gone"), "died at step 4", "gone without a word"),
        ({"peer": Peer("gone", 0)}, PeerStatus(ticks=9, ended="finished"), "left at step 4", "ended: finished"),
        ({"peer": Peer("runs"), "left": True}, PeerStatus(ticks=9, ended="finished"), "left at", "ended: finished"),
        ({"peer": Peer("stopped")}, PeerStatus(ticks=9, state="stopped"), "is stopped (by", "is stopped (by"),
        (
            {"peer": Peer("elsewhere"), "silent_s": 5.0},
            PeerStatus(ticks=9, silent_s=5.0),
            "no sign of",
            "no sign of life for",
        ),
        ({"peer": Peer("runs"), "at": BEFORE}, PeerStatus(ticks=8, state="runs"), "hangs at step 4", "hangs in the s"),
    ],
    ids=["died", "ended with 0", "left", "stopped", "silent", "behind"],
)
def test_a_watch_and_a_heartbeat_come_to_one_conclusion(
    watched: dict[str, object], beating: PeerStatus, said: str, word: str
) -> None:
    error = DistStoreError("Timed out waiting for rank 1")
    found = monitor(**watched).missing(EndMessages(0, WORLD, HERE), error)  # type: ignore[arg-type]
    assert found is not None
    assert found.text.startswith("rank 1 of 3 ")
    assert said in found.text
    assert heard(beating).startswith("rank 1 of 3 ")
    assert word in heard(beating)


def test_who_is_itself_the_last_accuses_nobody_of_hanging() -> None:
    ahead = Position(5, "before its forward pass")
    link = FakeLink({1: Peer("runs"), 2: Peer("runs")}, StoreReport(frozenset(), {0: HERE, 1: HERE, 2: ahead}))
    found = PeerMonitor(link, 0, 5.0, PendingCollectives(range(WORLD))).missing(  # type: ignore[arg-type]
        EndMessages(0, WORLD, HERE), DistStoreError("Timed out waiting")
    )
    assert found is not None
    assert found.text.startswith("rank 0 of 3 timed out at step 4")
    assert "rank 2 has been at step 5" in found.text


@pytest.mark.parametrize("left", [True, False])
def test_only_who_did_not_leave_in_order_is_missed(left: bool) -> None:
    found = monitor(Peer("elsewhere"), left=left, silent_s=6.0).trouble(EndMessages(0, WORLD, HERE))
    assert (found is None) == left


def test_nothing_is_said_of_one_that_is_gone_before_the_store_says_whether_it_left() -> None:
    watching = monitor(Peer("gone"))
    link: FakeLink = watching._link  # type: ignore[assignment]
    news, link.news = link.news, None
    assert watching.trouble(EndMessages(0, WORLD, HERE)) is None
    link.news = news
    found = watching.trouble(EndMessages(0, WORLD, HERE))
    assert found is not None
    assert found.kind == "died"


# Messages for slow, hung, silent and dead ranks.

WAITS = PeerStatus(ticks=9, step=4, phase="update", waits=True, since_s=6.0, phase_s=7.0, state="runs")
WORKS = replace(WAITS, ticks=8, waits=False, place="train.py:7 load")
SILENCE_S = 3.0


def view(*signs: PeerStatus, rank: int = 0) -> View:
    return View(rank, len(signs), dict(enumerate(signs)), SILENCE_S)


def test_who_only_noticed_another_ends_with_an_exit_that_says_so() -> None:
    assert diagnosis.NOTICED == {"lost": Exit.RANK_LOST, "silent": Exit.RANK_SILENT}


def test_a_wait_in_which_nobody_is_to_blame_is_of_the_network() -> None:
    words = "all ranks give signs of life, but no message got through in the update of step 4"
    assert diagnosis.explain_timeout(view(WAITS, WAITS, WAITS)).startswith(words)


def test_an_error_of_its_own_comes_before_those_that_only_noticed() -> None:
    noticed = replace(WAITS, ended="rank 2 is gone", exit=71)
    assert diagnosis.known_end(view(WAITS, noticed, replace(WAITS, ended="LookupError: x", exit=1))) == (
        "rank 2 of 3 ended: LookupError: x"
    )
    assert diagnosis.known_end(view(WAITS, noticed, WAITS)) == ""
    assert diagnosis.possible_loss(view(WAITS, noticed, WAITS)) == "rank 1 of 3 ended: rank 2 is gone"


def test_ranks_that_finished_are_not_missed() -> None:
    finished = replace(FINISHED, silent_s=60.0)
    assert diagnosis.known_end(view(WORKS, finished)) == ""
    assert "rank 1" not in diagnosis.slowness(view(WORKS, finished), 0.0)


def test_hosts_are_named_where_they_are_others() -> None:
    here, there = replace(WAITS, host="a"), replace(WORKS, host="b", silent_s=SILENCE_S)
    found = view(here, there, replace(there, host="c"), replace(here, silent_s=SILENCE_S))
    assert diagnosis.explain_timeout(found).startswith("ranks 1, 2, 3 of 4 (on b, c) gave no sign of life")


SLOW_ENDED = replace(WORKS, ended="rank 1 of 4 is slow: in the update of step 4", exit=Exit.RANK_SILENT)
FINISHED = replace(WAITS, ended="finished")
CRASHED = replace(WAITS, ended="LookupError: x", exit=Exit.CRASHED)


@pytest.mark.parametrize(
    ("signs", "words"),
    [
        ((WAITS, WORKS, WAITS), "rank 1 of 3 is slow: in the update of step 4 for 7.0 s, train.py:7 load; 2 wait for"),
        ((WAITS, replace(WAITS, ticks=7, since_s=5.0)), "all 2 ranks exchange data in the update of step 4 for 6.0 s"),
        ((WAITS, WAITS), "all 2 ranks exchange data in the update of step 4 for 6.0 s, 7.0 s after it began: their"),
        ((WORKS, WORKS), "all 2 ranks are slow: in the update of step 4 for 7.0 s, train.py:7 load"),
        ((WAITS, replace(WORKS, silent_s=4.0)), "rank 1 of 2 gave no sign of life for 4.0 s, last seen in"),
        ((WAITS, replace(WORKS, silent_s=4.0, state="stopped")), "rank 1 of 2 is stopped (by a signal, a debugger)"),
        ((WAITS, SLOW_ENDED, WAITS, WAITS), "rank 1 of 4 ended: rank 1 of 4 is slow: in the update of step 4; 3 wait"),
        ((WAITS, SLOW_ENDED, replace(WAITS, silent_s=SILENCE_S)), "rank 1 of 3 ended: rank 1 of 4 is slow: in"),
        ((WAITS, SLOW_ENDED, CRASHED), "rank 2 of 3 ended: LookupError: x; 1 waits"),
        ((WAITS, replace(WORKS, state="gone")), "rank 1 of 2 is gone without a word, last seen in the update of step"),
        ((WAITS, FINISHED, WAITS), "ranks 0, 2 of 3 exchange data in the update of step 4 for 6.0 s"),
        ((WORKS, FINISHED), "rank 0 of 2 is slow: in the update of step 4 for 7.0 s"),
        ((WORKS,), "rank 0 is slow: in the update of step 4 for 7.0 s, train.py:7 load"),
        ((WAITS,), "rank 0 is slow: in the update of step 4 for 6.0 s"),
    ],
)
def test_slowness_has_a_rank_or_the_network_for_its_cause(signs: tuple[PeerStatus, ...], words: str) -> None:
    """Where a rank has ended the network is not slow."""
    assert diagnosis.slowness(view(*signs), 0.1).startswith(words)
    if not any(sign.ended or sign.state == "gone" for sign in signs):
        assert diagnosis.slowness(view(*signs), 0.1).endswith("; a step usually takes 0.1 s")


@pytest.mark.parametrize("explanation", [diagnosis.explain_timeout, diagnosis.possible_loss])
def test_nobody_is_silent_where_nobody_can_be_heard(explanation: Callable[[View], str]) -> None:
    far = replace(WAITS, silent_s=60.0, state="elsewhere")
    cut = replace(view(WAITS, far, far), link_error="the ranks' store is gone (x)")
    assert explanation(cut) == "the ranks' store is gone (x)"
    assert diagnosis.slowness(cut, 0.0).endswith("store is gone (x); rank 0 of 3 is in the update of step 4 for 6.0 s")
    said = replace(cut, statuses={**cut.statuses, 1: replace(far, ended="LookupError: x", exit=Exit.CRASHED)})
    assert explanation(said) == "rank 1 of 3 ended: LookupError: x"
    assert diagnosis.slowness(said, 0.0).startswith("rank 1 of 3 ended: LookupError: x")
    stopped = replace(cut, statuses={**cut.statuses, 2: replace(far, state="stopped")})
    assert diagnosis.slowness(stopped, 0.0).startswith("rank 2 of 3 is stopped")


def test_a_sign_of_before_says_nothing_of_this_step() -> None:
    assert diagnosis.all_reported(view(WAITS, replace(WORKS, silent_s=2.9)))
    short = replace(WAITS, phase_s=4.0)
    assert not diagnosis.all_reported(view(short, WORKS, replace(WORKS, silent_s=2.0)))
    assert diagnosis.all_reported(view(short, replace(WORKS, silent_s=SILENCE_S)))
    assert diagnosis.all_reported(view(short, replace(WORKS, silent_s=2.5, ended="finished")))


def test_one_rank_speaks_for_all_that_are_heard() -> None:
    unheard = replace(WAITS, silent_s=SILENCE_S)
    assert min(view(WAITS, WAITS, WAITS, rank=1).fresh()) == 0
    assert min(view(unheard, WAITS, WAITS, rank=1).fresh()) == 1


def test_what_lasts_is_a_wait_of_anyone_or_an_update() -> None:
    evaluates = replace(WORKS, phase="evaluation", phase_s=99.0)
    assert [diagnosis.longest_s(view(evaluates, other)) for other in (evaluates, WAITS)] == [0.0, WAITS.phase_s]
    assert diagnosis.longest_s(view(evaluates, replace(WAITS, phase="evaluation"))) == WAITS.since_s


# What an error means for the other ranks.

GLOO = "[/x/gloo/transport/tcp/"


def _raised(work: object) -> BaseException:
    try:
        work()  # type: ignore[operator]
    except BaseException as error:  # noqa: BLE001 - whatever torch raises is looked at
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), "out of memory"),
        (_raised(lambda: torch.empty(1 << 60, dtype=torch.uint8)), "out of memory"),
        (OSError(12, "Cannot allocate memory"), "out of memory"),
        (ValueError("out of memory"), "failed"),
        (RuntimeError("shape mismatch"), "failed"),
        (Violation("x", clause="finite"), "violation"),
        (Halted("x", cause="died"), "died"),
    ],
)
def test_an_error_of_the_ranks_own(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind
    assert consequence(error) is None


def test_what_anybody_wrote_does_not_act_on_a_terminal() -> None:
    assert first_line(ValueError("bad row \x1b]0;t\x07\u202e\nmore")) == "ValueError: bad row \\x1b]0;t\\x07\\u202e"


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (RuntimeError(GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:1"), "lost"),
        (RuntimeError(GLOO + "unbound_buffer.cc:78] Timed out waiting 5000ms for recv"), "silent"),
        (DistNetworkError("failed to recv, got 0 bytes"), "lost"),
        (DistBackendError("NCCL communicator was aborted on rank 1"), "lost"),
        (RuntimeError("Connection closed by peer, says a data base"), None),
        (RuntimeError(GLOO + "pair.cc:1] something of its own"), None),
    ],
)
def test_an_error_that_another_rank_caused(error: BaseException, meaning: str | None) -> None:
    assert consequence(error) == meaning


def test_a_cause_travels_whole() -> None:
    finding = Finding("nan", 7, (0, 2), "lora.A")
    sent = Cause.of_violation(Violation("the message", clause="finite", finding=finding, bundle="b/7"), 2)
    found = Cause.from_json(json.loads(json.dumps(sent.to_json()))).checked(3)
    assert found == sent
    error = pickle.loads(pickle.dumps(found.violation()))
    assert type(error) is Violation
    assert (str(error), error.clause, error.finding, error.bundle) == ("the message", "finite", finding, "b/7")
    for body in (None, [], {"kind": "died"}, {"nothing": 1, "ranks": []}, {"kind": "bored", "text": "x"}):
        with pytest.raises(ValueError, match=r"must be|missing|unknown"):
            Cause.from_json(body)
    with pytest.raises(ValueError, match="names rank 2 of 2"):
        sent.checked(2)


def test_a_rank_is_at_least_where_the_others_let_it_be() -> None:
    told = Position(3, diagnosis.POINTS[2], 0.5, last_equal=2)
    assert told.at_least(Position(8, diagnosis.POINTS[1], last_equal=7)) == Position(8, "", last_equal=7)
    assert told.at_least(Position(3, diagnosis.POINTS[1], last_equal=2)) == told
