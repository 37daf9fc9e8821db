"""LoRA through peft, checked: each named target exists, a new head trains, trainable weights are fp32.

peft accepts a target that matches nothing as long as another one matches, and a head in bfloat16 beside adapters in
fp32; both end in a model that trains worse and says nothing. Here the first is an error and the second cannot be.
"""

from __future__ import annotations

import difflib
import json
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from andon.config.schema import Adapter
from andon.config.source import is_folder, require_model_folder
from andon.console.problems import InputError, Problem, ProblemList
from andon.model.build import facts_of, head_names, seeded, vocabulary_head, without_adapter
from andon.model.finite import require_finite
from andon.model.new_tokens import add_rows, layers_with_rows, with_rows_put_in
from andon.model.stored import Stored, write_sharded, write_tensors
from andon_contracts.digest import tree_digest

ALL_LINEAR = "all-linear"
_WRAPPERS = ("base_layer", "original_module", "token_adapter")
"""Parts of names under which peft keeps what it wraps."""


def attach(model: nn.Module, adapter: Adapter, seed: int, new_tokens: Sequence[int] = ()) -> nn.Module:
    """`model` with its adapter: A drawn from `seed`, B zero, the whole head trainable, trainables fp32.

    Modules of the backbone that the base's checkpoint lacks train whole, as the head does, and are part of the adapter:
    who loads the adapter elsewhere would draw other weights for them.
    The head of a causal language model came with it, and stays as it is, but for the rows of new tokens, which train
    as those of its embedding do. new_tokens: their ids, in order and without a gap after the others. Changes `model`
    in place and returns what to train (a peft model, or `model` itself for kind 'none'). Raises `InputError` for each
    target that matches no Linear, with the nearest names.
    """
    if new_tokens:
        add_rows(model, new_tokens, adapter.kind)
    if adapter.kind == "none":
        return model.float().requires_grad_(True)
    heads = head_names(model)
    if not heads:
        raise InputError([Problem("model.base", f"{type(model).__name__} has no head beside its backbone")])
    drawn = facts_of(model).drawn
    names = _named(adapter.targets)
    _check_targets(model, names, heads, drawn)
    new = () if vocabulary_head(model) is not None else (*heads, *drawn)
    adapted = _inject(model, adapter, names, new, new_tokens, seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for name in new:
        _train_head(adapted.get_base_model().get_submodule(name), name)
    trained: nn.Module = adapted
    return trained


def _named(targets: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return targets if isinstance(targets, tuple) else (targets or ALL_LINEAR,)


def _check_targets(model: nn.Module, names: Sequence[str], heads: Sequence[str], drawn: Sequence[str]) -> None:
    if names == (ALL_LINEAR,):
        return
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.partition(".")[0] not in heads and name not in drawn
    ]
    found = ProblemList()
    for target in names:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            found.add("adapter.targets", _unmatched(target, linear, heads, causal=vocabulary_head(model) is not None))
    found.raise_if_any()


def _unmatched(target: str, linear: Iterable[str], heads: Sequence[str], *, causal: bool) -> str:
    if target in heads and causal:
        return f"{target!r} gives the logits of the vocabulary, which no adapter changes here; leave it out"
    if target in heads:
        return f"{target!r} is the classification head, which is trained whole; leave it out"
    if target == ALL_LINEAR:
        return f"{ALL_LINEAR!r} already names every module; leave the others out"
    suffixes = sorted({name.rpartition(".")[2] for name in linear})
    near = difflib.get_close_matches(target, suffixes, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(suffixes)}"
    return f"{target!r} matches no Linear module; {remedy}"


def _peft_task(model: nn.Module, new_heads: Sequence[str]) -> Any:
    from peft import TaskType

    if not new_heads:
        return TaskType.CAUSAL_LM
    return TaskType.TOKEN_CLS if "TokenClassification" in type(model).__name__ else TaskType.SEQ_CLS


def _inject(
    model: nn.Module,
    adapter: Adapter,
    names: Sequence[str],
    new_heads: Sequence[str],
    new_tokens: Sequence[int],
    seed: int,
) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type=_peft_task(model, new_heads),
        r=adapter.r,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if names == (ALL_LINEAR,) else list(names),
        modules_to_save=list(new_heads) or None,
        trainable_token_indices=layers_with_rows(model, new_tokens),
    )
    with seeded(seed), torch.device("cpu"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # Of a mixture's experts, whose weights transformers joins: peft ranks them by a pattern that it does not need.
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys", RuntimeWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)  # it sets what GPT-2 needs
        try:
            return with_rows_put_in(get_peft_model(model, config))
        except ValueError as error:
            # peft adapts the experts of a mixture as plain parameters, which have no input to drop from.
            remedy = "; --set adapter.dropout=0" if adapter.dropout and "dropout" in str(error) else ""
            what = f"peft refuses it for {type(model).__name__}: {str(error).removesuffix('.')}{remedy}"
            raise InputError([Problem("adapter", what)]) from error


def _train_head(wrapper: Any, name: str) -> None:
    """A part of the head must train, and gets its input in its own type (an fp32 head behind a bfloat16 backbone)."""
    head = wrapper.modules_to_save["default"]
    if not all(parameter.requires_grad for parameter in head.parameters()):
        msg = f"{name}, which is part of the classification head, is not trainable"
        raise RuntimeError(msg)
    head.register_forward_pre_hook(_in_own_type)
    head.register_forward_hook(_back_to_autocast, always_call=True)


_left: weakref.WeakKeyDictionary[nn.Module, torch.autocast] = weakref.WeakKeyDictionary()
"""The heads that are computing, each with the context in which autocast is off."""


def _in_own_type(head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Autocast would round the head's weights and its logits to the backbone's type."""
    first = next(head.parameters())
    _left[head] = torch.autocast(first.device.type, enabled=False)
    _left[head].__enter__()  # type: ignore[no-untyped-call]
    return tuple(value.to(first.dtype) if isinstance(value, torch.Tensor) else value for value in inputs)


def _back_to_autocast(head: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    _left.pop(head).__exit__(None, None, None)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters in canonical order: sorted by their full name, so no registration order enters."""
    named = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    return dict(sorted(named, key=itemgetter(0)))


def base_digest(model: nn.Module) -> int:
    """The 64-bit digest of everything that must not change: frozen parameters and all buffers, by name."""
    frozen: dict[str, torch.Tensor] = {
        name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad
    }
    return tree_digest(frozen | dict(model.named_buffers()))


def export_adapter(
    model: nn.Module,
    folder: Path,
    base_reference: str,
    labels: Sequence[str],
    *,
    revision: str | None = None,
    with_base: bool = False,
) -> None:
    """Write what was trained: a PEFT folder, or for kind 'none' the whole model. The same bytes in every process.

    folder: made if absent; atomicity is its owner's affair. base_reference: where stock peft looks for the base, a hub
    id (at `revision`) or a path, which is looked up from the working folder of whoever loads it. labels: names in the
    order of their ids, which transformers finds in `classifier.json` (`AutoConfig` reads it); none of a causal language
    model, for which no file of names is written. with_base: the base's weights and a `config.json` lie in the folder
    too, and transformers needs no other (it looks for no base where there is one).
    """
    from peft import PeftModel

    folder.mkdir(parents=True, exist_ok=True)
    if with_base or not isinstance(model, PeftModel):
        save_base(model, folder, labels)
    if not isinstance(model, PeftModel):
        return
    write_tensors(folder / "adapter_model.safetensors", {name: Stored(t) for name, t in adapter_tensors(model).items()})
    _write_json(folder / "adapter_config.json", _adapter_config(model, base_reference, revision))
    if labels and not with_base:
        _write_json(folder / "classifier.json", _model_config(model.get_base_model(), labels))
    _write_labels(folder, labels)


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Adapter and head as peft names them in its files: copies on the CPU."""
    from peft import get_peft_model_state_dict

    state: Mapping[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in sorted(state.items())}


def load_adapter(model: nn.Module, folder: Path) -> None:
    """Read adapter and head of an exported folder into `model`, which has the same adapter attached.

    Unlike stock peft this checks every name and shape. Raises `InputError` where one is absent, unknown or different,
    and for weights that are NaN or infinite.
    """
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / "adapter_model.safetensors"
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise InputError([Problem(str(file), f"cannot read the adapter: {error}")]) from error
    _check_shapes(file, found, adapter_tensors(model))
    require_finite(found, file)
    set_peft_model_state_dict(model, found)


def _check_shapes(file: Path, found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    problems = ProblemList()
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            problems.add(str(file), f"has no {name}")
        elif name not in wanted:
            problems.add(str(file), f"has {name}, which the model does not have")
        elif found[name].shape != wanted[name].shape:
            problems.add(str(file), f"{name} is {tuple(found[name].shape)}, the model's {tuple(wanted[name].shape)}")
    problems.raise_if_any()


def save_base(model: nn.Module, folder: Path, labels: Sequence[str]) -> None:
    """Write the base model without its adapter (config.json, model.safetensors, labels.json) as transformers loads it.

    Of weights that are tied one is written. labels: as `export_adapter` has them.
    What makes an adapter of the embedded model loadable by stock peft. Needed once: the base never changes.
    """
    _write_model(model, folder, labels, _stored(model, merge=False, dtype=None), str(without_adapter(model).dtype))


def save_merged(model: nn.Module, folder: Path, labels: Sequence[str], dtype: torch.dtype) -> None:
    """Write `model` with its adapter added to the weights of its base, as `save_base` writes the base.

    Each sum is computed in fp32 as its weight is written, and stored in `dtype`: memory holds one merged weight at a
    time. `model` does not change. A model without an adapter is written as it is, in `dtype`.
    """
    _write_model(model, folder, labels, _stored(model, merge=True, dtype=dtype), str(dtype))


def _write_model(
    model: nn.Module, folder: Path, labels: Sequence[str], tensors: Mapping[str, Stored], dtype: str
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_sharded(folder, tensors)
    config = _model_config(without_adapter(model), labels) | {"dtype": dtype.removeprefix("torch.")}
    _write_json(folder / "config.json", config)
    _write_labels(folder, labels)


def _stored(model: nn.Module, *, merge: bool, dtype: torch.dtype | None) -> dict[str, Stored]:
    base: Any = without_adapter(model)
    changes = _changes(base) if merge else {}
    other = ".original_module." if merge else ".modules_to_save."
    found = {}
    for name, value in base.state_dict().items():
        # peft keeps the base's own tensors beside those that it adds, under names with a part more for each wrapper.
        # The experts of a mixture have two.
        plain = _plain(name.replace(".modules_to_save.default.", "."))
        if other in name or ".lora_" in name or ".trainable_tokens_" in name or plain in base.all_tied_weights_keys:
            continue
        found[plain] = Stored(value, dtype if value.is_floating_point() else None, changes.get(plain))
    return found


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _changes(base: nn.Module) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """By the name of each weight that an adapter of peft changes: its value, in fp32, to the changed one."""
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for name, module in base.named_modules():
        layer: Any = module
        if hasattr(layer, "lora_A"):  # of the experts of a mixture each tensor has a wrapper, which names it
            found[f"{_plain(name)}.{getattr(layer, 'parameter_name', 'weight')}"] = partial(_with_delta, layer)
        elif hasattr(layer, "trainable_tokens_delta"):
            found[f"{_plain(name)}.weight"] = partial(_with_rows, layer)
    return found


def _with_delta(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    delta: torch.Tensor = layer.get_delta_weight("default")
    return weight + delta.float()


def _with_rows(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    rows = layer.trainable_tokens_delta["default"].float()
    return weight.index_copy(0, torch.tensor(layer.token_indices["default"], device=weight.device), rows)


def read_labels(folder: Path) -> tuple[str, ...]:
    """The label names of an exported folder, in the order of their ids: what is read of it first.

    Raises `InputError` if there are none, and for a folder that holds what is no data (`require_model_folder`).
    """
    if is_folder(folder):
        require_model_folder(folder, str(folder))
    file = folder / "labels.json"
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["labels"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("labels is no list of names")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError([Problem(str(file), f"cannot read the label names: {error}")]) from error
    return tuple(names)


def _adapter_config(model: Any, base_reference: str, revision: str | None) -> dict[str, Any]:
    """peft's own description with its sets as sorted lists: a set's order depends on the process."""
    config = model.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": base_reference,
        "revision": revision,
        "inference_mode": True,
        "modules_to_save": sorted(set(config["modules_to_save"] or ())) or None,
    }
    return {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}


def _model_config(base: Any, labels: Sequence[str]) -> dict[str, Any]:
    """The configuration of a model of transformers, with the names of its classes where it has any."""
    config: dict[str, Any] = base.config.to_dict() | {
        "architectures": [type(base).__name__],
        "dtype": str(base.dtype).removeprefix("torch."),
    }
    if labels:
        config["id2label"] = {str(index): name for index, name in enumerate(labels)}
        config["label2id"] = {name: index for index, name in enumerate(labels)}
    config.pop("_name_or_path", None)
    config.pop("auto_map", None)  # code that is not run here, and does not lie beside what is written
    return config


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_labels(folder: Path, labels: Sequence[str]) -> None:
    if labels:
        _write_json(folder / "labels.json", {"labels": list(labels)})
