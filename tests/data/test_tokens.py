"""Tokenizers: lossless bytes, cuts that are counted, an end that a decoder can pool, and names that are no folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, BertConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from andon.console.messages import InputError
from andon.data import tokens
from andon.data.tokens import Tokenizer, byte_tokenizer, pretrained_tokenizer

BYTES = byte_tokenizer()
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(["<pad>", "a<pad>", ""]))


def worded(folder: Path, *, pad: str | None, end: str = "</s>") -> Path:
    words = {word: place for place, word in enumerate(["</s>", "<unk>", "<pad>", "one", "two", "three"])}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, words[end])])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, unk_token="<unk>", pad_token=pad).save_pretrained(
        str(folder)
    )
    return folder


@given(TEXTS, st.integers(1, 40))
def test_no_encoding_is_empty_too_long_or_ends_in_padding(texts: list[str], most: int) -> None:
    encoded = BYTES.encode(texts, most).tokens
    assert len(encoded) == len(texts)
    for ids in encoded:
        assert 1 <= len(ids) <= most
        assert ids[-1] != BYTES.pad_id
        assert all(0 <= id_ < BYTES.vocab_size for id_ in ids)


@given(TEXTS)
def test_one_id_for_each_byte_and_nothing_lost(texts: list[str]) -> None:
    encoded = BYTES.encode(texts, 1000).tokens
    for text, ids in zip(texts, encoded, strict=True):
        assert len(ids) == max(1, len(text.encode()))
        assert BYTES.pad_id not in ids
    assert len({tuple(ids) for ids in encoded}) == len(set(texts))


def test_there_are_256_byte_ids_and_four_special_ones() -> None:
    ids = {
        id_
        for ids in BYTES.encode([chr(c) for c in range(128)] + [chr(c << 6) for c in range(2, 800)], 9).tokens
        for id_ in ids
    }
    assert (BYTES.vocab_size, BYTES.pad_id) == (260, 0)
    assert min(ids) == 4


def test_cutting_keeps_the_beginning_and_is_counted() -> None:
    tokenizer = byte_tokenizer()
    whole = tokenizer.encode(["abcdef"], 6).tokens[0]
    assert tokenizer.truncated == 0
    assert tokenizer.encode(["abcdef", "abc", "abcdef"], 3).tokens == [whole[:3]] * 3
    assert tokenizer.truncated == 2


def test_a_saved_tokenizer_is_the_same_for_transformers_and_for_us(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.encode(["abcdef"], 3)
    tokenizer.save(tmp_path)
    text = "é <pad> abcdef"
    again = pretrained_tokenizer(str(tmp_path), local_only=True)
    stock = AutoTokenizer.from_pretrained(str(tmp_path))(text)["input_ids"]
    assert again.encode([text], 100).tokens[0] == stock == byte_tokenizer().encode([text], 100).tokens[0]
    assert again.digest == tokenizer.digest == byte_tokenizer().digest


def test_what_is_saved_can_pad_batches(tmp_path: Path) -> None:
    tokenizer = pretrained_tokenizer(str(worded(tmp_path / "one", pad=None)), local_only=True)
    before = tokenizer.digest
    tokenizer.save(tmp_path / "saved")
    stock = AutoTokenizer.from_pretrained(str(tmp_path / "saved"))
    batch = stock(["one two three", "one"], padding=True, padding_side="right")["input_ids"]
    assert stock.pad_token_id == tokenizer.pad_id == 0
    assert batch == [[3, 4, 5, 0], [3, 0, 0, 0]]
    again = pretrained_tokenizer(str(tmp_path / "saved"), local_only=True)
    texts = ["one two", "", "three"]
    assert again.encode(texts, 8).tokens == tokenizer.encode(texts, 8).tokens
    assert pretrained_tokenizer(str(tmp_path / "one"), local_only=True).digest == before


@pytest.mark.parametrize("config", [Qwen3Config(), BertConfig()])
def test_a_folder_with_a_model_alone_is_refused(tmp_path: Path, config: PreTrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="knows no token but special ones"):
        pretrained_tokenizer(str(tmp_path), local_only=True)


def test_the_digest_tells_tokenizers_apart(tmp_path: Path) -> None:
    one = pretrained_tokenizer(str(worded(tmp_path / "one", pad="<pad>")), local_only=True)
    other = pretrained_tokenizer(str(worded(tmp_path / "other", pad="<unk>")), local_only=True)
    assert len({one.digest, other.digest, BYTES.digest}) == 3


@pytest.mark.parametrize("pad", ["<pad>", "</s>", None])
def test_a_closing_token_that_also_pads_is_no_end_of_a_row(tmp_path: Path, pad: str | None) -> None:
    tokenizer = pretrained_tokenizer(str(worded(tmp_path, pad=pad)), local_only=True)
    own = pad == "<pad>"
    assert tokenizer.pad_id == (2 if own else 0)
    assert tokenizer.encode(["one two", "", "one <pad>"], 8).tokens[:2] == ([[3, 4, 0], [0]] if own else [[3, 4], [1]])
    assert tokenizer.encode(["one two three"], 3).tokens == ([[3, 4, 0]] if own else [[3, 4]])
    assert all(ids[-1] != tokenizer.pad_id for ids in tokenizer.encode(["one <pad> <pad>", "<pad>"], 8).tokens)


def test_a_lone_surrogate_is_the_texts_fault() -> None:
    with pytest.raises(InputError, match="text 2: holds a lone surrogate at character 1"):
        BYTES.encode(["a", "b\ud800"], 8)


def test_a_text_that_the_tokenizers_native_code_gives_up_on_is_named() -> None:
    backend = Backend(models.WordLevel({"</s>": 0, "<unk>": 1, "one": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    base = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer, hard = Tokenizer(base, 0, 1), "a" * 40 + "b"
    with pytest.raises(InputError, match=r"^text 2: the tokenizer fails on it \(Onig: .* leave the row out") as caught:
        tokenizer.encode(["one", hard, "one"], 8)
    assert str(caught.value).endswith(repr(hard))
    typed = closing_typed()
    typed.base.backend_tokenizer.pre_tokenizer = backend.pre_tokenizer
    for asking in (lambda: tokenizer.encode(["one"], 8, [hard]), lambda: typed.encode([hard, "one"], 8)):
        with pytest.raises(InputError, match=r"^text 1: the tokenizer fails on it \(Onig: "):
            asking()


def test_a_text_that_the_tokenizer_has_no_token_for_is_named() -> None:
    base = PreTrainedTokenizerFast(tokenizer_object=Backend(models.Unigram([("<pad>", 0.0), ("a", -1.0)])))
    tokenizer = Tokenizer(base, 0, 1)
    assert tokenizer.encode(["aa"], 8).tokens == [[1, 1]]
    with pytest.raises(InputError, match=r"^text 2000: the tokenizer fails on it \(Encountered an unknown token but"):
        tokenizer.encode(["aa"] * 1999 + ["ab"], 8)


def _trained(kind: str) -> Tokenizer:
    words = ["abab ba aab", "abba  baab\nb", "aaab abb ab ab"] * 20
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]"]
    if kind == "unigram":
        backend, trainer = (
            Backend(models.Unigram()),
            trainers.UnigramTrainer(vocab_size=30, special_tokens=special, unk_token="<unk>"),
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    elif kind == "wordpiece":
        backend = Backend(models.WordPiece(unk_token="<unk>"))
        trainer = trainers.WordPieceTrainer(vocab_size=30, special_tokens=special)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        backend = Backend(models.BPE())
        trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=special)
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
    backend.train_from_iterator(words, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    base = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    return Tokenizer(base, 0, 1)


def closing_typed() -> Tokenizer:
    base = byte_tokenizer().base
    base.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A:0 </s>:2", pair="$A:0 </s>:0 $B:1 </s>:2", special_tokens=[("</s>", 2)]
    )
    base.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return Tokenizer(base, 0, 3)


KINDS = {kind: _trained(kind) for kind in ("bpe", "one word", "unigram", "wordpiece")} | {
    "bytes": BYTES,
    "typed": closing_typed(),
}
LONG = st.text(st.sampled_from("aab  b\nc\u0301"), min_size=100, max_size=300)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(LONG, LONG, st.integers(8, 12))
def test_the_beginning_of_a_long_text_gives_its_first_tokens(kind: str, text: str, other: str, most: int) -> None:
    tokenizer = KINDS[kind]
    asked = [
        lambda: tokenizer.encode([text, "ab", other], most),
        lambda: tokenizer.encode([text, "ab", text], most, ["ab", text, other]),
        lambda: tokenizer.encode([" ".join(text.split()) or "a"], most, words=True),
    ]
    with pytest.MonkeyPatch.context() as patch:
        before = tokenizer.truncated
        whole = [ask() for ask in asked]
        between = tokenizer.truncated
        patch.setattr(tokens, "_WHOLE", 64)
        patch.setattr(tokens, "_WHOLE_OF_A_TOKEN", 1)
        patch.setattr(tokens, "_AT_ONCE", 2)
        assert [ask() for ask in asked] == whole
    assert tokenizer.truncated - between == between - before


def test_a_long_text_is_not_tokenised_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, given_to, text = _trained("wordpiece"), [0], "ab " * 100_000

    def asked(method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(self: Any, *texts: list[str], **how: Any) -> Any:
            given_to.append(max(len(each) for column in texts for each in column))
            return method(self, *texts, **how)

        return noting

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", asked(PreTrainedTokenizerFast.__call__))
    (short,) = tokenizer.encode(["ab " * 50], 32).tokens
    assert tokenizer.encode([text], 32).tokens == [short]
    assert tokenizer.encode([text], 32, ["ab"]).tokens[0][:28] == short[:28]
    words = tokenizer.encode([text], 32, words=True)
    assert (words.tokens, len(words.firsts[0]), max(words.firsts[0])) == ([short], 100_000, 30)
    assert tokenizer.truncated == 4
    assert max(given_to) <= 2 * 65_536


def test_a_limit_without_room_for_text_is_refused(tmp_path: Path) -> None:
    tokenizer = pretrained_tokenizer(str(worded(tmp_path, pad="<pad>")), local_only=True)
    with pytest.raises(InputError, match=r"model.max_length: must be more than 1 for this tokenizer \(1\)"):
        tokenizer.encode(["one"], 1)


@pytest.mark.parametrize("place", ["nothing/here", "missing", "empty"])
def test_a_base_without_tokenizer_is_refused_by_name(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    name = place if place == "nothing/here" else str(tmp_path / place)
    with pytest.raises(InputError) as caught:
        pretrained_tokenizer(name, local_only=True)
    (problem,) = caught.value.problems
    assert problem.where == "model.base"
    assert repr(name) in problem.what


def test_the_largest_id_counts_and_not_the_number_of_words(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<unk>": 0, "<pad>": 1, "one": 900}, unk_token="<unk>"))
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>"), 1, 0)
    assert tokenizer.vocab_size == 901


def test_types_of_a_single_text_are_told_as_stock_tells_them() -> None:
    tokenizer, texts = closing_typed(), ["abc", "abcdefghij"]
    stock = tokenizer.base(texts, truncation=True, max_length=6)["token_type_ids"]
    assert stock == [[0, 0, 0, 2], [0, 0, 0, 0, 0, 2]]
    found = tokenizer.encode(texts, 6)
    assert found.columns == {"token_type_ids": (stock, 0)}
    assert [len(row) for row in found.tokens] == [4, 6]
    assert byte_tokenizer().encode(texts, 6).columns == {}


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_saved_tokenizer_pads_where_its_model_wants_it(side: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path, 8, side)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert (again.padding_side, tokenizer.base.padding_side) == (side, "right")


def test_a_tokenizer_whose_own_code_is_not_run_says_so(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    assert pretrained_tokenizer(str(tmp_path), local_only=True).own_code == ""
    file = tmp_path / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    assert "names custom code" in pretrained_tokenizer(str(tmp_path), local_only=True).own_code


# Names that are no folder.

_PROGRAM = """
from andon.data.hub import require_found
for _ in range(2):
    try:
        require_found("nodir")
    except ValueError as error:
        print(error, flush=True)
    input()
"""


class _KnowsNothing(BaseHTTPRequestHandler):
    """A hub without models that records the requests."""

    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.mark.parametrize(
    ("name", "part"), [("nodir", "HF_HUB_OFFLINE"), ("my dir", "can be no hub id"), ("runs/a/b", "can be no hub id")]
)
def test_without_the_hub_a_name_that_is_no_folder_is_refused_as_both(name: str, part: str) -> None:
    with pytest.raises(InputError, match=f"'{name}' is not a local folder, and .*{part}"):
        pretrained_tokenizer(name, local_only=False)


def test_a_name_that_the_hub_does_not_know_is_asked_for_once(tmp_path: Path) -> None:
    """One request and its answer. A process that asks once more after the hub is gone says that it is."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with HTTPServer(("127.0.0.1", 0), _KnowsNothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        environment |= {"HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        asking = subprocess.Popen([sys.executable, "-c", _PROGRAM], env=environment, cwd=tmp_path, **pipes)
        assert asking.stdout is not None
        unknown = asking.stdout.readline()
        server.shutdown()
        thread.join()
    unreachable, _ = asking.communicate("\n\n")
    assert unknown.startswith("model.base: 'nodir' is not a local folder, and the hub has no model of that name")
    assert [path for path in _KnowsNothing.asked if "nodir" in path] == ["/api/models/nodir"]
    assert unreachable.startswith("model.base: 'nodir' is not a local folder, and the hub could not be reached (")


def test_a_file_is_no_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").write_bytes(b"")
    with pytest.raises(InputError, match="'weights' is a file"):
        pretrained_tokenizer("weights", local_only=False)
