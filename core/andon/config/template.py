"""The commented configuration that `andon init` writes, made from the schema so that it cannot fall behind it."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from andon.config.document import dump
from andon.config.schema import Config

_HEAD = """\
# Every setting of a run at its default. Keys that are left out keep their defaults.
# Train with: andon train config.yaml [--workers N] [--set KEY=VALUE]
"""
_COMMENT_COLUMN = 36


def template() -> str:
    """The text of a config.yaml that `load_config` reads back to the defaults."""
    return _HEAD + "\n".join(_entries(Config(), "")) + "\n"


def _entries(values: BaseModel, indent: str) -> Iterator[str]:
    plain = values.model_dump(mode="json")
    for name, field in type(values).model_fields.items():
        inner = getattr(values, name)
        if isinstance(inner, BaseModel):
            about = " ".join((type(inner).__doc__ or "").split())
            yield f"\n# {about}\n{name}:"
            yield from _entries(inner, indent + "  ")
        else:
            value = dump([plain[name]], flow=True).strip()[1:-1]  # as the only entry of a list, so that it is one line
            setting = f"{indent}{name}: {value}"
            yield f"{setting:<{_COMMENT_COLUMN}}# {field.description}" if field.description else setting
