"""A report as one HTML page that needs nothing else: no network, no script to be read, no colour to be understood.

A policy in the page lets the browser run its one script and style and load nothing. What is shown is put in by a
template that escapes, so the policy is a second lock.
"""

from __future__ import annotations

from pathlib import Path

from andon.run.atomic import write_whole
from andon_falsify.campaign.findings import Report
from andon_falsify.report.page.render import render


def write_html(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` where that cannot be written."""
    write_whole(path, render(report).encode())
