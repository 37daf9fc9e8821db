"""How the pages of this folder become a site: `tox -e docs`. A warning is an error, a dead link is a warning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from andon.config.schema import Config

DOCS = Path(__file__).parent
_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")

project = "Andon"
author = "The Andon authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
highlight_language = "none"
smartquotes = False  # `--` in the text of an option stays two dashes

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "Andon"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_use_index = html_copy_source = html_show_sourcelink = html_show_copyright = html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Adapt each page when it is read."""
    app.connect("source-read", adapt)


def adapt(app: Sphinx, page: str, source: list[str]) -> None:
    """Fill in the table of settings, and adapt links to the repository: `source` is the text of a page."""
    del app, page
    text = _LINK.sub(_led, source[0])
    source[0] = text.replace("<!-- settings -->", "\n".join(settings())) if "<!-- settings -->" in text else text


def _led(link: re.Match[str]) -> str:
    """A link to a file outside this folder becomes a download, one to a folder plain text."""
    text, target = link[1], link[2]
    if (DOCS / target).is_dir():
        return text
    # Without `path:`, the parser would look for a page of this name.
    return f"[{text}](path:{target})" if target.endswith(".md") and (DOCS / target).is_file() else link[0]


def settings() -> Iterator[str]:
    """Every key of a configuration, from its schema: lines of Markdown, a table for each section."""
    schema = Config.model_json_schema()
    yield from ("| key | values | default | |", "| --- | --- | --- | --- |")
    parts: dict[str, dict[str, Any]] = {}
    for name, field in schema["properties"].items():
        if "$ref" in field:
            parts[name] = schema["$defs"][field["$ref"].rpartition("/")[2]]
        else:
            yield _row(name, field)
    for name, part in parts.items():
        yield from ("", f"## {name}", "", part["description"], "")
        yield from ("| key | values | default | |", "| --- | --- | --- | --- |")
        yield from (_row(f"{name}.{key}", field) for key, field in part["properties"].items())


def _row(key: str, field: dict[str, Any]) -> str:
    """One key: its values, its default as in YAML, its description."""
    default = field["default"]
    shown = default if isinstance(default, str) else json.dumps(default)
    described = field.get("description", "").replace("<", "&lt;")  # or the browser takes it for a tag
    return f"| `{key}` | {_values(field)} | `{shown}` | {described} |"


def _values(field: dict[str, Any]) -> str:
    """The allowed values, in words."""
    for several in ("anyOf", "oneOf"):
        if several in field:
            return ", or ".join(map(_values, field[several]))
    if "$ref" in field:
        part = Config.model_json_schema()["$defs"][field["$ref"].rpartition("/")[2]]
        return " and ".join(f"`{key}` ({_values(each)})" for key, each in part["properties"].items())
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        items = [_values(each) for each in field.get("prefixItems", [field["items"]] if "items" in field else [])]
        return f"a list of {' and '.join(dict.fromkeys(items))}"
    words = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "a text",
        "null": "null",
    }
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {_number(field[name])}" for name, sign in signs.items() if name in field]
    return " ".join([words[field["type"]], ", ".join(bounds)]).strip()


def _number(bound: float) -> str:
    """A bound in short: large powers of two as `2^N`."""
    large = isinstance(bound, int) and bound >= 1 << 14 and bound & (bound - 1) == 0
    return f"2^{bound.bit_length() - 1}" if large else str(bound)
