"""The page's parts put together: template, style, script, and the policy that names them by their digests."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from andon_contracts.legible import legible
from andon_falsify.campaign.findings import Report
from andon_falsify.report.page.view import Page, filter_rules, width_rule

_MOST_CHARACTERS = 4000


def render(report: Report) -> str:
    """The whole page. Text longer than 4000 characters is cut, with the number of those left out; JSON has all."""
    page = Page(report)
    columns = len(page.table.subjects)
    style = f"{_part('style.css')}\n{width_rule(columns)}{filter_rules(columns)}"
    script = _part("script.js")
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _template().render(page=page, style=Markup(style), script=Markup(script), policy=policy)


def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_part("page.html.j2"))


def _shown(value: object) -> object:
    """What the template puts in: style and script as they are, all else as text that can be read, still unescaped."""
    return value if isinstance(value, Markup) else legible(str(value), _MOST_CHARACTERS)


def _part(name: str) -> str:
    return resources.files("andon_falsify.report.page").joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    """How a content security policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
