"""Hugging Face's Trainer with its default arguments.

Packed is `DataCollatorWithFlattening`: a micro-batch's rows end to end in one line, told apart by their positions.
(https://huggingface.co/docs/transformers/main_classes/data_collator)
"""

from __future__ import annotations

import tempfile
from typing import Any

from accelerate.state import AcceleratorState
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from benchmarks.causal_peers.job import RATE, UPDATES, Layout, collator, features, optimizer


def train(model: Any, layout: Layout) -> None:
    """Three epochs of one update each."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=layout.local(),
            gradient_accumulation_steps=layout.accumulation,
            num_train_epochs=UPDATES,
            learning_rate=RATE,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(
            model,
            arguments,
            data_collator=DataCollatorWithFlattening() if layout.packed else collator(),
            train_dataset=features(layout.trained),
            optimizers=(optimizer(model), None),
        ).train()
