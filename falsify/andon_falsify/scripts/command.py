"""The user's command with places in it for what the suite chooses."""

from __future__ import annotations

import glob
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from andon.console.messages import InputError, Problem
from andon_falsify.subjects.case import Case

_RESUME = "{resume:"


@dataclass(frozen=True)
class Command:
    """A command line with `{world}`, `{local_batch}` and, where the script has them, `{accumulation}`, `{folder}` and
    `{resume:WORDS}`.

    `{folder}` becomes a folder that is new for every run and the same for a run and its resumption. `{resume:WORDS}`
    becomes nothing, and `WORDS` where a run that was killed is to be taken up. These may have places in them, and
    braces of their own that are closed; of a path with `*` in it they name the newest.
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
        if _RESUME in text and "{folder}" not in text:
            wrong.append(Problem("--script", "has {resume:...} but no {folder}: where is what is to be resumed?"))
        try:
            parts = list(_parts(text))
            shlex.split("".join(part for part, _ in parts))
            shlex.split("".join(part for part, resuming in parts if not resuming))
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
        return _RESUME in self.text

    def words(self, case: Case, folder: str, *, resumed: bool = False) -> list[str]:
        """The command for the layout of `case`, as words."""
        values = {
            "world": str(case.world),
            "local_batch": str(case.local_batch),
            "accumulation": str(case.accumulation),
            "folder": shlex.quote(folder),
        }
        filled = ""
        for part, resuming in _parts(self.text):
            for name, value in values.items():
                part = part.replace(f"{{{name}}}", value)
            if not resuming:
                filled += part
            elif resumed:
                filled += shlex.join(map(_newest, shlex.split(part)))
        return shlex.split(filled)


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """What stands outside of `{resume:...}`, and each time what stands within (True), in order.

    Raises `ValueError` for one that is not closed.
    """
    outside, found, rest = text.partition(_RESUME)
    yield outside, False
    while found:
        depth, end = 1, 0
        while depth:
            if end == len(rest):
                msg = "a {resume: is not closed"
                raise ValueError(msg)
            depth += {"{": 1, "}": -1}.get(rest[end], 0)
            end += 1
        yield rest[: end - 1], True
        outside, found, rest = rest[end:].partition(_RESUME)
        yield outside, False


def _newest(word: str) -> str:
    """The newest path that `word` is a pattern of; itself where there is none, or it is no pattern."""
    return max(glob.glob(word), key=os.path.getmtime) if "*" in word and glob.glob(word) else word
