"""Right loops with the help of others: FSDP2, Accelerate, Lightning Fabric, the Trainer of transformers."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import Dataset, TensorDataset

import andon
from andon_contracts.watch import Watch
from tests.watch.clean import Kind, Seen, ignore, path_of_all_ranks, seen_by
from tests.watch.clean_loops import adamw
from tests.watch.clean_models import Normed, Replying
from tests.watch.loop import CLASSES, FEATURES, data


def sharded(steps: int, wrap: str = "FSDP2", how: str = "") -> Seen:
    """Each layer and the whole sharded, with clipping, accumulation, and checkpoints that are loaded.

    how: "words": an embedding, of whose rows each rank's batches use few; "whole": a layer put in later, reduced by the
    loop; "late": only the last micro-batch reduces; "in place": gradients are zeroed and clipped by value in place, and
    an average of the weights is kept; "evaluated": a forward pass comes between the optimizer and the watch.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    first = nn.Embedding(40, 16) if how == "words" else nn.Linear(FEATURES, 16)
    model: Any = nn.Sequential(first, nn.Tanh(), nn.Linear(16, CLASSES))
    if wrap.startswith("FSDP1"):
        kept = {"use_orig_params": "flat" not in wrap, "device_id": torch.device("cpu")}
        flat = functools.partial(FullyShardedDataParallel, **kept)  # type: ignore[arg-type]
        model[0], model[2] = flat(model[0]), flat(model[2])
        model = flat(model)
    else:
        shape = (world, 1) if "replicated" in wrap else (1, world)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    if how == "whole":
        model[1] = nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05) if how else adamw(list(model.parameters()))
    x, y = data()
    x = (x[:, :3] > 0).long() @ torch.tensor([1, 2, 4]) if how == "words" else x
    if how == "evaluated":
        with torch.no_grad():
            model(x)
    w = andon.watch(model, optimizer, action=ignore)
    average = [p.detach().clone() for p in model.parameters()]
    path = path_of_all_ranks()
    for step in range(steps):
        for micro in range(2):
            if how == "late":
                model.set_requires_gradient_sync(micro == 1)
            rows = (torch.arange(4) + 8 * step + 4 * micro + rank) % len(x)
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
        if wrap.startswith("FSDP1"):
            model.clip_grad_norm_(0.1)
        elif how == "in place":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        elif how != "whole":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for p in model[1].parameters() if how == "whole" else ():
            dist.all_reduce(p.grad)
            p.grad /= world
        optimizer.step()
        optimizer.zero_grad(set_to_none=how != "in place")
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        if step == steps // 2:
            w.saved(path)
            w.loaded(path)
    w.close()
    return seen_by(w)


def _launched() -> None:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "ACCELERATE_USE_CPU": "true"}


def accelerated(steps: int) -> Seen:
    """Accelerate with accumulation, bf16, clipping, a schedule, and even batches (32 rows)."""
    from accelerate import Accelerator

    _launched()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    inner = Normed()
    x, y = data()
    loader: Any = torch.utils.data.DataLoader(TensorDataset(x[:32], y[:32]), batch_size=4, shuffle=True)
    adam = adamw(list(inner.parameters()))
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, step / 10))
    model, optimizer, loader, schedule = accelerator.prepare(inner, adam, loader, schedule)
    w = andon.watch(model, optimizer, action=ignore)
    done = 0
    while done < steps:
        for features, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(features), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    done += 1
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    w.close()
    accelerator.free_memory()
    return seen_by(w)


def fabric(steps: int) -> Seen:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    _launched()
    os.environ["NODE_RANK"] = "0"
    made = Fabric(accelerator="cpu", devices=dist.get_world_size(), precision="bf16-mixed", strategy="ddp",
                  plugins=[LightningEnvironment()])  # fmt: skip
    made.launch()
    torch.manual_seed(0)
    inner = Normed()
    model, optimizer = made.setup(inner, adamw(list(inner.parameters())))
    w = andon.watch(model, optimizer, action=ignore)
    x, y = data()
    mine = torch.arange(dist.get_rank(), 32, dist.get_world_size())
    for _ in range(steps):
        for number, part in enumerate(mine.tensor_split(2)):
            with made.no_backward_sync(model, enabled=number == 0):
                made.backward(nn.functional.cross_entropy(model(x[part]), y[part]) / 2)
        made.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    w.close()
    return seen_by(w)


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = data()
        return {"x": x[index], "labels": y[index]}


def transformers_trainer(steps: int) -> Seen:
    """The Trainer of transformers with LoRA, accumulation, warm-up, clipping, and its known faults switched off."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    _launched()
    opened: list[Watch] = []

    class Watched(TrainerCallback):
        def on_train_begin(self, *_: Any, **given: Any) -> None:
            opened.append(andon.watch(trainer.model_wrapped, given["optimizer"], action=ignore))

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=steps, learning_rate=1e-2,
            warmup_steps=4, max_grad_norm=0.1, average_tokens_across_devices=False, use_cpu=True, save_strategy="no",
            logging_steps=5, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(Replying(Normed()), arguments, train_dataset=Rows(), callbacks=[Watched()])
        trainer.train()
    (w,) = opened
    w.close()
    return seen_by(w)


KINDS = {
    "FSDP2": Kind(sharded),
    **{
        f"FSDP2, {how}": Kind(functools.partial(sharded, how=how), weight="many")
        for how in ("words", "whole", "late", "in place", "evaluated")
    },
    **{
        wrap: Kind(functools.partial(sharded, wrap=wrap), weight="many")
        for wrap in ("FSDP2 replicated", "FSDP1", "FSDP1 flat")
    },
    "Accelerate": Kind(accelerated, ("accelerate",), "heavy"),
    "Lightning Fabric": Kind(fabric, ("lightning",), "heavy"),
    "Trainer of transformers": Kind(transformers_trainer, ("transformers", "accelerate"), "heavy"),
}
