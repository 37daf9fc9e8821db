"""The Trainer of transformers, watched by a callback: torchrun --nproc-per-node 2 examples/watch/hf_trainer.py

It shows the callback. On two ranks this Trainer has twice the gradient of the law, which the watch suspects
(docs/libraries.md).
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, default_data_collator

from andon.integrations.transformers import WatchCallback


class Rows(Dataset):
    """64 rows of tokens; `id` is the column that says which row it is."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"id": index, "input_ids": self.tokens[index], "labels": int(self.tokens[index].sum()) % 2}


def main() -> None:
    """Two epochs of a tiny BERT that is made here: nothing is downloaded."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    rows = Rows()
    callback = WatchCallback(ids="id", rows=len(rows))  # the one line
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            remove_unused_columns=False,  # the ids must reach the collator
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        Trainer(
            BertForSequenceClassification(config),
            arguments,
            train_dataset=rows,
            data_collator=callback.collator(default_data_collator),  # optional: who trains on what
            callbacks=[callback],
        ).train()


if __name__ == "__main__":
    main()
