"""The code that a card shows: how whoever gets a folder uses it, with transformers and peft alone."""

from __future__ import annotations

from andon.config.schema import CLASSIFICATION, MULTI_LABEL, REGRESSION, SFT, TOKEN_CLASSIFICATION, Config
from andon.data.chat import Asking
from andon.model.build import LOADERS
from andon.training.material import HEADS

PIPELINES = {
    CLASSIFICATION: "text-classification",
    REGRESSION: "text-classification",
    MULTI_LABEL: "text-classification",
    TOKEN_CLASSIFICATION: "token-classification",
    SFT: "text-generation",
}
"""By the task's name: the hub's word for what its models do, and the pipeline of transformers that does it."""
_SETTINGS = {"text-classification": ", truncation=True", "token-classification": ", ignore_labels=[]"}
"""What that pipeline is given: texts are cut as in training; no tag is left out."""
_TAGGING = r"""
for text in ["a text"]:
    tokens = use(text)
    for word in re.finditer(r"\S+", text):  # its first token has its tag
        of = [token for token in tokens if token["start"] < word.end() and word.start() < token["end"]]
        print(word[0], of[0]["entity"] if of else None)
"""


def use(config: Config, *, alone: bool, asking: Asking | None) -> str:
    """Python that uses a model of `config` in `THIS FOLDER`. alone: an adapter lies there without its base. asking: of
    one that answers."""
    task = config.task or CLASSIFICATION
    pipeline = PIPELINES[task]
    lines = ["import re", ""] if task == TOKEN_CLASSIFICATION else []
    if alone:
        lines += _loaded(task, config)
        given = "model, tokenizer=tokenizer"
    else:
        lines += ["from transformers import pipeline", ""]
        given = '"THIS FOLDER"'
    lines.append(f'use = pipeline("{pipeline}", {given}{_SETTINGS.get(pipeline, "")})')
    if asking is not None:
        lines += _answering(asking)
    elif task == TOKEN_CLASSIFICATION:
        lines += _TAGGING.strip().split("\n")
    elif config.data.text_pair_column is not None:
        lines.append('print(use([{"text": "a text", "text_pair": "another"}], top_k=None))')
    else:
        lines.append('print(use(["a text"], top_k=None))')
    return "\n".join(f"    {line}".rstrip() for line in lines)


def _loaded(task: str, config: Config) -> list[str]:
    """An adapter with its base, which knows neither the classes nor where an answer ends, and no new tokens: for these
    peft's own loader makes room."""
    loader = LOADERS[HEADS[task]]
    if task == SFT:
        used = f"{loader}, AutoTokenizer, GenerationConfig, pipeline"
        if config.model.new_tokens:
            loader, used = "AutoPeftModelForCausalLM", "AutoTokenizer, GenerationConfig, pipeline"
        return [
            *(["from peft import AutoPeftModelForCausalLM"] if config.model.new_tokens else []),
            f"from transformers import {used}",
            "",
            'folder = "THIS FOLDER"',
            f'model = {loader}.from_pretrained(folder, dtype="{config.model.dtype}")',
            "model.generation_config = GenerationConfig.from_pretrained(folder)  # where an answer ends",
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
        ]
    names = sorted(("AutoConfig", loader, "AutoTokenizer"))
    return [
        f"from transformers import {', '.join(names)}, pipeline",
        "",
        'folder = "THIS FOLDER"',
        'config = AutoConfig.from_pretrained(f"{folder}/classifier.json")  # the classes, which the base does not know',
        f"model = {loader}.from_pretrained(",
        "    folder, config=config, ignore_mismatched_sizes=True  # a base may have a head of its own",
        ")",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
    ]


def _answering(asking: Asking) -> list[str]:
    given = '[{"role": "user", "content": "a prompt"}]'
    if asking.example is not None:
        given = '"' + asking.example.replace("\n", "\\n") + '"'
    how = "max_new_tokens=256, do_sample=False, return_full_text=False"
    return [f"asked = {given}", f'print(use(asked, {how})[0]["generated_text"])']
