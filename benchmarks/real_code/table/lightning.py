"""Lightning-AI: the examples of Fabric and of Lightning."""

from __future__ import annotations

from typing import Any

from benchmarks.real_code.data import wikitext
from benchmarks.real_code.row import Patch, Plant, Row

_FABRIC = {"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_DEVICES": "2", "LT_STRATEGY": "ddp"}


def _fabric(path: str, family: str, **kwargs: Any) -> Row:
    return Row(
        name=f"Lightning-AI/{kwargs.pop('called', path.removeprefix('examples/').removesuffix('.py'))}",
        repository="Lightning-AI/pytorch-lightning",
        commit="7f0c3436cd3f6ad3753125672024fc415cbcb414",
        path=path,
        family=family,
        parts=(path.rpartition("/")[0],),
        environment=kwargs.pop("environment", _FABRIC),
        modules=("lightning", "torchvision", "torchmetrics"),
        **kwargs,
    )


_FAKE = "FakeData(640, (1, 28, 28), 10, transform=transform)"

ROWS = (
    _fabric(
        "examples/fabric/image_classifier/train_fabric.py",
        "Fabric, DDP: a loader that is not shuffled",
        arguments="--epochs 2",
        patches=(
            Patch("from torchvision.datasets import MNIST", "from torchvision.datasets import FakeData"),
            Patch("MNIST(DATASETS_PATH, download=fabric.is_global_zero, train=True, transform=transform)", _FAKE),
            Patch("MNIST(DATASETS_PATH, download=fabric.is_global_zero, train=False, transform=transform)", _FAKE),
        ),
        plants=(
            Plant(
                "the data loader is not set up",
                (Patch("train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)", ""),),
                ("samples-once",),
            ),
            Plant("gradients are never set to zero", (Patch("optimizer.zero_grad()", "pass"),), ("gradient-fresh",)),
        ),
    ),
    _fabric(
        "examples/fabric/dcgan/train_fabric.py",
        "Fabric, DDP: a GAN, two wrapped models and optimizers in turn",
        environment={},
        patches=(
            Patch('Fabric(accelerator="auto", devices=1)', 'Fabric(accelerator="cpu", devices=2, strategy="ddp")'),
            Patch("dataset = CelebA(", "dataset = FakeData(64, (3, 64, 64), 10, transforms.ToTensor()); dict("),
            Patch("from torchvision.datasets import CelebA", "from torchvision.datasets import FakeData"),
            Patch("workers = os.cpu_count()", "workers = 0"),
            Patch("batch_size = 128", "batch_size = 8"),
            Patch("ngf = 64", "ngf = 8"),
            Patch("ndf = 64", "ndf = 8"),
            Patch("num_epochs = 5", "num_epochs = 2"),
        ),
    ),
    _fabric(
        "examples/fabric/language_model/train.py",
        "Fabric, DDP: SGD with clipping",
        prepare=wikitext,
        patches=(Patch("[n - 4000, 2000, 2000]", "[n - 40, 20, 20]"), Patch("max_epochs=20", "max_epochs=2")),
    ),
)
