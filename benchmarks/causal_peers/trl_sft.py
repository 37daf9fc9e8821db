"""TRL's SFTTrainer with its default arguments, in fp32, and its own packing (best fit, padding-free).

(https://huggingface.co/docs/trl/sft_trainer) Its packing is meant for flash attention, which a CPU has not; it says so.
"""

from __future__ import annotations

import tempfile
from typing import Any

from accelerate.state import AcceleratorState
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from benchmarks.causal_peers.job import LONGEST, PACKS, RATE, ROWS, UPDATES, Layout, features, optimizer, tokenizer


def train(model: Any, layout: Layout) -> None:
    """Three epochs of one update each. Raises `ValueError` where it made other packs than the layouts go by."""
    AcceleratorState._reset_state(reset_partial_state=True)
    things = PACKS if layout.packed else ROWS
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder,
            use_cpu=True,
            bf16=False,
            packing=layout.packed,
            max_length=LONGEST,
            per_device_train_batch_size=layout.local(things),
            gradient_accumulation_steps=layout.accumulation,
            num_train_epochs=UPDATES,
            learning_rate=RATE,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_list(features(layout.trained)),
            processing_class=tokenizer(),
            optimizers=(optimizer(model), None),
        )
        if len(trainer.train_dataset) != things:
            msg = f"{len(trainer.train_dataset)} packs were made, not {things}"
            raise ValueError(msg)
        trainer.train()
