"""Others' time for a step of the reference job: `torchrun --standalone --nproc-per-node N -m benchmarks.gpu_peers`.

The same decoder, LoRA, rows and global batch as `benchmarks.gpu_step`, trained by the HF Trainer or by a loop with
Accelerate, as their documentation advises: bf16 autocast, fused AdamW, pinned memory, no logging and no look for NaN
within the measured steps. `--per-device` makes micro-batches of so many rows, with accumulation; without it each GPU
takes its share of the batch at once. The host's clock is read with the device at rest, before and after `--steps`
updates that follow `--warm-up` others. Rank 0 prints one JSON object. Small on a CPU with `--shape tiny`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.device_time import now, now_on_all
from benchmarks.gpu_job import SHAPES, Shape, base_of, rows_of
from benchmarks.turns import Turns


def main() -> int:
    """Measure one peer, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, default="hf_trainer")
    parser.add_argument("--shape", choices=SHAPES, default="reference" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--per-device", type=int, help="rows of a micro-batch; else all of a rank's rows at once")
    parser.add_argument("--compile", action="store_true", help="torch_compile=True, or torch.compile(model)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="of --steps; the median is taken")
    parser.add_argument("--warm-up", type=int, default=8)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    share, rest = divmod(shape.batch, world)
    rows = options.per_device or share
    if rest or share % rows:
        parser.error(f"a batch of {shape.batch} on {world} ranks is not made of micro-batches of {rows}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    clock = Clock(device, options.warm_up, options.steps, options.rounds)
    PEERS[options.peer](shape, device, rows, share // rows, options.compile, clock)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(_figures(options, shape, world, rows, device, clock)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def _figures(
    options: argparse.Namespace, shape: Shape, world: int, rows: int, device: torch.device, clock: Clock
) -> dict[str, Any]:
    return {
        "peer": options.peer,
        "job": options.shape,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "world": world,
        "rows_per_device": rows,
        "accumulation": shape.batch // world // rows,
        "compile": options.compile,
        "torch": torch.__version__,
        "ms_by_round": clock.rounds,
        "ms_per_step": round(clock.ms_per_step, 3),
        "tflops_per_rank": round(shape.products / clock.ms_per_step / 1e9 / world, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 2) if device.type == "cuda" else 0.0,
    }


class Clock:
    """Times `rounds` of `steps` updates after `warm_up` others; the device is at rest when it is read.

    Each round begins once all ranks are there.
    """

    def __init__(self, device: torch.device, warm_up: int, steps: int, rounds: int) -> None:
        self._device, self._warm_up, self._steps, self._count = device, warm_up, steps, rounds
        self._turns, self._taken, self._began = Turns(), 0, 0.0
        self.rounds: list[float] = []

    @property
    def updates(self) -> int:
        """How many updates a peer is to make in all."""
        return self._warm_up + self._steps * self._count

    @property
    def ms_per_step(self) -> float:
        """The median of the rounds, in milliseconds. Raises `ValueError` if not all updates were made."""
        if self._taken != self.updates:
            msg = f"{self._taken} updates were made, not {self.updates}"
            raise ValueError(msg)
        return statistics.median(self.rounds)

    def update_made(self) -> None:
        """One more update has been launched."""
        self._taken += 1
        into = self._taken - self._warm_up
        if into < 0 or into % self._steps:
            return
        ended = now(self._device)
        if into:
            self.rounds.append(round((ended - self._began) * 1e3 / self._steps, 3))
        self._turns.wait()
        self._began = now_on_all(self._device)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The rows of the job as the HF Trainer wants them, repeated as often as needed."""

    def __init__(self, shape: Shape, count: int) -> None:
        tokens, labels = rows_of(shape)
        self._tokens, self._labels, self._count = torch.tensor(tokens), torch.tensor(labels), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = index % len(self._tokens)
        return {
            "input_ids": self._tokens[row],
            "attention_mask": torch.ones_like(self._tokens[row]),
            "labels": self._labels[row],
        }


def adapted(shape: Shape, device: torch.device) -> nn.Module:
    """The decoder of `shape` with a LoRA as peft makes it: r=16 on q and v, in fp32 beside the bf16 base."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=16, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]
    )
    found: nn.Module = get_peft_model(base_of(shape, device), config)
    return found.to(device)


def hf_trainer(shape: Shape, device: torch.device, rows: int, accumulation: int, compiled: bool, clock: Clock) -> None:
    """`transformers.Trainer` with its defaults but for what makes it fast here."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ticks(TrainerCallback):
        def on_step_end(self, *_args: Any, **_more: Any) -> None:
            clock.update_made()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=accumulation,
            max_steps=clock.updates,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            bf16=True,
            torch_compile=compiled,
            logging_steps=10**9,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=device.type == "cpu",
            ddp_find_unused_parameters=False,
        )
        data = Rows(shape, clock.updates * shape.batch)
        Trainer(adapted(shape, device), arguments, train_dataset=data, callbacks=[Ticks()]).train()


def accelerate(shape: Shape, device: torch.device, rows: int, accumulation: int, compiled: bool, clock: Clock) -> None:
    """A loop with `accelerate.Accelerator`, tuned as its documentation allows."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="bf16", cpu=device.type == "cpu", gradient_accumulation_steps=accumulation
    )
    model = adapted(shape, device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
    loader = torch.utils.data.DataLoader(
        Rows(shape, clock.updates * shape.batch), batch_size=rows, pin_memory=device.type == "cuda", num_workers=2
    )
    prepared: tuple[nn.Module, Any, Iterable[dict[str, Tensor]]] = accelerator.prepare(model, optimizer, loader)
    model, wrapped, batches = prepared
    if compiled:
        from torch._dynamo import config as tracing

        tracing.recompile_limit = tracing.accumulated_recompile_limit = 16 * shape.layers  # else some run eagerly
    called: Callable[..., Any] = torch.compile(model) if compiled else model
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(called(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained, 1.0)
            wrapped.step()
            wrapped.zero_grad()
        if accelerator.sync_gradients:
            clock.update_made()


PEERS = {"hf_trainer": hf_trainer, "accelerate": accelerate}


if __name__ == "__main__":
    raise SystemExit(main())
