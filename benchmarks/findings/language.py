"""Defects in projects that train language models: nanoGPT, llama-cookbook, MiniMind."""

from __future__ import annotations

from benchmarks.findings.checkout import Checkout
from benchmarks.findings.finding import Finding, Shown

_NANOGPT = """
import numpy, os
os.makedirs("data/tiny", exist_ok=True)
for part in ("train", "val"):
    numpy.random.default_rng(1).integers(0, 50, 20000).astype("uint16").tofile(f"data/tiny/{part}.bin")
"""


def nanogpt_resume(files: Checkout) -> Shown:
    """Ten steps on two ranks with a checkpoint after five, and five more of a run resumed from that checkpoint."""
    files.change(
        "train.py",
        ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
        ("torch.cuda.set_device(device)", "pass"),
        ("device_ids=[ddp_local_rank]", "device_ids=None"),
        ("    x = torch.stack([", "    drawn.append((split, ix.tolist()))\n    x = torch.stack(["),
        ("iter_num = 0\n", "iter_num = 0\ndrawn = []\n"),
        ("if ddp:\n    destroy_process_group()", _WRITE_DRAWN),
    )
    files.python("-c", _NANOGPT)
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16, "batch_size": 4, "dataset": "'tiny'"}
    course = {"eval_interval": 5, "eval_iters": 2, "gradient_accumulation_steps": 2, "backend": "'gloo'"}
    words = [f"--{name}={value}" for name, value in {**sizes, **course, "compile": False, "dtype": "'float32'"}.items()]
    for start, until in (("scratch", 5), ("resume", 9)):
        name = f"--wandb_run_name='{start}'"
        files.ranks("train.py", *words, f"--init_from='{start}'", f"--max_iters={until}", name, watched=False)
    seen, again = [], True
    for rank in (0, 1):
        first, second = (files.text(f"{start}{rank}.txt").splitlines() for start in ("scratch", "resume"))
        again = again and first[: len(second)] == second[: len(first)]
        seen.append(f"rank {rank}: {len(first)} batches drawn from the start, {len(second)} after the resumption")
    words_of_it = "the same, in the same order, as far as the first run went" if again else "not the same"
    return Shown(again, (*seen, f"they are {words_of_it}"))


_WRITE_DRAWN = """with open(f"{wandb_run_name}{seed_offset}.txt", "w") as file:
    file.writelines(f"{rows}\\n" for part, rows in drawn if part == "train")"""


def llama_cookbook_order(files: Checkout) -> Shown:
    """Two epochs of its `train` with the data loader of its default options, on two ranks under the watch."""
    files.stand_in("datasets", "def __getattr__(name):\n    return None\n")
    files.stand_in("fire", "")
    files.change(
        "src/llama_cookbook/utils/train_utils.py",
        ("is_xpu_available, is_ccl_available", "is_xpu_available"),  # gone from Accelerate, and not used on a CPU
        ("batch[key].to(local_rank)", "batch[key]"),
    )
    files.write("src/run.py", _LLAMA_COOKBOOK)
    found = files.ranks("run.py", at="src").found("order-renewed")
    return Shown(bool(found), tuple(found))


_LLAMA_COOKBOOK = """
import os
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from llama_cookbook.configs import train_config
from llama_cookbook.utils.config_utils import get_dataloader_kwargs
from llama_cookbook.utils.train_utils import train

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
config = train_config()
config.enable_fsdp, config.run_validation, config.save_model, config.num_epochs = True, False, False, 2
config.batch_size_training, config.use_peft = 2, True
rows = [{"input_ids": ids, "labels": ids, "attention_mask": [1] * 8} for ids in torch.randint(0, 32, (16, 8)).tolist()]
sizes = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = torch.utils.data.DataLoader(rows, **get_dataloader_kwargs(config, rows, None, "train"))
rank = int(os.environ["RANK"])
train(model, loader, None, None, optimizer, schedule, 1, config, None, rank, rank)
"""


def minimind_half(files: Checkout) -> Shown:
    """A model of fp32 weights through the checkpoint that `--from_resume 1` starts from."""
    seen = files.probe("minimind_half")
    said = (
        f"{seen['changed']} of {seen['all']} weights are another number after saving and resuming",
        f"by up to {seen['relative']:.1e} of their value; {seen['zero']} became zero",
        f"in the mean by {seen['rounded']:.1e}; ten steps of AdamW at a rate of 1e-6 moved them by {seen['moved']:.1e}",
    )
    return Shown(seen["changed"] > 0, said)


FINDINGS = (
    Finding(
        "nanogpt-resume",
        "karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "train.py",
        106,
        "torch.manual_seed(1337 + seed_offset)",
        ("train.py", "model.py", "configurator.py"),
        nanogpt_resume,
        "karpathy/nanoGPT#467",
    ),
    Finding(
        "llama-cookbook-order",
        "meta-llama/llama-recipes",
        "faae2fd877995430906e1d0904131ecdaa89a604",
        "src/llama_cookbook/utils/config_utils.py",
        95,
        'kwargs["sampler"] = DistributedSampler(',
        ("src/llama_cookbook",),
        llama_cookbook_order,
    ),
    Finding(
        "minimind-half",
        "jingyaogong/minimind",
        "d65ef2c00ebc6082f9df11541e1b191655eddb00",
        "trainer/trainer_utils.py",
        73,
        "state_dict = {k: v.half().cpu()",
        ("trainer", "model"),
        minimind_half,
    ),
)
