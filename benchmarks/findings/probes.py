"""What functions of other projects do, called from their own files in a process of their own.

`python -m benchmarks.findings.probes NAME ARGUMENTS`, in the folder of a checkout; the last line printed is JSON.
"""

from __future__ import annotations

import ast
import copy
import importlib
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.violation import Violation


def fsdp2_reset(folder: str) -> dict[str, Any]:
    """How many tensors still hold what memory held, after `to_empty` and `reset_parameters`."""
    sys.path.insert(0, folder)
    model = importlib.import_module("model")
    with torch.device("meta"):
        built = model.Transformer(model.ModelArgs(n_layers=10, n_heads=4, vocab_size=1024, max_seq_len=64))
    built.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in built.parameters():
            tensor.fill_(float("nan"))
    built.reset_parameters()
    left = [name for name, tensor in built.named_parameters() if bool(tensor.isnan().any())]
    return {"left": len(left), "all": len(list(built.parameters())), "names": left}


def nt_xent() -> dict[str, Any]:
    """Loss and gradient of SimCLR's loss on the ranks of this launch, each with its rows, beside all rows on one."""
    modules = importlib.import_module("simclr.modules")
    dist.init_process_group("gloo")
    rank, world, batch = dist.get_rank(), dist.get_world_size(), 4
    torch.manual_seed(0)
    first, second = torch.randn(2, world * batch, 6).unbind()
    alone = torch.nn.Linear(6, 3)
    shared = DistributedDataParallel(copy.deepcopy(alone))
    mine = slice(rank * batch, (rank + 1) * batch)
    loss = modules.NT_Xent(batch, 0.5, world)(*map(shared, (first[mine], second[mine])))
    whole = modules.NT_Xent(world * batch, 0.5, 1)(*map(alone, (first, second)))
    loss.backward()
    whole.backward()
    ratio, rest = _ratio(_gradient(shared), _gradient(alone))
    return {"loss": loss.item(), "alone": whole.item(), "ratio": ratio, "rest": rest}


def guided_diffusion() -> dict[str, Any]:
    """How many times the gradient of one micro-batch of 8 rows the training loop makes of smaller ones."""
    train_util = importlib.import_module("guided_diffusion.train_util")
    _join_alone()
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    gradients = {size: _gradient(_of_micro_batches(train_util, rows, size, 1)[0]) for size in (8, 2, 3)}
    _, found = _of_micro_batches(train_util, rows, 2, 3)
    return {str(size): _ratio(gradients[size], gradients[8])[0] for size in (2, 3)} | {"found": found}


def _of_micro_batches(
    train_util: Any, rows: torch.Tensor, size: int, updates: int
) -> tuple[torch.nn.Module, list[str]]:
    """A model whose loss is one number for each row, after steps of the loop, and what a watch found in them."""

    def losses(model: Any, rows: torch.Tensor, times: torch.Tensor, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"loss": model(rows).square().mean(1)}

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    loop = train_util.TrainLoop(
        model=model,
        diffusion=SimpleNamespace(training_losses=losses, num_timesteps=4),
        schedule_sampler=SimpleNamespace(sample=lambda n, device: (torch.zeros(n, dtype=torch.long), torch.ones(n))),
        data=None,
        batch_size=8,
        microbatch=size,
        lr=1e-3,
        ema_rate=0.9,
        log_interval=1,
        save_interval=1,
        resume_checkpoint="",
    )
    found = list[str]()
    with andon.watch(model, loop.opt, action=lambda each: found.append(_said(each))):
        for _ in range(updates):
            loop.forward_backward(rows, {})
            loop.mp_trainer.optimize(loop.opt)
    return model, found


def stylegan2_order() -> dict[str, Any]:
    """The rows of three passes over 12 rows, of the first of two ranks."""
    train = importlib.import_module("train")
    _join_alone()
    sampler = train.data_sampler(range(12), shuffle=True, distributed=True)
    batches = train.sample_data(torch.utils.data.DataLoader(range(12), batch_size=3, sampler=sampler))
    return {"passes": [[row for _ in range(4) for row in next(batches).tolist()] for _ in range(3)]}


def minimind_half() -> dict[str, Any]:
    """How weights after ten steps differ from what the checkpoint of a run that is to be resumed gives back."""
    trainer = importlib.import_module("trainer.trainer_utils")
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    torch.nn.init.normal_(model.weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    before = model.weight.detach().clone()
    for _ in range(10):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sizes = SimpleNamespace(use_moe=False, hidden_size=64)
    with tempfile.TemporaryDirectory() as folder:
        trainer.lm_checkpoint(sizes, weight="w", model=model, optimizer=optimizer, save_dir=folder)
        saved = trainer.lm_checkpoint(sizes, weight="w", save_dir=folder)
    after = model.weight.detach().clone()
    model.load_state_dict(saved["model"])
    rounded = (model.weight.detach() - after).abs()
    return {
        "changed": int((rounded > 0).sum()),
        "all": after.numel(),
        "relative": (rounded / after.abs()).max().item(),
        "zero": int(((model.weight == 0) & (after != 0)).sum()),
        "moved": (after - before).abs().mean().item(),
        "rounded": rounded.mean().item(),
    }


def accelerate_resume(folder: str, part: str, sampler: str) -> dict[str, Any]:
    """The rows of all ranks in three epochs of 24 rows; the second is saved, or resumed, after 2 of 4 batches.

    The loop is that of Accelerate's example of checkpointing.
    """
    accelerate = importlib.import_module("accelerate")
    config = accelerate.DataLoaderConfiguration(use_seedable_sampler=sampler == "seedable")
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    accelerate.utils.set_seed(1)
    loader = torch.utils.data.DataLoader(torch.arange(24), batch_size=3, shuffle=True)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
    epochs: list[list[int]] = []
    if part == "resume":
        accelerator.load_state(folder)
        epochs.append([])
    for epoch in range(len(epochs), 3):
        resumed = part == "resume" and epoch == 1
        active = accelerator.skip_first_batches(loader, 2) if resumed else loader
        epochs.append([])
        for number, rows in enumerate(active):
            epochs[-1] += accelerator.gather(rows).tolist()
            if part == "train" and (epoch, number) == (1, 1):
                accelerator.save_state(folder)
    return {"epochs": epochs}


def accumulate_twice(script: str) -> dict[str, Any]:
    """How many updates the context managers of a script's training loop make of 16 batches, and of which gradient."""
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    loop = ast.parse(Path(script).read_text(encoding="utf-8"))
    contexts = [
        [compile(ast.Expression(item.context_expr), script, "eval") for item in node.items]
        for node in ast.walk(loop)
        if isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith("accelerator.accumulate(")
    ]
    # Of a parameter with one element a watch knows no scale.
    unet, text_encoder = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(unet.parameters(), lr=1.0)
    unet, text_encoder, optimizer = accelerator.prepare(unet, text_encoder, optimizer)
    names = {"accelerator": accelerator, "unet": unet, "text_encoder": text_encoder}
    gradients, found = list[float](), list[str]()
    watch = andon.watch(unet, optimizer, action=lambda each: found.append(_said(each)))
    for _ in range(16):
        with ExitStack() as stack:
            for each in contexts[0]:
                stack.enter_context(eval(each, names))
            accelerator.backward(unet(torch.ones(3, 2)).mean())
            if accelerator.sync_gradients:
                gradients.append(unet.weight.grad.mean().item())
            optimizer.step()
            optimizer.zero_grad()
    watch.close()
    return {"updates": len(gradients), "factor": sum(gradients) / len(gradients), "found": found}


def _said(found: Violation) -> str:
    return f"{found.clause} at step {found.step}: {found.finding.seen}"


def same_noise(script: str) -> dict[str, Any]:
    """Which timesteps a script's own statements draw on each rank, and how many kinds of noise, in three steps."""
    accelerate = importlib.import_module("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    statements = {
        text: node
        for node in ast.walk(ast.parse(Path(script).read_text(encoding="utf-8")))
        if isinstance(node, (ast.Assign, ast.Expr))
        and (text := ast.unparse(node)).startswith(
            ("set_seed(", "noise = torch.randn_like", "timesteps = torch.randint")
        )
    }
    seed, *draws = (compile(ast.Module([node], []), script, "exec") for node in statements.values())
    scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
    latents = torch.zeros(4, 4, 8, 8)
    names = {"torch": torch, "args": SimpleNamespace(seed=42), "bsz": 4, "latents": latents}
    names |= {"set_seed": accelerate.utils.set_seed, "noise_scheduler": scheduler}
    exec(seed, names)
    drawn: list[list[int]] = []
    noises: set[float] = set()
    for _ in range(3):
        for draw in draws:
            exec(draw, names)
        drawn.append(accelerator.gather(names["timesteps"]).tolist())
        noises |= set(accelerator.gather(names["noise"].sum().reshape(1)).tolist())
    return {"statements": list(statements), "timesteps": drawn, "noises": len(noises)}


def fsdp_t5_loss(folder: str) -> dict[str, Any]:
    """What the example's epochs say of a model whose loss is 2 for every batch."""
    sys.path.insert(0, folder)
    functions = importlib.import_module("train_utils")
    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.zeros(()))

    class Two(torch.nn.Module):
        def forward(self, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": 2 + 0 * weight}

    model = Two()
    rows = [{name: torch.zeros(1) for name in ("source_ids", "source_mask", "target_ids", "target_mask")}] * 6
    loader = torch.utils.data.DataLoader(rows, batch_size=3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    trained = functions.train(None, model, rank, world, loader, optimizer, 1)
    return {"train": trained.item(), "validation": functions.validation(model, rank, world, loader).item()}


def _join_alone() -> None:
    """A group of this process alone, for code that asks how many ranks there are."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([tensor.grad.flatten() for tensor in model.parameters() if tensor.grad is not None])


def _ratio(seen: torch.Tensor, law: torch.Tensor) -> tuple[float, float]:
    """The factor from `law` to `seen`, and what is left of `seen` beside it, relative to its norm."""
    factor = (seen @ law / (law @ law)).item()
    return factor, ((seen - factor * law).norm() / seen.norm()).item()


PROBES = {
    probe.__name__: probe
    for probe in (
        fsdp2_reset,
        nt_xent,
        guided_diffusion,
        stylegan2_order,
        minimind_half,
        accelerate_resume,
        accumulate_twice,
        same_noise,
        fsdp_t5_loss,
    )
}


if __name__ == "__main__":
    # One write, so that the lines of several ranks do not run into each other.
    sys.stdout.write(json.dumps(PROBES[sys.argv[1]](*sys.argv[2:])) + "\n")
