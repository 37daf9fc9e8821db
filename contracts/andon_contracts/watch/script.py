"""`andon watch SCRIPT ARGS`: a training script as it is, watched without a line in it (issue 3).

Needs torch and icontract alone; `python -m andon_contracts.watch` is the same where nothing else is installed.
"""

from __future__ import annotations

import argparse
import io
import os
import runpy
import sys
import traceback
import types
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from andon_contracts.error_file import tell_launcher
from andon_contracts.legible import tell
from andon_contracts.violation import Halted, Violation
from andon_contracts.watch.settings import allow_problems
from andon_contracts.watch.standby import Standby

_FAILED, _VIOLATION = 1, 70


@dataclass(frozen=True)
class Asked:
    """What was asked for: options of the watch, the ledger, and the script or module with its own arguments."""

    options: dict[str, Any]
    ledger: str | None
    module: bool
    command: list[str]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="andon watch",
        usage="andon watch [OPTIONS] SCRIPT [ARGS...]  |  andon watch [OPTIONS] -m MODULE [ARGS...]",
        description="Run a training script (or a folder or archive with a __main__.py) as it is, and hold every update "
        "of its torch optimizers to the contracts of a step. Under several ranks: torchrun ... -m andon watch SCRIPT.",
        epilog=f"The script's exit code is passed on; {_VIOLATION} says that --action raise found a violation.",
        allow_abbrev=False,
    )
    parser.add_argument("--action", choices=("warn", "raise"), default="warn", help="on a violation (default: warn)")
    parser.add_argument("--ledger", metavar="PATH", help="write a line of every update (as ANDON_LEDGER does)")
    parser.add_argument(
        "--allow", metavar="CLAUSE=REASON", action="append", default=[], help="silence a clause; may be repeated"
    )
    parser.add_argument("--folder", metavar="PATH", help="where bundles of violations are written")
    parser.add_argument("--hard-stop", action="store_true", help="end ranks that are blocked where no Python runs")
    parser.add_argument("--verbose", action="store_true", help="list every clause at the opening")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS...]")
    return parser


def parse(arguments: Sequence[str]) -> Asked:
    """What `arguments` ask for. Exits with 2, all that is wrong said, where they make no sense."""
    parser = _parser()
    given = parser.parse_args(arguments)
    allow = {clause.strip(): reason.strip() for clause, _, reason in (text.partition("=") for text in given.allow)}
    problems = allow_problems(allow)
    if not given.command:
        problems.append("name the script to run")
    elif not given.module:
        problems += _unrunnable(given.command[0])
    if problems:
        parser.error("; ".join(problems))
    options = {"action": given.action, "allow": allow, "folder": given.folder, "hard_stop": given.hard_stop}
    options["verbose"] = given.verbose
    return Asked(options, given.ledger, given.module, given.command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what `arguments` (those of the process if None) ask for, watched; returns the exit code.

    What the script raises passes through, its own `SystemExit` too.
    """
    asked = parse(sys.argv[1:] if arguments is None else arguments)
    if asked.ledger is not None:
        os.environ["ANDON_LEDGER"] = os.path.abspath(asked.ledger)
    _hide_our_frames()
    standby = Standby(asked.options)
    try:
        with standby:
            _run(asked)
    except Violation as found:
        _report(found)
        return _FAILED if isinstance(found, Halted) and not standby.violated else _VIOLATION
    except SystemExit as ended:
        if not ended.code:
            _tell_of_nothing(idle=standby.saw_nothing)
        if ended.code or not standby.violated:
            raise
        return _VIOLATION
    _tell_of_nothing(idle=standby.saw_nothing)
    return _VIOLATION if standby.violated else 0


def _tell_of_nothing(*, idle: bool) -> None:
    if idle:
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        which = f"rank {os.environ.get('RANK', '?')}: " if several else ""
        tell(f"andon watch: {which}no optimizer of torch made an update, so nothing was watched")


def _unrunnable(name: str) -> list[str]:
    """Why Python could not run what `name` names, if it could not."""
    if _is_program(name):
        with_main = [(Path(name) / f"__main__{end}").is_file() for end in (".py", ".pyc")]
        if Path(name).is_file():
            with zipfile.ZipFile(name) as archive:
                with_main = [f"__main__{end}" in archive.namelist() for end in (".py", ".pyc")]
        return [] if any(with_main) else [f"can't find '__main__' module in {name!r}"]
    return [] if Path(name).is_file() else [f"can't open file {name!r}"]


def _is_program(name: str) -> bool:
    """Whether `name` is a folder or an archive, whose `__main__` Python runs."""
    return Path(name).is_dir() or zipfile.is_zipfile(name)


def _run(asked: Asked) -> None:
    """The script or module as Python runs one: it is `__main__`, and its folder is looked in first for modules."""
    sys.argv = list(asked.command)
    name = asked.command[0]
    if asked.module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if not sys.flags.safe_path:
        sys.path[0] = name if _is_program(name) else str(Path(name).resolve().parent)
    if _is_program(name):
        # It looks for modules there again, which changes nothing.
        runpy.run_path(name, run_name="__main__")
        return
    main_module = types.ModuleType("__main__")
    vars(main_module).update(__file__=name, __builtins__=__builtins__)
    sys.modules["__main__"] = main_module
    with io.open_code(name) as file:
        code = compile(file.read(), name, "exec")
    exec(code, vars(main_module))


def _report(found: Violation) -> None:
    """The whole message once for each machine, its first line from the other ranks."""
    text = f"andon.{type(found).__name__}: {found}"
    tell_launcher(text, late=False)
    local = os.environ.get("LOCAL_RANK", "0")
    shown = text if local == "0" else f"rank {os.environ.get('RANK', local)}: {text.partition(chr(10))[0]}"
    tell(shown)


def _hide_our_frames() -> None:
    """Let a traceback begin where the script does: leave out what ran before it, by the files on the stack now."""
    before = {each.f_code.co_filename for each, _ in traceback.walk_stack(None)} | {__file__, runpy.__file__}
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and _file(trace) in before:
            trace = trace.tb_next
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def _file(trace: types.TracebackType) -> str:
    name = trace.tb_frame.f_code.co_filename
    return str(runpy.__file__) if name == "<frozen runpy>" else name
