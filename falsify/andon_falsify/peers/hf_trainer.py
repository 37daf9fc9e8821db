"""Hugging Face's Trainer with its default arguments, and the same without the known faults that arguments can avoid.

`HfTrainerLoop` leaves every argument that affects the result at its default. `MendedHfTrainerLoop` sets
`average_tokens_across_devices=False` on the arguments and `accepts_loss_kwargs=False` on the model. Together they keep
a classifier's loss from being multiplied by accumulation x world size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from andon_falsify.loops.protocol import Told
from andon_falsify.loops.task import collate, dataset, model, optimizer
from andon_falsify.subjects.case import Case


class _Losses(TrainerCallback):
    def __init__(self, told: Told) -> None:
        self.told = told

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.told.loss(logs["loss"])


class HfTrainerLoop:
    mended = False

    def __init__(self, case: Case) -> None:
        self.case = case
        AcceleratorState._reset_state(reset_partial_state=True)
        self.model: nn.Module = model(case)
        if self.mended:
            base: Any = self.model
            base = base.get_base_model() if case.rank else base
            base.accepts_loss_kwargs = False
        mend: dict[str, Any] = {"average_tokens_across_devices": False} if self.mended else {}
        self._folder = tempfile.TemporaryDirectory(prefix="andon-hf-trainer-")
        arguments = TrainingArguments(
            self._folder.name,
            use_cpu=case.backend != "nccl",
            per_device_train_batch_size=case.local_batch,
            per_device_eval_batch_size=case.local_batch,
            gradient_accumulation_steps=case.accumulation,
            num_train_epochs=case.epochs,
            max_steps=case.max_steps or -1,
            max_grad_norm=case.clip_norm or 0.0,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            seed=case.seed,
            **mend,
        )
        self.trainer = Trainer(
            self.model,
            arguments,
            data_collator=collate,
            train_dataset=dataset(case),
            eval_dataset=dataset(case),
            optimizers=(optimizer(case, self.model.parameters()), None),
        )

    def train(self, told: Told) -> None:
        self.trainer.add_callback(_Losses(told))
        self.trainer.train()

    def evaluate(self) -> Mapping[str, float]:
        return {"loss": self.trainer.evaluate()["eval_loss"]}


class MendedHfTrainerLoop(HfTrainerLoop):
    mended = True
