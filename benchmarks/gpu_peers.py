"""Other trainers' time for the reference job: `torchrun --standalone --nproc-per-node N -m benchmarks.gpu_peers`.

The decoder, LoRA, rows and global batch are those of `benchmarks.gpu_step`. The HF Trainer or a loop with Accelerate
trains it as their documentation advises: bf16 autocast, fused AdamW, pinned memory, no logging and no check for NaN
within the measured steps. `--per-device` makes micro-batches of that many rows, with accumulation; without it each GPU
takes its share of the batch at once. TRL trains conversations (`--shape sft-0.6b`) in its own packs. The device is
synchronized before and after each timed round. Rank 0 prints one JSON object. `--shape tiny` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_job import (
    SHAPES,
    Shape,
    Turns,
    base_of,
    conversations_of,
    device_here,
    measured,
    now,
    now_on_all,
    rows_of,
    targets_of,
    trained_tokens,
)

WARM_UP = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, default="hf_trainer")
    parser.add_argument("--shape", choices=SHAPES, default="reference" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--per-device", type=int, help="rows of a micro-batch; default: all rows of a rank")
    parser.add_argument("--compile", action="store_true", help="torch_compile=True, or torch.compile(model)")
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of --steps; the median counts")
    options = parser.parse_args()
    shape, world = SHAPES[options.shape], int(os.environ.get("WORLD_SIZE", "1"))
    share, rest = divmod(shape.batch, world)
    rows = options.per_device or share
    if rest or share % rows:
        parser.error(f"a batch of {shape.batch} on {world} ranks is not made of micro-batches of {rows}")
    if shape.causal != (options.peer == "trl"):
        parser.error(f"{options.peer} does not train {options.shape} here")
    device = device_here()
    clock = Clock(device, options.steps, options.rounds)
    job = Job(shape, device, rows, share // rows, options.compile, options.attention, clock)
    more = PEERS[options.peer](job)
    if os.environ.get("RANK", "0") == "0":
        found = {"peer": options.peer, "job": options.shape, "rows_per_device": rows, "accumulation": share // rows}
        print(json.dumps(found | measured(shape, device, clock.finished()) | more))
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


@dataclass(frozen=True)
class Job:
    """rows: rows or packs of a micro-batch. accumulation: micro-batches of a rank's update."""

    shape: Shape
    device: torch.device
    rows: int
    accumulation: int
    compiled: bool
    attention: str
    clock: Clock

    def model(self) -> nn.Module:
        from peft import LoraConfig, TaskType, get_peft_model

        kind = TaskType.CAUSAL_LM if self.shape.causal else TaskType.SEQ_CLS
        targets = list(targets_of(self.shape))
        config = LoraConfig(task_type=kind, r=16, lora_alpha=32, lora_dropout=0.05, target_modules=targets)
        base: Any = base_of(self.shape, self.device)
        base.set_attn_implementation(self.attention)
        found: nn.Module = get_peft_model(base, config)
        return found.to(self.device)

    def examples(self) -> list[dict[str, Any]]:
        """As many classified rows as the job trains on."""
        rows: list[dict[str, Any]] = [
            {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.int64), "labels": label}
            for ids, label in zip(*rows_of(self.shape), strict=True)
        ]
        count = self.clock.updates * self.shape.batch
        return (rows * (-(-count // len(rows))))[:count]

    def conversations(self) -> list[dict[str, list[int]]]:
        return [
            {
                "input_ids": list(row.ids),
                "labels": [token if weight else -100 for token, weight in zip(row.ids, row.weights, strict=True)],
            }
            for row in conversations_of(self.shape)
        ]

    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        words = {str(number): number for number in range(self.shape.vocabulary)}
        model = Tokenizer(WordLevel(words, unk_token="1"))
        return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="0", eos_token="2", unk_token="1")


def transformers_trainer(job: Job) -> dict[str, float]:
    """The HF Trainer, or TRL's SFTTrainer for conversations."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            job.clock.update_made()

    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {
            "output_dir": folder,
            "per_device_train_batch_size": job.rows,
            "gradient_accumulation_steps": job.accumulation,
            "max_steps": job.clock.updates,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "bf16": True,
            "torch_compile": job.compiled,
            "logging_steps": 10**9,
            "logging_nan_inf_filter": False,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": job.device.type == "cpu",
            "ddp_find_unused_parameters": False,
        }
        if not job.shape.causal:
            rows: Any = job.examples()
            Trainer(job.model(), TrainingArguments(**arguments), train_dataset=rows, callbacks=[Ticks()]).train()
            return {}
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        arguments |= {"packing": True, "max_length": job.shape.length, "gradient_checkpointing": False}
        trainer = SFTTrainer(
            job.model(),
            SFTConfig(**arguments, dataloader_num_workers=2),
            train_dataset=Dataset.from_list(job.conversations()),
            processing_class=job.tokenizer(),
            callbacks=[Ticks()],
        )
        packs = len(trainer.train_dataset)
        trainer.train()
    return {"trained_tokens_per_step": trained_tokens(job.shape) / packs * job.shape.batch}


def accelerate(job: Job) -> dict[str, float]:
    from accelerate import Accelerator

    cuda = job.device.type == "cuda"
    accelerator = Accelerator(mixed_precision="bf16", cpu=not cuda, gradient_accumulation_steps=job.accumulation)
    model = job.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda)
    rows: Any = job.examples()
    loader = torch.utils.data.DataLoader[dict[str, Tensor]](rows, batch_size=job.rows, pin_memory=cuda, num_workers=2)
    model, wrapped, batches = accelerator.prepare(model, optimizer, loader)
    if job.compiled:
        from torch._dynamo import config as tracing

        # With the default limit some layers run eagerly.
        tracing.recompile_limit = tracing.accumulated_recompile_limit = 16 * job.shape.layers
    called: Callable[..., Any] = torch.compile(model) if job.compiled else model
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(called(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained, 1.0)
            wrapped.step()
            wrapped.zero_grad()
        if accelerator.sync_gradients:
            job.clock.update_made()
    return {}


PEERS = {"hf_trainer": transformers_trainer, "accelerate": accelerate, "trl": transformers_trainer}


if __name__ == "__main__":
    raise SystemExit(main())
