"""Pages that show text of others: a template that escapes it, and how a page's policy names what a browser may run."""

from __future__ import annotations

import base64
import hashlib

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from andon_contracts.legible import legible


def escaping(template: str, most: int) -> Template:
    """The template of this text. What it is given is escaped, with all that cannot be seen written out, and cut after
    `most` characters with the number of those left out; only `Markup` stays as it is."""

    def shown(value: object) -> object:
        return value if isinstance(value, Markup) else legible(str(value), most)

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, finalize=shown, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template)


def source(text: str) -> str:
    """How a content security policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
