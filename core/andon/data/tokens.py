"""Tokenizers: the embedded byte-level one, or one from a model folder or the hub."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon.config.source import loading
from andon.console.messages import InputError, Problem, ProblemList, is_panic, shown
from andon.data.hub import require_found
from andon.data.rows import text_fault
from andon_contracts.legible import legible_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
_WHOLE, _WHOLE_OF_A_TOKEN = 1 << 16, 16
"""Texts up to max(`_WHOLE`, `_WHOLE_OF_A_TOKEN` * max_length) characters are tokenised whole."""
_AT_ONCE = 1024
"""Texts per tokenizer call. Before truncation a token takes about a hundred bytes."""
_OF_ORIGIN = re.compile("name_or_path|local_files_only|_commit_hash|is_local|transformers_version|tokenizer_file")
"""Keys of tokenizer_config.json that name a tokenizer's origin and do not change its tokens."""


@dataclass(frozen=True)
class EncodedTexts:
    """Texts, or pairs of texts, as token ids.

    types: token type ids, for example which text of a pair a token is from; empty if all are 0. cut: the positions of
    the texts that were truncated. firsts: per text, the position of each word's first token, or -1; empty unless
    encoded with `words`.
    """

    tokens: Sequence[Sequence[int]]
    types: Sequence[Sequence[int]] = ()
    cut: Sequence[int] = ()
    firsts: Sequence[Sequence[int]] = ()

    @property
    def columns(self) -> dict[str, tuple[Sequence[Sequence[int]], int]]:
        """Further columns of a batch, each with its padding value."""
        return {"token_type_ids": (self.types, 0)} if self.types else {}


class Tokenizer:
    """A transformers tokenizer, which adds its special tokens to each text.

    A decoder classifies at the last token other than the padding id, regardless of the attention mask. So `encode`
    drops trailing padding ids (a text that ends in the literal padding token, or an end token that is also the padding
    token), and replaces an encoding that is then empty by one unknown or end token.

    truncated: the number of texts truncated so far. read: the digests of the token files read so far.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pad_id: int, empty_id: int) -> None:
        assert pad_id != empty_id, "an empty text must not become padding"
        self.base, self.pad_id, self._empty_id = tokenizer, pad_id, empty_id
        self.vocab_size = max(*tokenizer.get_vocab().values(), pad_id, empty_id) + 1
        self.truncated, self.read = 0, list[str]()
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder))
            self.digest = _files_digest(Path(folder))

    @property
    def own_code(self) -> str:
        """A note that the tokenizer's custom code (`auto_map`) is not run; empty if it has none."""
        if not self.base.init_kwargs.get("auto_map"):
            return ""
        return (
            "the base's tokenizer_config.json names custom code (auto_map), which Andon does not run: this is the "
            f"{type(self.base).__name__} of transformers, which may give other tokens"
        )

    def encode(
        self, texts: Sequence[str], max_length: int, pairs: Sequence[str] | None = None, *, words: bool = False
    ) -> EncodedTexts:
        """Encode each text, or each text with its pair, as 1 to `max_length` ids.

        Truncation is the tokenizer's and keeps special tokens. A pair loses tokens of its longer text first.
        words: also compute the first token of each word (words are separated by white space): the first covering
        a character of the word, by the tokenizer's offsets.

        Raises `InputError` if `max_length` leaves no room for a token of the text, for a text that the tokenizer cannot
        encode, and with `words` for a tokenizer without offsets.
        """
        if words and not self.base.is_fast:
            raise InputError.at("model.base", "its tokenizer does not say where in a text a token is")
        options = {"return_offsets_mapping": True} if words else {}
        least = self.base.num_special_tokens_to_add(pair=pairs is not None) + (pairs is not None)
        if max_length <= least:
            kind = "this tokenizer" if pairs is None else "pairs of texts and this tokenizer"
            raise InputError.at("model.max_length", f"must be more than {least} for {kind} ({max_length})")
        tokens: list[list[int]] = []
        types: list[list[int]] = []
        firsts: list[list[int]] = []
        cut_off: list[int] = []
        for first in range(0, len(texts), _AT_ONCE):
            block = range(first, min(first + _AT_ONCE, len(texts)))
            if pairs is None:
                columns = [[self._beginning(texts[place], max_length, place) for place in block]]
            else:
                both = [self._beginnings_of_pair((texts[place], pairs[place]), max_length, place) for place in block]
                columns = [[pair[side] for pair in both] for side in (0, 1)]
            whole = self._call(*columns, first=first, truncation=False, **options)
            ids: list[list[int]] = whole["input_ids"]
            too_long = [place for place, each in enumerate(ids) if len(each) > max_length]
            if too_long:
                side = True if pairs is None else "longest_first"
                texts_of_long = [[column[place] for place in too_long] for column in columns]
                cut = self._call(*texts_of_long, truncation=side, max_length=max_length, **options)
                for name in whole.keys() & {"input_ids", "token_type_ids", "offset_mapping"}:
                    for place, values in zip(too_long, cut[name], strict=True):
                        whole[name][place] = values
            cut_off += [first + place for place in too_long]
            for place, each in enumerate(ids):
                end = len(each)
                while end and each[end - 1] == self.pad_id:
                    end -= 1
                tokens.append(each[:end] or [self._empty_id])
                if "token_type_ids" in whole:
                    types.append(whole["token_type_ids"][place][:end] or [0])
                if words:
                    firsts.append(_firsts(texts[first + place], whole["offset_mapping"][place][: len(tokens[-1])]))
        self.truncated += len(cut_off)
        return EncodedTexts(tokens, types if any(map(any, types)) else (), cut_off, firsts)

    def with_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        """A copy of this tokenizer with `tokens` appended to the vocabulary, in order.

        They match exactly and are not special: messages may contain them, and decoding keeps them. Raises `InputError`
        for a token that already exists, contains a special token, or does not round-trip as one id.
        """
        problems, known = ProblemList(), self.base.get_vocab()
        for token in tokens:
            ids = [known[token]] if token in known else self.plain_ids([token])[0]
            contained = [each for each in self.base.all_special_tokens if each in token]
            if len(ids) == 1 and self.base.decode(ids) == token:
                what = f"is a token of this tokenizer already (id {ids[0]}); leave it out"
            elif token in known:
                what = f"stands for something else in this tokenizer's vocabulary ({self.shown(ids[0])}, id {ids[0]})"
            elif contained:
                what = f"holds the special token {contained[0]!r}, which no message may spell"
            else:
                continue
            problems.add("model.new_tokens", f"{token!r} {what}")
        problems.raise_if_any()
        from transformers import AddedToken

        base = copy.deepcopy(self.base)
        base.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
        grown = Tokenizer(base, self.pad_id, self._empty_id)
        for id_, token in enumerate(tokens, start=self.vocab_size):
            if grown.plain_ids([token]) != [[id_]] or base.decode([id_]) != token:
                problems.add("model.new_tokens", f"{token!r} is not read and written as one token by this tokenizer")
        problems.raise_if_any()
        return grown

    def ids_of(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """The ids of these tokens. Raises `InputError` for an unknown token."""
        known = self.base.get_vocab() if tokens else {}
        unknown = [
            Problem("model.new_tokens", f"{each!r} is not a token of this tokenizer")
            for each in tokens
            if each not in known
        ]
        if unknown:
            raise InputError(unknown)
        return tuple(known[token] for token in tokens)

    def shown(self, id_: int) -> str:
        """A token's text in quotes, on one line; its vocabulary entry if it is a partial UTF-8 character."""
        text = str(self.base.decode([id_]))
        return legible_line(repr(str(self.base.convert_ids_to_tokens(id_)) if "\ufffd" in text else text))

    def plain_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without truncation and without added special tokens."""
        return self._ids(list(texts)) if texts else []

    def _beginning(self, text: str, most: int, before: int) -> str:
        """A prefix of `text` with the same first `most` tokens, since tokenising takes a hundred bytes per character.
        before: number of earlier texts, for messages."""
        size, first = max(_WHOLE, _WHOLE_OF_A_TOKEN * most), None
        while size < len(text) and self.base.truncation_side == "right":
            (ids,) = self._ids([text[:size]], before)
            if first is not None and ids[:most] == first:
                return text[: size // 2]
            first = ids[:most] if len(ids) > most else None
            size *= 2
        return text

    def _beginnings_of_pair(self, pair: tuple[str, str], most: int, before: int) -> list[str]:
        """The pair, with a long text replaced by its `_beginning`. Truncation removes tokens from the longer text, so
        the beginning must have more tokens than the other text. If both are long, both stay whole."""
        both = [self._beginning(text, most, before) for text in pair]
        cut = [len(beginning) < len(text) for beginning, text in zip(both, pair, strict=True)]
        if all(cut):
            return [*pair]
        if any(cut):
            long = cut.index(True)
            (other,) = self._ids([pair[1 - long]], before)
            both[long] = self._beginning(pair[long], max(most, len(other)), before)
        return both

    def _ids(self, texts: list[str], first: int = 0) -> list[list[int]]:
        ids: list[list[int]] = self._call(texts, first=first, truncation=False, add_special_tokens=False)["input_ids"]
        return ids

    def _call(self, *texts: list[str], first: int = 0, **how: Any) -> Any:
        """Call the transformers tokenizer. Raises `InputError` for texts that it cannot encode. first: of the batch."""
        numbered = (pair for column in texts for pair in enumerate(column, start=first + 1))
        try:
            return self.base(*texts, verbose=False, **how)
        except TypeError as error:
            faults = ((place, text_fault(text)) for place, text in numbered if text.strip())
            problems = [Problem(f"text {place}", fault) for place, fault in faults if fault is not None]
            if problems:
                raise InputError(problems) from error
            raise
        except BaseException as error:
            if not _of_native_code(error):
                raise
            where, why = (
                "model.base",
                f"the tokenizer fails on it ({error}); leave the row out, or use another tokenizer",
            )
            for place, text in numbered:
                try:
                    self.base([text], verbose=False)
                except BaseException as again:
                    if not _of_native_code(again):
                        raise
                    where, why = f"text {place}", f"{why}: {shown(text)}"
                    break
            raise InputError.at(where, why) from error

    def save(self, folder: Path, max_length: int | None = None, side: str = "right") -> None:
        """Write the tokenizer's files into `folder`, without the truncation state that `encode` leaves in it.

        A tokenizer without a padding token gets the token of `pad_id`, so that it can pad batches once loaded.
        max_length, side: the saved truncation length and padding side.
        """
        before = (self.base.pad_token, self.base.padding_side, self.base.model_max_length)
        if self.base.pad_token_id is None:
            self.base.pad_token = self.base.convert_ids_to_tokens(self.pad_id)
        if max_length is not None:
            self.base.padding_side, self.base.model_max_length = side, max_length
        try:
            self._write(folder)
        finally:
            self.base.pad_token, self.base.padding_side, self.base.model_max_length = before

    def _write(self, folder: Path) -> None:
        backend = getattr(self.base, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
        self.base.save_pretrained(str(folder))


def _firsts(text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    place_of = [-1] * max((end for _, end in offsets), default=0)  # by character: the position of its first token
    for place, (start, end) in reversed([*enumerate(offsets)]):
        place_of[start:end] = [place] * (end - start)
    spans = (place_of[word.start() : word.end()] for word in re.finditer(r"\S+", text))
    return [min((place for place in span if place >= 0), default=-1) for span in spans]


def _of_native_code(error: BaseException) -> bool:
    return is_panic(error) or type(error) is Exception


def _files_digest(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        if path.name == "tokenizer_config.json":
            settings = {key: value for key, value in json.loads(content).items() if not _OF_ORIGIN.fullmatch(key)}
            content = json.dumps(settings, sort_keys=True).encode()
        for part in (path.relative_to(folder).as_posix().encode(), content):
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part)
    return sha.hexdigest()


def byte_tokenizer(*, pairs: bool = False, begins: bool = False) -> Tokenizer:
    """The embedded tokenizer: one id per UTF-8 byte, after `<pad>` 0, `<s>` 1, `</s>` 2 and `<unk>` 3.

    It is lossless: a special token in a text is encoded as bytes. pairs: put `</s>` between two texts. begins: put
    `<s>` before a text, as at the beginning of a conversation.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate((*_SPECIALS, *alphabet))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if pairs:
        backend.post_processor = processors.TemplateProcessing(
            single="$A", pair=f"$A {_SPECIALS[2]} $B", special_tokens=[(_SPECIALS[2], 2)]
        )
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{_SPECIALS[1]} $A", special_tokens=[(_SPECIALS[1], 1)]
        )
    pad, start, end, unknown = _SPECIALS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=start,
        eos_token=end,
        unk_token=unknown,
        padding_side="right",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    return Tokenizer(tokenizer, vocabulary[pad], vocabulary[unknown])


def pretrained_tokenizer(path_or_hub_id: str, *, local_only: bool, revision: str | None = None) -> Tokenizer:
    """Load the tokenizer of a model folder or, unless `local_only`, of a hub id at `revision`. Runs no custom code.

    Without a padding token, the end, unknown or begin token pads. Raises `InputError` if all are missing.
    """
    if not local_only or path_or_hub_id.startswith((".", "/", "~")):
        require_found(path_or_hub_id, revision)
    from transformers import AutoTokenizer

    with loading(path_or_hub_id, "model.base", "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path_or_hub_id, revision=revision, local_files_only=local_only, trust_remote_code=False
        )
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            what = f"the tokenizer of {path_or_hub_id!r} knows no token but special ones: are its files there?"
            raise InputError.at("model.base", what)
        special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos", "unk", "bos", "sep")}
        pad_id = next((special[name] for name in ("pad", "eos", "unk", "bos") if special[name] is not None), None)
        if pad_id is None:
            what = f"the tokenizer of {path_or_hub_id!r} has no padding token and no end token to pad with"
            raise InputError.at("model.base", what)
        others = [special[name] for name in ("unk", "eos", "sep", "bos")]
        least = min(set(tokenizer.get_vocab().values()) - {pad_id})
        empty_id = next((id_ for id_ in others if id_ is not None and id_ != pad_id), least)
    return Tokenizer(tokenizer, pad_id, empty_id)
