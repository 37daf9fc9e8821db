"""A page of HTML as its readers have it: elements, text, tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input"}


@dataclass
class Read(HTMLParser):
    """A page taken apart: its elements with their attributes, and the text outside of style and script."""

    page: str
    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.page)
        assert self.inside == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.inside.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.inside and self.inside[-1] not in ("style", "script"):
            self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@dataclass
class Shown:
    """A table: its caption, and each row's cells as text and, where a cell has one, as the exact number behind it."""

    caption: str = ""
    rows: list[list[str]] = field(default_factory=list)
    exact: list[list[float | None]] = field(default_factory=list)

    def by_name(self) -> dict[str, list[str]]:
        return {row[0]: row[1:] for row in self.rows}

    def numbers(self) -> dict[str, list[float | None]]:
        return {row[0]: numbers[1:] for row, numbers in zip(self.rows, self.exact, strict=True)}


@dataclass
class Tables(Read):
    tables: list[Shown] = field(default_factory=list)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        if tag == "table":
            self.tables.append(Shown())
        elif tag == "tr":
            self.tables[-1].rows.append([])
            self.tables[-1].exact.append([])
        elif tag in ("th", "td"):
            self.tables[-1].rows[-1].append("")
            self.tables[-1].exact[-1].append(None)
        elif tag == "data":
            self.tables[-1].exact[-1][-1] = float(dict(attrs)["value"] or "")

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if "caption" in self.inside:
            self.tables[-1].caption += data
        elif "th" in self.inside or "td" in self.inside:
            self.tables[-1].rows[-1][-1] += data

    def named(self, caption: str) -> Shown:
        """The table of that caption, or the one whose caption begins so."""
        exact = [table for table in self.tables if table.caption == caption]
        (found,) = exact or self.all_named(caption)
        return found

    def all_named(self, caption: str) -> Iterator[Shown]:
        return (table for table in self.tables if table.caption.startswith(caption))
