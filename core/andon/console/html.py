"""HTML pages with untrusted text: an escaping template, and source expressions for content security policies."""

from __future__ import annotations

import base64
import hashlib

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from andon_contracts.legible import legible


def escaping(template: str, most: int) -> Template:
    """Compile a Jinja template that makes every value legible (invisible characters written out), cuts it after `most`
    characters with a count of the rest, and escapes it. `Markup` stays unchanged."""

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else legible(str(value), most)

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=shown, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template)


def source(text: str) -> str:
    """The source expression by which a content security policy allows the inline style or script `text`."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
