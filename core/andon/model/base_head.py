"""The classification head that a base model brings with it: whether it is kept, and in which order its classes are.

A checkpoint that already classifies numbers its classes in its own order. Its head only means something for rows whose
labels have the same names, numbered in that order; for other labels its output layer is drawn anew, as for a base
without a head. Without this a head that says "negative" for 0 would be read as the first label of the alphabet.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from andon_contracts.legible import legible_line

_MOST_NAMES = 8


@dataclass(frozen=True)
class BaseFacts:
    """What is known of a base model once its checkpoint is loaded.

    drawn: modules of its backbone whose weights the checkpoint lacks, so that they were drawn at random. notes: lines
    for the user about its head. own_code: a sentence about code that the base names and that was not run, or empty.
    """

    drawn: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    own_code: str = ""


def own_classes(config: Any) -> tuple[str, ...]:
    """The names of the classes of a model of transformers, in the order of its outputs; empty if they are unclear."""
    found = getattr(config, "id2label", None) or {}
    return tuple(str(found[number]) for number in range(len(found))) if set(found) == set(range(len(found))) else ()


def has_own_head(config: Any, auto: Any) -> bool:
    """Whether the checkpoint of `config` (as stored) was written by the class that `auto` loads it with."""
    written_by = getattr(config, "architectures", None)
    loads = auto._model_mapping.get(type(config), None)
    loads = loads if isinstance(loads, (tuple, list)) else (loads,)
    return not written_by or any(each is not None and each.__name__ in written_by for each in loads)


def in_order_of(config: Any, labels: Sequence[str]) -> tuple[str, ...]:
    """`labels` in the order of the same names in `config`, ignoring case; unchanged if `config` names other classes."""
    own = [name.casefold() for name in own_classes(config)]
    named = {name.casefold(): name for name in labels}
    same = len(named) == len(labels) == len(own) and set(own) == set(named)
    return tuple(named[name] for name in own) if same else tuple(labels)


def keeps_head(config: Any, auto: Any, head: str, labels: Sequence[str]) -> bool:
    """Whether the outputs of the base are what `labels` name, in their order. head: a key of `LOADERS`."""
    if not has_own_head(config, auto):
        return False
    own = own_classes(config)
    if head == "regression" and len(own) == 1:
        return getattr(config, "problem_type", None) in (None, "regression")
    folded = [name.casefold() for name in own]
    alike = len(set(folded)) == len(folded) and folded == [name.casefold() for name in labels]
    return alike or own == tuple(labels)  # names that differ only in case say nothing in another case


def head_note(config: Any, auto: Any, head: str, labels: Sequence[str], *, kept: bool) -> str:
    """The line that says what became of the base's own head. head, labels: as in `ModelInterface`."""
    if kept and head == "regression":
        return "head: the base's own is kept; it gives one number too"
    if kept:
        return f"head: the base's own is kept, since it names the same classes; numbered as there: {_shown(labels)}"
    own = own_classes(config)
    if not has_own_head(config, auto):
        why = f"is that of {', '.join(config.architectures)}"
    elif own == tuple(f"LABEL_{number}" for number in range(len(own))):
        why = f"has {len(own)} output{'s' * (len(own) != 1)} without names"
    else:
        why = f"names other classes ({_shown(own)})"
    return f"head: drawn anew, since the base's own {why}"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(legible_line, names[:_MOST_NAMES])) + more


def own_code_note(config: Any, model: nn.Module) -> str:
    """A sentence that says that the model's own code was not run, if its configuration names any; else empty."""
    named = getattr(config, "auto_map", None) or {}
    codes = {str(code) for key, code in named.items() if str(key).startswith(("AutoModel", "AutoConfig"))}
    if not codes:
        return ""
    return (
        f"the base's config.json names code of its own ({_shown(sorted(codes))}), which Andon does not run: this is "
        f"the {type(model).__name__} of transformers with the same weights, which may compute something else (if it "
        "does not, remove auto_map from config.json)"
    )


def output_tensors(auto: Any, config: Any) -> frozenset[str]:
    """The names of the tensors whose shape depends on the number of classes: the output layer of a head."""
    other = copy.deepcopy(config)
    other.num_labels = config.num_labels + 1
    with torch.device("meta"):
        ours, theirs = (auto.from_config(each, trust_remote_code=False).state_dict() for each in (config, other))
    return frozenset(name for name, value in ours.items() if theirs[name].shape != value.shape)


def draw_again(model: Any, names: Collection[str], seed: int) -> None:
    """Draw the tensors `names` of `model` as transformers does for a checkpoint that lacks them, from `seed`.

    The process-global generator is left at another place: call it inside `seeded`.
    """
    torch.default_generator.manual_seed(seed)
    for name in names:
        model.get_parameter(name)._is_hf_initialized = False
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in sorted(names)):
        module: nn.Module = model.get_submodule(parent)
        model._init_weights(module)
