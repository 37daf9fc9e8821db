"""pytorch/examples: the scripts from which most others were copied."""

from __future__ import annotations

from typing import Any

from benchmarks.real_code.data import corpus, plain_text
from benchmarks.real_code.row import Expected, Patch, Plant, Row

_FAKE_MNIST = (
    Patch("datasets.MNIST('../data', train=True, download=True,", "datasets.FakeData(640, (1, 28, 28), 10,"),
    Patch("datasets.MNIST('../data', train=False,", "datasets.FakeData(128, (1, 28, 28), 10,"),
)
_NO_ZERO_GRAD = Plant("gradients are never set to zero", (Patch("optimizer.zero_grad()", "pass"),), ("gradient-fresh",))


def _row(path: str, family: str, **kwargs: Any) -> Row:
    return Row(
        name=f"pytorch/examples/{kwargs.pop('called', path.removesuffix('.py').removesuffix('/main'))}",
        repository="pytorch/examples",
        commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
        path=path,
        family=family,
        parts=kwargs.pop("parts", (path.rpartition("/")[0],)),
        **kwargs,
    )


ROWS = (
    _row(
        "mnist/main.py",
        "one process; Adadelta; evaluation after each epoch",
        arguments="--epochs 2",
        patches=_FAKE_MNIST,
        ranks=1,
        modules=("torchvision",),
        plants=(
            _NO_ZERO_GRAD,
            Plant("trains on in evaluation mode", (Patch("model.train()", "pass"),), ("training-mode",)),
        ),
    ),
    _row(
        "vae/main.py",
        "one process; draws in the forward pass; a loss that is a sum",
        arguments="--epochs 2",
        patches=_FAKE_MNIST,
        ranks=1,
        modules=("torchvision",),
        plants=(_NO_ZERO_GRAD,),
    ),
    _row(
        "mnist_rnn/main.py",
        "one process; LSTM",
        arguments="--epochs 2",
        patches=_FAKE_MNIST,
        ranks=1,
        modules=("torchvision",),
    ),
    _row(
        "dcgan/main.py",
        "one process; a GAN: two models, two optimizers in turn",
        arguments="--dataset fake --imageSize 64 --batchSize 8 --ngf 8 --ndf 8 --niter 1 --workers 0 --manualSeed 1",
        patches=(Patch("dset.FakeData(image_size", "dset.FakeData(96, image_size"),),
        ranks=1,
        modules=("torchvision",),
    ),
    _row(
        "word_language_model/main.py",
        "one process; LSTM whose hidden state goes on; clipping",
        arguments="--data corpus --use-optimizer --lr 1e-3 --emsize 16 --nhid 16 --epochs 2 --batch_size 8",
        parts=tuple(f"word_language_model/{name}.py" for name in ("main", "data", "model")),
        ranks=1,
        prepare=corpus,
    ),
    _row(
        "time_sequence_prediction/train.py",
        "one process; LBFGS, which calls its closure as often as it likes; float64",
        arguments="--steps 2",
        patches=(Patch("torch.load('traindata.pt')", "np.sin(np.arange(2e3).reshape(20, 100))"),),
        ranks=1,
        modules=("matplotlib",),
    ),
    _row(
        "imagenet/main.py",
        "DDP forgotten: two processes in one group that never reduce",
        called="imagenet without an accelerator",
        arguments="--dummy --dist-url env:// --dist-backend gloo -b 4 -j 0 --epochs 1 --seed 1",
        patches=(
            Patch("datasets.FakeData(1281167, (3, 224, 224)", "datasets.FakeData(48, (3, 64, 64)"),
            Patch("datasets.FakeData(50000, (3, 224, 224)", "datasets.FakeData(16, (3, 64, 64)"),
        ),
        modules=("torchvision",),
        expected=tuple(
            Expected(
                "replicas-agree",
                "without an accelerator main.py:167-169 leaves DDP out",
                "examples-imagenet-no-ddp",
                suspected,
            )
            for suspected in (True, False)  # as soon as weights part, and at the close, since they never met again
        ),
    ),
    _row(
        "distributed/ddp-tutorial-series/multigpu_torchrun.py",
        "DDP; DistributedSampler; an iterator that is opened and thrown away at each epoch",
        arguments="2 1",
        gpu=True,
        expected=(
            Expected(
                "gradient-present",
                "cross_entropy on one output is 0, and so is its gradient",
                "examples-ddp-one-class",
                True,
            ),
        ),
    ),
    _row(
        "distributed/ddp-tutorial-series/multigpu_torchrun.py",
        "the same with a loss that has a gradient",
        called="distributed/ddp-tutorial-series/multigpu_torchrun, another loss",
        arguments="2 1",
        gpu=True,
        patches=(Patch("F.cross_entropy(", "F.mse_loss("),),
        plants=(
            Plant(
                "gradients are never set to zero",
                (Patch("self.optimizer.zero_grad()", "pass"),),
                ("gradient-fresh",),
            ),
            Plant("no set_epoch", (Patch("self.train_data.sampler.set_epoch(epoch)", "pass"),), ("order-renewed",)),
            Plant(
                "the module is called and not its DDP",
                (Patch("output = self.model(source)", "output = self.model.module(source)"),),
                ("gradients-agree", "replicas-agree"),
            ),
        ),
    ),
    _row(
        "distributed/minGPT-ddp/mingpt/main.py",
        "DDP; GradScaler in fp16; clipping",
        called="distributed/minGPT-ddp",
        prepare=plain_text,
        arguments="data_config.path=text.txt data_config.block_size=16 data_config.truncate=1.0"
        " gpt_config.n_layer=1 gpt_config.n_head=2 gpt_config.n_embd=16 trainer_config.max_epochs=2"
        " trainer_config.batch_size=32 trainer_config.data_loader_workers=0 trainer_config.save_every=5",
        gpu=True,
        files={"boto3.py": ""},
        parts=("distributed/minGPT-ddp",),
        modules=("omegaconf", "hydra"),
        expected=(
            Expected(
                "samples-once",
                "main.py:28 splits without a seed: each rank deals out other rows",
                "examples-mingpt-split",
            ),
            Expected("clip-placed", "trainer.py:107 clips before unscaling", "examples-mingpt-clip-scaled"),
        ),
    ),
    _row(
        "distributed/FSDP2/example.py",
        "FSDP2",
        patches=(Patch("n_layers=10", "n_layers=2"), Patch("batch_size = 32", "batch_size = 4")),
        gpu=True,
        unseeded="what to_empty leaves in memory is trained on",
        expected=(
            Expected(
                "finite",
                "reset_parameters (model.py:130-134) resets no block: memory as it was found",
                "examples-fsdp2-reset",
            ),
            Expected(
                "samples-once",
                "one seed on all ranks (example.py:54): they draw one batch",
                "examples-fsdp2-seed",
                True,
            ),
        ),
    ),
    _row(
        "distributed/tensor_parallelism/tensor_parallel_example.py",
        "tensor parallel: shards, and one batch on all ranks",
        gpu=True,
    ),
    _row(
        "distributed/tensor_parallelism/sequence_parallel_example.py",
        "sequence parallel",
        gpu=True,
    ),
)
