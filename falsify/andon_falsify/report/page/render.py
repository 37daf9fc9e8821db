"""The page's parts put together: template, style, script, and the policy that names them by their digests."""

from __future__ import annotations

from importlib import resources

from markupsafe import Markup

from andon.console.html import escaping, source
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
        f"default-src 'none'; style-src {source(style)}; script-src {source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    template = escaping(_part("page.html.j2"), _MOST_CHARACTERS)
    return template.render(page=page, style=Markup(style), script=Markup(script), policy=policy)


def _part(name: str) -> str:
    return resources.files("andon_falsify.report.page").joinpath(name).read_text(encoding="utf-8")
