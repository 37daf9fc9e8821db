"""Defects in projects that generate: images (guided-diffusion, stylegan2-pytorch) and speech (tacotron2)."""

from __future__ import annotations

from benchmarks.findings.checkout import Checkout
from benchmarks.findings.finding import Finding, Shown

# In place of the project's own files that need a GPU or a data set: everything that the training loop asks of them.
_TACOTRON = {
    "hparams.py": """
from types import SimpleNamespace
def create_hparams(text):
    return SimpleNamespace(
        batch_size=2, cudnn_benchmark=False, cudnn_enabled=False, dist_backend="gloo", dist_url="env://",
        distributed_run=True, dynamic_loss_scaling=False, epochs=2, fp16_run=False, grad_clip_thresh=1.0,
        iters_per_checkpoint=1000, learning_rate=1e-3, n_frames_per_step=1, seed=1, training_files=16,
        use_saved_learning_rate=False, validation_files=4, weight_decay=0.0)
""",
    "model.py": """
import torch
class Tacotron2(torch.nn.Linear):
    def __init__(self, hparams):
        super().__init__(4, 1)
    def parse_batch(self, batch):
        return batch[0], batch[1]
""",
    "data_utils.py": """
import torch
class TextMelLoader(torch.utils.data.TensorDataset):
    def __init__(self, size, hparams):
        draws = torch.Generator().manual_seed(size)
        super().__init__(torch.randn(size, 4, generator=draws), torch.randn(size, 1, generator=draws))
def TextMelCollate(frames):
    return None
""",
    "loss_function.py": "from torch.nn import MSELoss as Tacotron2Loss",
    "logger.py": "from unittest.mock import MagicMock\ndef Tacotron2Logger(folder):\n    return MagicMock()\n",
}


def microbatch_sum(files: Checkout) -> Shown:
    """The gradient of eight rows as one micro-batch, as four of two, and as three of three, three and two, and what a
    watch says of three updates with four."""
    files.stand_in("blobfile", "")
    files.stand_in("mpi4py", "MPI = None")
    seen = files.probe("guided_diffusion", environment={"OPENAI_LOGDIR": str(files.folder / "log")})
    said = [f"micro-batches of {size}: {seen[size]:.4f} x the gradient of one of 8" for size in ("2", "3")]
    said += [f"watch: {each}" for each in seen["found"][:1]]
    return Shown(abs(seen["2"] - 4) < 1e-3, tuple(said))


def stylegan2_order(files: Checkout) -> Shown:
    """Three passes of `sample_data` over a loader with the sampler that `data_sampler` makes."""
    for module in ("dataset", "distributed", "op", "non_leaking"):
        files.write(f"{module}.py", "def __getattr__(name):\n    return None\n")
    files.stand_in("torchvision", "transforms = utils = None")
    passes = files.probe("stylegan2_order")["passes"]
    return Shown(passes[0] == passes[1] == passes[2], tuple(f"pass {k}: rows {rows}" for k, rows in enumerate(passes)))


def tacotron2_order(files: Checkout) -> Shown:
    """Two epochs of `train.py` on two ranks under the watch; its loop and data loaders are its own."""
    for file, text in _TACOTRON.items():
        files.write(file, text)
    files.change(
        "train.py",
        ('assert torch.cuda.is_available(), "Distributed mode requires CUDA."', "pass"),
        ("torch.cuda.set_device(rank % torch.cuda.device_count())", "pass"),
        (", group_name=group_name)", ")"),
        (".cuda()", ""),
        ("dist.reduce_op.SUM", "dist.ReduceOp.SUM"),
        ("    args = parser.parse_args()", '    args = parser.parse_args(); args.rank = int(os.environ["RANK"])'),
    )
    found = files.ranks("train.py", "-o", "out", "-l", "log", "--n_gpus", "2").found("order-renewed")
    return Shown(bool(found), tuple(found))


FINDINGS = (
    Finding(
        "guided-diffusion-microbatch",
        "openai/guided-diffusion",
        "22e0df8183507e13a7813f8d38d51b072ca1e67c",
        "guided_diffusion/train_util.py",
        210,
        'loss = (losses["loss"] * weights).mean()',
        ("guided_diffusion",),
        microbatch_sum,
        "openai/guided-diffusion#111",
    ),
    Finding(
        "stylegan2-order",
        "rosinality/stylegan2-pytorch",
        "bef283a1c24087da704d16c30abc8e36e63efa0e",
        "train.py",
        60,
        "for batch in loader:",
        ("train.py",),
        stylegan2_order,
        "rosinality/stylegan2-pytorch#319",
    ),
    Finding(
        "tacotron2-order",
        "NVIDIA/tacotron2",
        "185cd24e046cc1304b4f8e564734d2498c6e2e6f",
        "train.py",
        49,
        "train_sampler = DistributedSampler(trainset)",
        ("train.py", "distributed.py"),
        tacotron2_order,
        "NVIDIA/tacotron2#241",
    ),
)
