"""`andon watch SCRIPT ARGS`: runs a training script as it is, and watches every torch optimizer that makes an update.

Torch's global step hooks report the first update of an optimizer, and `intercept` the clip call just before it. The
watch opens there, because every rank reaches that call. It does not read the raw gradients and buffers before it.

Needs torch and icontract alone; `python -m andon_contracts.watch` is the same command if nothing else is installed.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import runpy
import sys
import threading
import time
import traceback
import types
import weakref
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from andon_contracts.act import LAUNCHER_FILES, current_activity
from andon_contracts.legible import legible_line, log, report_to_launcher
from andon_contracts.liveness.halt import own_store
from andon_contracts.violation import Halted, Violation, first_line
from andon_contracts.watch import opening
from andon_contracts.watch.checks.sketch import forwards, requested
from andon_contracts.watch.intercept import Listener, listen
from andon_contracts.watch.model_probe import parameters_of
from andon_contracts.watch.settings import RAISING, Settings, allow_problems
from andon_contracts.watch.values import text_digest
from andon_contracts.watch.watcher import Watch

_FAILED, _VIOLATION = 1, 70
_LONGEST_S, _AGAIN_S = 120.0, 5.0
"""How long a rank waits for all others at a first update, but at most a third of their group's timeout; and after one
failed wait. After two failed waits the rank opens no more watches."""
_POLL_S, _REPORT_S = 0.1, 1.0
"""How often a waiting rank polls for the others, and how often any rank reports where its main thread is."""
_CONFIRM_S = 3.0
"""How long a rank waits before it believes a report that another rank waits elsewhere: that wait may just be over."""
_STUCK_S, _BUSY_S = 5.0, 0.1
"""A rank waits in a collective if it is in one call for this long and computes less than this between two polls."""
_scripts = itertools.count()
"""Numbers the scripts of this process; a script has the same number on all ranks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script that `arguments` (those of the process if None) name, watched; returns the exit code.

    The script's own exceptions pass through, `SystemExit` too.
    """
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.ledger is not None:
        os.environ["ANDON_LEDGER"] = os.path.abspath(options.ledger)
    _hide_our_frames()
    standby = Standby({name: getattr(options, name) for name in ("action", "allow", "folder", "hard_stop", "verbose")})
    try:
        with standby:
            _run(options.command, is_module=options.module)
    except Violation as found:
        # Local rank 0 prints the whole message, the other ranks only its first line.
        text = f"andon.{type(found).__name__}: {found}"
        report_to_launcher(text, late=False)
        local = os.environ.get("LOCAL_RANK", "0")
        log(text if local == "0" else f"rank {os.environ.get('RANK', local)}: {text.partition(chr(10))[0]}")
        return _FAILED if isinstance(found, Halted) and not standby.violated else _VIOLATION
    except SystemExit as ended:
        if not ended.code:
            standby.report_if_idle()
        if ended.code or not standby.violated:
            raise
        return _VIOLATION
    standby.report_if_idle()
    return _VIOLATION if standby.violated else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="andon watch",
        usage="andon watch [OPTIONS] SCRIPT [ARGS...]  |  andon watch [OPTIONS] -m MODULE [ARGS...]",
        description="Run a training script (or a folder or archive with a __main__.py) as it is, and check every "
        "update of its torch optimizers by the contracts. Under several ranks: torchrun ... -m andon watch SCRIPT.",
        epilog=f"The exit code is the script's, or {_VIOLATION} if --action raise found a violation.",
        allow_abbrev=False,
    )
    parser.add_argument("--action", choices=("warn", "raise", "strict"), default="warn", help="on a violation")
    parser.add_argument("--ledger", metavar="PATH", help="write a ledger with a line per update (as ANDON_LEDGER does)")
    allow_help = "silence a clause; may be repeated"
    parser.add_argument("--allow", metavar="CLAUSE=REASON", action="append", default=[], help=allow_help)
    parser.add_argument("--folder", metavar="PATH", help="write bundles of violations to this folder")
    parser.add_argument("--hard-stop", action="store_true", help="end ranks that are blocked outside of Python")
    parser.add_argument("--verbose", action="store_true", help="list every clause when a watch opens")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]")
    options, unknown = parser.parse_known_args(arguments)
    pairs = (text.partition("=") for text in options.allow)
    options.allow = {clause.strip(): reason.strip() for clause, _, reason in pairs}
    without = (clause for clause, reason in options.allow.items() if not reason)
    problems = [f"--allow {clause} has no reason: write --allow {clause}=REASON" for clause in without]
    problems = problems or allow_problems(options.allow)
    for name in unknown:
        known = name.removeprefix("--").partition("=")[0].replace("-", "_") in Settings.__dataclass_fields__
        in_script = f"{name} is not an option but an argument of andon.watch(...) in the script"
        problems.append(in_script if known else f"no option {name}")
    if not (options.command or unknown):
        problems.append("name the script to run")
    elif not (options.module or unknown):
        name = options.command[0]
        if _is_program(name):
            if Path(name).is_dir():
                entries = os.listdir(name)
            else:
                with zipfile.ZipFile(name) as archive:
                    entries = archive.namelist()
            if not {"__main__.py", "__main__.pyc"} & set(entries):
                problems.append(f"can't find '__main__' module in {name!r}")
        elif not Path(name).is_file():
            problems.append(f"can't open file {name!r}")
    if problems:
        parser.error("; ".join(problems))
    return options


def _is_program(name: str) -> bool:
    return Path(name).is_dir() or zipfile.is_zipfile(name)


def _run(command: Sequence[str], *, is_module: bool) -> None:
    sys.argv = list(command)
    name = command[0]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = name if _is_program(name) else str(Path(name).resolve().parent)
    if _is_program(name):
        runpy.run_path(name, run_name="__main__")  # puts `name` into sys.path once more, which changes nothing
        return
    main_module = types.ModuleType("__main__")
    vars(main_module).update(__file__=name, __builtins__=__builtins__)
    sys.modules["__main__"] = main_module
    with io.open_code(name) as file:
        exec(compile(file.read(), name, "exec"), vars(main_module))


def _hide_our_frames() -> None:
    """Let tracebacks and messages leave out the frames of the files that are on the stack now, outside the script."""
    LAUNCHER_FILES.update(frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    LAUNCHER_FILES.update((__file__, runpy.__file__, "<frozen runpy>"))
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in LAUNCHER_FILES:
            trace = trace.tb_next
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


class Standby(Listener):
    """Opens a watch, with these `options` of `Settings`, for every optimizer of this process that makes an update."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._settings = Settings(**options, by_command=True)
        self._watches: list[Watch] = []
        self._opened_before = opening.opened_so_far[0]
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._running: list[torch.optim.Optimizer] = []
        self._clipped: set[int] = set()
        self._rendezvous = Rendezvous()
        self._undo: list[Callable[[], object]] = []
        self._unwatched: set[str] = set()

    def __enter__(self) -> Self:
        before, after = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)
        self._undo = [before.remove, after.remove, listen(self), self._rendezvous.close]
        if requested() is not None:
            self._undo += forwards.listen()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for undo in self._undo:
            undo()
        for watch in self._watches:
            if isinstance(error, SystemExit):  # the script ends by itself
                watch.close()
            else:
                watch.__exit__(kind, error, trace)

    @property
    def violated(self) -> bool:
        """True if a watch that raises found a violation, or with "strict" a suspicion."""
        counted = (each.findings if self._settings.action == "strict" else each.violations for each in self._watches)
        return self._settings.action in RAISING and any(counted)

    def report_if_idle(self) -> None:
        """Print a line if neither this object nor the script opened a watch, and no optimizer was reported."""
        if opening.opened_so_far[0] == self._opened_before and not self._unwatched:
            which = f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
            log(f"andon watch: {which}no torch optimizer made an update, so nothing was watched")

    def _before(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if optimizer in self._running:  # its last update raised, so that its post-hook never ran
            del self._running[self._running.index(optimizer) :]
        # An optimizer that shards its state over ranks makes its update by another optimizer inside.
        own = set(map(id, parameters_of([optimizer])))
        is_inside = any(own <= set(map(id, parameters_of([outer]))) for outer in self._running)
        self._running.append(optimizer)
        if not is_inside and optimizer not in self._seen:
            self._open(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        # An inner update that raised never ended, so its optimizer still lies above this one.
        while self._running and self._running.pop() is not optimizer:
            pass

    def clipping(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor | None) -> None:
        """Open a watch if an optimizer of these parameters has made no update yet: it will make its first one next."""
        if not parameters or id(parameters[0]) in self._clipped:
            return
        self._clipped.add(id(parameters[0]))
        optimizer = opening.optimizer_of(parameters)
        opened = None if optimizer is None or optimizer in self._seen else self._open(optimizer)
        if opened is not None:
            for each in opened.listeners:
                each.clipping(parameters, norm)

    def _open(self, optimizer: torch.optim.Optimizer) -> Watch | None:
        self._seen.add(optimizer)
        if opening.is_watched(optimizer):
            return None
        trained, kind = parameters_of([optimizer]), type(optimizer).__qualname__
        if not any(isinstance(each, torch.nn.Parameter) for each in trained):
            self._report_unwatched(f"{kind} trains only tensors that are not parameters of a module")
            return None
        why = ""
        try:
            model, optimizers = opening.trained_by(optimizer)
        except ValueError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - it asks objects of the script, which may raise anything
            why = f"cannot find the model that {kind} trains: {first_line(error)}"
        refused = self._rendezvous.meet(f"{kind} of {len(trained)} tensors", why)
        if refused is not None:
            self._report_unwatched(refused)
            return None
        if any(opening.is_watched(each) for each in optimizers):
            optimizers = [optimizer]
        # An open watch of this model would miss what the new optimizer trains.
        parameters = set(map(id, model.parameters()))
        for watch in self._watches:
            if not watch.closed and not parameters.isdisjoint(map(id, watch.parameters)):
                log("andon watch: another optimizer trains this model now, so a new watch opens")
                watch.close()
        self._seen.update(optimizers)
        try:
            self._watches.append(opening.open_watch(model, optimizers, self._settings))
        except opening.CannotWatch as error:
            self._report_unwatched(str(error).removeprefix("andon.watch: "))
            return None
        except ValueError as error:
            log(f"andon watch: {str(error).removeprefix('andon.watch: ')}")
            raise SystemExit(2) from None  # no `except Exception` of the script hides it
        return self._watches[-1]

    def _report_unwatched(self, why: str) -> None:
        known = why in self._unwatched
        self._unwatched.add(why)
        if why and not known:
            with suppress(RuntimeError, ValueError):
                store = own_store(self._rendezvous.name)
                if store is not None and store.add(f"said/{text_digest(why)}", 1) > 1:
                    return  # another rank printed it
            log(f"andon watch: an optimizer is not watched, and the script goes on: {legible_line(why)}")


class Rendezvous:
    """The meetings of the ranks of one script, and a thread that tells the others if this rank waits elsewhere.

    Opening a watch is collective, so a rank must not begin it unless all ranks do. Not every right script trains on
    every rank: a learner updates weights while actors wait for them in a broadcast. So a rank that comes to a first
    update waits for the others through the store, without a collective, and gives up if they do not come. The ranks
    decide by one value that the store sets once: a rank that comes later reads it and does not wait.
    """

    def __init__(self) -> None:
        self.name = f"standby/{next(_scripts)}"
        self._round = 0
        self._patience = [_LONGEST_S, _AGAIN_S]
        self._over = threading.Event()
        self._main = threading.get_ident()
        # A single process has no peers to inform, and a thread would make a later fork unsafe.
        self._thread = threading.Thread(target=self._report_waits, name="andon-standby", daemon=True)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            self._thread.start()

    def close(self) -> None:
        """Tell the others that the script has ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def meet(self, what: str, refuses: str = "") -> str | None:
        """Meet the others at an update of `what`. Returns None if all ranks came, else why no watch may open.

        refuses: why this rank cannot open a watch. Once the attempts are used up it returns `refuses` at once.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return refuses or None
        if not self._patience:
            return refuses
        try:
            store = own_store(self.name)
            assert store is not None
            while True:
                key, self._round = f"{self._round}", self._round + 1
                late = store.check([f"{key}/verdict"])
                store.set(f"{key}/here/{dist.get_rank()}", what)
                verdict = _agreed(store, key, what, refuses) if refuses else self._await(store, key, what)
                given_up, why = json.loads(verdict)
                # If the others gave up on an optimizer that this rank does not have, all meet again at the next one.
                if not (late and why and given_up != what):
                    return str(why) or None
        except (RuntimeError, ValueError, TypeError) as error:
            self._patience.clear()
            return f"the ranks' store does not answer ({type(error).__name__})"

    def _await(self, store: Store, key: str, what: str) -> str:

        def read(name: str) -> str:
            return bytes(store.get(name)).decode() if store.check([name]) else ""

        group, timeouts = dist.distributed_c10d._get_default_group(), [30 * 60.0]
        for kind in ("cpu", "cuda"):
            with suppress(RuntimeError, AttributeError):  # the group has no backend for it, or one without a timeout
                timeouts.append(group._get_backend(torch.device(kind)).options._timeout.total_seconds())
        began, ranks = time.monotonic(), range(dist.get_world_size())
        patience = min(self._patience[0], min(timeouts) / 3)
        while True:
            if verdict := read(f"{key}/verdict"):
                return verdict
            if store.check([f"{key}/here/{rank}" for rank in ranks]):
                return _agreed(store, key, what, "")
            waited = time.monotonic() - began
            if waited > min(_CONFIRM_S, patience):
                absent = [rank for rank in ranks if not store.check([f"{key}/here/{rank}"])]
                elsewhere = [f"rank {rank} {away}" for rank in absent if (away := read(f"away/{rank}"))]
                if absent and (waited > patience or len(elsewhere) == len(absent)):
                    del self._patience[0]
                    if not self._patience:
                        store.set(f"away/{dist.get_rank()}", "has given up waiting for the others")
                    missing = f"rank {', '.join(map(str, absent))} did not come to the first update of {what}"
                    reports = f" ({'; '.join(elsewhere)})" if elsewhere else f" within {waited:.0f} s"
                    return _agreed(store, key, what, missing + reports)
            time.sleep(_POLL_S)

    def _report_waits(self) -> None:
        reported, last, computed, since = "", None, 0.0, time.monotonic()
        clock = time.pthread_getcpuclockid(self._main)
        store: Store | None = None
        while True:
            over = self._over.wait(_REPORT_S)
            here, before, computed = _in_collective(self._main), computed, time.clock_gettime(clock)
            if here != last or computed - before > _BUSY_S:
                last, since = here, time.monotonic()
            stuck = here is not None and time.monotonic() - since >= _STUCK_S
            text = "has ended its script" if over else f"waits {current_activity(self._main)}" if stuck else ""
            with suppress(RuntimeError, ValueError):  # without the store no other rank can read it
                if text != reported and (store := store or own_store(self.name)) is not None:
                    store.set(f"away/{dist.get_rank()}", text)
                    reported = text
            if over:
                return


def _agreed(store: Store, key: str, what: str, why: str) -> str:
    """Store [what, why] as the verdict of a meeting unless another rank was faster. Returns the stored verdict."""
    return bytes(store.compare_set(f"{key}/verdict", "", json.dumps([what, why]))).decode()


def _in_collective(ident: int) -> tuple[int, int] | None:
    """Identifies the call of `torch.distributed` in which the thread is; None without one. Keeps no frame alive."""
    frame: Any = sys._current_frames().get(ident)
    if frame is None or not str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
        return None
    return id(frame), frame.f_lasti
