"""Small generated input for the scripts; nothing is downloaded."""

from __future__ import annotations

import array
import json
import pickle
import random
from pathlib import Path


def words(count: int, seed: int = 0) -> str:
    drawn = random.Random(seed)
    text = [f"w{drawn.randrange(60)}" for _ in range(count)]
    return "\n".join(" ".join(text[start : start + 12]) for start in range(0, count, 12)) + "\n"


def corpus(folder: Path) -> None:
    (folder / "corpus").mkdir()
    for name, count in (("train", 4000), ("valid", 600), ("test", 600)):
        (folder / "corpus" / f"{name}.txt").write_text(words(count, len(name)), encoding="utf-8")


def plain_text(folder: Path) -> None:
    (folder / "text.txt").write_text(words(400), encoding="utf-8")


def token_files(folder: Path) -> None:
    """`data/tiny/{train,val}.bin`: 16-bit tokens, and `meta.pkl` with how many different ones there are."""
    place = folder / "data" / "tiny"
    place.mkdir(parents=True)
    for name, count in (("train", 6000), ("val", 1500)):
        (place / f"{name}.bin").write_bytes(_tokens(count, 64).tobytes())
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


def gpt2_tokens(folder: Path) -> None:
    tokens = _tokens(8000, 50257)
    header = array.array("i", [20240520, 1, len(tokens), *[0] * 253])
    (folder / "tokens.bin").write_bytes(header.tobytes() + tokens.tobytes())


def _tokens(count: int, vocabulary: int) -> array.array[int]:
    drawn = random.Random(count)
    return array.array("H", [drawn.randrange(vocabulary) for _ in range(count)])


_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def _vocabulary(*special: str) -> dict[str, int]:
    return {word: number for number, word in enumerate([*special, *(f"w{number}" for number in range(60))])}


def bert(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    torch.manual_seed(0)
    vocabulary = _vocabulary("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=64, **_SIZES)
    BertModel(config).save_pretrained(folder / "bert-base-cased")
    BertTokenizerFast(vocab=vocabulary, model_max_length=64).save_pretrained(folder / "bert-base-cased")


def glue(folder: Path) -> None:
    bert(folder)
    place = folder / "nyu-mll" / "glue"
    place.mkdir(parents=True)
    for name, count in (("train", 256), ("validation", 64), ("test", 16)):
        sentences = words(24 * count, len(name)).splitlines()
        lines = [f"{sentences[2 * row]},{sentences[2 * row + 1]},{row % 2},{row}" for row in range(count)]
        (place / f"{name}.csv").write_text("\n".join(["sentence1,sentence2,label,idx", *lines]), encoding="utf-8")
    splits = "".join(f"  - {{split: {name}, path: {name}.csv}}\n" for name in ("train", "validation", "test"))
    text = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}---\n"
    (place / "README.md").write_text(text, encoding="utf-8")


def images(folder: Path) -> None:
    """`images/train/{one,two}/*.jpg` and, in one folder, `pets/{one,two}_N.jpg`: noise of 40 by 40."""
    import numpy
    from PIL import Image

    drawn = numpy.random.default_rng(0)
    for kind in ("one", "two"):
        (folder / "images" / "train" / kind).mkdir(parents=True)
    (folder / "pets").mkdir()
    for number in range(64):
        kind = ("one", "two")[number % 2]
        picture = Image.fromarray(drawn.integers(0, 255, (40, 40, 3), dtype=numpy.uint8))
        picture.save(folder / "images" / "train" / kind / f"{number}.jpg")
        picture.save(folder / "pets" / f"{kind}_{number}.jpg")


def wikitext(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text(words(7000), encoding="utf-8")


def nanochat(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    import torch

    special = ["bos", "user_start", "user_end", "assistant_start", "assistant_end"]
    special += ["python_start", "python_end", "output_start", "output_end"]
    ranks = {bytes([byte]): byte for byte in range(256)}
    names = {f"<|{name}|>": 256 + number for number, name in enumerate(special)}
    encoding = tiktoken.Encoding("bytes", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens=names)
    (folder / "base" / "tokenizer").mkdir(parents=True)
    (folder / "base" / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = torch.tensor([1] * 256 + [0] * len(names), dtype=torch.int32)
    torch.save(lengths, folder / "base" / "tokenizer" / "token_bytes.pt")
    place = folder / "base" / "base_data_climbmix"
    place.mkdir()
    for shard in range(2):
        texts = pyarrow.table({"text": words(3000, shard).splitlines()})
        pyarrow.parquet.write_table(texts, place / f"shard_{shard:05d}.parquet", row_group_size=50)


def documents(folder: Path, name: str = "texts.jsonl") -> None:
    lines = [json.dumps({"text": line}) for line in words(1536).splitlines()]
    (folder / name).write_text("\n".join(lines), encoding="utf-8")


def llama(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = _vocabulary("<unk>", "<s>", "</s>", "<pad>")
    config = LlamaConfig(vocab_size=len(vocabulary), max_position_embeddings=128, **_SIZES)
    LlamaForCausalLM(config).save_pretrained(folder / "tiny-llama")
    model = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=model, **special).save_pretrained(folder / "tiny-llama")


def texts(folder: Path) -> None:
    llama(folder)
    (folder / "texts").mkdir()
    documents(folder, "texts/train.jsonl")
