"""Scripts of single projects."""

from __future__ import annotations

from benchmarks.real_code.data import documents, gpt2_tokens
from benchmarks.real_code.row import Patch, Plant, Row

ROWS = (
    Row(
        name="KellerJordan/modded-nanogpt/2024-10-10_Muon",
        repository="KellerJordan/modded-nanogpt",
        commit="f411b3d346aa52d3504324ca93c230fd84c6c07f",
        path="records/track_1_short/2024-10-10_Muon/train_gpt2.py",
        family="DDP; AdamW and Muon in turn; gradients divided by hand",
        patches=(
            Patch("assert torch.cuda.is_available()", "assert True"),
            Patch("n_layer=12, n_head=12, n_embd=768", "n_layer=2, n_head=2, n_embd=32"),
            Patch("'data/fineweb10B/fineweb_train_*.bin'", "'tokens.bin'"),
            Patch("'data/fineweb10B/fineweb_val_*.bin'", "'tokens.bin'"),
            Patch("batch_size : int = 8*64", "batch_size : int = 8"),
            Patch("device_batch_size : int = 64", "device_batch_size : int = 2"),
            Patch("sequence_length : int = 1024", "sequence_length : int = 16"),
            Patch("num_iterations : int = 6200", "num_iterations : int = 12"),
            Patch("warmdown_iters : int = 1800", "warmdown_iters : int = 4"),
            Patch("val_loss_every : int = 125", "val_loss_every : int = 6"),
            Patch("val_tokens : int = 10485760", "val_tokens : int = 256"),
            Patch("subprocess.run(['nvidia-smi']", "subprocess.run(['true']"),
        ),
        parts=("records/track_1_short/2024-10-10_Muon",),
        gpu=True,
        prepare=gpt2_tokens,
        environment={"TORCHDYNAMO_DISABLE": "1"},
        plants=(
            Plant(
                "gradients are never set to zero",
                (Patch("model.zero_grad(set_to_none=True)", "pass"),),
                ("gradient-fresh",),
            ),
        ),
    ),
    Row(
        name="jingyaogong/minimind/train_pretrain",
        repository="jingyaogong/minimind",
        commit="d65ef2c00ebc6082f9df11541e1b191655eddb00",
        path="trainer/train_pretrain.py",
        parts=("trainer", "model", "dataset"),
        family="DDP; a batch sampler of its own; accumulation without no_sync; rank 0 saves",
        arguments="--data_path texts.jsonl --hidden_size 32 --num_hidden_layers 1 --max_seq_len 32 --batch_size 4"
        " --accumulation_steps 2 --num_workers 0 --log_interval 8 --save_interval 8",
        gpu=True,
        prepare=documents,
        modules=("datasets", "transformers"),
    ),
    Row(
        name="kuangliu/pytorch-cifar/main",
        repository="kuangliu/pytorch-cifar",
        commit="49b7aa97b0c12fe0d4054e670403a16b6b834ddd",
        path="main.py",
        parts=("main.py", "utils.py", "models"),
        family="one process; batch norms; augmentation in workers",
        patches=(
            Patch(
                "trainset = torchvision.datasets.CIFAR10(",
                "trainset = torchvision.datasets.FakeData(256, (3, 32, 32), 10,",
            ),
            Patch("root='./data', train=True, download=True, ", ""),
            Patch(
                "testset = torchvision.datasets.CIFAR10(",
                "testset = torchvision.datasets.FakeData(100, (3, 32, 32), 10,",
            ),
            Patch("root='./data', train=False, download=True, ", ""),
            Patch("net = SimpleDLA()", "net = MobileNet()"),
            Patch("start_epoch+200", "start_epoch+2"),
            Patch("_, term_width = os.popen('stty size', 'r').read().split()", "term_width = 80", "utils.py"),
        ),
        ranks=1,
        modules=("torchvision",),
        plants=(Plant("trains on in evaluation mode", (Patch("    net.train()", "    pass"),), ("training-mode",)),),
    ),
)
