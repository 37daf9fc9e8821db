"""A run, or two side by side, as one HTML page that needs nothing else: no network, no script, no colour to be read.

A policy in the page lets the browser load nothing and use its one style. What is shown is put in by a template that
escapes, so the policy is a second lock. Every curve is a table too.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from markupsafe import Markup

from andon.console.html import escaping, source
from andon.inspection.report.curves import HEIGHT, WIDTH
from andon.inspection.report.page import Page, data_of
from andon.run.atomic import write_whole

_MOST_CHARACTERS = 2000


def write_page(page: Page, path: Path) -> None:
    """Write `page` to `path`, whole or not at all. Raises `InputError` where that cannot be written."""
    write_whole(path, render(page).encode())


def render(page: Page) -> str:
    """The whole page. A text longer than 2000 characters is cut, and says how many are left out."""
    style = _part("style.css")
    policy = f"default-src 'none'; style-src {source(style)}; base-uri 'none'; form-action 'none'"
    template = escaping(_part("page.html.j2"), _MOST_CHARACTERS)
    return template.render(**data_of(page), style=Markup(style), policy=policy, width=WIDTH, height=HEIGHT)


def _part(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
