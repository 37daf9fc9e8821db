"""One rank stops, leaves out an update or loses its guard: all end and say why, none hangs, slow ones are let alone."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.legible import ERROR_FILE_VARIABLE
from andon_contracts.liveness import halt
from andon_contracts.liveness.diagnosis import POINTS, EndMessages, Position
from andon_contracts.liveness.halt import BACKWARD, REDUCTION, Counts, HaltSignal, PendingCollectives, Waiting
from andon_contracts.liveness.store_link import SignedStore
from andon_contracts.violation import Halted, Violation
from tests.support.ranks import run_ranks
from tests.watch.small import answers, clauses, loss_of, net, sgd

REASON = "a row that no rank may train on"


def _watched(folder: str | None = None, *, hard_stop: bool = False) -> tuple[nn.Module, andon.Watch]:
    model, patience = net(), datetime.timedelta(seconds=1)
    return model, andon.watch(model, sgd(model), hard_stop=hard_stop, folder=folder, patience=patience)


def _in_a_collective(model: nn.Module) -> None:
    dist.all_reduce(torch.ones(1))


def _in_backward(model: nn.Module) -> None:
    while True:
        loss_of(model).backward()


def _asleep(model: nn.Module) -> None:
    threading.Event().wait()


PLACES = {
    "backward": _in_backward,
    "a collective": _in_a_collective,
    "the loader": _asleep,
    "a read": lambda model: os.read(os.pipe()[0], 1),
}


# a rank that says stop


def _stop(place: str, folder: str | None = None) -> None:
    model, w = _watched(folder)
    if dist.get_rank() == 1:
        w.pull(REASON)
    PLACES[place](model)


@pytest.mark.parametrize("place", PLACES)
def test_all_ranks_raise_the_same_wherever_they_are(place: str) -> None:
    """In backward, asleep, in a read, and in a collective whose peer has raised: one error, and no force is needed."""
    errors = [outcome.error for outcome in run_ranks(3, _stop, place)]
    assert {type(error) for error in errors} == {Violation}, errors
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"rank 1 of 3 halted the run at step 1, before its forward pass: {REASON}.")
    assert {(error.clause, error.step, error.rank) for error in errors if isinstance(error, Violation)} == {
        ("halt-together", 1, 1)
    }
    assert multiprocessing.active_children() == []


def _end_the_blocked(folder: str) -> list[str]:
    model, w = _watched(folder, hard_stop=True)
    rank = dist.get_rank()
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    dist.barrier()
    if rank != 1:
        _in_a_collective(model)
    # This rank lives on, so that no connection that it closes ends the others.
    others = [os.pidfd_open(int(Path(folder, f"pid-{other}").read_text())) for other in (0, 2)]
    with pytest.raises(Violation):
        w.pull(REASON)
    for other in others:
        select.select([other], [], [])
    parts = Path(folder, "1", "halt-together").iterdir()
    return sorted(path.name for path in parts if not path.name.endswith(".collectives.json"))


def test_a_rank_where_no_python_runs_is_ended_with_hard_stop() -> None:
    """Blocked in a collective, it writes its part of the bundle, with what it was doing, and ends itself."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_ranks(3, _end_the_blocked, folder)
        assert [type(outcome.error) for outcome in outcomes] == [ChildProcessError, type(None), ChildProcessError]
        assert outcomes[1].get() == ["rank-0.json", "rank-1.json", "rank-1.safetensors", "rank-2.json"]
        part = json.loads(Path(folder, "1", "halt-together", "rank-2.json").read_text())
        assert part["doing"].startswith("in a collective, ")
        main = next(thread["frames"] for thread in part["threads"] if thread["main"])
        assert any(frame.endswith(" _in_a_collective") for frame in main)
        account = json.loads(Path(folder, "1", "halt-together.json").read_text())
        assert (account["record"]["ranks"], account["record"]["seen"]) == ([1], REASON)
        assert account["explain"] == f"andon explain {folder}/1"


def test_one_process_that_pulls_leaves_the_bundle_that_it_names(tmp_path: Path) -> None:
    _model, w = _watched(str(tmp_path))
    with pytest.raises(Violation) as caught, w:
        w.pull(REASON)
    place = Path(caught.value.bundle)
    assert place == tmp_path / "1"
    assert json.loads((place / "halt-together.json").read_text())["message"] == str(caught.value)
    assert {path.name for path in (place / "halt-together").iterdir()} >= {"rank-0.json", "rank-0.safetensors"}


def test_a_bundle_that_cannot_be_made_keeps_nobody_from_halting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for outcome in run_ranks(2, _stop, "the loader", str(tmp_path / "file"), deadline_s=30.0):
        assert type(outcome.error) is Violation, outcome.error
        assert REASON in str(outcome.error)


# a rank that ends otherwise


NONE = r"\(not a contract violation\): "
ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "failed": (lambda: int("boom"), rf"at step 1, before its forward pass {NONE}ValueError: invalid literal for int"),
    "out of memory": (
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        rf"at step 1, before its forward pass {NONE}RuntimeError: ",
    ),
    # At which point of the step it was it says every second, if it comes to that.
    "died": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        rf"at step 1(, before its forward pass)? {NONE}its process \d+ on ",
    ),
    "hangs": (
        lambda: os.kill(os.getpid(), signal.SIGSTOP),
        rf"at step 1(, before its forward pass)? {NONE}its process \d+ on ",
    ),
}


def _end(folder: str, kind: str) -> None:
    # Only by force does a stopped rank end.
    model, w = _watched(folder, hard_stop=kind == "hangs")
    with w:
        dist.barrier()
        if dist.get_rank() == 1:
            ENDS[kind][0]()
        (_asleep, _asleep, _in_backward)[dist.get_rank()](model)


@pytest.mark.parametrize("kind", ENDS)
def test_an_end_that_is_no_violation_is_told_apart(kind: str) -> None:
    """The others raise `andon.Halted`, which says whose end it was and of which kind; the lowest live one writes."""
    verb = "ran out of memory" if kind == "out of memory" else kind
    with tempfile.TemporaryDirectory() as folder:
        errors = [outcome.error for outcome in run_ranks(3, _end, folder, kind)]
        for error in (errors[0], errors[2]):
            assert type(error) is Halted, errors
            assert (error.cause, error.clause, error.rank, error.step) == (kind, "halt-together", 1, 1)
            assert re.match(f"rank 1 of 3 {verb} {ENDS[kind][1]}", str(error)), error
        assert str(errors[0]) == str(errors[2])
        account = json.loads(Path(folder, "1", "halt-together.json").read_text())
        assert (account["cause"], account["message"]) == (kind, str(errors[0]))
        parts = {path.name for path in Path(folder, "1", "halt-together").glob("rank-?.json")}
        assert parts == {"rank-0.json", "rank-2.json"} | (set() if kind in ("died", "hangs") else {"rank-1.json"})
    assert multiprocessing.active_children() == []


def _leave() -> str:
    model, w = _watched()
    if dist.get_rank() == 1:
        w.close()
        return "left"
    with pytest.raises(Halted) as caught:
        _in_a_collective(model)
    return f"{caught.value.cause}: {caught.value}"


def test_a_rank_that_leaves_the_others_is_named() -> None:
    waiting, left = answers(2, _leave)
    assert left == "left"
    assert waiting.startswith("left: rank 1 of 2 left at step 1, before its forward pass (not a contract violation): ")


def _swallow() -> list[str]:
    model = net()
    optimizer = sgd(model)
    w = andon.watch(model, optimizer)
    found: list[str] = []
    for _attempt in range(2):
        try:
            if found:
                optimizer.step()
            elif dist.get_rank() == 1:
                w.pull(REASON)
            else:
                _asleep(model)
        except Violation as error:
            found.append(str(error))
    loss_of(model)  # what saves or evaluates after the error is not disturbed
    return found


def test_nobody_trains_on_after_a_halt() -> None:
    """A loop that swallows the error gets it again before its next update, and is otherwise left alone."""
    for found in answers(2, _swallow):
        assert len(found) == 2
        assert len(set(found)) == 1


# processes whose error nobody catches for us


def _bare(rank: int, folder: str) -> None:
    os.environ[ERROR_FILE_VARIABLE] = f"{folder}/error-{rank}"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model, _ = _watched()
    dist.barrier()
    if rank == 1:
        raise ValueError("boom")
    try:
        _asleep(model)
    except Halted as error:
        Path(folder, "said").write_text(f"{error.cause}: {error}")


def _processes(work: Callable[..., None], *args: object) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=work, args=(rank, *args)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


def test_an_error_that_multiprocessing_catches_is_heard(tmp_path: Path) -> None:
    """Its processes call no excepthook, and skip what runs at an interpreter's exit. Torch's launcher is told too."""
    assert _processes(_bare, str(tmp_path)) == [0, 1]
    told = "rank 1 of 2 failed at step 1, before its forward pass (not a contract violation): ValueError: boom."
    assert all(told in (tmp_path / f"error-{rank}").read_text() for rank in range(2))
    assert (tmp_path / "said").read_text().startswith("failed: rank 1 of 2 failed at step 1")


def test_a_closed_watch_has_no_part_in_how_a_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed in another order than opened, it is still called by the excepthook of the one that was opened later."""
    uncaught, alarms = list[object](), list[float]()
    monkeypatch.setattr(sys, "excepthook", lambda *error: uncaught.append(error[1]))
    monkeypatch.setattr("andon_contracts.liveness.halt._alarm", alarms.append)
    begun, signals = PendingCollectives([0, 1]), list[HaltSignal]()
    for store in (SignedStore(HashStore(), bytes(32)), SignedStore(HashStore(), bytes(32))):
        signals.append(HaltSignal(store, 0, 2, begun, hard_stop=True, patience_s=1.0, warns=False))
    for each in signals:
        each.close()
    sys.excepthook(ValueError, ValueError(REASON), None)
    assert (len(uncaught), alarms) == (1, [])


@pytest.mark.parametrize(("rank", "kind"), [(0, Violation), (1, Violation), (1, Halted)])
def test_a_violation_ends_short(
    rank: int, kind: type[Violation], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a traceback. The first rank of a machine prints all of it, and each other rank its first line."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    store, begun = SignedStore(HashStore(), bytes(32)), PendingCollectives([0, 1])
    signal = HaltSignal(store, rank, 2, begun, hard_stop=False, patience_s=1.0, warns=False)
    sys.excepthook(kind, kind("finite broken\n  where    x"), None)
    signal.close()
    text = f"andon.{kind.__name__}: finite broken\n"
    assert capsys.readouterr().err == text + "  where    x\n" * (rank == 0)


def _vanishing(rank: int, folder: str, gone: int) -> None:
    os.dup2(os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model = net()
    optimizer = sgd(model)
    with andon.watch(model, optimizer, action="raise"):
        for step in range(3):
            loss_of(model).backward()
            if step == 1 and rank == gone:
                os._exit(0)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_vanished_is_named_where_the_loops_own_error_ends_the_other(tmp_path: Path, gone: int) -> None:
    """`os._exit(0)` says nothing: the other rank ends by gloo's error in its own collective, and it is told who."""
    assert _processes(_vanishing, str(tmp_path), gone) == [int(rank != gone) for rank in (0, 1)]
    # Whether it left or died its code would say, which its parent may have taken from the system already.
    said = (tmp_path / f"said-{1 - gone}").read_text()
    assert re.search(rf"rank {gone} of 2 (left|died) at step 2 \(not a contract violation\)", said)


def _alone_at_an_update(rank: int, folder: str, vanishes: bool) -> None:
    os.dup2(os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model = net()
    optimizer = sgd(model)
    with andon.watch(model, optimizer):
        loss_of(model).backward()
        if rank == 1 and vanishes:
            os._exit(1)
        if rank == 1:
            raise ValueError("boom")
        optimizer.step()


@pytest.mark.parametrize("vanishes", [True, False])
def test_each_rank_shows_one_traceback_that_ends_at_a_line_of_the_loop(tmp_path: Path, vanishes: bool) -> None:
    """The socket's error on the other rank follows from the first one, and our own frames help nobody."""
    assert _processes(_alone_at_an_update, str(tmp_path), vanishes) == [1, 1]
    for rank in range(2 - vanishes):
        said = (tmp_path / f"said-{rank}").read_text()
        assert said.count("Traceback (most recent call last)") == 1
        assert re.findall(r'File "(.+)", line', said)[-1] == __file__
        assert "rank 1 of 2 " in said


# a guard that ends


def _unforeseen(*_: object, **__: object) -> None:
    raise LookupError("nobody foresaw this")


GUARDS: dict[str, Callable[[andon.Watch], object]] = {
    "andon-halt-link": lambda w: setattr(w._halt, "progress", _unforeseen),
    "andon-halt": lambda w: setattr(w._halt._monitor, "_observe", _unforeseen),
}
WORDS = (
    "rank 1 of 2 is unguarded at step 1, before its forward pass (not a contract violation): "
    "its thread {}, which guards it, failed (LookupError: nobody foresaw this)."
)


def _lose(action: str, guard: str, folder: str) -> str:
    """Rank 1 loses a guard while both sleep; with `warn` both go on, once both have said so."""
    model = net()
    optimizer = sgd(model)
    said = [Path(folder, f"said-{rank}") for rank in range(2)]
    os.dup2(os.open(said[dist.get_rank()], os.O_WRONLY | os.O_CREAT), 2)
    with andon.watch(model, optimizer, action=action) as w:
        dist.barrier()
        if dist.get_rank() == 1:
            GUARDS[guard](w)
        if action != "warn":
            _asleep(model)
        deadline, pause = time.monotonic() + 30.0, threading.Event()
        while not all(path.exists() and "is unguarded" in path.read_text() for path in said):
            assert time.monotonic() < deadline, [path.read_text() for path in said]
            pause.wait(0.05)
        loss_of(model).backward()
        optimizer.step()
    return "trained on"


@pytest.mark.parametrize("guard", GUARDS)
def test_all_ranks_halt_where_one_is_no_longer_guarded(guard: str, tmp_path: Path) -> None:
    errors = [outcome.error for outcome in run_ranks(2, _lose, "raise", guard, str(tmp_path))]
    for error in errors:
        assert type(error) is Halted, errors
        assert (error.cause, error.rank, error.step) == ("failed", 1, 1)
        assert str(error).partition("\n")[0] == WORDS.format(guard)


def test_all_ranks_say_so_where_a_watch_only_warns(tmp_path: Path) -> None:
    guard = "andon-halt-link"
    assert answers(2, _lose, "warn", guard, str(tmp_path)) == ["trained on"] * 2
    for rank in range(2):
        assert (tmp_path / f"said-{rank}").read_text().count("andon: " + WORDS.format(guard)) == 1


# an update that one rank leaves out


UPDATES = 4
SEVERAL_LOOKS_S = 1.2
"""A rank that waits looks twice a second at why; how often it does here decides nothing but how much is shown."""


class _Loop:
    """A loop by DDP, or by hand with one reduction for each gradient."""

    def __init__(self, *, wrapped: bool) -> None:
        self.model = DistributedDataParallel(net()) if wrapped else net()
        self.optimizer = sgd(self.model)
        self.wrapped, self.rank = wrapped, dist.get_rank()

    def backward(self) -> None:
        self.model(torch.full((2, 4), self.rank + 1.0)).sum().backward()
        for p in () if self.wrapped else self.model.parameters():
            dist.all_reduce(p.grad)


def _leaves_out(wrapped: bool) -> None:
    loop = _Loop(wrapped=wrapped)
    with andon.watch(loop.model, loop.optimizer):
        for update in range(1, UPDATES + 1):
            loop.backward()
            if (update, loop.rank) != (2, 1):
                loop.optimizer.step()
            loop.optimizer.zero_grad()


@pytest.mark.parametrize(("world", "wrapped"), [(2, True), (3, False)])
def test_all_halt_at_the_update_that_one_rank_leaves_out(world: int, wrapped: bool) -> None:
    """Long before any timeout, with one message on all ranks, which names that rank and the update."""
    errors = [outcome.error for outcome in run_ranks(world, _leaves_out, wrapped)]
    found = [error for error in errors if type(error) is Violation]
    # In a backward pass of DDP the connection that breaks may be the error that the loop sees.
    assert all(type(errors[rank]) is Violation for rank in range(world) if rank != 1 or not wrapped), errors
    assert errors[1] is not None
    assert len({str(error) for error in found}) == 1
    assert {(error.clause, error.step, error.finding.ranks) for error in found} == {("halt-together", 2, (1,))}
    assert str(found[0]).startswith(f"rank 1 of {world} went past update 2, at which rank ")
    assert (BACKWARD if wrapped else REDUCTION) in str(found[0])
    assert "state    last state known equal: step 1" in str(found[0])


def test_of_three_ranks_the_one_that_waits_alone_is_named() -> None:
    """The two others left nothing out: it makes an update too many, or makes a call that they do not make."""
    for point, words in ((POINTS[2], "makes an update"), (POINTS[0], "makes a call")):
        messages = EndMessages(0, 3, Position(3, point, last_equal=2))
        alone = messages.passed({1: BACKWARD, 2: BACKWARD}, waiting=0)
        assert (alone.ranks, alone.step, alone.kind) == ((0,), 3, "violation")
        assert f"rank 0 {words} that the others do not make" in alone.text
        assert messages.passed({1: BACKWARD, 2: BACKWARD}, waiting=1).ranks == (1, 2)


# what keeps the others waiting, and is right


def _evaluates(loop: _Loop, group: dist.ProcessGroup) -> None:
    loss_of(loop.model)
    with torch.no_grad():
        loss_of(loop.model)


def _accumulates(loop: _Loop, group: dist.ProcessGroup) -> None:
    with loop.model.no_sync():
        loss_of(loop.model).backward()


def _reduces_alone(loop: _Loop, group: dist.ProcessGroup) -> None:
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)


Between = Callable[[_Loop, dist.ProcessGroup], None]


def _be_slow(between: Between, wrapped: bool) -> list[str]:
    loop = _Loop(wrapped=wrapped)
    group, _ = dist.new_subgroups(1)
    with andon.watch(loop.model, loop.optimizer, action=lambda found: None) as w:
        for update in range(UPDATES):
            loop.backward()
            if update == 1 and loop.rank == 1:
                between(loop, group)
                threading.Event().wait(SEVERAL_LOOKS_S)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    return clauses(w)


@pytest.mark.parametrize(
    ("between", "wrapped", "found"),
    [
        (_evaluates, True, []),
        (_accumulates, True, ["gradients-agree"]),  # that the weights part is of the same cause
        (_reduces_alone, False, []),
    ],
)
def test_a_rank_that_others_wait_for_is_not_accused(between: Between, wrapped: bool, found: list[str]) -> None:
    """Whatever it does meanwhile that needs none of them. A micro-batch of its own alters its gradient, no more."""
    assert answers(2, _be_slow, between, wrapped) == [found, found]


# counted


def _told(backwards: int, gathers: int, inside: tuple[str, int] = ("", 0)) -> dict[int, Counts]:
    return {1: Counts(gathers, backwards, *inside)}


def _in_gather(gathers: int, *, armed: bool = False) -> Waiting:
    begun = PendingCollectives([0, 1])
    for _ in range(gathers):
        begun.gathering()
    begun.armed = armed
    begun.gathering()
    assert begun.waiting is not None
    return begun.waiting


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (_told(1, 2), {1: BACKWARD}),
        (_told(1, 3), {}),  # it has come to the gather since
        (_told(0, 2), {}),
        (_told(0, 2, ("0", 1)), {1: REDUCTION}),
        (_told(0, 3, ("0", 1)), {}),
        ({}, {}),  # it has told nothing yet
    ],
)
def test_a_rank_waits_in_vain_for_one_that_began_more(told: dict[int, Counts], found: dict[int, str]) -> None:
    """Of a rank in its third gather, which has begun nothing."""
    assert halt.deadlocked(_in_gather(2), told) == found


def test_a_forward_pass_without_a_backward_pass_accuses_nobody() -> None:
    """The backward pass that another rank has begun may be the one that this rank has still to come to."""
    waiting = _in_gather(2, armed=True)
    assert [halt.deadlocked(waiting, _told(number, 2)) for number in (1, 2)] == [{}, {1: BACKWARD}]


def _opened_apart(how: str) -> str:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5 if how == "frozen" else 5 + dist.get_rank(), 2))
    if how == "frozen" and dist.get_rank() == 1:
        model[2].weight.requires_grad = False
    if how == "width" and dist.get_rank() == 1:
        model[0] = nn.Linear(4, 6)
    with pytest.raises(Violation) as found:
        andon.watch(model, sgd(model), action="raise")
    return str(found.value)


@pytest.mark.parametrize(("how", "tensor"), [("frozen", "2.weight"), ("width", "0.weight")])
def test_what_is_trained_and_its_shapes_are_compared_before_the_loop_reduces(how: str, tensor: str) -> None:
    """A parameter that is frozen, or wider, on one rank ends the collectives of a loop that reduces by hand in a crash:
    the watch says so as it opens, with the tensor, before there is one."""
    for said in answers(2, _opened_apart, how):
        assert said.startswith("parameters-kept broken at the start"), said
        assert f"where    {tensor} (" in said
        assert "the tensors differ in name, shape, dtype, order or requires_grad" in said
