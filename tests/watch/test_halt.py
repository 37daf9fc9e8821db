"""One rank stops, or a thread that guards it ends: all live ranks end and say why; none hangs and none is left."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
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

import andon
from andon_contracts.violation import Halted, Violation
from tests.support.ranks import run_ranks
from tests.watch.small import answers, loss_of, net, sgd

REASON = "a row that no rank may train on"


def _watched(folder: str | None = None, *, hard_stop: bool = False) -> tuple[nn.Module, andon.Watch]:
    model, patience = net(), datetime.timedelta(seconds=1)
    return model, andon.watch(model, sgd(model), hard_stop=hard_stop, folder=folder, patience=patience)


def _in_backward(model: nn.Module) -> None:
    while True:
        loss_of(model).backward()


def _in_a_collective(model: nn.Module) -> None:
    dist.all_reduce(torch.ones(1))


def _in_the_loader(model: nn.Module) -> None:
    threading.Event().wait()


def _in_a_read(model: nn.Module) -> None:
    os.read(os.pipe()[0], 1)


# a rank that says stop


def _stop(place: Callable[[nn.Module], None]) -> None:
    model, w = _watched()
    if dist.get_rank() == 1:
        w.pull(REASON)
    place(model)


@pytest.mark.parametrize("place", [_in_backward, _in_a_collective, _in_the_loader, _in_a_read])
def test_all_ranks_raise_the_same_wherever_they_are(place: Callable[[nn.Module], None]) -> None:
    """In backward, asleep, in a read, and in a collective whose peer has raised: one error, and no force is needed."""
    errors = [outcome.error for outcome in run_ranks(3, _stop, place)]
    assert {type(error) for error in errors} == {Violation}, errors
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"rank 1 of 3 pulled the cord at step 1, before its forward pass: {REASON}.")
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


def _pull_without_a_folder(folder: str) -> None:
    model, w = _watched(folder)
    dist.barrier()
    if dist.get_rank() == 1:
        w.pull(REASON)
    _in_the_loader(model)


def test_a_bundle_that_cannot_be_made_keeps_nobody_from_halting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for outcome in run_ranks(2, _pull_without_a_folder, str(tmp_path / "file"), deadline_s=30.0):
        assert type(outcome.error) is Violation, outcome.error
        assert REASON in str(outcome.error)


# a rank that ends otherwise


def _fail() -> None:
    raise ValueError("boom")


def _starve() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


ENDS = {
    _fail: ("failed", r"failed at step 1, before its forward pass, which is no violation: ValueError: boom\."),
    _starve: ("out of memory", r"ran out of memory at step 1, before its forward pass, which is no violation: Run"),
    # At which point of the step it was it says every second, if it comes to that.
    _die: ("died", r"died at step 1(, before its forward pass)?, which is no violation: its process \d+ on "),
    _freeze: ("hangs", r"hangs at step 1(, before its forward pass)?, which is no violation: its process \d+ on "),
}


def _end(folder: str, end: Callable[[], None]) -> None:
    # Only by force does a stopped rank end.
    model, w = _watched(folder, hard_stop=end is _freeze)
    with w:
        dist.barrier()
        if dist.get_rank() == 1:
            end()
        (_in_the_loader, _in_the_loader, _in_backward)[dist.get_rank()](model)


@pytest.mark.parametrize("end", ENDS)
def test_an_end_that_is_no_violation_is_told_apart(end: Callable[[], None]) -> None:
    """The others raise `andon.Halted`, which says whose end it was and of which kind; the lowest live one writes."""
    kind, words = ENDS[end]
    with tempfile.TemporaryDirectory() as folder:
        errors = [outcome.error for outcome in run_ranks(3, _end, folder, end)]
        for error in (errors[0], errors[2]):
            assert type(error) is Halted, errors
            assert (error.cause, error.clause, error.rank, error.step) == (kind, "halt-together", 1, 1)
            assert re.match("rank 1 of 3 " + words, str(error)), error
        assert str(errors[0]) == str(errors[2])
        account = json.loads(Path(folder, "1", "halt-together.json").read_text())
        assert (account["cause"], account["message"]) == (kind, str(errors[0]))
        parts = {path.name for path in Path(folder, "1", "halt-together").glob("rank-?.json")}
        assert parts == {"rank-0.json", "rank-2.json"} | ({"rank-1.json"} if end in (_fail, _starve) else set())
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
    assert waiting.startswith("left: rank 1 of 2 left at step 1, before its forward pass, which is no violation: ")


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
                _in_the_loader(model)
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
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    model, _ = _watched()
    dist.barrier()
    if rank == 1:
        raise ValueError("boom")
    try:
        _in_the_loader(model)
    except Halted as error:
        Path(folder, "said").write_text(f"{error.cause}: {error}")


def _processes(work: Callable[..., None], *args: object) -> list[int | None]:
    """The exit codes of two processes, which know their rank and nothing else of each other."""
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=work, args=(rank, *args)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


def test_an_error_that_multiprocessing_catches_is_heard(tmp_path: Path) -> None:
    """Its processes call no excepthook, and skip what runs at an interpreter's exit."""
    assert _processes(_bare, str(tmp_path)) == [0, 1]
    assert (tmp_path / "said").read_text().startswith("failed: rank 1 of 2 failed at step 1")


SCRIPT = f"""
import os, time, torch, torch.distributed as dist, andon
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
andon.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), hard_stop=True)
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("{REASON}")
time.sleep(600)
"""


# Deep, for torchrun's start: the tests above have each rank end by the same error.
@pytest.mark.deep
def test_torchs_launcher_names_the_cause(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    done = subprocess.run([sys.executable, *words, str(tmp_path / "loop.py")], capture_output=True, text=True)
    assert done.returncode == 1
    root = done.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in root
    assert (
        f"rank 1 of 2 failed at step 1, before its forward pass, which is no violation: ValueError: {REASON}." in root
    )


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
    assert re.search(rf"rank {gone} of 2 (left|died) at step 2, which is no violation", said)


# a guard that ends


PATIENCE_S = 30.0


def _unforeseen(*_: object, **__: object) -> None:
    raise LookupError("nobody foresaw this")


def _break_link(w: andon.Watch) -> None:
    w._cord._link._progress = _unforeseen


def _break_cord(w: andon.Watch) -> None:
    w._cord._monitor._look = _unforeseen


GUARDS = {"andon-halt-link": _break_link, "andon-cord": _break_cord}
WORDS = (
    "rank 1 of 2 is unguarded at step 1, before its forward pass, which is no violation: "
    "its thread {}, which guards it, ended by an error of its own (LookupError: nobody foresaw this)."
)


def _lose(action: str, wound: Callable[..., None], folder: str) -> str:
    """Rank 1 loses a guard while both sleep; with `warn` both go on, once both have said so."""
    model = net()
    optimizer = sgd(model)
    said = [Path(folder, f"said-{rank}") for rank in range(2)]
    os.dup2(os.open(said[dist.get_rank()], os.O_WRONLY | os.O_CREAT), 2)
    with andon.watch(model, optimizer, action=action) as w:
        dist.barrier()
        if dist.get_rank() == 1:
            wound(w)
        if action != "warn":
            _in_the_loader(model)
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while not all(path.exists() and "is unguarded" in path.read_text() for path in said):
            assert time.monotonic() < deadline, [path.read_text() for path in said]
            pause.wait(0.05)
        loss_of(model).backward()
        optimizer.step()
    return "trained on"


@pytest.mark.parametrize("guard", GUARDS)
def test_all_ranks_halt_where_one_is_no_longer_guarded(guard: str, tmp_path: Path) -> None:
    errors = [outcome.error for outcome in run_ranks(2, _lose, "raise", GUARDS[guard], str(tmp_path))]
    for error in errors:
        assert type(error) is Halted, errors
        assert (error.cause, error.rank, error.step) == ("failed", 1, 1)
        assert str(error).partition("\n")[0] == WORDS.format(guard)


def test_all_ranks_say_so_where_a_watch_only_warns(tmp_path: Path) -> None:
    guard, wound = next(iter(GUARDS.items()))
    assert answers(2, _lose, "warn", wound, str(tmp_path)) == ["trained on"] * 2
    for rank in range(2):
        assert (tmp_path / f"said-{rank}").read_text().count("andon: " + WORDS.format(guard)) == 1
