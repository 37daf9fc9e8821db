"""The user's command with places in it for what the suite chooses."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from andon.console.problems import InputError, Problem
from andon_falsify.subjects.case import Case

_RESUME = re.compile(r"\{resume:([^{}]*)\}")
_PLACES = ("world", "local_batch", "accumulation", "folder")


@dataclass(frozen=True)
class Command:
    """A command line with `{world}`, `{local_batch}` and, where the script has them, `{accumulation}`, `{folder}` and
    `{resume:WORDS}`.

    `{folder}` becomes a folder that is new for every run and the same for a run and its resumption. `{resume:WORDS}`
    becomes nothing, and `WORDS` where a run that was killed is to be taken up.
    """

    text: str

    @classmethod
    def read(cls, text: str) -> Command:
        """The command, if it can be laid out. Raises `InputError` with all that is missing."""
        wrong = [
            Problem("--script", f"has no {{{name}}}, {why}")
            for name, why in (
                ("world", "so that the number of ranks cannot be varied"),
                ("local_batch", "so that the global batch would grow with the number of ranks"),
            )
            if f"{{{name}}}" not in text
        ]
        if _RESUME.search(text) and "{folder}" not in text:
            wrong.append(Problem("--script", "has {resume:...} but no {folder}: where is what is to be resumed?"))
        try:
            shlex.split(text)
        except ValueError as error:
            wrong.append(Problem("--script", f"cannot be split into words: {str(error).lower()}"))
        if wrong:
            raise InputError(wrong)
        return cls(text)

    @property
    def accumulates(self) -> bool:
        """Whether it takes a number of micro-batches."""
        return "{accumulation}" in self.text

    @property
    def resumes(self) -> bool:
        """Whether it says how a run is taken up."""
        return _RESUME.search(self.text) is not None

    def words(self, case: Case, folder: str, *, resumed: bool = False) -> list[str]:
        """The command for the layout of `case`, as words."""
        text = _RESUME.sub(r"\1" if resumed else "", self.text)
        values = (case.world, case.local_batch, case.accumulation, shlex.quote(folder))
        for name, value in zip(_PLACES, values, strict=True):
            text = text.replace(f"{{{name}}}", str(value))
        return shlex.split(text)
