"""Build a classifier or causal language model: the small embedded one, or one loaded from a folder or the hub.

The same settings give the same bits in every process. Weights that a checkpoint lacks (all weights of the embedded
models, the classification head of others) are drawn from the run's seed without changing torch's global generator.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from andon.config.schema import Model
from andon.config.source import is_folder, loading, setting_faults
from andon.console.messages import InputError, Problem, ProblemList
from andon_contracts.legible import legible_line

T = TypeVar("T")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOADERS = dict.fromkeys(("classification", "regression", "multi-label"), "AutoModelForSequenceClassification")
LOADERS |= {"tokens": "AutoModelForTokenClassification", "causal": "AutoModelForCausalLM"}
"""By head: the transformers class that loads a model from a folder or the hub."""
_PROBLEMS = {"regression": "regression", "multi-label": "multi_label_classification"}
"""transformers' `problem_type`, by which its pipelines choose between softmax, sigmoid and raw outputs."""
_MOST_NAMES, _MOST_TENSORS = 8, 5
_SEEDING = threading.Lock()


@dataclass(frozen=True)
class ModelInterface:
    """Requirements of the rows and the tokenizer on a model.

    head: a key of `LOADERS`. labels: the class names in the order of their ids; empty for 'causal'. vocab_size: the
    number of the tokenizer's ids without `new_tokens`. pad_id: the padding id; a decoder pools the last token that
    differs from it. new_tokens: consecutive ids after those, for tokens that a causal language model learns.
    """

    head: str
    labels: tuple[str, ...]
    vocab_size: int
    pad_id: int
    new_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class BaseFacts:
    """Facts about a base model from loading its checkpoint.

    drawn: backbone modules that the checkpoint lacks, initialized at random. notes: lines for the user about the head.
    own_code: a sentence about remote code that the base names and Andon did not run, or empty.
    """

    drawn: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    own_code: str = ""


def build_base(settings: Model, interface: ModelInterface, seed: int, *, weights: bool = True) -> nn.Module:
    """The model on the CPU, in training mode, without an adapter or new tokens; identical on every call.

    seed: for every weight that is not loaded. weights: False builds the model on the meta device, from config.json
    alone and without memory. Loading a folder needs no network. Remote code is never run.

    Raises `InputError` for fewer than two classes, embedded weights larger than this machine's memory, a base that
    cannot be loaded, lacks weights of its backbone (or a causal head) or has weights that are not finite, ids outside
    the vocabulary, rows longer than the model's positions, and an encoder for a causal head.
    """
    problems, head, embedded = ProblemList(), interface.head, settings.base is None
    if head == "classification" and len(interface.labels) < 2:
        problems.add("num_labels", f"{len(interface.labels)} classes; a classifier needs at least 2")
    if not 0 <= interface.pad_id < interface.vocab_size:
        what = f"padding id {interface.pad_id} is outside of the {interface.vocab_size} ids of the vocabulary"
        problems.add("pad_id", what)
    if embedded and head == "causal" and settings.architecture == "encoder":
        problems.add("model.architecture", "'encoder' reads both ways and cannot write the next token; give 'decoder'")
    problems.raise_if_any()
    products = 4 * settings.hidden_size**2 + 3 * settings.hidden_size * settings.intermediate_size
    embeddings = (interface.vocab_size + settings.max_length) * settings.hidden_size
    needed = 4 * (settings.num_hidden_layers * products + embeddings)
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if embedded and weights and needed > installed:
        what = f"its sizes ask for {needed / 2**30:.1f} GiB of weights; this machine has {installed / 2**30:.1f}"
        raise InputError.at("model", what)
    with seeded(seed), torch.device("cpu" if weights else "meta"):
        if embedded:
            model: Any = _embedded(settings, interface)
        elif weights:
            model = _pretrained(settings, interface, seed)
        else:
            config = _configuration(settings, interface)
            with loading(str(settings.base), "model.base"):
                model = _auto_class(head).from_config(config, dtype=_DTYPES[settings.dtype], trust_remote_code=False)
    if interface.vocab_size > model.config.vocab_size:
        what = f"the tokenizer has {interface.vocab_size} ids, the model's vocabulary {model.config.vocab_size}"
        problems.add("model.base", what)
    positions, length = positions_of(model), settings.max_length
    if positions is not None and length > positions and not _accepts_length(model, length, interface, positions):
        what = f"{length} tokens are more than the model's {positions} positions"
        problems.add("model.max_length", f"{what}; --set model.max_length={positions} is the most")
    problems.raise_if_any()
    if vocabulary_head(model) is not None:
        # A causal model may use a trained token, such as its stop token, as padding; `padding_idx` would zero the
        # gradient of that token's embedding.
        model.get_input_embeddings().padding_idx = None
    built: nn.Module = model.train()
    return built


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context manager: seed the CPU's generator, and restore its state on exit. One thread at a time."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed every GPU's too
        yield


def _label_names(interface: ModelInterface) -> dict[str, Any]:
    if interface.head == "causal":
        return {}
    return {
        "problem_type": _PROBLEMS.get(interface.head),  # None overrides the base's own problem type
        "num_labels": len(interface.labels),
        "id2label": dict(enumerate(interface.labels)),
        "label2id": {name: index for index, name in enumerate(interface.labels)},
    }


def _embedded(settings: Model, interface: ModelInterface) -> Any:
    import transformers

    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    shared = settings.model_dump(include=sizes) | _label_names(interface)
    shared |= {"vocab_size": interface.vocab_size, "pad_token_id": interface.pad_id, "use_cache": False}
    shared |= {"max_position_embeddings": settings.max_length}
    kind = "Bert" if settings.architecture == "encoder" else "Qwen3"
    if kind == "Bert":
        shared |= {"hidden_dropout_prob": settings.dropout, "attention_probs_dropout_prob": settings.dropout}
    else:
        heads, key_value_heads = settings.num_attention_heads, settings.num_key_value_heads
        shared |= {"head_dim": settings.hidden_size // heads, "num_key_value_heads": key_value_heads}
        shared |= {"attention_dropout": settings.dropout, "tie_word_embeddings": interface.head == "causal"}
        shared |= {"bos_token_id": None, "eos_token_id": None}
    loaded_as = LOADERS[interface.head].removeprefix("AutoModel")
    model: Any = getattr(transformers, kind + loaded_as)(getattr(transformers, f"{kind}Config")(**shared))
    model.config.dtype = _DTYPES[settings.dtype]
    return model.to(_DTYPES[settings.dtype])


def _auto_class(head: str) -> Any:
    import transformers

    return getattr(transformers, LOADERS[head])


def _pretrained(settings: Model, interface: ModelInterface, seed: int) -> Any:
    base, causal = str(settings.base), interface.head == "causal"
    # Labels and padding id go in by the configuration: `from_pretrained` would pass unknown keywords to the model.
    config, stored = _configuration(settings, interface), _config(base, settings.revision)
    source, local = _source(base, settings.revision)
    auto, how = _auto_class(interface.head), dict[str, Any](ignore_mismatched_sizes=True, output_loading_info=True)
    how |= {"revision": settings.revision, "local_files_only": local, "dtype": _DTYPES[settings.dtype]}
    with loading(base, "model.base"):
        model, report = auto.from_pretrained(source, config=config, trust_remote_code=False, **how)
    missing = set(map(str, report["missing_keys"]))
    # transformers reports a mismatched tensor as a name, or as a tuple of name and shapes.
    mismatched = {str(key[0] if isinstance(key, tuple | list) else key) for key in report["mismatched_keys"]}
    # Of the backbone, a checkpoint may lack only the pooler, which is initialized at random.
    heads = () if causal else tuple(f"{name}." for name in head_names(model))
    inside = sorted(name for name in missing | mismatched if not name.startswith(heads))
    backbone = [name for name in inside if ".pooler." not in name]
    if backbone:
        shown = ", ".join(backbone[:5]) + (f" and {len(backbone) - 5} more" if len(backbone) > 5 else "")
        kind = "that a causal language model needs" if causal else "of its own backbone"
        raise InputError.at("model.base", f"{base!r} lacks weights {kind}: {shown}")
    _require_finite_model(model, base)
    note = "" if causal else _keep_or_draw_head(model, stored, missing, mismatched, interface, seed)
    named, own_code = getattr(stored, "auto_map", None) or {}, ""
    codes = {str(code) for key, code in named.items() if str(key).startswith(("AutoModel", "AutoConfig"))}
    if codes:
        own_code = (
            f"the base's config.json names custom code ({_shown(sorted(codes))}), which Andon does not run: this "
            f"is the {type(model).__name__} of transformers with the same weights, which may compute something else "
            "(if it does not, remove auto_map from config.json)"
        )
    drawn = tuple(dict.fromkeys(name.rpartition(".")[0] for name in inside))
    model.andon_facts = BaseFacts(drawn, (note,) if note else (), own_code)
    return model


def is_finite(tensor: Tensor) -> bool:
    """Whether `tensor` (any dtype but complex) holds no NaN and no infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    plain = tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()  # float8 has no `aminmax` kernel
    return bool(torch.stack(torch.aminmax(plain)).isfinite().all())


def require_finite(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise `InputError` if any of `tensors`, read from `file`, is not finite; it names the file and the tensors."""
    odd = {name: tensor for name, tensor in sorted(tensors.items()) if not is_finite(tensor)}
    if odd:
        raise InputError(_not_finite(str(file), odd))


def _require_finite_model(model: nn.Module, base: str) -> None:
    """Raise `InputError` unless all parameters of the loaded `model` are finite and its saved buffers hold no NaN.
    Buffers such as attention masks may hold infinities."""
    odd = {
        key: value
        for key, value in model.state_dict(keep_vars=True).items()
        if not is_finite(value) and (isinstance(value, nn.Parameter) or bool(value.isnan().any()))
    }
    if odd:
        raise InputError(_not_finite(base, odd))


def _not_finite(where: str, odd: Mapping[str, Tensor]) -> list[Problem]:
    problems = []
    for name, tensor in [*odd.items()][:_MOST_TENSORS]:
        plain = tensor.detach().float()
        bad = ~plain.isfinite()
        first = tuple(torch.nonzero(bad)[0].tolist())
        what = f"the tensor {name!r} is not finite: {int(bad.sum())} of its {tensor.numel()} values are NaN or infinite"
        place = f"(the first, {plain[first].item()}, is at {list(first)}); get an undamaged copy"
        problems.append(Problem(where, f"{what} {place}"))
    if len(odd) > _MOST_TENSORS:
        problems.append(Problem(where, f"and {len(odd) - _MOST_TENSORS} more tensors that are not finite"))
    return problems


def class_names(config: Any) -> tuple[str, ...]:
    """The class names of a transformers configuration in output order; empty if its ids are not 0 to n - 1."""
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[number]) for number in range(len(names))) if set(names) == set(range(len(names))) else ()


def _has_own_head(stored: Any, auto: Any) -> bool:
    written_by = getattr(stored, "architectures", None)
    classes = auto._model_mapping.get(type(stored), None)
    classes = classes if isinstance(classes, (tuple, list)) else (classes,)
    return not written_by or any(each is not None and each.__name__ in written_by for each in classes)


def _keep_or_draw_head(
    model: Any, stored: Any, missing: Set[str], mismatched: Set[str], interface: ModelInterface, seed: int
) -> str:
    """Keep the checkpoint's head if its labels have the same names, else initialize its output layer anew.

    stored: the checkpoint's configuration. missing, mismatched: tensors that the checkpoint lacks or has in another
    shape, initialized already. Returns a note for the user, empty if the checkpoint has no output layer.
    """
    heads = {f"{name}.{each}" for name in head_names(model) for each, _ in model.get_submodule(name).named_parameters()}
    if heads <= missing:
        return ""
    auto, other, absent = _auto_class(interface.head), copy.deepcopy(model.config), missing | mismatched
    other.num_labels = model.config.num_labels + 1
    with torch.device("meta"):
        configs = (model.config, other)
        ours, theirs = (auto.from_config(each, trust_remote_code=False).state_dict() for each in configs)
    outputs = {name for name, value in ours.items() if theirs[name].shape != value.shape}
    if outputs <= missing:
        return ""
    own, is_own, regression = class_names(stored), _has_own_head(stored, auto), interface.head == "regression"
    if regression and len(own) == 1:
        same = getattr(stored, "problem_type", None) in (None, "regression")
    else:  # ignore case, unless two of the base's names differ only in case
        folded = [name.casefold() for name in own]
        same = len(set(folded)) == len(folded) and folded == [name.casefold() for name in interface.labels]
        same = same or own == tuple(interface.labels)
    if is_own and same and not outputs & absent:
        if regression:
            return "head: the base's own is kept; it gives one number too"
        names = _shown(interface.labels)
        return f"head: the base's own is kept, since it names the same classes; numbered as there: {names}"
    if not outputs <= absent:  # initialize them as transformers does missing weights
        torch.default_generator.manual_seed(seed)
        for name in outputs:
            model.get_parameter(name)._is_hf_initialized = False
        for parent in dict.fromkeys(name.rpartition(".")[0] for name in sorted(outputs)):
            model._init_weights(model.get_submodule(parent))
    if not is_own:
        why = f"is that of {', '.join(stored.architectures)}"
    elif own == tuple(f"LABEL_{number}" for number in range(len(own))):
        why = f"has {len(own)} output{'s' * (len(own) != 1)} without names"
    else:
        why = f"names other classes ({_shown(own)})"
    return f"head: drawn anew, since the base's own {why}"


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(legible_line, names[:_MOST_NAMES])) + more


def labels_in_own_order(base: str, head: str, labels: Sequence[str], revision: str | None = None) -> tuple[str, ...]:
    """`labels` in the output order of the model at `base` if its classes have the same names, ignoring case; else
    unchanged. Raises `InputError` for a base whose configuration cannot be loaded."""
    stored = _config(base, revision)
    own = [name.casefold() for name in class_names(stored)]
    named = {name.casefold(): name for name in labels}
    same = len(named) == len(labels) == len(own) and set(own) == set(named)
    return tuple(named[name] for name in own) if same and _has_own_head(stored, _auto_class(head)) else tuple(labels)


def _config(base: str, revision: str | None, **values: Any) -> Any:
    from transformers import AutoConfig

    source, local = _source(base, revision)
    values |= {"revision": revision, "local_files_only": local}
    with loading(base, "model.base"):
        return AutoConfig.from_pretrained(source, trust_remote_code=False, **values)


def _configuration(settings: Model, interface: ModelInterface) -> Any:
    base, values = str(settings.base), {"pad_token_id": interface.pad_id, "use_cache": False, **_label_names(interface)}
    config, problems = _config(base, settings.revision, **values), ProblemList()
    for fault in setting_faults(config.to_dict()):  # `loading` has checked a folder's already
        problems.add("model.base", f"{base!r} {fault}")
    problems.raise_if_any()
    if config.get_text_config() is not config:
        what = f"is several models in one ({', '.join(config.sub_configs)}); give one of text alone"
        raise InputError.at("model.base", f"{base!r} {what}")
    if interface.head == "causal":
        require_decoder(base, config=config)
    elif config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        what = f"{base!r} has a decoder ({config.model_type}), and its config.json does not say which token that "
        what += "begins with; add decoder_start_token_id (of T5 it is the padding id, 0)"
        raise InputError.at("model.base", what)
    return config


def require_decoder(base: str, revision: str | None = None, config: Any = None) -> None:
    """Raise `InputError` for a base that is an encoder, for which transformers would only warn. config: the base's;
    None: load it. For architectures that can be both, its `is_decoder` decides."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = config or _config(base, revision)
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.is_encoder_decoder or (masked and not getattr(config, "is_decoder", False)):
        what = f"{base!r} is an encoder ({config.model_type}), which cannot write the next token; give a decoder"
        raise InputError.at("model.base", what)


def _source(base: str, revision: str | None) -> tuple[str, bool]:
    folder, where = Path(base).expanduser(), "model.base"
    if is_folder(folder):
        if revision is not None:
            where = "model.revision"
            what = f"is of a base on the hub, and {base!r} is a folder; leave it out ({revision!r})"
        elif (folder / "adapter_config.json").is_file():  # also next to a model: transformers would load both
            what = f"{base!r} holds an adapter: give its base model, or merge it (andon export RUN DIR --merge)"
        elif not (folder / "config.json").is_file():
            what = f"{base!r} has no config.json, so it is not a model"
        else:
            return str(folder), True
    elif folder.exists():
        what = f"{base!r} is a file; give the model's folder"
    elif base.startswith((".", "/", "~")) or base.count("/") > 1:
        what = f"folder {base!r} does not exist"
    else:
        return base, False
    raise InputError.at(where, what)


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the head's modules: the model's children with parameters except its backbone, such as `score`."""
    backbone, children = getattr(model, "base_model_prefix", None), model.named_children()
    return tuple(name for name, child in children if name != backbone and any(True for _ in child.parameters()))


def vocabulary_head(model: nn.Module) -> nn.Module | None:
    """The layer that computes a causal language model's next-token logits; None for any other model."""
    head: nn.Module | None = getattr(without_adapter(model), "get_output_embeddings", lambda: None)()
    return head


def facts_of_shape(settings: Model, interface: ModelInterface) -> tuple[int | None, int, str]:
    """From a base's configuration: its number of positions (None: no limit), its number of weights, and 'bfloat16' if
    it was saved in that, else 'float32'. Raises `InputError` for a base that cannot be loaded."""
    model: Any = build_base(settings.model_copy(update={"max_length": 1}), interface, 0, weights=False)
    weights = sum(parameter.numel() for parameter in model.parameters())
    return positions_of(model), weights, "bfloat16" if _saved_dtype(settings) == "bfloat16" else "float32"


def _saved_dtype(settings: Model) -> str:
    saved = getattr(_config(str(settings.base), settings.revision), "dtype", None)
    return str(saved or "float32").removeprefix("torch.")


def maps_files(settings: Model, model: nn.Module) -> bool:
    """Whether loading maps the base's files, so that the ranks of a host share its memory. Weights that loading draws,
    converts to another dtype or merges (experts) are in each rank's own memory. model: built from `settings`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    built: Any = without_adapter(model)
    merges = any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(built))
    return settings.base is not None and settings.dtype == _saved_dtype(settings) and not merges


def positions_of(model: Any) -> int | None:
    """The most tokens of a row by the model's configuration and its position embeddings; None: no limit. RoBERTa's
    position embeddings have a padding row, and positions start after it."""
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions < 1:  # -1 means no limit in XLNet
        return None
    token_table = model.get_input_embeddings()
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not token_table]
    sizes = [(each.num_embeddings, each.padding_idx) for each in tables]
    return min([positions, *(rows - pad - 1 for rows, pad in sizes if pad is not None and rows >= positions)])


def _accepts_length(model: Any, length: int, interface: ModelInterface, positions: int) -> bool:
    """Whether `model` supports `length` tokens, more than its configuration's `positions`.

    A model with relative positions only (DeBERTa) does. Others fail, or index a position table out of range. A model
    with rotary positions computes any length, but was not trained on it, so it counts as unsupported.
    """
    used_tables: list[int] = []

    def note(table: Any, _: object) -> None:
        if table is not model.get_input_embeddings() and table.num_embeddings >= positions:
            used_tables.append(table.num_embeddings)

    if any("inv_freq" in name for name, _ in model.named_buffers()):
        return False
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooks = [module.register_forward_pre_hook(note) for module in embeddings]
    ids = torch.full((1, length), (interface.pad_id + 1) % interface.vocab_size, device=model.device)
    with evaluating(model, torch.device("cpu")):
        output = try_pass(partial(model, input_ids=ids, attention_mask=torch.ones_like(ids)))
    for hook in hooks:
        hook.remove()
    return not isinstance(output, Exception) and not used_tables


def without_adapter(model: nn.Module) -> nn.Module:
    """The transformers model inside peft's wrapper; its layers keep their adapters."""
    base: nn.Module = getattr(model, "get_base_model", lambda: model)()
    return base


def backbone_of(model: nn.Module) -> nn.Module:
    """The backbone: the model without peft's wrapper and the head; its layers keep their adapters."""
    base: Any = without_adapter(model)
    backbone: nn.Module = getattr(base, base.base_model_prefix)
    return backbone


def facts_of(model: nn.Module) -> BaseFacts:
    """`BaseFacts` of `model`, with or without an adapter; empty if no checkpoint was loaded."""
    facts: BaseFacts = getattr(without_adapter(model), "andon_facts", BaseFacts())
    return facts


def half_of(model: nn.Module) -> torch.dtype | None:
    """The half precision of the model's weights and matrix products; None: fp32."""
    stored = getattr(getattr(model, "config", None), "dtype", None)
    return stored if stored in (torch.bfloat16, torch.float16) else None


def computing(model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """Context manager: autocast on `device` to the half precision of the model's weights, if they have one."""
    half = half_of(model)
    return nullcontext() if half is None else torch.autocast(device.type, dtype=half)


def try_pass(call: Callable[[], T]) -> T | Exception:
    """The result of `call`, a model's forward pass, or the exception by which the model rejects its input.

    Errors of the device, such as out of memory, are raised: on another rank the same call might succeed.
    """
    try:
        return call()
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError) or "CUDA error" in str(error):
            raise
        return error


@contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager: evaluation mode without gradients, under `computing`. Restores the modules' modes on exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), computing(model, device):
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def using_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Context manager: `model` uses the attention that is registered in transformers as `name`."""
    config: Any = without_adapter(model).config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def checkpoint_layers(model: nn.Module, again: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Enable activation checkpointing: each layer keeps only its input and recomputes the rest in the backward pass.

    The recomputation uses the first pass's random numbers and attention. again: makes a context for it. Only training
    passes change. Raises `InputError` for a model whose layers do not support this.
    """
    able = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if not able:
        what = f"{type(model).__name__} has no layers that can compute their activations again"
        raise InputError.at("training.activation_checkpointing", what)
    config: Any = without_adapter(model).config

    @contextmanager
    def as_before(attention: str, context: AbstractContextManager[object]) -> Iterator[None]:
        with using_attention(model, attention), context:
            yield

    def both_passes() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        return nullcontext(), as_before(config._attn_implementation, again())

    def computed_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # the compiler traces both passes itself
            kwargs["context_fn"] = both_passes
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    # `gradient_checkpointing_enable` would make the embeddings' output require gradients.
    for module in able:
        module._gradient_checkpointing_func = computed_again  # type: ignore[assignment]
        module.gradient_checkpointing = True  # type: ignore[assignment]
