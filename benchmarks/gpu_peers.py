"""The HF Trainer's time for the reference job: `torchrun --standalone --nproc-per-node N -m benchmarks.gpu_peers`.

The decoder, LoRA, rows and global batch are those of `benchmarks.gpu_step`. It trains as its documentation advises:
bf16 autocast, fused AdamW, pinned memory, no logging and no check for NaN within the measured steps. `--per-device`
makes micro-batches of that many rows, with accumulation; without it each GPU takes its share of the batch at once. The
device is synchronized before and after each timed round. Rank 0 prints one JSON object. `--shape tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from typing import Any

import torch

from benchmarks.gpu_job import (
    SHAPES,
    Turns,
    base_of,
    device_here,
    measured,
    now,
    now_on_all,
    rows_of,
    targets_of,
)

WARM_UP = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name for name, shape in SHAPES.items() if not shape.causal]
    parser.add_argument("--shape", choices=names, default="reference" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--per-device", type=int, help="rows of a micro-batch; default: all rows of a rank")
    parser.add_argument("--compile", action="store_true", help="torch_compile=True")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of --steps; the median counts")
    options = parser.parse_args()
    shape, world = SHAPES[options.shape], int(os.environ.get("WORLD_SIZE", "1"))
    share, rest = divmod(shape.batch, world)
    rows = options.per_device or share
    if rest or share % rows:
        parser.error(f"a batch of {shape.batch} on {world} ranks is not made of micro-batches of {rows}")
    device = device_here()
    clock = Clock(device, options.steps, options.rounds)
    train(options, device, rows, share // rows, clock)
    if os.environ.get("RANK", "0") == "0":
        found = {"job": options.shape, "rows_per_device": rows, "accumulation": share // rows}
        print(json.dumps(found | measured(shape, device, clock.finished())))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


class Clock:
    """Counts the updates of a rank, and times `rounds` of `steps` after the warm-up."""

    def __init__(self, device: torch.device, steps: int, rounds: int) -> None:
        self._device, self._steps, self._turns, self._taken, self._began = device, steps, Turns(), 0, 0.0
        self.updates, self._rounds = WARM_UP + steps * rounds, list[float]()

    def finished(self) -> list[float]:
        """Milliseconds per step of each round. Raises `ValueError` if updates are missing."""
        if self._taken != self.updates:
            raise ValueError(f"{self._taken} updates were made, not {self.updates}")
        return self._rounds

    def update_made(self) -> None:
        self._taken += 1
        into = self._taken - WARM_UP
        if into < 0 or into % self._steps:
            return
        ended = now(self._device)
        if into:
            self._rounds.append(round((ended - self._began) * 1e3 / self._steps, 3))
        self._turns.wait()
        self._began = now_on_all(self._device)


def train(options: argparse.Namespace, device: torch.device, rows: int, accumulation: int, clock: Clock) -> None:
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            clock.update_made()

    shape = SHAPES[options.shape]
    targets = list(targets_of(shape))
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=16, lora_alpha=32, lora_dropout=0.05, target_modules=targets)
    base: Any = base_of(shape, device)
    model = get_peft_model(base, config).to(device)
    examples: Any = [
        {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.int64), "labels": label}
        for ids, label in zip(*rows_of(shape), strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=clock.updates,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            bf16=True,
            torch_compile=options.compile,
            logging_steps=10**9,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            ddp_find_unused_parameters=False,
        )
        Trainer(model, arguments, train_dataset=examples, callbacks=[Ticks()]).train()


if __name__ == "__main__":
    raise SystemExit(main())
