"""karpathy's: nanoGPT, minGPT, llm.c, nanochat."""

from __future__ import annotations

from typing import Any

from benchmarks.real_code.data import gpt2_tokens, nanochat, token_files
from benchmarks.real_code.row import Expected, Patch, Plant, Row

_NANOCHAT: dict[str, Any] = {
    "commit": "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd",
    "module": True,
    "folder": "",
    "arguments": "--device-type cpu --depth 2 --aspect-ratio 16 --head-dim 16 --max-seq-len 32 --device-batch-size 2"
    " --total-batch-size 256 --num-iterations 12 --warmup-steps 2 --eval-every 6 --eval-tokens 256"
    " --core-metric-every -1 --sample-every -1 --window-pattern L",
    "gpu": True,
    "prepare": nanochat,
    "files": {"rustbpe.py": "", "wandb.py": ""},
    "environment": {"NANOCHAT_BASE_DIR": "base", "TORCHDYNAMO_DISABLE": "1"},
    "modules": ("tiktoken", "pyarrow", "filelock"),
}

ROWS = (
    Row(
        name="karpathy/nanoGPT/train",
        repository="karpathy/nanoGPT",
        commit="3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        path="train.py",
        family="DDP; accumulation by a flag of DDP; evaluation on rank 0; rows drawn by rank, no data loader",
        arguments="--dataset=tiny --device=cpu --compile=False --dtype=float32 --backend=gloo --n_layer=2 --n_head=2"
        " --n_embd=32 --block_size=32 --batch_size=4 --gradient_accumulation_steps=4 --max_iters=20"
        " --eval_interval=10 --eval_iters=2 --warmup_iters=4 --lr_decay_iters=20",
        gpu=True,
        prepare=token_files,
        plants=(
            Plant(
                "every micro-batch is reduced by none",
                (Patch("(micro_step == gradient_accumulation_steps - 1)", "False"),),
                ("gradients-agree", "replicas-agree"),
            ),
            Plant(
                "gradients are never set to zero",
                (Patch("optimizer.zero_grad(set_to_none=True)", "pass"),),
                ("gradient-fresh",),
            ),
        ),
    ),
    Row(
        name="karpathy/llm.c/train_gpt2",
        repository="karpathy/llm.c",
        commit="f1e2ace651495b74ae22d45d1723443fd00ecd3a",
        path="train_gpt2.py",
        family="DDP; ZeroRedundancyOptimizer; clipping",
        arguments="--input_bin tokens.bin --batch_size 2 --sequence_length 16 --total_batch_size 128 --model d12"
        " --num_iterations 12 --zero_stage 1 --write_tensors 0 --overfit_single_batch 0",
        patches=(
            Patch('assert torch.cuda.is_available(), "for now', 'assert True, "for now'),
            Patch(
                "vocab_size=50257, n_layer=12, n_head=12, n_embd=768",
                "vocab_size=50257, n_layer=1, n_head=2, n_embd=16",
            ),
            Patch('enc = tiktoken.get_encoding("gpt2")', "enc = None"),
        ),
        parts=("train_gpt2.py",),
        gpu=True,
        prepare=gpt2_tokens,
        modules=("tiktoken",),
    ),
    Row(
        name="karpathy/nanochat/base_train",
        repository="karpathy/nanochat",
        path="scripts.base_train",
        patches=(
            Patch("if is_ddp_requested and device_type", "if is_ddp_requested or device_type", "nanochat/common.py"),
            Patch('torch.device("cuda", ddp_local_rank)', 'torch.device("cpu")', "nanochat/common.py"),
        ),
        family="no DDP; Muon with AdamW, which reduce and shard inside of step; documents dealt by row group",
        **_NANOCHAT,
    ),
    Row(
        name="karpathy/nanochat/base_train on CPUs",
        repository="karpathy/nanochat",
        path="scripts.base_train",
        family="ranks of a launcher that make no process group",
        expected=tuple(
            Expected("ranks-joined", "without a GPU compute_init makes no process group", "", suspected)
            for suspected in (True, False)  # at the second update, and at the close
        ),
        **_NANOCHAT,
    ),
)
