"""A tiny causal language model with its tokenizer, and 48 rows of text, made here: python tiny.py FOLDER"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LETTERS = string.ascii_lowercase


def main(folder: Path) -> None:
    """Write FOLDER/model and FOLDER/data, unless they are there."""
    if (folder / "data").is_dir():
        return
    words = Tokenizer(
        models.WordLevel({each: place for place, each in enumerate(["<pad>", "<eos>", *LETTERS])}, "<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=32, pad_token_id=0, eos_token_id=1, **sizes, **heads))
    for part in (tokenizer, model):
        part.save_pretrained(folder / "model")
    drawn = random.Random(0)
    rows = [{"text": "".join(drawn.choices(LETTERS, k=drawn.randint(4, 20)))} for _ in range(48)]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
