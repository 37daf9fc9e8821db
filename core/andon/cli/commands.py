"""The command line: its commands by name, each imported once it is asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand

from andon.cli import plugins
from andon.console.messages import put, say

COMMANDS = {
    "train": ("andon.cli.train:train", "Train."),
    "init": ("andon.cli.setup:init", "Write a commented config.yaml with every setting at its default."),
    "check": ("andon.cli.setup:check", "Say what a run would do."),
    "doctor": ("andon.cli.setup:doctor", "Say whether runs can train here, and what to do where not."),
    "watch": ("andon.cli.commands:watch", "Run a training script of your own under the contracts."),
    "plan": ("andon.cli.plan:plan", "Say what memory a run needs on each device."),
    "eval": ("andon.cli.results:evaluate", "Score a run's model on a file; prints JSON."),
    "predict": ("andon.cli.results:predict", "Label texts of a file, or lines of standard input."),
    "generate": ("andon.cli.results:generate", "Answer prompts, with the likeliest token at each place."),
    "export": ("andon.cli.results:export", "Write a run's model for others, with its card."),
    "show": ("andon.cli.inspect:show", "Show a run from start to end, or one step of it, by its ledger."),
    "explain": ("andon.cli.inspect:explain", "Explain a violation."),
    "diff": ("andon.cli.inspect:diff", "Find where two runs part."),
    "replay": ("andon.cli.inspect:replay", "Do steps of a run again and compare every digest."),
    "report": ("andon.cli.inspect:report", "Make one HTML page of a run, or of two side by side."),
}
"""Each command with where it is, as module:function, and how its docstring begins: so the list needs no module."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        put(version("andon"))
        raise typer.Exit


@app.callback()
def andon(
    shown: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Say which version this is.")
    ] = False,
) -> None:
    """Data-parallel LoRA training, every step a checked fact."""


def watch(context: typer.Context) -> None:
    """Run a training script of your own under the contracts. See andon watch --help."""
    # Listed here for --help alone: `main` runs it before typer is imported, which it does not need.
    from andon_contracts.watch.script import main

    raise typer.Exit(main(context.args))


class ListedCommand(TyperCommand):
    """A command of `COMMANDS`: its line in the list of commands, and itself once it is called."""

    def make_context(self, *given: Any, **named: Any) -> Any:
        """See click: the context in which the command itself is called."""
        try:
            found = _imported(str(self.name))
        except KeyboardInterrupt:  # which typer ends with, and without a word
            say("interrupted")
            raise
        try:
            return found.make_context(*given, **named)
        except Exception as error:
            # By name: typer brings its own copy of click, or imports it, depending on its version.
            if type(error).__name__ == "NoSuchOption" and any("--set" in option.opts for option in found.params):
                _point_to_set(error)
            raise


def _point_to_set(error: Any) -> None:
    from andon.config.load import meant_by

    meant = meant_by(error.option_name.lstrip("-").replace("-", "_"))
    if meant:
        how = f". Use --set {meant}=VALUE" if " " not in meant else f"; {meant}"
        error.message, error.possibilities = error.message + how, None


def _imported(name: str) -> Any:
    module, _, function = COMMANDS[name][0].partition(":")
    # A script has options of its own, which are not to be read here.
    theirs = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, context_settings=theirs if name == "watch" else None)(getattr(import_module(module), function))
    return typer.main.get_command(alone)


def _listed() -> None:
    """What stands for each command in the list; never called."""


for _name, (_, _begins) in COMMANDS.items():
    app.command(_name, help=_begins, cls=ListedCommand)(_listed)
plugins.register(app)
