"""What is trained and how: the seed's two configurations, checked as a whole when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from andon.model.adapter import AdapterSpec
from andon.model.build import ModelSpec
from andon.problems import ProblemList

_TARGETS = {"decoder": ("q_proj", "v_proj"), "encoder": ("query", "value")}


@dataclass(frozen=True)
class ClassifyConfig:
    """How a classifier is trained: the twelve settings of the seed with its defaults (seed 2c).

    learning_rate: constant here; a schedule belongs to the trainer, as do epochs, batch_size and log_interval.
    accumulation_steps: every micro-batch is computed in so many parts, still for one update (V32).
    gradient_clip_norm: L2 limit of the reduced gradient, None: no clipping. class_weights: one for each class, or None.
    max_seq_len: longer texts are cut at the end. quantize_nf4: only False; four-bit bases are not supported (V34).

    Raises `InputError` with all that is wrong, before anything is built (V16).
    """

    num_classes: int = 5
    lora_rank: int = 16
    lora_alpha: float = 16.0
    learning_rate: float = 1e-4
    epochs: int = 3
    max_seq_len: int = 512
    log_interval: int = 100
    batch_size: int = 32
    accumulation_steps: int = 1
    gradient_clip_norm: float | None = 1.0
    class_weights: Sequence[float] | None = None
    quantize_nf4: bool = False

    def __post_init__(self) -> None:
        found = ProblemList()
        _check(found, self, "num_classes", _is_class_count, "an integer of at least 2 (F-CLASS-004)")
        for name in ("lora_rank", "epochs", "max_seq_len", "log_interval", "batch_size", "accumulation_steps"):
            _check(found, self, name, _is_count, "an integer of at least 1")
        for name in ("lora_alpha", "learning_rate"):
            _check(found, self, name, _is_positive, "a finite number above 0")
        if self.gradient_clip_norm is not None:
            _check(found, self, "gradient_clip_norm", _is_positive, "a finite number above 0, or None")
        if self.quantize_nf4:
            found.add("quantize_nf4", "True, but four-bit bases are not supported; must be False")
        self._check_class_weights(found)
        found.raise_if_any()

    def _check_class_weights(self, found: ProblemList) -> None:
        weights = self.class_weights
        if weights is None:
            return
        if len(weights) != self.num_classes:
            found.add("class_weights", f"{len(weights)} weights for {self.num_classes} classes")
        for label, weight in enumerate(weights):
            if not _is_positive(weight):
                found.add(f"class_weights[{label}]", f"{weight!r} must be a finite number above 0")


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of a base model with random weights: the fields of the seed (S7), and dropout, which it lacks.

    vocab_size: ids that a text may use; the model gets one more, which is padding and nothing else.
    architecture: 'decoder' (Qwen3: causal, rotary positions, RMSNorm, SwiGLU, the last token is classified) or
    'encoder' (BERT: learned positions, LayerNorm, GELU, the first token is classified).
    dropout: of the attention (encoder: and hidden layers) and in the adapter.

    `to_model_spec` refuses what the embedded models cannot be. Presets such as `qwen3_4b` then still serve for their
    sizes; their real weights are trained with `andon train --model`.
    """

    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    use_bias: bool = False
    head_dim_override: int | None = None
    architecture: str = "decoder"
    hf_architecture: str | None = None
    hf_model_type: str | None = None
    tie_word_embeddings: bool = False
    dropout: float = 0.0

    @classmethod
    def tiny(cls) -> TransformerConfig:
        """The seed's preset for tests: 2 layers of 64 (2 heads), 1,000 ids."""
        return cls(64, 2, 2, 256, 2, 1000, 512)

    @classmethod
    def qwen2_0_5b(cls) -> TransformerConfig:
        """The shape of Qwen2-0.5B."""
        return cls(
            896, 14, 2, 4864, 24, 151936, 32768, rope_theta=1e6, use_bias=True, hf_architecture="Qwen2ForCausalLM",
            hf_model_type="qwen2", tie_word_embeddings=True,
        )  # fmt: skip

    @classmethod
    def qwen3_4b(cls) -> TransformerConfig:
        """The shape of Qwen3-4B; its heads are wider (128) than hidden size over heads (80)."""
        return cls(
            2560, 32, 8, 9728, 36, 151936, 40960, rope_theta=1e6, head_dim_override=128,
            hf_architecture="Qwen3ForCausalLM", hf_model_type="qwen3", tie_word_embeddings=True,
        )  # fmt: skip

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_dim_override or self.hidden_size // self.num_attention_heads

    @property
    def q_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key (or value) heads together; an encoder has no grouped heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_encoder(self) -> bool:
        """Whether every token sees every other one."""
        return self.architecture == "encoder"

    def lora_parameters(self, rank: int) -> int:
        """Trainable elements of LoRA on query and value projections: layers * rank * (2 hidden + q + kv)."""
        return self.num_hidden_layers * rank * (2 * self.hidden_size + self.q_dim + self.kv_dim)

    def to_model_spec(self, classify: ClassifyConfig, seed: int) -> ModelSpec:
        """The embedded model of this shape. Raises `InputError` for each field that it cannot have."""
        self._refuse_what_is_not_embedded()
        return ModelSpec(
            num_labels=classify.num_classes,
            labels=tuple(map(str, range(classify.num_classes))),
            vocab_size=self.vocab_size + 1,
            pad_id=self.vocab_size,
            architecture=self.architecture,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_kv_heads,
            intermediate_size=self.intermediate_size,
            dropout=self.dropout,
            max_length=self.max_position_embeddings,
            seed=seed,
        )

    def _refuse_what_is_not_embedded(self) -> None:
        found = ProblemList()
        _check(found, self, "vocab_size", _is_count, "an integer of at least 1")
        remedy = "; real weights are trained with `andon train --model`"
        fixed = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "use_bias": False}
        for name, value in {} if self.is_encoder else fixed.items():
            if getattr(self, name) != value:
                found.add(name, f"{getattr(self, name)!r}, but the embedded decoder has {value!r}{remedy}")
        narrow = self.hidden_size // max(self.num_attention_heads, 1)
        if self.head_dim_override not in (None, narrow):
            found.add(
                "head_dim_override", f"{self.head_dim_override} is not to be had: the model {remedy} has {narrow}"
            )
        if self.is_encoder and self.num_kv_heads != self.num_attention_heads:
            found.add("num_kv_heads", f"{self.num_kv_heads} must be {self.num_attention_heads} in an encoder")
        found.raise_if_any()

    def to_adapter_spec(self, classify: ClassifyConfig) -> AdapterSpec:
        """LoRA on the query and value projections of every layer (seed S10)."""
        return AdapterSpec(
            r=classify.lora_rank,
            alpha=classify.lora_alpha,
            dropout=self.dropout,
            targets=_TARGETS.get(self.architecture, _TARGETS["decoder"]),
        )


def _check(found: ProblemList, config: object, name: str, test: Callable[[object], bool], wanted: str) -> None:
    value = getattr(config, name)
    if not test(value):
        found.add(name, f"{value!r} must be {wanted}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_class_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 2


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
