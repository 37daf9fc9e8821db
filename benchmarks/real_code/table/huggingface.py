"""Hugging Face: Accelerate, TRL, timm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.real_code.data import glue, images, texts
from benchmarks.real_code.row import Expected, Patch, Row

_EVALUATE = """\"\"\"A metric that needs no script from a hub.\"\"\"


class _Accuracy:
    def __init__(self):
        self.right = self.all = 0

    def add_batch(self, predictions, references):
        self.right += int((predictions == references).sum())
        self.all += len(references)

    def compute(self, predictions=None, references=None):
        if predictions is not None:
            self.add_batch(predictions, references)
        found, self.right, self.all = {"accuracy": self.right / self.all, "f1": 0.0}, 0, 0
        return found


def load(*names):
    return _Accuracy()
"""
_GLUE = {"parts": ("examples",), "modules": ("datasets",), "prepare": glue, "arguments": "--cpu"}


def _accelerate(path: str, family: str, **kwargs: Any) -> Row:
    folder = path.rpartition("/")[0]
    return Row(
        name=f"huggingface/accelerate/{kwargs.pop('called', path.removeprefix('examples/').removesuffix('.py'))}",
        repository="huggingface/accelerate",
        commit="16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        path=path,
        family=family,
        files={f"{folder}/evaluate.py": _EVALUATE},
        **(_GLUE | kwargs),
    )


def _trl(called: str, family: str, data: str, prepare: Callable[[Path], None], more: str) -> Row:
    return Row(
        name=f"huggingface/trl/{called}",
        repository="huggingface/trl",
        commit="f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        path=f"trl/scripts/{called}.py",
        family=family,
        folder="",
        parts=(f"trl/scripts/{called}.py",),
        arguments=f"--model_name_or_path tiny-llama --dataset_name {data} --output_dir out --max_steps 10 --use_cpu"
        f" --per_device_train_batch_size 2 --report_to none --bf16 false --learning_rate 1e-3 --save_strategy no"
        f" {more}",
        prepare=prepare,
        modules=("trl", "datasets", "peft"),
    )


ROWS = (
    _accelerate(
        "examples/nlp_example.py",
        "Accelerate without a GPU and without cpu=True: every rank by itself, on the same rows",
        called="nlp_example without --cpu",
        arguments="",
        expected=(
            Expected(
                "samples-once",
                "Accelerator() without a GPU makes a group and shares out nothing: all ranks train on all rows",
            ),
        ),
    ),
    _accelerate(
        "examples/by_feature/gradient_accumulation.py",
        "Accelerate: accumulation in no_sync",
        arguments="--cpu --gradient_accumulation_steps 3",
        expected=(
            Expected(
                "gradient-scale",
                "Accelerate divides every window by the accumulation that was asked for, also a shorter one at the end",
                suspected=True,
            ),
        ),
    ),
    _accelerate(
        "examples/by_feature/ddp_comm_hook.py",
        "DDP with a communication hook: gradients are reduced as fp16",
        arguments="--cpu --ddp_comm_hook fp16",
    ),
    _accelerate(
        "examples/by_feature/ddp_comm_hook.py",
        "DDP with PowerSGD, which keeps an error by rank",
        called="by_feature/ddp_comm_hook, PowerSGD",
        arguments="--cpu --ddp_comm_hook power_sgd",
    ),
    _accelerate(
        "examples/by_feature/checkpointing.py",
        "Accelerate: states saved after each epoch",
        arguments="--cpu --checkpointing_steps epoch --output_dir out",
    ),
    _accelerate(
        "examples/by_feature/early_stopping.py",
        "Accelerate: a loop that all ranks leave early",
    ),
    _accelerate(
        "examples/cv_example.py",
        "Accelerate: a frozen body, one-cycle schedule",
        arguments="--cpu --data_dir pets",
        prepare=images,
        modules=("timm", "torchvision"),
        patches=(
            Patch('"batch_size": 64, "image_size": 224', '"batch_size": 8, "image_size": 32'),
            Patch('"resnet50d", pretrained=True', '"resnet18d", pretrained=False'),
            Patch("shuffle=True, batch_size=batch_size, num_workers=4", "shuffle=True, batch_size=batch_size"),
            Patch("shuffle=False, batch_size=batch_size, num_workers=4", "shuffle=False, batch_size=batch_size"),
        ),
    ),
    Row(
        name="huggingface/peft/peft_no_lora_accelerate",
        repository="huggingface/peft",
        commit="5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
        path="examples/sequence_classification/peft_no_lora_accelerate.py",
        family="Accelerate, DDP: p-tuning; most of the model frozen; find_unused_parameters",
        arguments="--model_name_or_path bert-base-cased --output_dir out --num_train_epochs 2 --seed 1"
        " --num_virtual_tokens 4 --encoder_hidden_size 16",
        patches=(Patch('load_dataset("glue", task)', 'load_dataset("nyu-mll/glue", task)'),),
        parts=("examples/sequence_classification",),
        files={"examples/sequence_classification/evaluate.py": _EVALUATE},
        prepare=glue,
        environment={"ACCELERATE_USE_CPU": "true"},
        modules=("datasets", "peft", "accelerate"),
    ),
    _trl("sft", "HF Trainer, DDP: supervised fine-tuning", "texts", texts, "--gradient_accumulation_steps 2"),
)
