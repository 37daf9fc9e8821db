"""Texts to token ids: the embedded byte-level tokenizer, or a folder's or the hub's own."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from andon.config.source import loading
from andon.console.problems import InputError, Problem, ProblemList, is_panic, shown
from andon.data.hub import require_on_hub
from andon.data.labels import text_fault
from andon_contracts.legible import legible_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
_WHOLE, _WHOLE_OF_A_TOKEN = 1 << 16, 16
"""A text is tokenised whole up to this many characters, or up to this many for each token that it may have."""
_AT_ONCE = 1024
"""Texts that are tokenised together: uncut, their tokens take a hundred bytes each meanwhile."""
_NOT_CONTENT = (
    "name_or_path",
    "local_files_only",
    "_commit_hash",
    "is_local",
    "transformers_version",
    "tokenizer_file",
)
"""Keys of tokenizer_config.json that name a tokenizer's origin and do not change its tokens."""


class Tokenizer:
    """A tokenizer of transformers, with its own special tokens around each text.

    A decoder classifies at the last token whose id is not the padding id, whatever the attention mask says. So padding
    ids at the end of an encoding (a text that ends in the literal padding token, an end token that is also the
    padding token) are dropped, and an encoding that is then empty becomes one unknown or end token.

    truncated: how many texts were cut so far. last_cut: the positions of those of the last call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pad_id: int, empty_id: int) -> None:
        if pad_id == empty_id:
            msg = f"an empty text cannot be encoded as the padding id {pad_id}"
            raise ValueError(msg)
        self.base = tokenizer
        self._empty_id = empty_id
        self.pad_id = pad_id
        self.vocab_size = max(*tokenizer.get_vocab().values(), pad_id, empty_id) + 1
        self.truncated = 0
        self.last_cut: tuple[int, ...] = ()
        with tempfile.TemporaryDirectory() as folder:
            self._write(Path(folder))
            self.digest = _files_digest(Path(folder))

    @property
    def own_code(self) -> str:
        """A sentence saying that the tokenizer's own code was not run, if its files name any; else empty."""
        if not self.base.init_kwargs.get("auto_map"):
            return ""
        return (
            "the base's tokenizer_config.json names code of its own (auto_map), which Andon does not run: this is the "
            f"{type(self.base).__name__} of transformers, which may give other tokens"
        )

    def encode(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """One list of 1 to `max_length` ids for each text, cut at its end (a closing special token stays).

        Raises `InputError` if `max_length` leaves no room for a token of the text, and for a lone surrogate.
        """
        return self._encoded(texts, None, max_length)["input_ids"]

    def types_of(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """The token type of each id of `encode`; empty for a tokenizer without types, or with type 0 only.

        XLNet's closing token has a type of its own, and the model was trained with it.
        """
        if not texts or not any(self.base("a", verbose=False).get("token_type_ids") or ()):
            return []
        cut, last = self.truncated, self.last_cut
        found = self._encoded(texts, None, max_length)["token_type_ids"]
        self.truncated, self.last_cut = cut, last  # counted by `encode`
        return found

    def encode_pairs(
        self, texts: Sequence[str], pairs: Sequence[str], max_length: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The ids of each pair, joined as the tokenizer joins two texts, and their types; 0 for a tokenizer without.

        A pair longer than max_length loses tokens of its longer text first. Raises as `encode` does.
        """
        found = self._encoded(texts, pairs, max_length)
        return found["input_ids"], found["token_type_ids"]

    def encode_words(self, texts: Sequence[str], max_length: int) -> tuple[list[list[int]], list[list[int]]]:
        """Encode words joined by spaces. Also returns for each word the position of its first token; -1 for a word
        without a token, for example after a cut.

        A word's first token is the first that covers a character of it, by the tokenizer's offsets. Raises as `encode`
        does, and for a tokenizer without offsets.
        """
        if not self.base.is_fast:
            raise InputError([Problem("model.base", "its tokenizer does not say where in a text a token is")])
        found = self._encoded(texts, None, max_length, return_offsets_mapping=True)
        firsts = []
        for text, ids, offsets in zip(texts, found["input_ids"], found["offset_mapping"], strict=True):
            place_of = [-1] * max((end for _, end in offsets), default=0)  # of each character, the first of its tokens
            for place, (start, end) in reversed([*enumerate(offsets[: len(ids)])]):
                place_of[start:end] = [place] * (end - start)
            words = re.finditer(r"\S+", text)
            covers = ([place for place in place_of[word.start() : word.end()] if place >= 0] for word in words)
            firsts.append([min(places, default=-1) for places in covers])
        return found["input_ids"], firsts

    def _encoded(
        self, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, **how: Any
    ) -> dict[str, list[Any]]:
        """The tokenizer's lists for each text or pair: ids without padding at their end, types for as many ids."""
        least = self.base.num_special_tokens_to_add(pair=pairs is not None) + (pairs is not None)
        if max_length <= least:
            kind = "this tokenizer" if pairs is None else "pairs of texts and this tokenizer"
            raise InputError([Problem("model.max_length", f"must be more than {least} for {kind} ({max_length})")])
        rows: dict[str, list[Any]] = {"input_ids": [], "token_type_ids": [], "offset_mapping": []}
        cut_off: list[int] = []
        for first in range(0, len(texts), _AT_ONCE):
            here = slice(first, first + _AT_ONCE)
            begun = [self._beginning(text, max_length, place) for place, text in enumerate(texts[here], first)]
            columns = (
                [begun] if pairs is None else self._beginnings_of_pairs(texts[here], pairs[here], max_length, first)
            )
            whole = self._called(*columns, first=first, truncation=False, **how)
            ids: list[list[int]] = whole["input_ids"]
            long = [place for place, each in enumerate(ids) if len(each) > max_length]
            if long:
                side = True if pairs is None else "longest_first"
                texts_of_long = [[column[place] for place in long] for column in columns]
                cut = self._called(*texts_of_long, truncation=side, max_length=max_length, **how)
                for name in rows.keys() & whole.keys():
                    for place, values in zip(long, cut[name], strict=True):
                        whole[name][place] = values
            cut_off += [first + place for place in long]
            ended = [*map(self._ended, ids)]
            types = whole.get("token_type_ids") or [[0] * len(each) for each in ended]
            rows["input_ids"] += ended
            rows["token_type_ids"] += [of_row[: len(each)] or [0] for each, of_row in zip(ended, types, strict=True)]
            rows["offset_mapping"] += whole.get("offset_mapping", ())
        self.last_cut = tuple(cut_off)
        self.truncated += len(cut_off)
        return rows

    def with_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        """A copy of this tokenizer with `tokens` added after all other ids, in order.

        They match texts to the letter and are not special: a message may contain them, and decoding keeps them. Raises
        `InputError` for a token that exists already, or that is not encoded and decoded as one id.
        """
        found, known = ProblemList(), self.base.get_vocab()
        for token in tokens:
            ids = [known[token]] if token in known else self.plain_ids([token])[0]
            held = [each for each in self.base.all_special_tokens if each in token]
            if len(ids) == 1 and self.base.decode(ids) == token:
                what = f"is a token of this tokenizer already (id {ids[0]}); leave it out"
            elif token in known:
                what = f"stands for something else in this tokenizer's vocabulary ({self.shown(ids[0])}, id {ids[0]})"
            elif held:
                what = f"holds the special token {held[0]!r}, which no message may spell"
            else:
                continue
            found.add("model.new_tokens", f"{token!r} {what}")
        found.raise_if_any()
        from transformers import AddedToken

        base = copy.deepcopy(self.base)
        base.add_tokens([AddedToken(token, normalized=False, special=False) for token in tokens])
        grown = Tokenizer(base, self.pad_id, self._empty_id)
        for id_, token in enumerate(tokens, start=self.vocab_size):
            if grown.plain_ids([token]) != [[id_]] or base.decode([id_]) != token:
                found.add("model.new_tokens", f"{token!r} is not read and written as one token by this tokenizer")
        found.raise_if_any()
        return grown

    def ids_of(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """The id of each of these tokens. Raises `InputError` for an unknown token."""
        found, known = ProblemList(), self.base.get_vocab() if tokens else {}
        for token in tokens:
            if token not in known:
                found.add("model.new_tokens", f"{token!r} is no token of this tokenizer")
        found.raise_if_any()
        return tuple(known[token] for token in tokens)

    def shown(self, id_: int) -> str:
        """A token's text in quotes, on one line of a terminal; its vocabulary name if it is a part of a character."""
        said = str(self.base.decode([id_]))
        return legible_line(repr(str(self.base.convert_ids_to_tokens(id_)) if "\ufffd" in said else said))

    def plain_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """One list of ids for each text: uncut, and with no special tokens but those that the text spells."""
        return self._ids(list(texts), truncation=False, add_special_tokens=False) if texts else []

    def _beginning(self, text: str, most: int, before: int) -> str:
        """`text`, or a prefix of it that has the same first `most` tokens. before: earlier texts, for messages.

        Tokenising takes a hundred bytes a character: a row of 40 MB would take gigabytes to become 128 tokens. A text
        of up to `_WHOLE` characters is never cut here. A longer text is cut at the first length whose first `most`
        tokens are also those of twice that length. How far a tokenizer looks ahead is bounded by its vocabulary and
        its patterns. So tokens that do not change with 65,536 more characters do not change with the rest either.
        """
        size, first = max(_WHOLE, _WHOLE_OF_A_TOKEN * most), None
        while size < len(text) and self.base.truncation_side == "right":
            (ids,) = self._ids([text[:size]], before, truncation=False, add_special_tokens=False)
            if first is not None and ids[:most] == first:
                return text[: size // 2]
            first = ids[:most] if len(ids) > most else None
            size *= 2
        return text

    def _beginnings_of_pairs(
        self, texts: Sequence[str], pairs: Sequence[str], most: int, first: int
    ) -> list[list[str]]:
        """Pairs whose long text is replaced by its `_beginning`.

        Truncation takes tokens from the text that has more of them. So the beginning must have more tokens than the
        other text, as the whole has. If both texts are long, it is unknown which has more, and both stay whole.
        """
        both = [
            [self._beginning(text, most, place) for place, text in enumerate(each, first)] for each in (texts, pairs)
        ]
        for place, pair in enumerate(zip(texts, pairs, strict=True)):
            cut = [len(column[place]) < len(text) for column, text in zip(both, pair, strict=True)]
            if all(cut):
                both[0][place], both[1][place] = pair
            elif any(cut):
                long = cut.index(True)
                (other,) = self._ids([pair[1 - long]], first + place, truncation=False, add_special_tokens=False)
                both[long][place] = self._beginning(pair[long], max(most, len(other)), first + place)
        return both

    def _ids(self, texts: list[str], first: int = 0, **how: Any) -> list[list[int]]:
        ids: list[list[int]] = self._called(texts, first=first, **how)["input_ids"]
        return ids

    def _called(self, *texts: list[str], first: int = 0, **how: Any) -> Any:
        """Call the tokenizer of transformers with a batch. Raises `InputError` for texts that it cannot encode.

        first: how many texts came before these, for the message.
        """
        try:
            return self.base(*texts, verbose=False, **how)
        except TypeError as error:
            faults = ((place, text_fault(text)) for place, text in _numbered(first, *texts) if text.strip())
            problems = [Problem(f"text {place}", fault) for place, fault in faults if fault is not None]
            if problems:
                raise InputError(problems) from error
            raise
        except BaseException as error:
            if not _of_native_code(error):
                raise
            raise InputError([self._refusal(error, first, *texts)]) from error

    def _refusal(self, error: BaseException, first: int, *texts: list[str]) -> Problem:
        why = f"the tokenizer fails on it ({error}); leave the row out, or use another tokenizer"
        for place, text in _numbered(first, *texts):
            try:
                self.base([text], verbose=False)
            except BaseException as again:
                if not _of_native_code(again):
                    raise
                return Problem(f"text {place}", f"{why}: {shown(text)}")
        return Problem("model.base", why)

    def _ended(self, ids: list[int]) -> list[int]:
        end = len(ids)
        while end and ids[end - 1] == self.pad_id:
            end -= 1
        return ids[:end] or [self._empty_id]

    def save(self, folder: Path, max_length: int | None = None, side: str = "right") -> None:
        """Write the tokenizer's files into `folder`, without the truncation that `encode` may have left set.

        A tokenizer without a padding token gets that of `pad_id`, so that the loaded tokenizer can pad batches.
        max_length, side: where the loaded tokenizer truncates, and on which side it pads.
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


def _of_native_code(error: BaseException) -> bool:
    """Whether the library tokenizers raised it: a panic, or a bare `Exception`."""
    return is_panic(error) or type(error) is Exception


def _numbered(first: int, *texts: list[str]) -> Iterator[tuple[int, str]]:
    """All texts with their row number, from `first` + 1."""
    for column in texts:
        yield from enumerate(column, start=first + 1)


def _files_digest(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        content = path.read_bytes()
        if path.name == "tokenizer_config.json":
            settings = {key: value for key, value in json.loads(content).items() if key not in _NOT_CONTENT}
            content = json.dumps(settings, sort_keys=True).encode()
        for part in (path.relative_to(folder).as_posix().encode(), content):
            sha.update(len(part).to_bytes(8, "little"))
            sha.update(part)
    return sha.hexdigest()


def byte_tokenizer(*, pairs: bool = False, begins: bool = False) -> Tokenizer:
    """The embedded tokenizer: one id for each byte of UTF-8, after `<pad>` 0, `<s>` 1, `</s>` 2 and `<unk>` 3.

    It is lossless: letters that spell a special token are bytes like any others. pairs: puts `</s>` between two texts.
    begins: puts `<s>` before a text, as at the beginning of a conversation.
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
    """The tokenizer of a model folder or, unless `local_only`, of a hub id at `revision`. Runs no code from there.

    Without a padding token, the end token pads. Raises `InputError` without a tokenizer, or without either token.
    """
    if not Path(path_or_hub_id).is_dir() and path_or_hub_id.startswith((".", "/", "~")):
        raise InputError([Problem("model.base", f"there is no folder {path_or_hub_id!r}")])
    if not local_only:
        require_on_hub(path_or_hub_id, revision)
    from transformers import AutoTokenizer

    with loading(path_or_hub_id, "model.base", "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path_or_hub_id, revision=revision, local_files_only=local_only, trust_remote_code=False
        )
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            what = f"the tokenizer of {path_or_hub_id!r} knows no token but special ones: are its files there?"
            raise InputError([Problem("model.base", what)])
        ids = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
        pad_id = next((id_ for id_ in ids if id_ is not None), None)
        if pad_id is None:
            what = f"the tokenizer of {path_or_hub_id!r} has no padding token and no end token to pad with"
            raise InputError([Problem("model.base", what)])
        others = [tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id]
        empty_id = next((id_ for id_ in others if id_ is not None and id_ != pad_id), None)
        if empty_id is None:
            empty_id = min(set(tokenizer.get_vocab().values()) - {pad_id})
    return Tokenizer(tokenizer, pad_id, empty_id)
