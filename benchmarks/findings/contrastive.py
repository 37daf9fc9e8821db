"""Defects in Spijkervet/SimCLR."""

from __future__ import annotations

from benchmarks.findings.checkout import Checkout
from benchmarks.findings.finding import Finding, Shown

_REPOSITORY = "Spijkervet/SimCLR"
_COMMIT = "2738efae85b3ca1b70b7919c5d7a7837d9d75235"
_PATHS = ("main.py", "model.py", "config", "simclr", "utils")

# What the script needs of torchvision: an encoder with an `fc`, and pairs of views.
_TORCHVISION = {
    "torchvision.__init__": "from . import datasets, models, transforms",
    "torchvision.models.resnet": "Bottleneck = ResNet = object",
    "torchvision.models.__init__": """
import torch
class Encoder(torch.nn.Module):
    def __init__(self, pretrained):
        super().__init__()
        self.body, self.fc = torch.nn.Linear(12, 8), torch.nn.Linear(8, 2)
    def forward(self, x):
        return self.fc(torch.relu(self.body(x)))
resnet18 = resnet50 = Encoder
""",
    "torchvision.datasets": """
import torch
class CIFAR10(torch.utils.data.Dataset):
    def __init__(self, folder, download, transform):
        self.rows = torch.randn(32, 2, 12, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return 32
    def __getitem__(self, row):
        return tuple(self.rows[row]), 0
""",
    "torchvision.transforms": "def __getattr__(name):\n    return lambda *words, **named: None\n",
}


def _stand_ins(files: Checkout) -> None:
    for module, text in _TORCHVISION.items():
        files.stand_in(module, text)


def scheduler_on_one_node(files: Checkout) -> Shown:
    """Three epochs with LARS on two nodes, which are two processes of this machine, under the watch."""
    _stand_ins(files)
    files.change(
        "main.py",
        ("from torch.utils.tensorboard import SummaryWriter", "from unittest.mock import MagicMock as SummaryWriter"),
        ('"nccl"', '"gloo"'),
        ("torch.cuda.set_device(gpu)", "pass"),
        (".cuda(non_blocking=True)", ""),
        ("device_ids=[gpu]", "device_ids=None"),
        ("mp.spawn(main, args=(args,), nprocs=args.gpus, join=True)", "main(0, args)"),
        ('os.environ["MASTER_ADDR"] = "127.0.0.1"', 'args.nr = int(os.environ["RANK"])'),
        ('os.environ["MASTER_PORT"]', "unused"),  # torchrun's, as the rank above
    )
    files.change("simclr/modules/lars.py", (".to(device)", ""))
    words = {"nodes": 2, "optimizer": "LARS", "epochs": 2, "batch_size": 8, "workers": 0}
    arguments = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    found = files.ranks("main.py", *arguments).found("hyperparameters-agree")
    return Shown(bool(found), tuple(found))


def gathered_gradient(files: Checkout) -> Shown:
    """The loss on two ranks, as the script has it, beside the same rows on one."""
    _stand_ins(files)
    seen = files.probe("nt_xent", world=2)
    said = (
        f"loss on 2 ranks {seen['loss']:.6f}, of the same rows on one {seen['alone']:.6f}",
        f"gradient on 2 ranks = {seen['ratio']:.6f} x the gradient on one, but for {seen['rest']:.1e} of its norm",
    )
    return Shown(abs(seen["ratio"] - 0.5) < 1e-4, said)


FINDINGS = (
    Finding(
        "simclr-scheduler",
        _REPOSITORY,
        _COMMIT,
        "main.py",
        139,
        "if args.nr == 0 and scheduler",
        _PATHS,
        scheduler_on_one_node,
    ),
    Finding(
        "simclr-gather",
        _REPOSITORY,
        _COMMIT,
        "simclr/modules/gather.py",
        19,
        "grad_out[:] = grads[dist.get_rank()]",
        _PATHS,
        gathered_gradient,
        "Spijkervet/SimCLR#30",
    ),
)
