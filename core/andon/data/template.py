"""A model's chat template, rendered in the sandbox of transformers, with bounded length and a fixed date.

A template is a program by the model's author (SECURITY.md). transformers renders it in jinja2's immutable sandbox,
which reaches no file, module or Python internals. Here the lengths of the template and of its output are bounded, and
what it raises becomes a fault of the row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from andon.console.problems import InputError, Problem
from andon.data.conversations import Message
from andon.data.tokens import Tokenizer
from andon_contracts.legible import legible_line

MOST_CHARACTERS = 1 << 20
"""The longest template source; the longest in use have about ten thousand characters."""
MOST_WRITTEN = 1 << 26
"""The longest output for one conversation, in characters."""
_LONGEST_REASON = 300
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CLOCK = "strftime_now"
_UNKNOWN_CODE = "a part of the date is not known here: "
_DATE = dict(
    each.split("=")
    for each in [
        "%-d=26",
        "%-m=7",
        "%-H=0",
        "%-I=12",
        "%e=26",
        "%A=Friday",
        "%a=Fri",
        "%j=208",
        "%I=12",
        "%p=AM",
        "%F=2024-07-26",
        "%T=00:00:00",
        "%d=26",
        "%b=Jul",
        "%B=July",
        "%m=07",
        "%Y=2024",
        "%y=24",
        "%H=00",
        "%M=00",
        "%S=00",
    ]
)
"""The date that a template gets as today, so that a run that is repeated or resumed later has the same rows."""


class TemplateFault(ValueError):
    """Why this template cannot write a conversation, or why the result cannot be trained on."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the character spans [start, end) that the template marks as written by the model, in
    order."""

    text: str
    marks: tuple[tuple[int, int], ...]


class ChatTemplate:
    """The template of a tokenizer. `marked`: it marks with `{% generation %}` what the model writes. `dated`: it writes
    today's date, for which it always gets the same day."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._base = tokenizer.base
        try:
            source = self._base.get_chat_template()
        except (ValueError, TypeError) as error:
            raise _refused(f"cannot be found: {_words(error)}") from error
        if not isinstance(source, str):
            raise _refused(f"is a {type(source).__name__} and no text")
        if len(source) > MOST_CHARACTERS:
            raise _refused(f"has {len(source)} characters, more than {MOST_CHARACTERS}")
        self.marked = _MARK.search(source) is not None
        self.dated = _CLOCK in source
        self._source = _without_clock(source) if self.dated else source

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> Rendered:
        """`messages` as the model reads them; with `asks` up to the point at which it begins to answer.

        Raises `TemplateFault` with the template's own message, and `InputError` for a malformed template.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        given = [{"role": each.role, "content": each.content, **json.loads(each.extra or "{}")} for each in messages]
        tools = json.loads(messages[0].tools or "null")
        settings: dict[str, Any] = {**self._base.special_tokens_map, "return_assistant_tokens_mask": self.marked}
        rendered: Any
        try:
            rendered = render_jinja_template(
                [given], tools, chat_template=self._source, add_generation_prompt=asks, **settings
            )
        except TemplateSyntaxError as error:
            raise _refused(f"is no template: {_words(error)}") from error
        except Exception as error:  # a third-party program may raise anything
            raise TemplateFault(f"the model's chat template refuses it: {_words(error)}") from error
        (text,), marks = rendered
        if len(text) > MOST_WRITTEN:
            raise TemplateFault(f"the model's chat template makes {len(text)} characters of it")
        return Rendered(text, tuple(marks[0]) if self.marked else ())


def _without_clock(source: str) -> str:
    """The template after a macro that replaces the clock. The macro itself writes nothing, because transformers sets
    jinja2 to drop the line break after a block."""
    written = "".join(f" | replace({code!r}, {text!r})" for code, text in _DATE.items())
    refusal = f"{{%- if '%' in text -%}}{{{{ raise_exception({_UNKNOWN_CODE!r} ~ format) }}}}{{%- endif -%}}"
    body = f"{{%- set text = format{written} -%}}{refusal}{{{{ text }}}}"
    return f"{{%- macro {_CLOCK}(format) -%}}{body}{{%- endmacro %}}\n{source}"


def _words(error: Exception) -> str:
    said = legible_line(" ".join(str(error).split())) or type(error).__name__
    return said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."


def _refused(what: str) -> InputError:
    return InputError([Problem("model.base", f"the chat template {what}")])
