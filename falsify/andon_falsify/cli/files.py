"""The files of a report: written again and again while a campaign goes on, each time as a whole."""

from __future__ import annotations

import os
from pathlib import Path

from andon.console.messages import InputError, Problem, say
from andon_falsify.campaign.findings import Report
from andon_falsify.report.document import write_json
from andon_falsify.report.junit import write_junit

_AS_IT_GOES = ("--json", "--junit")
"""The page can be made from the first at any time."""


class ReportFiles:
    """Where `--json`, `--junit` and `--html` are to be written, by option."""

    def __init__(self, paths: dict[str, Path]) -> None:
        """Raises `InputError` where one could not be written afterwards."""
        wrong = []
        for option, path in paths.items():
            if path.is_dir():
                wrong.append(Problem(option, f"{path} is a folder"))
            elif not os.access(path.parent, os.W_OK | os.X_OK):
                there = "cannot be written to" if path.parent.is_dir() else "is no folder"
                wrong.append(Problem(option, f"{path.parent} {there}"))
        if wrong:
            raise InputError(wrong)
        self._paths = paths
        self._refused: set[str] = set()

    def __contains__(self, option: str) -> bool:
        return option in self._paths

    def __len__(self) -> int:
        return len(self._paths)

    def write(self, report: Report) -> None:
        """Write all. Raises `InputError` for the first that cannot be."""
        for option, path in self._paths.items():
            _write(option, report, path)

    def known(self, report: Report) -> None:
        """Write what can be read before the end; what is refused is said, once, and tried again."""
        try:
            for option in _AS_IT_GOES:
                if option in self._paths:
                    _write(option, report, self._paths[option])
        except InputError as error:
            if str(error) not in self._refused:
                self._refused.add(str(error))
                say(*map(str, error.problems))


def _write(option: str, report: Report, path: Path) -> None:
    from andon_falsify.report.page import write_html

    {"--json": write_json, "--junit": write_junit, "--html": write_html}[option](report, path)
