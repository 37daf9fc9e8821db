"""Defects in pytorch/examples."""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.findings.checkout import Checkout
from benchmarks.findings.finding import Finding, Shown

Show = Callable[[Checkout], Shown]

_REPOSITORY = "pytorch/examples"
_COMMIT = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
_FSDP2, _SERIES, _MINGPT = "distributed/FSDP2", "distributed/ddp-tutorial-series", "distributed/minGPT-ddp/mingpt"

# Everything that the ImageNet example uses of torchvision, small enough for a CPU.
_TORCHVISION = {
    "torchvision.models": """
import torch
def linear():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8))
""",
    "torchvision.datasets": """
import torch
class FakeData(torch.utils.data.TensorDataset):
    def __init__(self, size, shape, classes, transform):
        draws = torch.Generator().manual_seed(1)
        super().__init__(torch.randn(32, 3, 4, 4, generator=draws), torch.randint(0, 8, (32,), generator=draws))
""",
    "torchvision.transforms": "ToTensor = object",
}
# `hydra.main` as this script needs it: the configuration comes from a file of JSON.
_HYDRA = """
import json
from collections.abc import Callable
def main(**ignored):
    return lambda function: lambda: function(json.load(open("config.json")))
"""
_MINGPT_CONFIG = """{
    "gpt_config": {"model_type": null, "n_layer": 1, "n_head": 2, "n_embd": 8},
    "optimizer_config": {"weight_decay": 0.1, "learning_rate": 0.0003},
    "data_config": {"path": "data/input.txt", "block_size": 16, "train_split": 0.9, "truncate": 0.0005},
    "trainer_config": {"max_epochs": 1, "batch_size": 64, "data_loader_workers": 0, "grad_norm_clip": 1.0,
                       "snapshot_path": "snapshot.pt", "save_every": 3, "use_amp": false}
}"""


def _fsdp2(files: Checkout) -> None:
    """The example on a CPU: no test for two accelerators, and no device index."""
    files.change(
        f"{_FSDP2}/example.py",
        ("if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
        ("backend=backend, device_id=device", "backend=backend"),
    )


def fsdp2_reset(files: Checkout) -> Shown:
    """`to_empty` and `reset_parameters`, as the example calls them, over memory that holds NaN; and the example."""
    seen = files.probe("fsdp2_reset", _FSDP2)
    _fsdp2(files)
    ran = files.ranks("example.py", at=_FSDP2)
    return Shown(bool(seen["left"]), (f"{seen['left']} of {seen['all']} tensors are never reset", *ran.found("finite")))


def fsdp2_seed(files: Checkout) -> Shown:
    """The batches that the example draws on two ranks, and what the watch says of them."""
    _fsdp2(files)
    script = f"{_FSDP2}/example.py"
    files.change(script, ("        loss = model(x).sum()", _PRINT_BATCH + "        loss = model(x).sum()"))
    ran = files.ranks("example.py", at=_FSDP2)
    drawn = ran.lines("^batch ")
    return Shown(
        len(drawn) == 10,
        (f"{len(drawn)} different batches in 10 steps of 2 ranks", *ran.found("samples-once")),
    )


_PRINT_BATCH = """        import sys
        sys.stdout.write(f"batch {x.sum().item()} {x[0, :4].tolist()}\\n")
"""


def _series(files: Checkout) -> None:
    """The DDP tutorial's script on a CPU."""
    files.change(
        f"{_SERIES}/multigpu_torchrun.py",
        ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', "pass"),
        ('backend="nccl"', 'backend="gloo"'),
        ('int(os.environ["LOCAL_RANK"])', '"cpu"'),
        ("device_ids=[self.gpu_id]", "device_ids=None"),
        ('f"cuda:{self.gpu_id}"', '"cpu"'),
        ("self.gpu_id == 0", 'os.environ["RANK"] == "0"'),
    )


def one_class(files: Checkout) -> Shown:
    """Two epochs, and the weights before and after."""
    _series(files)
    files.change(f"{_SERIES}/multigpu_torchrun.py", ("    trainer.train(total_epochs)", _BEFORE_AND_AFTER))
    ran = files.ranks("multigpu_torchrun.py", "2", "5", at=_SERIES)
    moved = ran.lines("^weights moved")
    return Shown(moved == ["weights moved by 0.0 in 2 epochs"], (*moved, *ran.found("gradient-present")))


_BEFORE_AND_AFTER = """    before = [each.detach().clone() for each in trainer.model.parameters()]
    trainer.train(total_epochs)
    moved = max((a - b).abs().max().item() for a, b in zip(trainer.model.parameters(), before))
    import sys
    sys.stdout.write(f"weights moved by {moved} in {total_epochs} epochs\\n")"""


def snapshot_epoch(files: Checkout) -> Shown:
    """Two epochs, and the script again on their snapshot: which epochs are trained."""
    _series(files)
    epochs = []
    for until in ("2", "3"):
        ran = files.ranks("multigpu_torchrun.py", until, "1", at=_SERIES, watched=False)
        epochs.append([line.split("Epoch ")[1][0] for line in ran.lines(r"Epoch \d+ \| Batchsize")])
    seen = f"epochs of the first run: {' '.join(epochs[0])}; of the run resumed from it: {' '.join(epochs[1])}"
    return Shown(bool(set(epochs[0]) & set(epochs[1])), (seen,))


def imagenet_without_ddp(files: Checkout) -> Shown:
    """The example as its users start it on a machine without an accelerator, under the watch."""
    for module, text in _TORCHVISION.items():
        files.stand_in(module, text)
    words = ["--dummy", "--arch", "linear", "--epochs", "1", "--workers", "0", "--batch-size", "4", "--seed", "1"]
    distributed = ["--dist-url", "env://", "--dist-backend", "gloo"]
    found = files.ranks("main.py", *words, *distributed, at="imagenet").found("replicas-agree")
    return Shown(bool(found), tuple(found))


def quarter_loss(files: Checkout) -> Shown:
    """The example's epochs on two ranks, of a model whose loss is 2."""
    files.change("distributed/FSDP/utils/train_utils.py", (".to(local_rank)", ""))
    seen = files.probe("fsdp_t5_loss", "distributed/FSDP/utils", world=2)
    said = f"a loss of 2 in every batch is reported as {seen['train']} in training, {seen['validation']} in validation"
    return Shown(seen["train"] == seen["validation"] == 0.5, (said,))


def _mingpt(files: Checkout, *, use_amp: bool = False) -> None:
    """The example on a CPU, with a small model and a small part of its text."""
    files.stand_in("hydra", _HYDRA)
    files.stand_in("boto3", "")
    files.stand_in("omegaconf", "DictConfig = dict")
    files.write(f"{_MINGPT}/config.json", _MINGPT_CONFIG.replace("false", json.dumps(use_amp)))
    files.change(
        f"{_MINGPT}/main.py",
        ("if not verify_min_gpu_count(min_gpus=_min_gpu_count):", "if False:"),
        ('torch.device(f"{acc}:{rank}")', 'torch.device("cpu")'),
        ("torch.accelerator.set_device_index(rank)", "pass"),
    )
    files.change(
        f"{_MINGPT}/trainer.py",
        ('torch.device(f"{self.acc}:{self.local_rank}")', 'torch.device("cpu")'),
        (".to(self.local_rank)", '.to("cpu")'),
        ("device_ids=[self.local_rank]", "device_ids=None"),
    )


def unseeded_split(files: Checkout) -> Shown:
    """The script on two ranks, each of which writes down how it split the rows, under the watch."""
    _mingpt(files)
    files.change(f"{_MINGPT}/main.py", ("    gpt_cfg.vocab_size =", _WRITE_SPLIT + "    gpt_cfg.vocab_size ="))
    ran = files.ranks("main.py", at=_MINGPT)
    parts = [json.loads(files.text(f"{_MINGPT}/split{rank}.json")) for rank in (0, 1)]
    trained, held = set(parts[1]["train"]), set(parts[0]["test"])
    seen = f"{len(trained & held)} of the {len(held)} rows that rank 0 tests on are in rank 1's training set"
    return Shown(bool(trained & held), (seen, *ran.found("samples-once")))


_WRITE_SPLIT = """    import json
    parts = {"train": list(train_set.indices), "test": list(test_set.indices)}
    json.dump(parts, open(f"split{os.environ['RANK']}.json", "w"))
"""


def clip_while_scaled(files: Checkout) -> Shown:
    """The trainer's own step with a loss scaler, in bfloat16 on a CPU, under the watch."""
    _mingpt(files, use_amp=True)
    clip = "torch.nn.utils.clip_grad_norm_("
    files.change(f"{_MINGPT}/trainer.py", (clip, f"norm = {clip}"), ("dtype=torch.float16", "dtype=torch.bfloat16"))
    files.change(f"{_MINGPT}/trainer.py", ("        return loss.item()", _PRINT_NORM + "        return loss.item()"))
    ran = files.ranks("main.py", at=_MINGPT)
    found = ran.found("clip-placed")
    return Shown(bool(found), (*ran.lines("^norm of the gradient")[:1], *found))


_PRINT_NORM = """        import sys
        if train:
            limit, scale = self.config.grad_norm_clip, self.scaler.get_scale()
            sys.stdout.write(f"norm of the gradient {norm / scale:.3f}, times {scale:.0f}, clipped to {limit}\\n")
"""


def _finding(name: str, file: str, line: int, words: str, show: Show, issue: str = "") -> Finding:
    folder = file.rpartition("/")[0].removesuffix("/utils")
    return Finding(name, _REPOSITORY, _COMMIT, file, line, words, (folder,), show, issue)


FINDINGS = (
    _finding("examples-fsdp2-reset", f"{_FSDP2}/model.py", 130, "def reset_parameters", fsdp2_reset),
    _finding("examples-fsdp2-seed", f"{_FSDP2}/example.py", 54, "torch.manual_seed(0)", fsdp2_seed),
    _finding("examples-ddp-one-class", f"{_SERIES}/multigpu_torchrun.py", 49, "F.cross_entropy", one_class),
    _finding("examples-ddp-epoch-twice", f"{_SERIES}/multigpu_torchrun.py", 65, '"EPOCHS_RUN": epoch', snapshot_epoch),
    _finding("examples-imagenet-no-ddp", "imagenet/main.py", 167, "if not use_accel", imagenet_without_ddp),
    _finding("examples-mingpt-split", f"{_MINGPT}/main.py", 28, "random_split", unseeded_split),
    _finding(
        "examples-mingpt-clip-scaled",
        f"{_MINGPT}/trainer.py",
        107,
        "clip_grad_norm_",
        clip_while_scaled,
        "pytorch/examples#1196",
    ),
    _finding(
        "examples-fsdp-loss", "distributed/FSDP/utils/train_utils.py", 55, "fsdp_loss[1] += len(batch)", quarter_loss
    ),
)
