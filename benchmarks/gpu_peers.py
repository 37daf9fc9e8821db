"""Others' time for a step of the reference job: `torchrun --standalone --nproc-per-node N -m benchmarks.gpu_peers`.

The same decoder, LoRA, rows and global batch as `benchmarks.gpu_step`, trained by the HF Trainer or by a loop with
Accelerate, as their documentation advises: bf16 autocast, fused AdamW, pinned memory, no logging and no look for NaN
within the measured steps. `--per-device` makes micro-batches of so many rows, with accumulation; without it each GPU
takes its share of the batch at once. Conversations (`--shape sft-0.6b`) are trained by TRL in its own packs. The host's
clock is read with the device at rest, before and after `--steps` updates that follow `--warm-up` others. Rank 0 prints
one JSON object. Small on a CPU with `--shape tiny`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
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
    now,
    now_on_all,
    rows_of,
    targets_of,
    trained_tokens,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, default="hf_trainer")
    parser.add_argument("--shape", choices=SHAPES, default="reference" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--per-device", type=int, help="rows of a micro-batch; else all of a rank's rows at once")
    parser.add_argument("--compile", action="store_true", help="torch_compile=True, or torch.compile(model)")
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="of --steps; the median is taken")
    parser.add_argument("--warm-up", type=int, default=8)
    options = parser.parse_args()
    shape, world = SHAPES[options.shape], int(os.environ.get("WORLD_SIZE", "1"))
    share, rest = divmod(shape.batch, world)
    rows = options.per_device or share
    if rest or share % rows:
        parser.error(f"a batch of {shape.batch} on {world} ranks is not made of micro-batches of {rows}")
    if shape.causal != (options.peer == "trl"):
        parser.error(f"{options.peer} does not train {options.shape} here")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    clock = Clock(device, options.warm_up, options.steps, options.rounds)
    way = Way(rows, share // rows, options.compile, options.attention)
    trained = PEERS[options.peer](shape, device, way, clock)
    if os.environ.get("RANK", "0") == "0":
        found = {
            "peer": options.peer,
            "job": options.shape,
            "device": torch.cuda.get_device_name(device) if cuda else "CPU",
            "world": world,
            "rows_per_device": rows,
            "accumulation": way.accumulation,
            "compile": options.compile,
            "torch": torch.__version__,
            "ms_by_round": clock.rounds,
            "ms_per_step": round(clock.ms_per_step, 3),
            "tflops_per_rank": round(shape.products / clock.ms_per_step / 1e9 / world, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if cuda else 0.0,
        }
        print(json.dumps(found | ({"trained_tokens_per_step": trained * world} if shape.causal else {})))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


@dataclass(frozen=True)
class Way:
    """How a peer works: rows or packs of a micro-batch, micro-batches of a rank's update, and what it is tuned with."""

    rows: int
    accumulation: int
    compiled: bool
    attention: str


class Clock:
    def __init__(self, device: torch.device, warm_up: int, steps: int, rounds: int) -> None:
        self._device, self._warm_up, self._steps = device, warm_up, steps
        self.updates, self._turns, self._taken, self._began = warm_up + steps * rounds, Turns(), 0, 0.0
        self.rounds: list[float] = []

    @property
    def ms_per_step(self) -> float:
        """The median of the rounds, in milliseconds. Raises `ValueError` if not all updates were made."""
        if self._taken != self.updates:
            raise ValueError(f"{self._taken} updates were made, not {self.updates}")
        return statistics.median(self.rounds)

    def update_made(self) -> None:
        self._taken += 1
        into = self._taken - self._warm_up
        if into < 0 or into % self._steps:
            return
        ended = now(self._device)
        if into:
            self.rounds.append(round((ended - self._began) * 1e3 / self._steps, 3))
        self._turns.wait()
        self._began = now_on_all(self._device)


def examples(shape: Shape, count: int) -> list[dict[str, Tensor]]:
    rows = [
        {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.int64), "labels": label}
        for ids, label in zip(*rows_of(shape), strict=True)
    ]
    return (rows * (-(-count // len(rows))))[:count]


def labelled(shape: Shape) -> list[dict[str, list[int]]]:
    return [
        {
            "input_ids": list(row.ids),
            "labels": [token if weight else -100 for token, weight in zip(row.ids, row.weights, strict=True)],
        }
        for row in conversations_of(shape)
    ]


def tokenizer_of(shape: Shape) -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(shape.vocabulary)}
    model = Tokenizer(WordLevel(words, unk_token="1"))
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="0", eos_token="2", unk_token="1")


def adapted(shape: Shape, device: torch.device, attention: str) -> nn.Module:
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM if shape.causal else TaskType.SEQ_CLS,
        r=16,
        lora_alpha=32,
        lora_dropout=0.05,
        target_modules=list(targets_of(shape)),
    )
    base: Any = base_of(shape, device)
    base.set_attn_implementation(attention)
    found: nn.Module = get_peft_model(base, config)
    return found.to(device)


def arguments_of(device: torch.device, way: Way, clock: Clock, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "per_device_train_batch_size": way.rows,
        "gradient_accumulation_steps": way.accumulation,
        "max_steps": clock.updates,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "bf16": True,
        "torch_compile": way.compiled,
        "logging_steps": 10**9,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": device.type == "cpu",
        "ddp_find_unused_parameters": False,
    }


def ticking(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Ticks(TrainerCallback):
        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            clock.update_made()

    return Ticks()


def hf_trainer(shape: Shape, device: torch.device, way: Way, clock: Clock) -> float:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**arguments_of(device, way, clock, folder))
        rows = examples(shape, clock.updates * shape.batch)
        Trainer(
            adapted(shape, device, way.attention), arguments, train_dataset=rows, callbacks=[ticking(clock)]
        ).train()
    return 0.0


def trl(shape: Shape, device: torch.device, way: Way, clock: Clock) -> float:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            **arguments_of(device, way, clock, folder),
            packing=True,
            max_length=shape.length,
            gradient_checkpointing=False,
            dataloader_num_workers=2,
        )
        trainer = SFTTrainer(
            adapted(shape, device, way.attention),
            arguments,
            train_dataset=Dataset.from_list(labelled(shape)),
            processing_class=tokenizer_of(shape),
            callbacks=[ticking(clock)],
        )
        packs = len(trainer.train_dataset)
        trainer.train()
    return trained_tokens(shape) / packs * way.rows * way.accumulation


def accelerate(shape: Shape, device: torch.device, way: Way, clock: Clock) -> float:
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="bf16", cpu=device.type == "cpu", gradient_accumulation_steps=way.accumulation
    )
    model = adapted(shape, device, way.attention)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    rows, pinned = examples(shape, clock.updates * shape.batch), device.type == "cuda"
    loader = torch.utils.data.DataLoader(rows, batch_size=way.rows, pin_memory=pinned, num_workers=2)  # type: ignore[arg-type]
    prepared: tuple[nn.Module, Any, Iterable[dict[str, Tensor]]] = accelerator.prepare(model, optimizer, loader)
    model, wrapped, batches = prepared
    if way.compiled:
        from torch._dynamo import config as tracing

        tracing.recompile_limit = tracing.accumulated_recompile_limit = 16 * shape.layers  # else some run eagerly
    called: Callable[..., Any] = torch.compile(model) if way.compiled else model
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(called(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained, 1.0)
            wrapped.step()
            wrapped.zero_grad()
        if accelerator.sync_gradients:
            clock.update_made()
    return 0.0


PEERS = {"hf_trainer": hf_trainer, "accelerate": accelerate, "trl": trl}


if __name__ == "__main__":
    raise SystemExit(main())
