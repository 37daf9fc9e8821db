"""Defects in libraries and examples of Hugging Face: transformers, Accelerate, diffusers."""

from __future__ import annotations

from benchmarks.findings.checkout import Checkout
from benchmarks.findings.finding import Finding, Shown

_CASE = '{"rows":[8,0],"batch_size":8,"optimizer":"sgd","weight_decay":0.0,"lr":0.05,"clip_norm":null,"dropout":0.0}'

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
"""A model trained as the Trainer trains by default, but for an accumulation of 2. Arguments: its class, a folder."""
WRONG = ("LlamaForSequenceClassification", "BertForSequenceClassification", "BertForTokenClassification",
    "BertForMaskedLM")  # fmt: skip
"""Classes whose loss stays a mean, though the Trainer takes it for one that is divided by the count of all terms."""
RIGHT = ("LlamaForCausalLM",)
"""Classes whose loss is divided by that count."""


def trainer_factor(files: Checkout) -> Shown:
    """`andon falsify` on the bundled loop with the Trainer, a classifier of a decoder's last token; and a script with
    each of several models on two ranks under the watch."""
    seen: list[str] = []
    factors: list[bool] = []
    for world, accumulation in ((2, 1), (1, 2), (2, 2)):
        words = ["--subject", "hf_trainer", "--backend", "gloo", "--claim", "gradient-law", "--case", _CASE]
        layout = ["--world", str(world), "--accumulation", str(accumulation), "--seed", "0"]
        ran = files.python("-m", "andon", "falsify", *words, *layout)
        said = [line[line.index("ratio ") :] for line in ran.lines("ratio ")]
        factors.append(any(line.startswith(f"ratio {world * accumulation}.000") for line in said))
        seen.append(
            f"{world} ranks, accumulation {accumulation}: gradient-law, {said[0] if said else 'no ratio named'}"
        )
    files.write("trained.py", TRAINED)
    for name in (*WRONG, *RIGHT):
        found = files.ranks("trained.py", name, str(files.folder / "out")).found("gradient-scale")
        factors.append(bool(found) is (name in WRONG))
        seen.append(f"{name}: {found[0] if found else 'watch: nothing'}")
    return Shown(all(factors), tuple(seen))


def resumed_order(files: Checkout) -> Shown:
    """An epoch that is resumed after 2 of 4 batches on two ranks, beside the epoch as it would have gone on."""
    seen, stands = [], True
    for sampler in ("default", "seedable"):
        folder = str(files.folder / f"state_{sampler}")
        parts = (
            files.probe("accelerate_resume", folder, part, sampler, at="src", world=2) for part in ("train", "resume")
        )
        (_, before, after), (_, rest, following) = (part["epochs"] for part in parts)
        missed = len(set(before) - set(before[:12]) - set(rest))
        stands = stands and (missed > 0 or following == before)
        order = "the order of the resumed one" if following == before else "another order"
        as_before = "as without the interruption" if following == after else "not as without the interruption"
        seen.append(f"{sampler} sampler: {missed} of 12 rows left are never trained on, as many twice")
        seen.append(f"{sampler} sampler: the next epoch has {order}, {as_before}")
    return Shown(stands, tuple(seen))


def accumulate_twice(files: Checkout) -> Shown:
    """The two context managers of the script's `with`, around 16 batches with an accumulation of 4, under a watch."""
    seen = files.probe("accumulate_twice", "examples/custom_diffusion/train_custom_diffusion.py")
    said = (
        f"16 batches with gradient_accumulation_steps=4: {seen['updates']} updates instead of 4",
        f"each with {seen['factor']} x the mean gradient of its batches",
        *(f"watch: {each}" for each in seen["found"][:1]),
    )
    return Shown(seen["updates"] != 4, said)


def same_noise(files: Checkout) -> Shown:
    """What the script's own statements draw on two ranks after `set_seed`."""
    seen = files.probe("same_noise", _TEXT_TO_IMAGE, world=2)
    said = [f"step {step}: timesteps {drawn[:4]} and {drawn[4:]}" for step, drawn in enumerate(seen["timesteps"])]
    stands = all(drawn[:4] == drawn[4:] for drawn in seen["timesteps"]) and seen["noises"] == 3
    return Shown(stands, (*said, f"{seen['noises']} kinds of noise in 3 steps of 2 ranks"))


_TEXT_TO_IMAGE = "examples/text_to_image/train_text_to_image.py"

FINDINGS = (
    Finding(
        "transformers-trainer-factor",
        "huggingface/transformers",
        "5.23.0",
        "transformers/modeling_layers.py",
        190,
        "loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled_logits, config=self.config)",
        (),
        trainer_factor,
        "huggingface/transformers#47688",
    ),
    Finding(
        "accelerate-resume",
        "huggingface/accelerate",
        "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
        "src/accelerate/data_loader.py",
        1395,
        "def skip_first_batches",
        ("src/accelerate",),
        resumed_order,
        "huggingface/accelerate#2016",
    ),
    Finding(
        "diffusers-accumulate-twice",
        "huggingface/diffusers",
        "58eb52c0803ea9af3abec60841c2a093bdf1f951",
        "examples/custom_diffusion/train_custom_diffusion.py",
        1141,
        "accelerator.accumulate(unet), accelerator.accumulate(text_encoder)",
        ("examples/custom_diffusion",),
        accumulate_twice,
    ),
    Finding(
        "diffusers-same-noise",
        "huggingface/diffusers",
        "58eb52c0803ea9af3abec60841c2a093bdf1f951",
        _TEXT_TO_IMAGE,
        579,
        "set_seed(args.seed)",
        ("examples/text_to_image",),
        same_noise,
    ),
)
