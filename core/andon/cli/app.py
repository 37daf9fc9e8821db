"""Entry point of the `andon` command: runs a command and turns its errors into one message and an exit code."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from andon.console.messages import BROKEN_STREAM, Exit, InputError, install_hint, is_panic, not_written, put, say
from andon.launch import context as preemption
from andon_contracts.violation import Violation

_TRACEBACK = "ANDON_TRACEBACK"
_OF_EXTRAS = ("click", "pydantic", "yaml", "rich", "transformers", "peft", "safetensors", "tokenizers", "numpy")
_OF_JUDGE, _NEED_JUDGE = ("click", "pydantic", "yaml"), ("falsify", "verify", "show", "explain", "diff")


def main() -> NoReturn:
    """Run the command line and exit with an `Exit`, or with the exit code of the script that `andon watch` runs."""
    if sys.argv[1:2] == ["watch"]:  # needs no extra; its script chooses the exit code
        _open_closed_streams()
        from andon_contracts.watch.script import main as run_watched

        sys.exit(run_watched(sys.argv[2:]))
    try:
        if sys.argv[1:2] == ["train"]:
            preemption.heed()
        _open_closed_streams()
        code = guarded(_run)
        preemption.end()
    except KeyboardInterrupt:  # during imports; a command handles its own
        code = _say("interrupted", Exit.INTERRUPTED)
    except preemption.Interrupted as interruption:
        by_hand = interruption.signum == signal.SIGINT
        code = _say(f"ended by {interruption} before training began", Exit.INTERRUPTED if by_hand else Exit.PREEMPTED)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Exit with `code` even if a standard stream is broken; with torch loaded, without its slow shutdown."""
    broken = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BROKEN_STREAM as error:  # closed by its reader; the interpreter would exit with 120
            broken = True
            if stream is sys.stdout and code == 0 and isinstance(error, OSError) and error.errno == errno.ENOSPC:
                code = _say(str(not_written(error)), Exit.USAGE)
    if not ("torch" in sys.modules or broken or preemption.heeded()):  # shutdown resets signal handlers
        raise SystemExit(code)
    atexit._run_exitfuncs()
    os._exit(code)


def _open_closed_streams() -> None:
    """Open closed standard streams on /dev/null, also for ranks, so that no run file gets one of their descriptors."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor: `number`
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _run() -> int:
    try:
        os.getcwd()
    except FileNotFoundError as error:  # torch cannot be imported there
        raise InputError("the current folder does not exist any more; change to another one") from error
    if sys.argv[1:2] == ["explain"] and len(sys.argv) == 3 and not sys.argv[2].startswith("-"):  # needs no extra
        from andon.inspection.explain import explain

        for line in explain(Path(sys.argv[2])):
            put(line)
        return int(Exit.OK)
    from andon.cli.commands import app

    try:
        app()
    except SystemExit as ended:  # click always exits, with 2 after usage errors
        return ended.code if isinstance(ended.code, int) else int(Exit.OK)
    return int(Exit.OK)


def guarded(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code. An exception becomes one message on stderr and the matching exit code."""
    try:
        return work()
    except InputError as error:
        say(*map(str, error.problems))
        return int(Exit.USAGE)
    except Violation as error:
        return _say(str(error), Exit.VIOLATION)
    except Exception as error:  # the last resort: one line for a user, the traceback on request
        if isinstance(error, ModuleNotFoundError) and (name := (error.name or "").partition(".")[0]) in _OF_EXTRAS:
            extra = "judge" if name in _OF_JUDGE and {*sys.argv[1:2]} & {*_NEED_JUDGE} else "train"
            return _say(f"{error.name} is not installed; {install_hint(extra)}", Exit.USAGE)
        if isinstance(error, OSError) and _is_of_stdout(error):  # from the help, which click writes itself
            return _say(str(not_written(error)), Exit.USAGE)
        if os.environ.get(_TRACEBACK) == "1":
            raise
        return _say(f"{type(error).__name__}: {error} (set {_TRACEBACK}=1 for the traceback)", Exit.CRASHED)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit | preemption.Interrupted):
            raise
        # A Rust panic is not an `Exception`; native code rejected its input. Anything else is a bug in Andon.
        return _say(f"{type(error).__name__}: {error}", Exit.USAGE if is_panic(error) else Exit.CRASHED)


def _is_of_stdout(error: OSError) -> bool:
    if error.filename is not None or error.errno == errno.EPIPE:
        return False
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as again:
        return again.errno == error.errno
    except ValueError:  # closed
        return False
    return False


def _say(text: str, code: Exit) -> int:
    say(text)
    return int(code)
