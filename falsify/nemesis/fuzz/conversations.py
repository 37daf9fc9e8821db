"""Damaged conversations and chat templates: rejected, or encoded into valid rows."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path

from andon.console.problems import InputError
from andon.data.chat import EncodedRow, encode_each
from andon.data.conversations import Conversation, ConversationSet, Message, read_conversations
from andon.data.tokens import Tokenizer, byte_tokenizer

from .mutations import damaged

_LONGEST = 400
_TALK = (
    Message("system", "be brief"),
    Message("user", "one good day"),
    Message("assistant", "ünïcödé ☃"),
    Message("user", 'a "quoted", comma'),
    Message("assistant", "0", 0.5),
)
_ROW = {"messages": [{"role": each.role, "content": each.content} for each in _TALK]}
_WEIGHED = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0.5}]}
_PAIR = {"prompt": "what", "completion": "that", "id": 7}
_TEXT = {"text": "as it is", "source": "a book"}


def _lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


_FILES = (
    ("rows.jsonl", _lines(_ROW, _WEIGHED, _ROW)),
    ("rows.jsonl", _lines(_PAIR, {**_PAIR, "id": 8})),
    ("rows.json", _lines(_TEXT, _TEXT)),
    ("rows.csv", b'prompt,completion\r\n"a, ""b""",c\r\nd,"e\nf"\r\n'),
)
_BY_PREFIXES = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
_BY_MARKS = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}"
)
_DATED = (
    "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% for m in messages %}"
    "{{ raise_exception('odd') if m.role == 'tool' }}{{ '[' ~ m.role ~ ']' ~ m.content ~ eos_token }}{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)


def conversations(draw: random.Random, folder: Path) -> str:
    """A file of conversations: rows with at least one trained token, or `InputError` that names the file."""
    name, content = draw.choice(_FILES)
    path, tokenizer = folder / name, _tokenizer(True)
    path.write_bytes(damaged(draw, content))
    try:
        found = read_conversations(path)
        rows = _encoded(tokenizer, found)
    except InputError as error:
        return "" if str(path) in str(error) else "the message does not name the file"
    return _fault(found, rows, tokenizer)


def template(draw: random.Random, _folder: Path) -> str:
    """A model's chat template: it trains the answers, or `InputError` without control codes."""
    tokenizer = _tokenizer(False)
    chosen = draw.choice((_BY_PREFIXES, _BY_MARKS, _DATED))
    tokenizer.base.chat_template = damaged(draw, chosen.encode()).decode("utf-8", "replace")
    data = ConversationSet((Conversation(0, _TALK, "rows.jsonl:1"),), "rows.jsonl", "messages")
    try:
        rows = _encoded(tokenizer, data)
    except InputError as error:
        return "" if all(line.isprintable() for line in str(error).split("\n")) else "the message holds control codes"
    (row,) = rows
    answers = [each.content for each in _TALK if each.role == "assistant"]
    learned = str(tokenizer.base.decode([id_ for id_, weight in zip(row.ids, row.weights, strict=True) if weight]))
    if row.cut == 0 and not all(answer in learned for answer in answers):
        return f"an answer is not learned: {learned!r}"
    return _fault(data, rows, tokenizer)


def _encoded(tokenizer: Tokenizer, data: ConversationSet) -> list[EncodedRow]:
    rows: list[EncodedRow] = []
    encode_each(tokenizer, data.form, data.rows, _LONGEST, "assistant", rows.append)
    return rows


def _fault(data: ConversationSet, rows: list[EncodedRow], tokenizer: Tokenizer) -> str:
    """What is wrong with encoded rows."""
    if [row.id for row in rows] != [row.id for row in data.rows] or not rows:
        return "other rows were encoded than were read"
    for row in rows:
        if len(row.ids) != len(row.weights) or len(row.ids) > _LONGEST or row.weights[0] != 0.0:
            return f"row {row.id} has {len(row.ids)} ids, {len(row.weights)} weights"
        if not any(row.weights) or not all(0.0 <= weight < math.inf for weight in row.weights):
            return f"row {row.id} has the weights {[*row.weights]}"
        if not all(0 <= id_ < tokenizer.vocab_size for id_ in row.ids):
            return f"row {row.id} has an id that the vocabulary has not"
    return ""


@cache
def _tokenizer(split_special_tokens: bool) -> Tokenizer:
    """The tokenizers of models recognize special tokens in a text; the byte tokenizer by default does not."""
    tokenizer = byte_tokenizer()
    if not split_special_tokens:
        tokenizer.base.split_special_tokens = False
    return tokenizer


def prepare() -> None:
    """Create the tokenizers and import the renderer of templates."""
    template(random.Random(0), Path())
    _tokenizer(True)
