"""The Trainer of transformers with its own command line, on the model and the rows of tiny.py (see hf_trainer.yaml)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Script:
    """The folder that tiny.py has written."""

    tiny: str


def main() -> None:
    """Train on next tokens. Rows have unequal lengths, so a mean of means is not the mean."""
    script, arguments = HfArgumentParser((Script, TrainingArguments)).parse_args_into_dataclasses()
    folder = Path(script.tiny)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = (folder / "data" / "train.jsonl").read_text().splitlines()
    rows = [tokenizer(json.loads(line)["text"]) for line in lines]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", trust_remote_code=False)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, arguments, train_dataset=rows, data_collator=collator).train()


if __name__ == "__main__":
    main()
