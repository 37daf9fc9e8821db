"""The scale of the gradient where the loss is an output of the model, which DDP hands on by a node of its own."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import andon
from andon_contracts.watch.gradient_scale import parts_of
from tests.support.ranks import run_ranks

OUTPUTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "alone": (lambda loss, logits: loss, lambda given: given),
    "before the logits": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda given: given["loss"]),
    "after the logits": (lambda loss, logits: (logits, loss), lambda given: given[1]),
    "after what has no graph": (lambda loss, logits: (logits.argmax(-1), logits, loss), lambda given: given[2]),
    "after what is no tensor": (lambda loss, logits: (None, loss, 3 * loss), lambda given: given[1]),
}
"""What a model returns, and how the loop takes the loss from it. The last has an output more than tensors."""
NOT_SEEN = "after what is no tensor"


class Classifier(nn.Module):
    """Returns its loss among its outputs, as models of transformers do."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.returns = returns

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """[rows, 6] and [rows]."""
        logits = self.layers(x)
        return self.returns(F.cross_entropy(logits, labels), logits)


def found(name: str, factor: float, sgd: bool, **options: bool) -> tuple[list[str], list[str], list[float | None]]:
    """What a watch finds of three updates of two passes each, its closing lines, and what each loss weighs by itself.

    options: of DDP.
    """
    torch.manual_seed(0)
    returns, take = OUTPUTS[name]
    model = DistributedDataParallel(Classifier(returns), **options)
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.01)
    seen, weights, said = list[str](), list[float | None](), io.StringIO()
    with contextlib.redirect_stderr(said):
        watch = andon.watch(model, optimizer, action=lambda each: seen.append(f"{each.clause}: {each.finding.seen}"))
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(3):
            for _ in range(2):
                loss = factor * take(model(torch.randn(4, 6), torch.randint(3, (4,))))
                parts = parts_of(loss)
                weight = parts.weight() if parts is not None else None
                weights.append(None if weight is None else weight.first)
                loss.backward()  # type: ignore[no-untyped-call]
            if not sgd:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        watch.close()
    return seen, [line for line in said.getvalue().splitlines() if line.startswith("  gradient scale:")], weights


def every_output() -> list[str]:
    """Which outputs, options of DDP and factors show something else than they must."""
    wrong: list[str] = []
    for name in OUTPUTS:
        for options in ({"find_unused_parameters": True}, {"static_graph": True}, {}):
            for sgd, factor in ((True, 0.5), (False, 1.0), (True, 0.5 * dist.get_world_size())):
                seen, lines, weights = found(name, factor, sgd, **options)
                hidden = name == NOT_SEEN and bool(options)
                scales = [each for each in seen if each.startswith("gradient-scale: ")]
                if factor == 0.5:
                    said = not scales and (hidden or dist.get_rank() > 0 or "that of a mean in 3 of 3" in lines[0])
                else:
                    said = all(f"{2 * factor:.3f} together" in each for each in scales) and (hidden or scales != [])
                # A static graph is handed on so in its first pass alone.
                first, later = None if hidden else factor, None if hidden and "static_graph" not in options else factor
                weighed = weights == [first] + [later] * 5
                said = said and not (later is None and scales)
                if not said or not weighed:
                    wrong.append(f"{name}, {options}, {factor}: {seen}, {lines}, {weights}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_a_loss_that_ddp_hands_on_is_weighed_as_it_was(world: int) -> None:
    """Whichever output it is: halves are right, a loss that is not divided and one times the world size are found.

    Where an output is no tensor nobody can tell which input of DDP's node it was, and nothing is said.
    """
    assert [outcome.get() for outcome in run_ranks(world, every_output)] == [[]] * world


def prediction_beside_what_is_no_tensor() -> list[float | None]:
    """What losses of an output weigh that DDP hands on beside what is no tensor."""
    model = DistributedDataParallel(Classifier(lambda loss, logits: (None, logits)), find_unused_parameters=True)
    labels = torch.zeros(4, dtype=torch.long)
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda logits: F.mse_loss(logits, torch.zeros(4, 3)) / 2,
        lambda logits: -logits.mean(),
        lambda logits: 3 * F.cross_entropy(logits, labels),
    ]
    found: list[float | None] = []
    for loss in losses:
        parts = parts_of(loss(model(torch.randn(4, 6), labels)[1]))
        weight = None if parts is None else parts.weight()
        found.append(None if weight is None else weight.first)
    return found


def test_a_loss_of_what_ddp_hands_on_is_weighed_without_looking_further() -> None:
    """Where it cannot be told which output it was, that is not asked of what a loss ends in."""
    assert run_ranks(2, prediction_beside_what_is_no_tensor)[0].get() == [0.5, 1.0, 3.0]


TRAINED = """
import sys
import torch
import transformers
from transformers import Trainer, TrainingArguments

torch.manual_seed(0)
name = sys.argv[1]
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "pad_token_id": 0}
config = getattr(transformers, name.partition("For")[0] + "Config")(**sizes, num_attention_heads=4, num_labels=3)
model = getattr(transformers, name)(config)
rows = [{"input_ids": torch.randint(1, 64, (8,)).tolist(), "labels": row % 3} for row in range(64)]
for number, row in enumerate(rows if not name.endswith("SequenceClassification") else ()):
    row["labels"] = [-100] * (number % 5) + [token % 3 for token in row["input_ids"]][number % 5:]
arguments = TrainingArguments(
    sys.argv[2], per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1, use_cpu=True,
    report_to=[], save_strategy="no", disable_tqdm=True)
collate = lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
Trainer(model, arguments, train_dataset=rows, data_collator=collate).train()
"""
"""A model trained as the Trainer trains by default, with an accumulation of 2. Arguments: its class, a folder."""


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_the_factor_of_the_hf_trainer_is_found_without_a_line(name: str, tmp_path: Path) -> None:
    """Its gradient of a classifier is that of a mean times accumulation and world size, as
    huggingface/transformers#47688 has it; of next tokens, which it divides by their count, nothing is said."""
    pytest.importorskip("transformers")
    (tmp_path / "trained.py").write_text(TRAINED)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, "-m", "andon", "watch", "trained.py", name, "out"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    if name == "LlamaForCausalLM":
        assert "gradient scale: that of a mean in 3 of 4 updates" in ended.stderr
        assert "0 violations, 0 suspicions" in ended.stderr
    else:
        assert "suspicion: gradient-scale broken at step 3, before its update" in ended.stderr
        assert "weigh 2.000 each and the gradient is 0.500 of the sum over 2 ranks: 4.000 together" in ended.stderr
