"""Encodes conversations as token ids with loss weights, by the chat template of a tokenizer.

The tokens of an answer are never guessed. They are the spans that the template marks as generated, or the text after
the generation prompt. Both are verified on token ids: the ids of the text before an answer must be a prefix of the ids
of the whole row, as they are at inference.

A template is a program by the model's author (SECURITY.md). transformers renders it in jinja2's immutable sandbox,
without access to files, modules or Python internals. This module bounds the lengths of the template and of its output,
and reports exceptions of the template as faults of the row.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, Literal

from andon.console.messages import InputError, ProblemList, shown
from andon.data.conversations import ANSWERS, Conversation, Form, Message
from andon.data.tokens import Tokenizer
from andon_contracts.legible import legible_line

TrainOn = Literal["assistant", "all"]

MOST_CHARACTERS = 1 << 20
"""Length limit of a template's source; the longest in use have about ten thousand characters."""
MOST_WRITTEN = 1 << 26
"""Length limit of the rendered text of one conversation, in characters."""
_LONGEST_REASON = 300
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CLOCK = "strftime_now"
_UNKNOWN_CODE = "a part of the date is not known here: "
_DATE = (
    "%-d=26 %-m=7 %-H=0 %-I=12 %e=26 %A=Friday %a=Fri %j=208 %I=12 %p=AM %F=2024-07-26 %T=00:00:00 %d=26 %b=Jul "
    "%B=July %m=07 %Y=2024 %y=24 %H=00 %M=00 %S=00"
)
"""The fixed date that templates get as today, so that a repeated or resumed run has the same rows."""
_THINKING = re.compile(r"</?think>")
_AT_ONCE = 256
"""Rows per tokenizer call."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """weights[i]: loss weight of predicting ids[i]; 0.0 for untrained tokens and for the first token.

    cut: number of tokens that were truncated. cut_trained: number of those with a loss weight. Arrays of types "i" and
    "f" take eight bytes per token; lists would take about forty.
    """

    id: int
    ids: array[int]
    weights: array[float]
    cut: int = 0
    cut_trained: int = 0


@dataclass(frozen=True)
class Encoding:
    """How rows were encoded.

    mask_source: how the trained tokens were determined. stops: the ids that end an answer, ascending; generation stops
    at them. notes: lines for the user. skipped: (id, place, fault) of each unusable row, which is encoded as one
    untrained token.
    """

    mask_source: str
    stops: tuple[int, ...]
    notes: tuple[str, ...]
    skipped: tuple[tuple[int, str, str], ...] = ()


@dataclass(slots=True)
class _Batch:
    """Encoded rows of one call; an unusable row is (id, place, fault). stops: the ids that end answers. extended: a
    stop token outside the marked span was added. spelling: text rows that contain special tokens."""

    rows: list[EncodedRow | tuple[int, str, str]] = field(default_factory=list)
    stops: set[int] = field(default_factory=set)
    extended: bool = False
    spelling: list[str] = field(default_factory=list)


MapBatches = Callable[[Callable[[list[Conversation]], _Batch], Iterator[list[Conversation]]], Iterable[_Batch]]
"""Like `map`, possibly in worker processes."""


def encode_each(
    tokenizer: Tokenizer,
    form: Form,
    conversations: Iterable[Conversation],
    max_length: int,
    train_on: TrainOn,
    keep: Callable[[EncodedRow], None],
    *,
    skip_bad: bool = False,
    positions: int | None = None,
    map_batches: MapBatches = map,
) -> Encoding:
    """Encode rows of one form in order, truncate each to `max_length` tokens, and pass it to `keep`.

    skip_bad: skip rows with faults. positions: the model's position limit; None: unknown.

    The chat template renders messages. Without a template, a prompt and its completion are concatenated between the
    begin and end tokens. Messages are too, each after its role, but only if the tokenizer splits special tokens in
    texts (`split_special_tokens`). Rows of text are encoded unchanged and trained as a whole.

    Raises `InputError` with every fault, by file and line: a template that raises, an answer whose tokens merge with
    the text before it or that does not end in a special token, special tokens in the text of a message, a row without
    trained tokens, a tokenizer without a chat template that `messages` need.
    """
    if max_length < 2:
        raise InputError.at(
            "model.max_length", f"must be at least 2: the first token is never predicted ({max_length})"
        )
    encoder = _Encoder(tokenizer, form, train_on)
    problems, all_ = ProblemList(skips=skip_bad), _Batch()
    skipped: list[tuple[int, str, str]] = []
    cut = cut_tokens = cut_trained = 0
    rows = iter(conversations)

    def encode(group: list[Conversation]) -> _Batch:
        return encoder.batch(group, max_length, positions, skip_bad)

    for batch in map_batches(encode, iter(lambda: list(islice(rows, _AT_ONCE)), [])):
        all_.stops |= batch.stops
        all_.spelling += batch.spelling
        all_.extended |= batch.extended
        for row in batch.rows:
            if isinstance(row, EncodedRow):
                keep(row)
                cut, cut_tokens, cut_trained = cut + bool(row.cut), cut_tokens + row.cut, cut_trained + row.cut_trained
            else:
                problems.add_row(*row[1:])
                skipped.append(row)
                keep(EncodedRow(row[0], array("i", [0]), array("f", [0.0])))
    problems.raise_if_any()
    notes = []
    if encoder.dated:
        notes.append("the chat template writes today's date; Andon passes one fixed date, so that runs can be repeated")
    if all_.spelling:
        first = f"(first: {all_.spelling[0]})"
        notes.append(f"{len(all_.spelling)} rows of text spell special tokens, which are read as such {first}")
    if cut:
        lost = f"{cut_tokens} tokens are dropped, {cut_trained} of them to be trained"
        notes.append(f"{cut} {'row is' if cut == 1 else 'rows are'} cut to {max_length} tokens: {lost}")
    source = encoder.mask_source(extended=all_.extended)
    return Encoding(source, tuple(sorted(all_.stops)), tuple(notes), tuple(skipped))


def encode_prompt(tokenizer: Tokenizer, form: Form, messages: Sequence[Message]) -> list[int]:
    """The prompt ids, up to the generation prompt, for a model trained on rows of this `form`.

    Raises `InputError` for the faults that `encode_each` reports.
    """
    encoder = _Encoder(tokenizer, form, "assistant")
    prompt = Conversation(0, tuple(messages), "the prompt")
    try:
        encoder.require_plain(prompt)
        ids = tokenizer.plain_ids([encoder.text(prompt.messages, asks=True)])[0]
        return [*encoder.opening_of(ids), *ids]
    except TemplateFault as error:
        raise InputError.at(prompt.where, str(error)) from error


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How to prompt the model with transformers only.

    example: a prompt as text; None: pass messages to the tokenizer's chat template. note: when the ids differ from
    those of `encode_prompt`; empty if they never do.
    """

    example: str | None
    note: str


def prompt_format(tokenizer: Tokenizer, form: Form) -> PromptFormat:
    """The prompt format for a model trained on rows of this `form`. Raises `InputError` as `encode_each` does."""
    encoder = _Encoder(tokenizer, form, "assistant")
    if encoder.templated:
        dated = "its chat template writes the date, which was one day always in training: answers may change with it"
        return PromptFormat(None, dated if encoder.dated else "")
    text = encoder.text((Message("user", "a prompt"),), asks=True)
    same = tokenizer.base(text)["input_ids"] == [*encoder.opening, *tokenizer.plain_ids([text])[0]]
    other = "its tokenizer puts other special tokens around a text than it was trained with: answers may be others"
    return PromptFormat(text, "" if same else other)


def show_row(tokenizer: Tokenizer, row: EncodedRow) -> Iterator[str]:
    """Yield a line per token of a row: position, id, loss weight (a dot for 0) and text."""
    trained = sum(weight > 0 for weight in row.weights)
    yield f"row {row.id}: {len(row.ids)} tokens, {trained} of them trained"
    for place, (id_, weight) in enumerate(zip(row.ids, row.weights, strict=True)):
        yield f"{place:6} {id_:7} {f'{weight:g}' if weight else '.':>6}  {tokenizer.shown(id_)}"
    if row.cut:
        yield f"cut: {row.cut} tokens at its end, {row.cut_trained} of them to be trained"


@dataclass(frozen=True, slots=True)
class _Turn:
    """The span of a message: `before` is the rendered text up to the message, `after` the text up to its end."""

    place: int
    before: str
    after: str
    weight: float
    answer: bool


class _Encoder:
    """Renders rows of one form, tokenises them, and determines the loss weights of their tokens."""

    def __init__(self, tokenizer: Tokenizer, form: Form, train_on: TrainOn) -> None:
        base = tokenizer.base
        self._tokenizer = tokenizer
        self._form = form
        self._all = train_on == "all" or form == "text"
        # A tokenizer that splits special tokens would also split those of a chat template.
        self._literal = bool(getattr(base, "split_special_tokens", False))
        self.templated = form != "text" and not self._literal and base.chat_template is not None
        self._template = ChatTemplate(tokenizer) if self.templated else None
        self.dated = self._template is not None and self._template.dated
        if not self.templated and not self._literal and form in ("messages", "prompt and completion as messages"):
            what = "the tokenizer has no chat template, which says how messages are written"
            remedy = "take a model that has one, put chat_template.jinja into its folder, or give prompt and completion"
            raise InputError.at("model.base", f"{what}: {remedy}")
        added = base.added_tokens_decoder
        self._special = {id_ for id_, token in added.items() if token.special} | {*base.all_special_ids}
        self._spelled = _any_of(() if self._literal else base.convert_ids_to_tokens(sorted(self._special)))
        # tokenizers encodes the parts between exactly matched added tokens independently.
        exact = self.templated and base.is_fast and added
        exact = exact and not any(token.lstrip or token.rstrip or token.normalized for token in added.values())
        self._splits: bool | None = None if exact and not any(token.single_word for token in added.values()) else False
        self._added = re.compile(f"({_any_of(token.content for token in added.values()).pattern})")
        self._id_of_added = {token.content: id_ for id_, token in added.items()}
        self._is_blank = cache(lambda id_: not str(base.decode([id_])).strip())
        self._batch = _Batch()
        self.opening: list[int] = []
        self._closing: int | None = None
        if not self.templated:
            self._closing = base.eos_token_id
            if self._closing is None:
                raise InputError.at("model.base", "the tokenizer has no end token (eos_token) to close a row with")
            begins = base.bos_token_id is not None
            if begins and (self._literal or base("a")["input_ids"][:1] == [base.bos_token_id]):
                self.opening = [base.bos_token_id]

    def mask_source(self, *, extended: bool) -> str:
        if self._all:
            return "all tokens"
        if self._template is None:
            return "prompt and completion" if self._form == "prompt and completion" else "messages, each after its role"
        if not self._template.marked:
            return "prefixes of the template, verified"
        return "the template's generation marks" + (", and the stop token after each" if extended else "")

    def require_plain(self, row: Conversation) -> None:
        """Raise `TemplateFault` for a message that contains a special token. In rows of text, where special tokens may
        mark the turns, they are only noted."""
        for place, message in enumerate(row.messages):
            match = next(filter(None, map(self._spelled.search, (message.content, message.extra, message.tools))), None)
            if match is not None and self._form == "text":
                self._batch.spelling.append(row.where)
            elif match is not None:
                what = f"{self._name(place)} spells the special token {shown(match[0])} at character {match.start()}"
                remedy = "which would be read as one of the template's own; take it out, or write it otherwise"
                raise TemplateFault(f"{what}, {remedy}")

    def _name(self, place: int) -> str:
        return ("prompt", "completion")[place] if self._form == "prompt and completion" else f"message {place}"

    def text(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Render messages as one text; with `asks`, append the generation prompt."""
        if self._template is not None:
            return self._template.render(messages, asks=asks).text
        if any(each.extra or each.tools for each in messages):
            raise TemplateFault("tools need a chat template, and the tokenizer has none")
        if self._form in ("prompt and completion", "text"):
            return "".join(each.content for each in messages)
        turns = (f"{each.role}: {each.content}" + ("" if each.role == ANSWERS else "\n") for each in messages)
        return "".join(turns) + (f"{ANSWERS}: " if asks else "")

    def batch(self, rows: Iterable[Conversation], most: int, positions: int | None, skips: bool) -> _Batch:
        """Encode `rows`. most, positions, skips: `max_length`, `positions` and `skip_bad` of `encode_each`."""
        self._batch = _Batch()
        drafts: list[tuple[Conversation, str, list[_Turn], TemplateFault | None]] = []
        for row in rows:
            try:
                self.require_plain(row)
                drafts.append((row, *self._draft(row), None))
            except TemplateFault as error:
                drafts.append((row, "", [], error))
        texts: dict[str, None] = {}
        for _, whole, turns, fault in drafts:
            if fault is None:
                texts |= dict.fromkeys((whole, *(text for turn in turns for text in (turn.before, turn.after))))
        ids_of = dict(zip(texts, self._ids_of([*texts]), strict=True))
        for row, whole, turns, fault in drafts:
            try:
                if fault is not None:
                    raise fault
                ids, weights = self._weigh(ids_of, whole, turns)
                if not any(weights[:most]):
                    raise TemplateFault(_untrained(weights, most, positions, skips))
                lost, kept = weights[most:], (array("i", ids[:most]), array("f", weights[:most]))
                self._batch.rows.append(EncodedRow(row.id, *kept, len(lost), len(lost) - lost.count(0.0)))
            except TemplateFault as error:
                self._batch.rows.append((row.id, row.where, f"{row.side}: {error}" if row.side else str(error)))
        return self._batch

    def _ids_of(self, texts: list[str]) -> list[list[int]]:
        """Like `plain_ids`, but texts are split at added tokens and each distinct part is tokenised once. The first
        texts are also tokenised whole, and a difference disables splitting for good."""
        if self._splits is False:
            return self._tokenizer.plain_ids(texts)
        split = [self._added.split(text) for text in texts]
        parts = [*{part: None for each in split for part in each[::2] if part}]
        ids_of = dict(zip(parts, self._tokenizer.plain_ids(parts), strict=True))
        ids_of |= {token: [id_] for token, id_ in self._id_of_added.items()}
        joined = [[id_ for part in each if part for id_ in ids_of[part]] for each in split]
        if self._splits is None:
            whole = self._tokenizer.plain_ids(texts)
            several = any(len(each) > 3 for each in split)  # at least two added tokens: conclusive
            self._splits = False if joined != whole else True if several else None
            return whole
        return joined

    def _draft(self, row: Conversation) -> tuple[str, list[_Turn]]:
        messages = row.messages
        if self._form == "text":
            return messages[0].content, []
        if self._template is not None and self._template.marked and not self._all:
            return self._marked(messages, self._template)
        whole = self.text(messages)
        self._all_there(messages, whole)
        turns = []
        for place, message in enumerate(messages):
            answer = message.role == ANSWERS
            usual = message.weight == 1.0 if self._all else not answer or message.weight == 0.0
            closing = self._all and answer and place == len(messages) - 1  # its turn records the stop token
            if usual and not closing and (self._template is not None or not answer):
                continue
            if answer and place == 0 and self._template is not None and not self._all:
                raise TemplateFault('begins with an answer, to which nothing leads; give that message "train": false')
            # Templates cannot render an empty list of messages.
            before = self.text(messages[:place], asks=answer) if place or self._template is None else ""
            after = whole if place == len(messages) - 1 else self.text(messages[: place + 1])
            if not whole.startswith(before) or not after.startswith(before):
                what = f"what the chat template writes up to {self._name(place)} when it asks for it"
                remedy = "take a template with generation marks, or make a row of each answer"
                why = "does not begin the whole row, so that nothing says which tokens are the answer"
                raise TemplateFault(f"{what} {why}; {remedy}")
            if not all(text in after[len(before) :] for text in _required_texts(message)):
                raise TemplateFault(f"the chat template leaves out {self._name(place)}")
            if message.weight:
                self._require_thinking(place, message, after[len(before) :])
            turns.append(_Turn(place, before, after, message.weight, answer))
        return whole, turns

    def _all_there(self, messages: Sequence[Message], whole: str) -> None:
        for place, message in enumerate(messages):
            for text in _required_texts(message):
                if text not in whole:
                    raise TemplateFault(f"the chat template leaves out {self._name(place)} ({shown(text)})")
            for tool in json.loads(message.tools or "[]"):
                name = tool.get("function", tool).get("name")
                if str(name) not in whole:
                    raise TemplateFault(f"the chat template leaves out the tool {shown(name)}")

    def _require_thinking(self, place: int, message: Message, written: str) -> None:
        parts = _THINKING.split(message.content)[:-1] if message.role == ANSWERS else []
        missing = next((part.strip() for part in parts if part.strip() not in written), None)
        if missing is not None:
            what = f"the chat template leaves out what {self._name(place)} says before </think> ({shown(missing)})"
            remedy = "use a template that keeps it, or remove the reasoning from the rows"
            raise TemplateFault(f"{what}, so that it would not be trained; {remedy}")

    def _marked(self, messages: Sequence[Message], template: ChatTemplate) -> tuple[str, list[_Turn]]:
        """A row's text, and the spans that the template marks as generated: the answers in order, and other spans, such
        as a final end token. Other spans get the weight of the answers, which must then be equal."""
        rendered = template.render(messages)
        self._all_there(messages, rendered.text)
        answers = [(place, message) for place, message in enumerate(messages) if message.role == ANSWERS]
        weights = {message.weight for _, message in answers}
        matched = 0
        turns = []
        for start, end in rendered.marks:
            here = rendered.text[:start], rendered.text[:end]
            marked = rendered.text[start:end]
            if matched < len(answers) and all(text in marked for text in _required_texts(answers[matched][1])):
                place, message = answers[matched]
                if message.weight:
                    self._require_thinking(place, message, marked)
                turns.append(_Turn(place, *here, message.weight, answer=True))
                matched += 1
            elif len(weights) > 1:
                what = f"the chat template marks more than its answers ({shown(marked)})"
                raise TemplateFault(f"{what}, and these have different weights")
            elif answers and end > start:
                place, message = answers[max(0, matched - 1)]
                turns.append(_Turn(place, *here, message.weight, answer=False))
        if matched < len(answers):
            name = self._name(answers[matched][0])
            raise TemplateFault(f"{name} is in none of the {len(rendered.marks)} places that the chat template marks")
        return rendered.text, [turn for turn in turns if turn.weight > 0]

    def opening_of(self, ids: Sequence[int]) -> list[int]:
        """The begin token to prepend, unless a row of text already begins with it."""
        return [] if (self._form == "text" and list(ids[: len(self.opening)]) == self.opening) else self.opening

    def _weigh(self, ids_of: dict[str, list[int]], text: str, turns: list[_Turn]) -> tuple[list[int], list[float]]:
        whole = ids_of[text]
        usual = 1.0 if self._all else 0.0
        weights = [usual] * len(whole)
        closings = []
        for turn in turns:
            start, end = self._span(whole, ids_of[turn.before], ids_of[turn.after], turn)
            weights[start:end] = [turn.weight] * (end - start)
            if self._closing is None and turn.answer:
                self._batch.stops.add(whole[end - 1])
            elif turn.answer:
                closings.append((end, turn.weight))
        ids = list(whole)
        if self._closing is not None:
            self._batch.stops.add(self._closing)
            for end, weight in reversed(closings):
                ids.insert(end, self._closing)
                weights.insert(end, weight)
            if ids[-1:] != [self._closing]:
                ids.append(self._closing)
                weights.append(usual)
        opening = self.opening_of(ids)
        ids[:0] = opening
        weights[:0] = [0.0] * len(opening)
        bos = self._tokenizer.base.bos_token_id
        if bos is not None and bos != self._tokenizer.base.eos_token_id and ids[:2] == [bos, bos]:
            raise TemplateFault("begins with two begin tokens, one of the chat template and one of the text")
        if not ids:
            raise TemplateFault("the chat template writes nothing of it")
        weights[0] = 0.0
        return ids, weights

    def _span(self, whole: list[int], before: list[int], after: list[int], turn: _Turn) -> tuple[int, int]:
        """The span of one message in `whole`, including its stop token. The tokens before it must be a prefix of the
        row, and its own tokens must be the same as if it were the last message."""
        start = len(before)
        if whole[:start] != before or after[:start] != before:
            what = f"the last token before {self._name(turn.place)} and its first one merge into another"
            raise TemplateFault(f"{what}; let white space between them begin the second, not end the first")
        own = after[start:]
        if not own:
            raise TemplateFault(f"the chat template writes nothing of {self._name(turn.place)}")
        if turn.answer and self._closing is None:
            own = self._closed(own, whole[start + len(own) :][:1], turn)
        if whole[start : start + len(own)] != own:
            what = f"the chat template writes {self._name(turn.place)} differently if more messages follow"
            remedy = 'make a row of each answer, or give the earlier ones "train": false'
            raise TemplateFault(f"{what}, so that a model would learn what it will not be asked to write; {remedy}")
        return start, start + len(own)

    def _closed(self, own: list[int], following: list[int], turn: _Turn) -> list[int]:
        stop = None
        for place in range(len(own) - 1, -1, -1):
            if own[place] in self._special:
                stop = place
            elif not self._is_blank(own[place]):
                break
        if stop is not None:
            return own[: stop + 1]
        if self._template is not None and self._template.marked and following and following[0] in self._special:
            self._batch.extended = True
            return own + following
        end = shown(self._tokenizer.base.decode(own[-8:]))
        what = f"the chat template closes {self._name(turn.place)} with no special token (it ends in {end})"
        raise TemplateFault(f"{what}: a model would not learn to stop; close answers with the end token there")


def _required_texts(message: Message) -> tuple[str, ...]:
    """The parts of a message that every rendered text must contain. Many templates trim the text, and drop or move the
    reasoning before an answer. Formats of tool calls differ, but all contain the tool's name."""
    content = message.content.rpartition("</think>")[2] if message.role == ANSWERS else message.content
    calls = json.loads(message.extra or "{}").get("tool_calls", ())
    return content.strip(), *(call["function"]["name"] for call in calls)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    written = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, written)) or "(?!)")


def _untrained(weights: list[float], most: int, positions: int | None, skips: bool) -> str:
    first = next((place for place, weight in enumerate(weights) if weight), None)
    if first is None:
        return "no token of it would be trained: all its answers have weight 0"
    beyond = positions is not None and first >= positions
    least = f"--set model.max_length={first + 1} is the least that sees one"
    remedy = f"the model has {positions} positions" if beyond else least
    skip = "" if skips else "; to skip such rows: --set data.bad_rows=skip"
    what = f"its first trained token is number {first + 1}, and model.max_length is {most}"
    return f"no token of it would be trained: {what}; {remedy}{skip}"


class TemplateFault(ValueError):
    """The template cannot render a conversation, or the result is unusable for training."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. marks: character spans [start, end) that the template marks as generated, in order."""

    text: str
    marks: tuple[tuple[int, int], ...]


class ChatTemplate:
    """The chat template of a tokenizer. marked: it marks generated text with `{% generation %}`. dated: it writes
    today's date, which is replaced by a fixed one."""

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
        """Render `messages`; with `asks`, append the generation prompt.

        Raises `TemplateFault` with the template's own message, and `InputError` for a malformed template.
        """
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        dialog = [{"role": each.role, "content": each.content, **json.loads(each.extra or "{}")} for each in messages]
        tools = json.loads(messages[0].tools or "null")
        settings: dict[str, Any] = {**self._base.special_tokens_map, "return_assistant_tokens_mask": self.marked}
        rendered: Any
        try:
            rendered = render_jinja_template(
                [dialog], tools, chat_template=self._source, add_generation_prompt=asks, **settings
            )
        except TemplateSyntaxError as error:
            raise _refused(f"is not a valid template: {_words(error)}") from error
        except Exception as error:  # a third-party program may raise anything
            raise TemplateFault(f"the model's chat template refuses it: {_words(error)}") from error
        (text,), marks = rendered
        if len(text) > MOST_WRITTEN:
            raise TemplateFault(f"the model's chat template makes {len(text)} characters of it")
        return Rendered(text, tuple(marks[0]) if self.marked else ())


def _without_clock(source: str) -> str:
    """Prepend a macro that replaces the clock. Its definition renders as nothing, because transformers configures
    jinja2 to drop the line break after a block."""
    written = "".join(" | replace({!r}, {!r})".format(*each.split("=")) for each in _DATE.split())
    refusal = f"{{%- if '%' in text -%}}{{{{ raise_exception({_UNKNOWN_CODE!r} ~ format) }}}}{{%- endif -%}}"
    body = f"{{%- set text = format{written} -%}}{refusal}{{{{ text }}}}"
    return f"{{%- macro {_CLOCK}(format) -%}}{body}{{%- endmacro %}}\n{source}"


def _words(error: Exception) -> str:
    text = legible_line(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."


def _refused(what: str) -> InputError:
    return InputError.at("model.base", f"the chat template {what}")
