"""A sequence classifier or a causal language model from transformers: the embedded small one, a folder's or the hub's.

The same settings give the same bits in every process: what a checkpoint lacks (all of it for the embedded models, the
classification head for others) is drawn from the run's seed, and the process-global generator is left alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from andon.config.schema import Model
from andon.config.source import is_folder, loading, setting_faults
from andon.console.problems import InputError, Problem, ProblemList
from andon.model.base_head import (
    BaseFacts,
    draw_again,
    has_own_head,
    head_note,
    in_order_of,
    keeps_head,
    output_tensors,
    own_code_note,
)
from andon.model.finite import require_finite_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_HALVES = (torch.bfloat16, torch.float16)
LOADERS = {
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "multi-label": "AutoModelForSequenceClassification",
    "tokens": "AutoModelForTokenClassification",
    "causal": "AutoModelForCausalLM",
}
"""Who in transformers reads a folder's or the hub's model, by the head that it is to have."""
_EMBEDDED = {
    ("decoder", "AutoModelForSequenceClassification"): "Qwen3ForSequenceClassification",
    ("decoder", "AutoModelForTokenClassification"): "Qwen3ForTokenClassification",
    ("decoder", "AutoModelForCausalLM"): "Qwen3ForCausalLM",
    ("encoder", "AutoModelForSequenceClassification"): "BertForSequenceClassification",
    ("encoder", "AutoModelForTokenClassification"): "BertForTokenClassification",
}
"""The embedded models, by architecture and who would read them."""
_PROBLEMS = {"regression": "regression", "multi-label": "multi_label_classification"}
"""What transformers calls the problem, for whoever uses the model there: its pipelines make probabilities of others."""
_SEEDING = threading.Lock()


@dataclass(frozen=True)
class ModelInterface:
    """What the rows and the tokenizer require of a model.

    head: a key of `LOADERS`. labels: the class names in the order of their ids; empty for 'causal'. vocab_size: ids
    that the tokenizer may give, without `new_tokens`. pad_id: the padding id; a decoder pools the last token that is
    not this one. new_tokens: ids that a causal language model learns, in order and without a gap after the others.
    """

    head: str
    labels: tuple[str, ...]
    vocab_size: int
    pad_id: int
    new_tokens: tuple[int, ...] = ()


def build_base(settings: Model, interface: ModelInterface, seed: int) -> nn.Module:
    """The model on the CPU, in training mode, with no adapter and no new tokens; identical on every call.

    seed: of every weight that is not loaded. A folder is read without the network and without running code from it.
    Raises `InputError` for a folder or hub id that cannot be loaded or lacks weights of its backbone (of a causal model
    its head is no less), weights that are NaN or infinite, a tokenizer whose ids exceed the vocabulary, rows longer
    than the model has positions, and an encoder that is to write.
    """
    _check(settings, interface)
    _check_memory(settings, interface)
    with seeded(seed), torch.device("cpu"):
        embedded = settings.base is None
        model: nn.Module = _embedded(settings, interface) if embedded else _pretrained(settings, interface, seed)
    _check_fit(model, settings, interface)
    return _ready(model)


def build_shape(settings: Model, interface: ModelInterface, seed: int) -> nn.Module:
    """As `build_base`, without weights: on the meta device, nothing is allocated or read.

    A folder needs its config.json only. Raises `InputError` as `build_base` does, but for weights that are absent.
    """
    _check(settings, interface)
    with seeded(seed), torch.device("meta"):
        model: nn.Module = (_embedded if settings.base is None else _configured)(settings, interface)
    _check_fit(model, settings, interface)
    return _ready(model)


def _ready(model: nn.Module) -> nn.Module:
    """In training mode. What a causal model reads is known by rows, so the padding's id is an id like any other:
    `padding_idx` would drop the gradient of its embedding, and with it that of a stop token of the same id."""
    if vocabulary_head(model) is not None:
        built: Any = model
        built.get_input_embeddings().padding_idx = None
    return model.train()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the CPU generator starts from `seed`; afterwards it is as it was. One thread at a time.

    Only the CPU generator is touched: `torch.manual_seed` would seed every GPU's too.
    """
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _check(settings: Model, interface: ModelInterface) -> None:
    found, (pad, size) = ProblemList(), (interface.pad_id, interface.vocab_size)
    if interface.head == "classification" and len(interface.labels) < 2:
        found.add("num_labels", f"{len(interface.labels)} classes; a classifier needs at least 2")
    if not 0 <= pad < size:
        found.add("pad_id", f"padding id {pad} is outside of the {size} ids of the vocabulary")
    if settings.base is None and interface.head == "causal" and settings.architecture == "encoder":
        found.add("model.architecture", "'encoder' reads both ways and cannot write the next token; give 'decoder'")
    found.raise_if_any()


def _check_memory(settings: Model, interface: ModelInterface) -> None:
    """An embedded model is drawn in fp32 in this machine's memory, whatever sizes somebody wrote down."""
    products = 4 * settings.hidden_size**2 + 3 * settings.hidden_size * settings.intermediate_size
    embeddings = (interface.vocab_size + settings.max_length) * settings.hidden_size
    needed = 4 * (settings.num_hidden_layers * products + embeddings)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.base is None and needed > there:
        what = f"its sizes ask for {needed / 2**30:.1f} GiB of weights; this machine has {there / 2**30:.1f}"
        raise InputError([Problem("model", what)])


def _label_names(interface: ModelInterface) -> dict[str, Any]:
    if interface.head == "causal":
        return {}
    return {
        "problem_type": _PROBLEMS.get(interface.head),  # of a base that was trained on another problem too
        "num_labels": len(interface.labels),
        "id2label": dict(enumerate(interface.labels)),
        "label2id": {name: index for index, name in enumerate(interface.labels)},
    }


def _embedded(settings: Model, interface: ModelInterface) -> Any:
    import transformers

    shared: dict[str, Any] = {
        "vocab_size": interface.vocab_size,
        "hidden_size": settings.hidden_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "intermediate_size": settings.intermediate_size,
        "max_position_embeddings": settings.max_length,
        "pad_token_id": interface.pad_id,
        "use_cache": False,
        **_label_names(interface),
    }
    if settings.architecture == "encoder":
        config: Any = transformers.BertConfig(
            **shared, hidden_dropout_prob=settings.dropout, attention_probs_dropout_prob=settings.dropout
        )
    else:
        config = transformers.Qwen3Config(
            **shared,
            head_dim=settings.hidden_size // settings.num_attention_heads,
            num_key_value_heads=settings.num_key_value_heads,
            attention_dropout=settings.dropout,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=interface.head == "causal",
        )
    model: Any = getattr(transformers, _EMBEDDED[settings.architecture, LOADERS[interface.head]])(config)
    model.config.dtype = _DTYPES[settings.dtype]
    return model.to(_DTYPES[settings.dtype])


def _auto_class(head: str) -> Any:
    import transformers

    return getattr(transformers, LOADERS[head])


def _pretrained(settings: Model, interface: ModelInterface, seed: int) -> Any:
    auto, (source, local) = _auto_class(interface.head), _source(str(settings.base), settings.revision)
    # Its values are not given to the model, which refuses those that it lacks.
    config = _configuration(settings, interface, source, local)
    stored = _stored_config(str(settings.base), settings.revision)
    with loading(str(settings.base), "model.base"):
        model, report = auto.from_pretrained(
            source,
            config=config,
            dtype=_DTYPES[settings.dtype],
            revision=settings.revision,
            local_files_only=local,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    missing, mismatched = set(map(str, report["missing_keys"])), set(map(_key, report["mismatched_keys"]))
    drawn = _drawn_modules(model, missing | mismatched, str(settings.base), interface.head)
    require_finite_model(model, _folder_of(source, settings.revision, local=local), str(settings.base))
    note = "" if interface.head == "causal" else _settle_head(model, stored, missing, mismatched, interface, seed)
    model.andon_facts = BaseFacts(drawn, (note,) if note else (), own_code_note(stored, model))
    return model


def _folder_of(source: str, revision: str | None, *, local: bool) -> Path | None:
    """Where the files of `source` are on this disk; None: a hub id that the cache does not have."""
    from huggingface_hub import try_to_load_from_cache

    found = source if local else try_to_load_from_cache(source, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    return Path(found) if local else Path(found).parent


def _key(mismatched: Any) -> str:
    """The name of a tensor of another shape, which transformers reports with or without both shapes."""
    return str(mismatched[0] if isinstance(mismatched, (tuple, list)) else mismatched)


def _settle_head(
    model: Any, stored: Any, missing: Set[str], mismatched: Set[str], interface: ModelInterface, seed: int
) -> str:
    """Draw the output layer anew if the checkpoint has one for other classes, and return the line that says so.

    stored: the checkpoint's configuration as it lies there. missing, mismatched: tensors that the checkpoint lacks or
    has in another shape, which are drawn already. The line is empty for a checkpoint without an output layer.
    """
    heads = {f"{name}.{each}" for name in head_names(model) for each, _ in model.get_submodule(name).named_parameters()}
    if heads <= missing:
        return ""
    auto = _auto_class(interface.head)
    outputs = output_tensors(auto, model.config)
    if outputs <= missing:
        return ""
    absent = missing | mismatched
    kept = not outputs & absent and keeps_head(stored, auto, interface.head, interface.labels)
    if not kept and not outputs <= absent:
        draw_again(model, outputs, seed)
    return head_note(stored, auto, interface.head, interface.labels, kept=kept)


def labels_in_own_order(base: str, head: str, labels: Sequence[str], revision: str | None = None) -> tuple[str, ...]:
    """`labels` in the order of the outputs of the model at `base`, if that names the same classes; else as they are.

    head: a key of `LOADERS`. Raises `InputError` for a base whose configuration cannot be loaded.
    """
    stored, auto = _stored_config(base, revision), _auto_class(head)
    return in_order_of(stored, labels) if has_own_head(stored, auto) else tuple(labels)


def _stored_config(base: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    source, local = _source(base, revision)
    with loading(base, "model.base"):
        return AutoConfig.from_pretrained(source, revision=revision, local_files_only=local, trust_remote_code=False)


def _configured(settings: Model, interface: ModelInterface) -> Any:
    """The model that a folder's or the hub's configuration describes, with a head as `interface` requires it."""
    config = _configuration(settings, interface, *_source(str(settings.base), settings.revision))
    with loading(str(settings.base), "model.base"):
        return _auto_class(interface.head).from_config(config, dtype=_DTYPES[settings.dtype], trust_remote_code=False)


def _configuration(settings: Model, interface: ModelInterface, source: str, local: bool) -> Any:
    """The configuration at `source`, with a head as `interface` requires it. Refuses one of several models."""
    from transformers import AutoConfig

    base, values = str(settings.base), {"pad_token_id": interface.pad_id, "use_cache": False, **_label_names(interface)}
    with loading(base, "model.base"):
        config = AutoConfig.from_pretrained(
            source, revision=settings.revision, local_files_only=local, trust_remote_code=False, **values
        )
    faults = [Problem("model.base", f"{base!r} {fault}") for fault in setting_faults(config.to_dict())]
    if faults:  # of a folder they are found before; what the hub has is seen here first
        raise InputError(faults)
    if config.get_text_config() is not config:
        what = f"{base!r} is several models in one ({', '.join(config.sub_configs)}); give one of text alone"
        raise InputError([Problem("model.base", what)])
    if interface.head == "causal":
        _refuse_encoder(config, base)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        what = f"{base!r} has a decoder ({config.model_type}), and its config.json does not say which token that "
        what += "begins with; add decoder_start_token_id (of T5 it is the padding id, 0)"
        raise InputError([Problem("model.base", what)])
    return config


def require_decoder(base: str, revision: str | None = None) -> None:
    """Raise `InputError` for a base that cannot write the next token, by its configuration alone."""
    _refuse_encoder(_stored_config(base, revision), base)


def _refuse_encoder(config: Any, base: str) -> None:
    if _is_encoder(config):
        what = f"{base!r} is an encoder ({config.model_type}), which cannot write the next token; give a decoder"
        raise InputError([Problem("model.base", what)])


def _is_encoder(config: Any) -> bool:
    """Transformers would have one write, and warn. Those that can be both are what `is_decoder` says."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return bool(config.is_encoder_decoder or (masked and not getattr(config, "is_decoder", False)))


def _source(base: str, revision: str | None) -> tuple[str, bool]:
    """Where to load from, and whether that is a folder. revision: of a hub id; a folder has none."""
    folder = Path(base).expanduser()
    if is_folder(folder):
        if revision is not None:
            what = f"is of a base on the hub, and {base!r} is a folder; leave it out ({revision!r})"
            raise InputError([Problem("model.revision", what)])
        if (folder / "adapter_config.json").is_file():  # also beside a model: transformers would load both
            what = f"{base!r} holds an adapter: give its base model, or merge it (andon export RUN DIR --merge)"
            raise InputError([Problem("model.base", what)])
        if not (folder / "config.json").is_file():
            raise InputError([Problem("model.base", f"{base!r} has no config.json, so it is no model")])
        return str(folder), True
    if folder.exists():
        raise InputError([Problem("model.base", f"{base!r} is a file; give the model's folder")])
    if base.startswith((".", "/", "~")) or base.count("/") > 1:
        raise InputError([Problem("model.base", f"there is no folder {base!r}")])
    return base, False


def _drawn_modules(model: Any, absent: Set[str], base: str, head: str) -> tuple[str, ...]:
    """The modules of the backbone that were drawn at random because the checkpoint lacks them: a pooler alone.

    absent: the tensors that it lacks. Transformers fills them with noise and goes on, which is right for a new head,
    and for the pooler that belongs to it. Raises `InputError` for any other part of the backbone.
    """
    heads = () if head == "causal" else tuple(f"{name}." for name in head_names(model))
    inside = sorted(name for name in absent if not name.startswith(heads))
    backbone = [name for name in inside if ".pooler." not in name]
    if backbone:
        shown = ", ".join(backbone[:5]) + (f" and {len(backbone) - 5} more" if len(backbone) > 5 else "")
        whose = "that a causal language model needs" if head == "causal" else "of its own backbone"
        raise InputError([Problem("model.base", f"{base!r} lacks weights {whose}: {shown}")])
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in inside))


def head_names(model: nn.Module) -> tuple[str, ...]:
    """The head: the model's children with parameters, other than its backbone.

    `score` for decoders, `classifier` for BERT, `pre_classifier` and `classifier` for DistilBERT, `lm_head` for causal
    language models.
    """
    backbone = getattr(model, "base_model_prefix", None)
    return tuple(
        name
        for name, child in model.named_children()
        if name != backbone and next(child.parameters(), None) is not None
    )


def vocabulary_head(model: nn.Module) -> nn.Module | None:
    """The layer that gives a causal language model's logits of the next token; None: the model is none."""
    base: Any = without_adapter(model)
    found: nn.Module | None = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return found


def facts_of_shape(settings: Model, interface: ModelInterface) -> tuple[int | None, int, str]:
    """Of a base, from its configuration: most tokens of a row (None: no limit), weights, and the dtype that
    it was saved in, float32 or bfloat16. Raises `InputError` for a base that cannot be loaded."""
    model: Any = build_shape(settings.model_copy(update={"max_length": 1}), interface, 0)
    saved = str(getattr(_stored_config(str(settings.base), settings.revision), "dtype", None)).removeprefix("torch.")
    weights = sum(parameter.numel() for parameter in model.parameters())
    return positions_of(model), weights, "bfloat16" if saved == "bfloat16" else "float32"


def _check_fit(model: Any, settings: Model, interface: ModelInterface) -> None:
    found, vocabulary = ProblemList(), model.config.vocab_size
    if interface.vocab_size > vocabulary:
        found.add("model.base", f"the tokenizer has {interface.vocab_size} ids, the model's vocabulary {vocabulary}")
    positions, length = positions_of(model), settings.max_length
    if positions is not None and length > positions and not _takes(model, length, interface, positions):
        found.add(
            "model.max_length",
            f"{length} tokens are more than the model's {positions} positions; "
            f"--set model.max_length={positions} is the most",
        )
    found.raise_if_any()


def positions_of(model: Any) -> int | None:
    """How many tokens of a row have a position, as the model's configuration and its tables say; None: no limit.

    A table of positions with a row for padding, as RoBERTa has it, counts from behind that row.
    """
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions < 1:  # as XLNet says that there is no limit
        return None
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    behind = [
        table.num_embeddings - table.padding_idx - 1
        for table in tables
        if table is not model.get_input_embeddings()
        and table.padding_idx is not None
        and table.num_embeddings >= positions
    ]
    return min([positions, *behind])


def _takes(model: Any, length: int, interface: ModelInterface, positions: int) -> bool:
    """Whether `model` can be given `length` tokens, which are more than its configuration's `positions`.

    A model that only looks at distances (DeBERTa) can; others fail, or would look beyond a table. One that rotates by
    position computes something for any length, but was not trained on such.
    """
    beyond: list[int] = []

    def note(table: nn.Module, given: tuple[Any, ...]) -> None:
        rows = int(getattr(table, "num_embeddings", 0))
        beyond.extend([rows] if table is not model.get_input_embeddings() and rows >= positions else [])

    if any("inv_freq" in name for name, _ in model.named_buffers()):
        return False
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooks = [module.register_forward_pre_hook(note) for module in embeddings]
    ids = torch.full((1, length), (interface.pad_id + 1) % interface.vocab_size, device=model.device)
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids))
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError):
        return False
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return not beyond


def backbone_of(model: nn.Module) -> nn.Module:
    """The model without its adapter's wrapper and without its head."""
    base: Any = without_adapter(model)
    found: nn.Module = getattr(base, base.base_model_prefix)
    return found


def facts_of(model: nn.Module) -> BaseFacts:
    """What is known of the base of `model`, with or without an adapter; nothing of one that no checkpoint gave."""
    found: BaseFacts = getattr(without_adapter(model), "andon_facts", BaseFacts())
    return found


def without_adapter(model: nn.Module) -> nn.Module:
    """The model of transformers, whose layers are adapted if they were: peft's wrapper is taken off."""
    adapted: Any = model
    found: nn.Module = adapted.get_base_model() if hasattr(adapted, "get_base_model") else model
    return found


def half_of(model: nn.Module) -> torch.dtype | None:
    """The half precision of its matrix products, in which its weights are stored; None: they have its own."""
    config: Any = getattr(model, "config", None)
    stored = getattr(config, "dtype", None)
    return stored if stored in _HALVES else None


def computing(model: nn.Module, device: torch.device) -> AbstractContextManager[object]:
    """Inside, products of `model` on `device` are made in the half precision that its weights are stored in."""
    half = half_of(model)
    return nullcontext() if half is None else torch.autocast(device.type, dtype=half)


@contextmanager
def attending_as(model: nn.Module, name: str) -> Iterator[None]:
    """Inside, `model` attends by what transformers knows under `name`."""
    config: Any = without_adapter(model).config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def checkpoint_layers(model: nn.Module, again: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
    """Have every layer of `model` keep its input alone and compute the rest again in the backward pass.

    The second pass draws what the first drew, and attends as it did, whichever attention the model has by then. again:
    makes the context of the second pass. Only training passes are changed. Raises `InputError` for a model whose
    layers cannot do this.
    """
    able = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if not able:
        what = f"{type(model).__name__} has no layers that can compute their activations again"
        raise InputError([Problem("training.activation_checkpointing", what)])
    config: Any = without_adapter(model).config

    @contextmanager
    def as_before(attention: str, context: AbstractContextManager[object]) -> Iterator[None]:
        with attending_as(model, attention), context:
            yield

    def both_passes() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        return nullcontext(), as_before(config._attn_implementation, again())

    def computed_again(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # then both passes are traced here and now
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        return checkpoint(function, *args, use_reentrant=False, context_fn=both_passes, **kwargs)

    # Not `gradient_checkpointing_enable`: it has the embeddings ask for gradients that nobody needs here.
    for module in able:
        module._gradient_checkpointing_func = computed_again  # type: ignore[assignment]
        module.gradient_checkpointing = True  # type: ignore[assignment]
