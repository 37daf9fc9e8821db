"""A pretrained encoder on a real data set, beside the HF Trainer with the same hyperparameters: benchmarks.real_job.

    python -m benchmarks.real_job --model FOLDER --train train.csv --test test.csv --backend nccl --worlds 1,2

runs examples/banking77.yaml on each number of workers, rows grouped by length, then the HF Trainer with peft: the same
LoRA, rate, warm-up, cosine, clipping, batches and epochs, in bf16 on a GPU and fp32 on a CPU, its own
`group_by_length`. With `--rounds` they take turns. Prints a table and JSON; 0 if all of ours have the same bits and an
accuracy of at least `--least`. "first update" is seconds from the command to the end of the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from andon.config.load import load_config
from andon.config.schema import Config
from andon.training.material import Material, prepare
from andon_falsify.subjects.placing import why_not
from benchmarks.runs import run, table

_RECIPE = Path(__file__).parents[1] / "examples" / "banking77.yaml"
_PEER = "HF Trainer"


def main() -> int:
    """Run all, or with `--peer` one rank of the HF Trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--peer-worlds", default="1", help="numbers of ranks of the HF Trainer; empty: none")
    parser.add_argument("--rounds", type=int, default=1, help="how often all take their turn")
    parser.add_argument("--least", type=float, default=0.89, help="accuracy on the test rows")
    parser.add_argument("--set", action="append", default=[], help="as for andon train")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = [f"model.base={options.model}", f"data.train={options.train}", f"data.eval={options.test}"]
    settings += ["training.group_by_length=true", "training.pad_to_multiple_of=1", *options.set]
    if options.peer:
        return _hf_trainer(load_config(_RECIPE, settings), options.peer)
    for world in options.worlds.split(","):
        if reason := why_not(options.backend, int(world)):
            parser.error(reason)  # the run would go on on CPUs
    words = [str(_RECIPE), *(part for each in settings for part in ("--set", each)), "--backend", options.backend]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as base:
        for turn in range(options.rounds):
            for world in options.worlds.split(","):
                rows.append(_ours(world, Path(base) / f"ours-{world}-{turn}", words))
                print(rows[-1], flush=True)
            for world in filter(None, options.peer_worlds.split(",")):
                rows.append(_peer(world, Path(base) / f"peer-{world}.json"))
                print(rows[-1], flush=True)
    print(table(list(rows[0]), [[row.get(key, "") for key in rows[0]] for row in rows]))
    print(json.dumps(rows))
    ours = [row for row in rows if row["trainer"] == "Andon"]
    one = len({(row["weights"], row["accuracy"]) for row in ours}) == 1
    return 0 if one and all(row["accuracy"] >= options.least for row in ours) else 1


def _row(trainer: str, world: str, seconds: float, first: float, accuracy: float) -> dict[str, Any]:
    return {
        "trainer": trainer,
        "workers": world,
        "seconds": round(seconds, 1),
        "first update": round(first, 1),
        "accuracy": accuracy,
        "macro_f1": None,
        "weights": "",
    }


def _ours(world: str, folder: Path, words: Sequence[str]) -> dict[str, Any]:
    """`andon train` from its start to its end."""
    seen: list[float] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05) and not seen:
            ledger = folder / "ledger.jsonl"
            if ledger.exists() and len(ledger.read_bytes().splitlines()) > 1:  # the line of its start, and a step's
                seen.append(time.perf_counter())

    watcher = threading.Thread(target=look)
    watcher.start()
    began = time.perf_counter()
    try:
        done = run(folder, *words, "--workers", world)
    finally:
        ended.set()
        watcher.join()
    score = done.summary["eval"]
    row = _row("Andon", world, done.seconds, (seen or [began])[0] - began, score["accuracy"])
    return {**row, "macro_f1": score["macro_f1"], "weights": done.summary["weights_digest"]}


def _peer(world: str, result: Path) -> dict[str, Any]:
    """The HF Trainer from its start to its end: under torch's launcher where there is more than one rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", world] if world != "1" else []
    words = [*launcher, "-m", "benchmarks.real_job", *sys.argv[1:], "--peer", str(result)]
    began, clock = time.perf_counter(), time.time()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    found = json.loads(result.read_text())
    return _row(_PEER, world, time.perf_counter() - began, found["first"] - clock, found["accuracy"])


def _hf_trainer(config: Config, result: Path) -> int:
    """One rank: train as `config` says, score the test rows, write the accuracy."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    first: list[float] = []

    class First(TrainerCallback):
        """Notes when the first update was done."""

        def on_step_end(self, *_: object, **__: object) -> None:
            """Only the first counts."""
            if not first:
                first.append(time.time())

    material = prepare(config)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    set_seed(config.seed)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=config.training.batch_size // world,
            per_device_eval_batch_size=128,
            num_train_epochs=config.training.epochs,
            learning_rate=config.optimizer.lr,
            lr_scheduler_type="cosine",
            warmup_steps=int(config.schedule.warmup_fraction * material.plan.total_steps),
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.optimizer.clip_norm or 0.0,
            bf16=cuda,
            use_cpu=not cuda,
            seed=config.seed,
            save_strategy="no",
            logging_steps=10**9,
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            **_grouping(),
        )
        rows: Any = _encoded(material, held=False)
        held: Any = _encoded(material, held=True)
        trainer = Trainer(_model(config, material), arguments, train_dataset=rows, data_collator=_collator(material))
        trainer.add_callback(First())
        trainer.train()
        predicted: Any = trainer.predict(held)
    right = (predicted.predictions.argmax(-1) == predicted.label_ids).mean()
    if os.environ.get("RANK", "0") == "0":
        result.write_text(json.dumps({"accuracy": float(right), "first": first[0]}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def _grouping() -> dict[str, Any]:
    """Transformers 5.18 renamed the setting."""
    from transformers import TrainingArguments

    new = "train_sampling_strategy" in TrainingArguments.__dataclass_fields__
    return {"train_sampling_strategy": "group_by_length"} if new else {"group_by_length": True}


def _encoded(material: Material, *, held: bool) -> list[dict[str, Any]]:
    from torch import device

    task = material.evaluation_task if held else material.task
    ids = material.evaluation_ids if held else material.plan.ids
    found = []
    for row in ids:
        batch = task.load([row], device("cpu"))
        length = int(task.lengths[row])
        found.append({"input_ids": batch["input_ids"][0, :length].tolist(), "labels": int(batch["labels"][0])})
    return found


def _collator(material: Material) -> Any:
    import torch

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        fill = [longest - len(row["input_ids"]) for row in rows]
        tokens = [row["input_ids"] + [material.tokenizer.pad_id] * n for row, n in zip(rows, fill, strict=True)]
        mask = [[1] * len(row["input_ids"]) + [0] * n for row, n in zip(rows, fill, strict=True)]
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask), "labels": labels}

    return collate


def _model(config: Config, material: Material) -> Any:
    """The pretrained model with peft's own LoRA, as its documentation has it."""
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import AutoModelForSequenceClassification

    folder = str(config.model.base)
    base = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(material.labels), trust_remote_code=False
    )
    adapter = config.adapter
    targets = adapter.targets if isinstance(adapter.targets, str) or adapter.targets is None else list(adapter.targets)
    return get_peft_model(
        base.float(),
        LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=adapter.r,
            lora_alpha=int(adapter.alpha),
            lora_dropout=adapter.dropout,
            target_modules=targets,
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
