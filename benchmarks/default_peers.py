"""What `benchmarks.defaults` runs in other processes: other trainers with their defaults, outside scores, and inputs.

    python -m benchmarks.default_peers NAME '{"argument": value, ...}'

prints one JSON object. Each function imports only what it needs, since its whole process is timed.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def classify(
    train: str, test: str, text: str, label: str, model: str, out: str, seed: int, epochs: int | None = None
) -> Row:
    """The HF Trainer with its defaults: all weights, 3 epochs, batches of 8, a linear rate from 5e-5."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

    set_seed(seed)
    rows = {path: _csv(path) for path in (train, test)}
    names = sorted({row[label] for row in rows[train]})
    number = {name: index for index, name in enumerate(names)}
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    net = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=len(names), id2label=dict(enumerate(names)), label2id=number
    )
    encoded: dict[str, Any] = {
        path: [dict(tokenizer(row[text], truncation=True)) | {"labels": number[row[label]]} for row in found]
        for path, found in rows.items()
    }
    settings: Row = {"num_train_epochs": epochs} if epochs else {}
    trainer = Trainer(
        net,
        TrainingArguments(output_dir=f"{out}/trainer", seed=seed, report_to=[], **settings),
        train_dataset=encoded[train],
        eval_dataset=encoded[test],
        processing_class=tokenizer,
    )
    return _trained(trainer, out)


def sft(train: str, test: str, model: str, out: str, seed: int, lora: bool, epochs: int | None = None) -> Row:
    """TRL's SFTTrainer with its defaults, on the answers alone. lora: with r=16, and what TRL's command takes else."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    settings: Row = {"use_cpu": _device().type == "cpu"} | ({"num_train_epochs": epochs} if epochs else {})
    trainer = SFTTrainer(
        model,
        SFTConfig(output_dir=f"{out}/trainer", seed=seed, report_to=[], assistant_only_loss=True, **settings),
        train_dataset=Dataset.from_list(_jsonl(train)),
        eval_dataset=Dataset.from_list(_jsonl(test)),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.05) if lora else None,
    )
    return _trained(trainer, out)


def generate(model: str, prompts: str, out: str, tokens: int = 64, batch: int = 32) -> Row:
    """Greedy answers of transformers in batches of prompts of nearly equal length, longest first."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = _device()
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    net: Any = AutoModelForCausalLM.from_pretrained(model).to(device).eval()
    ids = [
        tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True)["input_ids"]
        for row in _jsonl(prompts)
    ]
    answers = [""] * len(ids)
    with torch.inference_mode():
        for group in _groups([len(each) for each in ids], batch):
            padded = tokenizer.pad({"input_ids": [ids[index] for index in group]}, return_tensors="pt").to(device)
            said = net.generate(**padded, do_sample=False, max_new_tokens=tokens)[:, padded["input_ids"].shape[1] :]
            for index, text in zip(group, tokenizer.batch_decode(said, skip_special_tokens=True), strict=True):
                answers[index] = text
    Path(out).write_text("".join(json.dumps({"answer": text}) + "\n" for text in answers))
    return {"answers": len(answers)}


def score_classify(model: str, test: str, text: str, label: str) -> Row:
    """Accuracy and mean cross-entropy of a folder that transformers reads, in fp32."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows, device = _csv(test), _device()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    net: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).to(device).eval()
    loss, right = 0.0, 0
    with torch.inference_mode():
        for group in _groups([len(row[text]) for row in rows], 64):
            found = tokenizer([rows[i][text] for i in group], truncation=True, padding=True, return_tensors="pt")
            wanted = torch.tensor([net.config.label2id[rows[i][label]] for i in group], device=device)
            logits = net(**found.to(device)).logits
            loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
            right += int((logits.argmax(-1) == wanted).sum())
    return {"loss": loss / len(rows), "accuracy": right / len(rows)}


def score_sft(model: str, test: str) -> Row:
    """Mean cross-entropy per token of an answer, its stop token included, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = _device()
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    loss, count = 0.0, 0
    with torch.inference_mode():
        for row in _jsonl(test):
            found = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = (torch.tensor(found[name], device=device) for name in ("input_ids", "assistant_masks"))
            each = torch.nn.functional.cross_entropy(net(ids[None]).logits[0, :-1], ids[1:], reduction="none")
            loss, count = loss + (each * mask[1:]).sum().item(), count + int(mask[1:].sum())
    return {"loss": loss / count, "answer tokens": count}


def base(out: str, talk: str, dtype: str, **shape: Any) -> Row:
    """Write a Qwen3 language model with random weights, and a tokenizer learned from `talk`, as a folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from benchmarks.gpu_job import Shape, base_of

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    size = min(4096, shape["vocabulary"])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = (message["content"] for row in _jsonl(talk) for message in row["messages"])
    words.train_from_iterator(texts, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=special[0], eos_token=special[2])
    tokenizer.chat_template = TEMPLATE
    net: Any = base_of(Shape(**shape), _device(), getattr(torch, dtype))
    net.config.use_cache, net.config.eos_token_id, net.generation_config.eos_token_id = True, 2, 2
    net.generation_config.pad_token_id = 0
    net.save_pretrained(out, max_shard_size="2GB")
    tokenizer.save_pretrained(out)
    return {"parameters": net.num_parameters()}


def talk(out: str, rows: int, seed: int, answers: bool = True) -> Row:
    """Write `rows` conversations of 1 to 4 turns by a noisy rule; without answers, first questions."""
    draw, rule = random.Random(seed), random.Random(0)
    words = [a + b + c for a in ("ka", "lo", "mi", "ru", "se") for b in "nrst" for c in ("el", "ion", "um", "ay")]
    after = {word: rule.sample(words, 2) for word in words}
    with Path(out).open("w") as file:
        for _ in range(rows):
            messages = []
            for _ in range(draw.randint(1, 4)):
                said = [draw.choice(words) for _ in range(draw.randint(1, 30))]
                messages.append({"role": "user", "content": f"Continue {' '.join(said)}."})
                if not answers:
                    break
                walk = said[-1:]
                for _ in range(min(120, 3 + int(draw.lognormvariate(2.5, 0.8)))):
                    walk.append(after[walk[-1]][draw.random() < 0.2])
                messages.append({"role": "assistant", "content": " ".join(walk)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return {"rows": rows}


def _trained(trainer: Any, out: str) -> Row:
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(out)
    return {"loss": loss, "steps": trainer.state.global_step}


def _groups(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for start in range(0, len(lengths), size):
        yield longest_first[start : start + size]


def _csv(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _jsonl(path: str) -> list[Row]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
