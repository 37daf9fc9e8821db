"""LoRA through peft, checked: each named target exists, a new head trains, trainable weights are fp32.

peft accepts a target that matches nothing if another one matches, and a bfloat16 head with fp32 adapters. Both train a
worse model without a warning.
"""

from __future__ import annotations

import difflib
import json
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from andon.config.schema import Adapter
from andon.config.source import is_folder, require_model_folder
from andon.console.messages import InputError, ProblemList, silence_bitsandbytes
from andon.model.build import (
    class_names,
    facts_of,
    half_of,
    head_names,
    require_finite,
    seeded,
    vocabulary_head,
    without_adapter,
)
from andon.run.checkpoint import bytes_of, safetensors_parts

ALL_LINEAR = "all-linear"
_WRAPPERS = ("base_layer", "original_module", "token_adapter")
"""Name components that peft inserts for the modules that it wraps."""
_INIT, _TO_SAVE = "adapter.init", "adapter.modules_to_save"
_OF_CONFIG = {
    "adapter.r": "r",
    "adapter.alpha": "lora_alpha",
    "adapter.rslora": "use_rslora",
    "adapter.dora": "use_dora",
}
"""Settings that an adapter to go on from must have too, with peft's names."""
_SUM_CHUNK = 4096
"""Rows in one chunk of the sum in `mean_row`."""
LARGEST_FILE = 5 * 10**9
"""Most bytes of tensors in one shard of a saved model."""


def attach(
    model: nn.Module, adapter: Adapter, seed: int, new_tokens: Sequence[int] = (), device: torch.device | None = None
) -> nn.Module:
    """Attach the adapter to `model` in place and return the module to train: a peft model, or `model` for kind 'none'.

    LoRA A is drawn from `seed`, B is zero, and trainable weights are fp32. The classification head trains in full. So
    do backbone modules that the base's checkpoint lacks: they are saved with the adapter, since another program would
    draw other weights. The head of a causal language model is frozen, except for the rows of new tokens. new_tokens:
    consecutive ids after the tokenizer's own. device: where weights of kind 'none' go, one by one as they become fp32,
    so that a GPU's host never holds all of them. Raises `InputError` for a target that matches no Linear (with the
    nearest names), a model without a head, an adapter that peft refuses, and an `adapter.init` that does not fit.
    """
    silence_bitsandbytes()
    from peft import LoraConfig, TaskType, get_peft_model

    if new_tokens:
        _add_rows(model, new_tokens, adapter.kind)
    if adapter.kind == "none":
        return model.to(device, torch.float32).requires_grad_(True)
    heads = head_names(model)
    if not heads:
        raise InputError.at("model.base", f"{type(model).__name__} has no head beside its backbone")
    drawn = facts_of(model).drawn
    targets = adapter.targets if isinstance(adapter.targets, tuple) else (adapter.targets or ALL_LINEAR,)
    if targets != (ALL_LINEAR,):
        _check_targets("targets", model, targets, heads, drawn)
    _check_targets("exclude", model, adapter.exclude, heads, drawn)
    by_token = TaskType.TOKEN_CLS if "TokenClassification" in type(model).__name__ else TaskType.SEQ_CLS
    trained_whole = () if vocabulary_head(model) is not None else (*heads, *drawn)
    saved = _modules_to_save(model, adapter.modules_to_save, trained_whole)
    layers: list[Any] = []
    if new_tokens:
        causal: Any = model
        layers = [causal.get_input_embeddings(), causal.get_output_embeddings()]
        if layers[0].weight is layers[1].weight:  # peft updates a tied head with its embedding
            del layers[1]
    named = {name: list(new_tokens) for name, module in model.named_modules() if any(module is tied for tied in layers)}
    config = LoraConfig(
        task_type=by_token if trained_whole else TaskType.CAUSAL_LM,
        r=adapter.r,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        target_modules=ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets),
        exclude_modules=list(adapter.exclude) or None,
        modules_to_save=[*trained_whole, *saved] or None,
        trainable_token_indices=named or None,
    )
    with seeded(seed), torch.device("cpu"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # peft warns about its own patterns for the fused weights of mixture-of-experts layers.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys", RuntimeWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)  # peft then sets it for GPT-2
        try:
            adapted: Any = get_peft_model(model, config)
        except ValueError as error:
            # peft adapts mixture-of-experts weights as plain parameters, without an input that dropout could apply to.
            remedy = "; --set adapter.dropout=0" if adapter.dropout and "dropout" in str(error) else ""
            what = f"peft refuses it for {type(model).__name__}: {str(error).removesuffix('.')}{remedy}"
            raise InputError.at("adapter", what) from error
    for layer in adapted.modules():
        if hasattr(layer, "trainable_tokens_delta"):
            layer.forward_adapters = partial(_with_new_rows, layer)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for name in trained_whole:
        head = adapted.get_base_model().get_submodule(name).modules_to_save["default"]
        if not all(parameter.requires_grad for parameter in head.parameters()):
            raise RuntimeError(f"{name}, which is part of the classification head, is not trainable")
        head.register_forward_pre_hook(_enter_fp32)
        head.register_forward_hook(_leave_fp32, always_call=True)
    half = half_of(model)
    for name, module in adapted.named_modules():
        if half is not None and name.endswith(tuple(f"{each}.modules_to_save.default" for each in saved)):
            module.register_forward_hook(partial(_in_half, half))
    trained: nn.Module = adapted
    if adapter.init is not None and not any(each.is_meta for each in trained.parameters()):
        _go_on_from(trained, Path(adapter.init).expanduser())
    return trained


def _modules_to_save(model: nn.Module, names: Sequence[str], trained_anyway: Sequence[str]) -> list[str]:
    """For peft: `adapter.modules_to_save`, with full names if peft would match others too. Raises `InputError`."""
    every, problems, saved = [name for name, _ in model.named_modules()], ProblemList(), list[str]()
    uses = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    for name in names:
        matching = [each for each in every if f".{each}".endswith(f".{name}")]
        tied = any(
            uses[id(weight)] > 1
            for each in matching
            for part in model.get_submodule(each).modules()
            for weight in part._parameters.values()
            if weight is not None
        )
        if not matching:
            last = sorted({each.rpartition(".")[2] for each in every} - {""})
            near = difflib.get_close_matches(name, last, n=1)
            problems.add(_TO_SAVE, f"{name!r} matches no module{f'; did you mean {near[0]!r}?' if near else ''}")
        elif {*matching} & {*trained_anyway}:
            problems.add(_TO_SAVE, f"{name!r} is trained whole anyway; leave it out")
        elif tied:
            problems.add(_TO_SAVE, f"{name!r} shares a weight with another module, so it cannot train alone")
        saved += [name] if matching == [each for each in every if each.endswith(name)] else matching
    problems.raise_if_any()
    return saved


def _in_half(half: torch.dtype, module: nn.Module, inputs: object, output: Any) -> Any:
    """Round the output of a module that trains in fp32 to the type of the modules around it."""
    return output.to(half) if isinstance(output, Tensor) else output


def _go_on_from(model: Any, folder: Path) -> None:
    """Load the adapter in `folder` into `model`, which has a new one of the run's settings.

    Raises `InputError` for a folder that is not a LoRA adapter of the same settings, targets, base and classes.
    """
    from safetensors import SafetensorError, safe_open

    file, own, problems = folder / "adapter_config.json", model.peft_config["default"], ProblemList()
    try:
        saved: Any = json.loads(file.read_text(encoding="utf-8"))
        with safe_open(folder / "adapter_model.safetensors", "pt") as stored:
            names = [*stored.keys()]
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        inside = folder / "adapter"
        hint = f"; did you mean {str(inside)!r}?" if (inside / file.name).is_file() else ""
        raise InputError.at(_INIT, f"cannot read the adapter in {str(folder)!r}: {error}{hint}") from error
    if not isinstance(saved, dict) or saved.get("peft_type") != "LORA":
        raise InputError.at(_INIT, f"{str(folder)!r} is not a LoRA adapter of peft ({file.name})")
    for key, name in _OF_CONFIG.items():
        theirs, ours = saved.get(name, False), getattr(own, name)
        if theirs != ours:
            what = f"is {json.dumps(ours)}, and the adapter in {folder} has {json.dumps(theirs)}"
            problems.add(key, f"{what}; --set {key}={json.dumps(theirs)}")
    for name in ("rank_pattern", "alpha_pattern", "lora_bias"):
        if saved.get(name):
            problems.add(_INIT, f"{str(folder)!r} has {name}, which is not supported")
    targets = [_adapted(each) for each in (adapter_tensors(model), names)]
    if targets[0] != targets[1]:
        ours, theirs = (", ".join(each) or "nothing" for each in targets)
        problems.add("adapter.targets", f"adapts {ours}; the adapter in {folder} adapts {theirs}")
    named, base = saved.get("base_model_name_or_path"), model.get_base_model().config._name_or_path
    on_hub = named and base and not any(is_folder(Path(each).expanduser()) for each in (folder / named, named, base))
    if on_hub and named != base:
        what = f"{str(folder)!r} is of the base {named!r}, and model.base is {base!r}"
        problems.add(_INIT, f"{what}; if they are the same, change {file}")
    if (folder / "labels.json").is_file() and vocabulary_head(model) is None:
        theirs, ours = read_labels(folder), class_names(model.get_base_model().config)
        if theirs != ours:
            problems.add(_INIT, f"{str(folder)!r} has the classes {', '.join(theirs)}; the data has {', '.join(ours)}")
    problems.raise_if_any()
    load_adapter(model, folder)


def _adapted(names: Iterable[str]) -> list[str]:
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name})


def _check_targets(
    key: str, model: nn.Module, targets: Sequence[str], heads: Sequence[str], drawn: Sequence[str]
) -> None:
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.partition(".")[0] not in heads and name not in drawn
    ]
    suffixes = sorted({name.rpartition(".")[2] for name in linear})
    problems, causal = ProblemList(), vocabulary_head(model) is not None
    for target in targets:
        if any(name == target or name.endswith(f".{target}") for name in linear):
            continue
        near = difflib.get_close_matches(target, suffixes, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(suffixes)}"
        what = f"matches no Linear module; {remedy}"
        if target in heads and causal:
            what = "gives the logits of the vocabulary, which no adapter changes here; leave it out"
        elif target in heads:
            what = "is the classification head, which is trained whole; leave it out"
        elif target == ALL_LINEAR:
            what = "already names every module; leave the others out"
        problems.add(f"adapter.{key}", f"{target!r} {what}")
    problems.raise_if_any()


def _add_rows(model: nn.Module, tokens: Sequence[int], kind: str) -> None:
    """Initialize the rows of `tokens` (consecutive ids) in `model`'s embedding and head, tied or not, in place.

    The adapter trains these rows through peft's `trainable_token_indices`. Each starts as the mean of all rows before
    the new ones, even if the vocabulary was larger than the tokenizer and had the row already: no random numbers are
    used, and no new token is likelier than another. Other rows keep their bits. Raises `InputError` unless `model` is a
    causal language model, and for an adapter on a head with a bias, since peft ignores the bias of new rows.
    """
    built: Any = model
    head: Any = vocabulary_head(model)
    if head is None:
        raise InputError.at("model.new_tokens", f"{type(model).__name__} is not a causal language model")
    if kind != "none" and getattr(head, "bias", None) is not None:
        what = f"the logits of {type(model).__name__} have a bias, and rows beside an adapter have none"
        raise InputError.at("model.new_tokens", f"{what}: adapter.kind=none")
    first, end = tokens[0], tokens[-1] + 1
    if built.get_input_embeddings().weight.shape[0] < end:
        with seeded(0):  # the drawn rows are overwritten below
            built.resize_token_embeddings(end, mean_resizing=False)
    for layer in (built.get_input_embeddings(), built.get_output_embeddings()):
        for values in (layer.weight, getattr(layer, "bias", None)):
            if values is not None and not values.is_meta:
                values.data[first:end] = mean_row(values.data[:first]).to(values.dtype)


def mean_row(rows: Tensor) -> Tensor:
    """fp64: the mean of `rows` over dimension 0. The order of additions does not depend on the number of threads."""
    total = torch.zeros((_SUM_CHUNK, *rows.shape[1:]), dtype=torch.float64)
    for part in torch.split(rows, _SUM_CHUNK):
        total[: len(part)] += part.double()
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return total[0] / len(rows)


def _with_new_rows(layer: Any, inputs: Tensor, active: object = None) -> Tensor:
    """The layer's output (embeddings of ids, or logits of hidden states) with the trained rows instead of the base's.
    peft's own forward copies the whole weight, and computes a gradient of that size, in each pass."""
    base = layer.base_layer
    output: Tensor = base(inputs)
    if layer.merged or layer.disable_adapters:
        return output
    rows = layer.trainable_tokens_delta["default"].to(base.weight.dtype)
    first, end = layer.token_indices["default"][0], layer.token_indices["default"][-1] + 1
    if isinstance(base, nn.Linear):
        output[..., first:end] = nn.functional.linear(inputs, rows)
        return output
    new = (inputs >= first) & (inputs < end)
    own = nn.functional.embedding((inputs - first).where(new, 0), rows)
    scale = layer._get_embed_scale()
    return torch.where(new[..., None], own if scale is None else own * scale.to(own.dtype), output)


_fp32_contexts: weakref.WeakKeyDictionary[nn.Module, torch.autocast] = weakref.WeakKeyDictionary()
"""Heads that are in their forward pass, with the context that switches autocast off."""


def _enter_fp32(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast a bfloat16 backbone's output for an fp32 head. Autocast would round the head's weights and logits."""
    first = next(head.parameters())
    _fp32_contexts[head] = torch.autocast(first.device.type, enabled=False)
    _fp32_contexts[head].__enter__()  # type: ignore[no-untyped-call]
    return tuple(value.to(first.dtype) if isinstance(value, Tensor) else value for value in inputs)


def _leave_fp32(head: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    _fp32_contexts.pop(head).__exit__(None, None, None)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters in canonical order: sorted by their full name."""
    named = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return dict(sorted(named, key=itemgetter(0)))


def export_adapter(
    model: nn.Module,
    folder: Path,
    base_reference: str,
    labels: Sequence[str],
    *,
    revision: str | None = None,
    with_base: bool = False,
) -> None:
    """Write the PEFT folder of the adapter, or for kind 'none' the whole model. Every process writes the same bytes.

    base_reference: where stock peft looks for the base, a hub id (at `revision`) or a path relative to the loader's
    working folder. labels: class names in the order of their ids, empty for a causal language model; `AutoConfig` reads
    them from `classifier.json`. with_base: write the base's weights and `config.json` too, so that transformers
    needs no other folder.
    """
    from peft import PeftModel

    folder.mkdir(parents=True, exist_ok=True)
    if with_base or not isinstance(model, PeftModel):
        save_base(model, folder, labels)
    if not isinstance(model, PeftModel):
        return
    write_tensors(folder / "adapter_model.safetensors", {name: Stored(t) for name, t in adapter_tensors(model).items()})
    config = model.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": base_reference,
        "revision": revision,
        "inference_mode": True,
        "modules_to_save": sorted(set(config["modules_to_save"] or ())) or None,
    }
    # Sets as sorted lists: a set's order depends on the process.
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
    _write_json(folder / "adapter_config.json", plain)
    if labels and not with_base:
        _write_json(folder / "classifier.json", _model_config(model.get_base_model(), labels))
    if labels:
        _write_json(folder / "labels.json", {"labels": list(labels)})


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """CPU copies of the adapter's and the head's tensors, by their names in peft's files."""
    from peft import get_peft_model_state_dict

    state: Mapping[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in sorted(state.items())}


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Load adapter and head from an exported folder into `model`, which has the same adapter attached.

    Raises `InputError` for an unreadable file, for weights that are not finite, and for missing, unknown or misshapen
    tensors, which stock peft accepts.
    """
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    try:
        loaded = load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError.at(file, f"cannot read the adapter: {error}") from error
    problems, expected = ProblemList(), adapter_tensors(model)
    for name in sorted(loaded.keys() | expected.keys()):
        if name not in loaded:
            problems.add(str(file), f"has no {name}")
        elif name not in expected:
            problems.add(str(file), f"has {name}, which the model does not have")
        elif loaded[name].shape != expected[name].shape:
            problems.add(str(file), f"{name} is {tuple(loaded[name].shape)}, the model's {tuple(expected[name].shape)}")
    problems.raise_if_any()
    require_finite(loaded, file)
    set_peft_model_state_dict(model, loaded)


def save_base(model: nn.Module, folder: Path, labels: Sequence[str], merged: torch.dtype | None = None) -> None:
    """Write the base model without its adapter in transformers' format: config.json, safetensors, labels.json.

    Stock peft needs these files to load an adapter of the embedded model. merged: write the sum of base and adapter in
    this dtype, computed in fp32 one weight at a time. Tied weights are written once. `model` does not change.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    base: Any = without_adapter(model)
    changes = {} if merged is None else _changes(base)
    left_out = (".lora_", ".trainable_tokens_", ".modules_to_save." if merged is None else ".original_module.")
    tensors: dict[str, Stored] = {}
    for name, value in base.state_dict().items():
        # The state dict has the base's and peft's tensors; each wrapper adds a component to the name.
        plain = _base_name(name.replace(".modules_to_save.default.", "."))
        if not any(part in name for part in left_out) and plain not in base.all_tied_weights_keys:
            tensors[plain] = Stored(value, merged if value.is_floating_point() else None, changes.get(plain))
    folder.mkdir(parents=True, exist_ok=True)
    sizes: dict[str, Any] = {"get_storage_size": lambda each: each.size, "max_shard_size": LARGEST_FILE}
    split = split_state_dict_into_shards_factory(tensors, filename_pattern="model{suffix}.safetensors", **sizes)
    for file, names in split.filename_to_tensors.items():
        write_tensors(folder / file, {name: tensors[name] for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)
    dtype = str(merged or base.dtype).removeprefix("torch.")
    _write_json(folder / "config.json", _model_config(base, labels) | {"dtype": dtype})
    if labels:
        _write_json(folder / "labels.json", {"labels": list(labels)})


def _base_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _changes(base: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:

    def with_delta(layer: Any, weight: Tensor) -> Tensor:
        changed: Tensor = weight + layer.get_delta_weight("default").float()
        lengths = getattr(layer, "lora_magnitude_vector", None) or {}
        if "default" in lengths:  # DoRA
            along = int(not layer.fan_in_fan_out)
            factor = lengths["default"].weight.float() / torch.linalg.norm(changed, dim=along)
            changed = changed * factor.unsqueeze(along)
        return changed

    def with_rows(layer: Any, weight: Tensor) -> Tensor:
        rows = layer.trainable_tokens_delta["default"].float()
        return weight.index_copy(0, torch.tensor(layer.token_indices["default"], device=weight.device), rows)

    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, module in base.named_modules():
        layer: Any = module
        plain = _base_name(name)
        if hasattr(layer, "lora_A"):  # wrappers of mixture-of-experts weights have `parameter_name`
            changes[f"{plain}.{getattr(layer, 'parameter_name', 'weight')}"] = partial(with_delta, layer)
        elif hasattr(layer, "trainable_tokens_delta"):
            changes[f"{plain}.weight"] = partial(with_rows, layer)
    return changes


@dataclass(frozen=True)
class Stored:
    """A tensor to write. dtype: stored dtype (None: its own). change: maps fp32 `tensor` to the new value."""

    tensor: Tensor
    dtype: torch.dtype | None = None
    change: Callable[[Tensor], Tensor] | None = None

    @property
    def kind(self) -> torch.dtype:
        return self.dtype or self.tensor.dtype

    @property
    def size(self) -> int:
        return self.tensor.numel() * self.kind.itemsize

    def data(self) -> memoryview:
        """The bytes to write. Raises `ValueError` if a changed tensor is not finite."""
        value = self.tensor.detach()
        if self.change is not None:
            with torch.no_grad():
                value = self.change(value.float())
            if not value.isfinite().all():
                raise ValueError("a merged weight is not finite")
        return bytes_of(value.to("cpu", self.kind))


def write_tensors(file: Path, tensors: Mapping[str, Stored]) -> None:
    """Write `tensors` as one safetensors file. Raises `ValueError` as `Stored.data` does."""
    kinds = {name: (each.kind, each.tensor.shape) for name, each in tensors.items()}
    with file.open("wb") as out:
        out.writelines(safetensors_parts(kinds, lambda name: tensors[name].data(), {"format": "pt"}))


def read_labels(folder: Path) -> tuple[str, ...]:
    """The label names of an exported folder, in the order of their ids. Raises `InputError` if labels.json cannot be
    read, and for a folder that `require_model_folder` refuses."""
    if is_folder(folder):
        require_model_folder(folder, str(folder))
    file = folder / "labels.json"
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["labels"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("labels is not a list of names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError.at(file, f"cannot read the label names: {error}") from error
    return tuple(names)


def _model_config(base: Any, labels: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = base.config.to_dict() | {
        "architectures": [type(base).__name__],
        "dtype": str(base.dtype).removeprefix("torch."),
    }
    if labels:
        config["id2label"] = {str(index): name for index, name in enumerate(labels)}
        config["label2id"] = {name: index for index, name in enumerate(labels)}
    config.pop("_name_or_path", None)
    config.pop("auto_map", None)  # names remote code, which was not run and is not written
    return config


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
