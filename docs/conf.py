"""How the pages of this folder become a site: `tox -e docs`. A warning is an error.

Files elsewhere in the repository that are read as pages, the README first of all, stay where they are: a page of this
folder stands for each in `PAGES`. Relative links are led to the page, or to the file.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from andon.config.schema import Config

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index",
    "CONTRIBUTING.md": "contributing",
    "SECURITY.md": "security",
    "CHANGELOG.md": "changes",
    "falsify/nemesis/README.md": "faults-in-real-runs",
}
"""A file of the repository, and the page of this folder in which it is read."""
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")

project = "Andon"
author = "The Andon authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
# One pair of back quotes in a docstring is a name of code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 60
highlight_language = "none"
smartquotes = False  # an option of a command keeps its two dashes

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "Andon"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_use_index = html_copy_source = html_show_sourcelink = html_show_copyright = html_show_sphinx = False


def setup(app: Sphinx) -> None:
    """Have every page read as `as_page` makes it."""
    app.connect("source-read", as_page)


def as_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Put a file of the repository and what is generated into its page, and lead relative links to where they end."""
    del app
    file = next((file for file, name in PAGES.items() if name == page), f"docs/{page}.md")
    text = source[0] if file == f"docs/{page}.md" else (ROOT / file).read_text(encoding="utf-8") + source[0]
    if "<!-- settings -->" in text:
        text = text.replace("<!-- settings -->", "\n".join(settings()))
    folder = posixpath.dirname(f"docs/{page}.md")

    def led(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), link[1]))
        return posixpath.relpath(f"docs/{PAGES[target]}.md" if target in PAGES else target, folder)

    source[0] = _LINK.sub(led, text)


def settings() -> Iterator[str]:
    """Every key of a configuration, from the schema that reads it: lines of Markdown, a table for each section."""
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
    """One key: its values, its default as YAML has it, what it is for."""
    default = field["default"]
    shown = default if isinstance(default, str) else json.dumps(default)
    return f"| `{key}` | {_values(field)} | `{shown}` | {field.get('description', '')} |"


def _values(field: dict[str, Any]) -> str:
    """What may stand there, in words."""
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
    """A bound as a reader takes it in: large powers of two by their exponent."""
    large = isinstance(bound, int) and bound >= 1 << 14 and bound & (bound - 1) == 0
    return f"2^{bound.bit_length() - 1}" if large else str(bound)
