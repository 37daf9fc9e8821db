"""A report as one HTML page without external resources, readable without scripts and without colour.

The page's content security policy allows its own script and style and nothing else. The template escapes every value,
so that the policy is a second line of defence.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from markupsafe import Markup

from andon.console.html import escaping, source
from andon.run.atomic import write_whole
from andon_falsify.report.findings import Report, count_marks, reasons
from andon_falsify.report.page.curve import draw
from andon_falsify.report.page.view import CLASSES, Page, filter_rules, width_rule

_MOST_CHARACTERS = 4000


def write_html(report: Report, path: Path) -> None:
    """Write `report` to `path`, whole or not at all. Raises `InputError` if the file cannot be written."""
    write_whole(path, render(report).encode())


def render(report: Report) -> str:
    """The page. A text longer than 4000 characters is cut, with a count of the rest; the JSON report has all of it."""
    page = Page(report)
    columns = len(page.table.subjects)
    style = f"{_part('style.css')}\n{width_rule(columns)}{filter_rules(columns)}"
    script = _part("script.js")
    policy = (
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    template = escaping(_part("page.html.j2"), _MOST_CHARACTERS)
    functions = {"draw": draw, "reasons": reasons, "count_marks": count_marks}
    trusted = {"style": Markup(style), "script": Markup(script), "policy": policy}
    return template.render(page=page, report=report, classes=CLASSES, **functions, **trusted)


def _part(name: str) -> str:
    return resources.files("andon_falsify.report.page").joinpath(name).read_text(encoding="utf-8")
