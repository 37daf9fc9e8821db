"""Commands of other packages: entry points of the group `andon.commands`, a name for a typer app or a function."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter

import typer

from andon.console.problems import InputError, Problem, install_hint
from andon.launch.interpreter import module_command

GROUP = "andon.commands"


def register(app: typer.Typer) -> None:
    """Add every command of `GROUP` to `app`. A function may say by its `command_class` how its options are read.

    One whose package is not installed, or lacks what it needs, is listed all the same and says so when it is called.
    """
    for point in sorted(entry_points(group=GROUP), key=attrgetter("name")):
        try:
            found = point.load()
        except ModuleNotFoundError as error:
            app.command(point.name, help=f"(needs {error.name})", context_settings=_ANYTHING)(_absent(point, error))
            continue
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=point.name)
        else:
            # Without a short help of its own the list of commands would cut it in mid-sentence.
            first = (found.__doc__ or "").partition("\n")[0]
            app.command(point.name, cls=getattr(found, "command_class", None), short_help=first)(found)


def said_by(name: str, *arguments: str) -> tuple[int, list[str]] | None:
    """What the command `name` of another package ends with and says, run as a process of its own.

    None where no package has it. Where it prints nothing, as for a mistake, its lines are those of standard error.
    """
    if not entry_points(group=GROUP, name=name):
        return None
    command = module_command("andon", name, *arguments)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.returncode, (done.stdout or done.stderr).decode(errors="backslashreplace").splitlines()


_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


def _absent(point: EntryPoint, error: ModuleNotFoundError) -> Callable[[], None]:
    def command() -> None:
        what = f"{error.name} is not installed; {install_hint('falsify')}"
        raise InputError([Problem(f"andon {point.name}", what)])

    return command
