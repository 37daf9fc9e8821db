"""The commands and how they end: one message and an exit code, never a traceback for a user's mistake."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from andon.console.exits import Exit
from andon.console.messages import BROKEN_STREAM, not_written, say
from andon.console.problems import InputError, install_hint, is_panic
from andon.launch import preemption
from andon_contracts.violation import Violation

_TRACEBACK = "ANDON_TRACEBACK"
_OF_COMMANDS = ("typer", "pydantic", "yaml", "rich", "click")  # what commands cannot be without


def main() -> NoReturn:
    """Run the command line; exits with an `Exit`, or as the script does that `andon watch` runs."""
    if sys.argv[1:2] == ["watch"]:  # which needs no extra, and whose script ends as it likes
        _open_closed_streams()
        from andon_contracts.watch.script import main as run_watched

        sys.exit(run_watched(sys.argv[2:]))
    try:
        if sys.argv[1:2] == ["train"]:
            preemption.heed()
        _open_closed_streams()
        code = guarded(_run)
        preemption.end()
    except KeyboardInterrupt:  # while modules are imported; typer sees those of a command
        code = _say("interrupted", Exit.INTERRUPTED)
    except preemption.Interrupted as asked:
        by_hand = asked.signum == signal.SIGINT
        code = _say(f"ended by {asked} before training began", Exit.INTERRUPTED if by_hand else Exit.PREEMPTED)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End with `code`, whatever became of the standard streams.

    If torch was loaded, without taking its modules down one by one, which takes a second.
    """
    broken = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BROKEN_STREAM as error:  # its reader may have gone; the interpreter would end with 120 for that
            broken = True
            if stream is sys.stdout and code == 0 and isinstance(error, OSError) and error.errno == errno.ENOSPC:
                code = _say(str(not_written(error)), Exit.USAGE)
    if not ("torch" in sys.modules or broken or preemption.heeded()):  # an interpreter that ends handles no signals
        raise SystemExit(code)
    atexit._run_exitfuncs()
    os._exit(code)


def _open_closed_streams() -> None:
    """Open closed standard streams on /dev/null, here and in ranks: no file of a run may take their place."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _run() -> int:
    try:
        os.getcwd()
    except FileNotFoundError as error:  # torch cannot be loaded there either
        raise InputError("the current folder does not exist any more; change to another one") from error
    from andon.cli.commands import app

    try:
        app()
    except SystemExit as ended:  # how typer ends, its own usage errors (2) included
        return ended.code if isinstance(ended.code, int) else int(Exit.OK)
    return int(Exit.OK)


def guarded(work: Callable[[], int]) -> int:
    """The exit code of `work`; an error becomes one message on stderr and the code that belongs to it."""
    try:
        return work()
    except InputError as error:
        say(*map(str, error.problems))
        return int(Exit.USAGE)
    except Violation as error:
        return _say(str(error), Exit.VIOLATION)
    except Exception as error:  # the last resort: one line for a user, the traceback on request
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _OF_COMMANDS:
            return _say(f"{error.name} is not installed; {install_hint('train')}", Exit.USAGE)
        if isinstance(error, OSError) and _is_of_stdout(error):  # the list of commands, which typer writes itself
            return _say(str(not_written(error)), Exit.USAGE)
        if os.environ.get(_TRACEBACK) == "1":
            raise
        return _say(f"{type(error).__name__}: {error} (set {_TRACEBACK}=1 for the traceback)", Exit.CRASHED)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | preemption.Interrupted):
            raise
        # A panic of Rust is not an `Exception`: native code gave up on its input. Anything else is a mistake of ours.
        return _say(f"{type(error).__name__}: {error}", Exit.USAGE if is_panic(error) else Exit.CRASHED)


def _is_of_stdout(error: OSError) -> bool:
    """Whether standard output raised `error`: then it refuses an empty line too."""
    if error.filename is not None or error.errno == errno.EPIPE:
        return False
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as again:
        return again.errno == error.errno
    except ValueError:  # it is closed
        return False
    return False


def _say(text: str, code: Exit) -> int:
    say(text)
    return int(code)
