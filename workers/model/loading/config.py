"""A model apart from its weights: sizes, rotary embedding, special token ids.

Imports neither torch nor numpy, so that the frontend can ask for a model's limits cheaply. Everything that
the compute engine cannot run is refused here, by name of the field, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfmoon.workers.model.loading.errors import ModelBroken, ModelError, ModelNotFound, ModelUnsupported
from halfmoon.workers.model.loading.fields import Fields

__all__ = [
    "ModelConfig",
    "ModelError",
    "ModelNotFound",
    "ModelUnsupported",
    "RopeScaling",
    "from_gguf",
    "from_huggingface",
]

# Bounds of a file's numbers: each far above any model's, and small enough that no product of two overflows.
LAYERS_MAX = 4096
HIDDEN_MAX = 1 << 20
HEADS_MAX = 1 << 14
HEAD_DIM_MAX = 1 << 12
INTERMEDIATE_MAX = 1 << 24
VOCAB_MAX = 1 << 22
CONTEXT_TOKENS_MAX = 1 << 26

MISTRAL_WINDOW_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`; `llama3` only the low ones, smoothly; `factors` divides
    frequency i by `factors[i]` (how GGUF files spell llama3: precomputed).
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes are counts of elements; a KV head serves `heads // kv_heads` query heads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_base: float
    rope_scaling: RopeScaling | None
    rms_eps: float
    context_tokens_max: int
    tied: bool
    attention_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelUnsupported("num_key_value_heads", self.kv_heads, f"a divisor of {self.heads} heads")
        if self.head_dim % 2:
            raise ModelUnsupported("head_dim", self.head_dim, "positive and even (rotary pairs)")
        scaling = self.rope_scaling
        if scaling is None:
            return
        if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelBroken(
                "rope_scaling.high_freq_factor",
                f"is {scaling.high_freq_factor}; it must be above low_freq_factor, {scaling.low_freq_factor}",
            )
        if scaling.kind == "factors" and len(scaling.factors) != self.head_dim // 2:
            raise ModelBroken(
                "rope_freqs.weight",
                f"has {len(scaling.factors)} values; half of the head dimension is {self.head_dim // 2}",
            )


def _head_dim(named: int | None, hidden: int, heads: int, field: str) -> int:
    """The head dimension that the file names, or the one that its sizes give."""
    head_dim = named or hidden // heads
    if head_dim < 1:
        raise ModelBroken(field, f"is {heads}; that is more than the {hidden} elements of a hidden state")
    return head_dim


def _huggingface_rope_scaling(config: Fields) -> RopeScaling | None:
    scaling = config.inner("rope_parameters") or config.inner("rope_scaling")
    if not scaling:
        return None
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling(kind="linear", factor=scaling.number("factor"))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=scaling.number("factor"),
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
                original_context_tokens=scaling.count("original_max_position_embeddings", CONTEXT_TOKENS_MAX),
            )
        case _:
            raise ModelUnsupported("rope_scaling.rope_type", kind, "default, linear, llama3")


def _refuse_huggingface_options(values: Mapping[str, Any], kind: str) -> None:
    """Raises `ModelUnsupported` for an option that would be computed wrongly."""
    config = Fields(values)
    # A file that leaves it out means the window of Mistral's first model.
    window = values.get("sliding_window", MISTRAL_WINDOW_TOKENS) if kind == "mistral" else None
    if window is not None and not (
        type(window) is int and window >= config.count("max_position_embeddings", CONTEXT_TOKENS_MAX)
    ):
        raise ModelUnsupported(
            "sliding_window", values.get("sliding_window", "left out (4096)"), "null, or the whole context"
        )
    for name, fields in (("rope_parameters.", config.inner("rope_parameters")), ("", config)):
        if fields.get("partial_rotary_factor") not in (None, 1):
            field = f"{name}partial_rotary_factor"
            raise ModelUnsupported(field, fields.get("partial_rotary_factor"), "1")
    if kind == "qwen2" and config.flag("use_sliding_window"):
        raise ModelUnsupported("use_sliding_window", True, "false")
    if config.text("hidden_act", default="silu") != "silu":
        raise ModelUnsupported("hidden_act", config.get("hidden_act"), "silu")
    if config.flag("mlp_bias"):
        raise ModelUnsupported("mlp_bias", True, "false")
    if kind != "qwen2" and config.flag("attention_bias"):
        raise ModelUnsupported("attention_bias", True, "false (or model_type qwen2)")
    if config.get("quantization_config"):
        raise ModelUnsupported("quantization_config", config.get("quantization_config"), "none")


def from_huggingface(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """From `config.json`, with the end tokens of `generation_config.json` added where it has some.

    Raises `ModelUnsupported` for an architecture or option that the engine does not compute, and `ModelBroken` for a
    field that is missing or out of bounds.
    """
    config = Fields(values)
    kind = config.get("model_type")
    if kind not in ("llama", "mistral", "qwen2"):
        raise ModelUnsupported("model_type", kind, "llama, mistral, qwen2")
    _refuse_huggingface_options(values, kind)
    hidden, heads = config.count("hidden_size", HIDDEN_MAX), config.count("num_attention_heads", HEADS_MAX)
    vocab = config.count("vocab_size", VOCAB_MAX)
    named_head_dim = config.count("head_dim", HEAD_DIM_MAX) if config.get("head_dim") else None
    stops = config.token_ids("eos_token_id", vocab)
    more = Fields(generation, "generation_config.json: ").token_ids("eos_token_id", vocab)
    begins = config.token_ids("bos_token_id", vocab)
    theta = config.inner("rope_parameters").get("rope_theta")
    rope = config.inner("rope_parameters") if theta is not None else config
    return ModelConfig(
        layers=config.count("num_hidden_layers", LAYERS_MAX),
        hidden=hidden,
        heads=heads,
        kv_heads=config.count("num_key_value_heads", HEADS_MAX, default=heads),
        head_dim=_head_dim(named_head_dim, hidden, heads, "num_attention_heads"),
        intermediate=config.count("intermediate_size", INTERMEDIATE_MAX),
        vocab=vocab,
        rope_base=rope.number("rope_theta", default=10000.0),
        rope_scaling=_huggingface_rope_scaling(config),
        rms_eps=config.number("rms_norm_eps"),
        context_tokens_max=config.count("max_position_embeddings", CONTEXT_TOKENS_MAX),
        tied=config.flag("tie_word_embeddings"),
        attention_bias=kind == "qwen2",
        bos_token_id=begins[0] if begins else None,
        eos_token_ids=stops + tuple(token for token in more if token not in stops),
    )


def _gguf_rope_scaling(fields: Fields, kind: str, factors: tuple[float, ...]) -> RopeScaling | None:
    """Without a type a factor is linear, as llama.cpp takes it; older files have it under another name."""
    named = fields.get(f"{kind}.rope.scaling.type")
    field = f"{kind}.rope.scaling.factor"
    if fields.get(field) is None and fields.get(f"{kind}.rope.scale_linear") is not None:
        field = f"{kind}.rope.scale_linear"
    stretched = fields.get(field) is not None and fields.number(field) != 1.0
    scaling_kind = ("linear" if stretched else "none") if named is None else named
    if factors and scaling_kind == "none":
        return RopeScaling(kind="factors", factors=factors)
    if factors:
        raise ModelUnsupported(f"{kind}.rope.scaling.type", scaling_kind, "none, beside a rope_freqs tensor")
    if scaling_kind == "linear":
        return RopeScaling(kind="linear", factor=fields.number(field))
    if scaling_kind != "none":
        raise ModelUnsupported(
            f"{kind}.rope.scaling.type", scaling_kind, "none, linear, or a rope_freqs tensor"
        )
    return None


def from_gguf(
    metadata: Mapping[str, Any], *, tied: bool, rope_factors: tuple[float, ...], biased: bool = False
) -> ModelConfig:
    """From the metadata of a GGUF file. `rope_factors` are the values of its `rope_freqs` tensor, if any; `biased`: it
    has biases of query, key and value, which a file of any architecture may have.

    Raises `ModelUnsupported`, `ModelBroken`.
    """
    fields = Fields(metadata)
    kind = fields.get("general.architecture")
    if kind not in ("llama", "qwen2"):
        raise ModelUnsupported("general.architecture", kind, "llama, qwen2")
    if metadata.get(f"{kind}.expert_count"):
        raise ModelUnsupported(f"{kind}.expert_count", metadata[f"{kind}.expert_count"], "0")
    heads = fields.count(f"{kind}.attention.head_count", HEADS_MAX)
    hidden = fields.count(f"{kind}.embedding_length", HIDDEN_MAX)
    key_length = f"{kind}.attention.key_length"
    named_head_dim = fields.count(key_length, HEAD_DIM_MAX) if fields.get(key_length) else None
    head_dim = _head_dim(named_head_dim, hidden, heads, f"{kind}.attention.head_count")
    rotary_dims = fields.count(f"{kind}.rope.dimension_count", HEAD_DIM_MAX, default=head_dim)
    if rotary_dims != head_dim:
        raise ModelUnsupported(f"{kind}.rope.dimension_count", rotary_dims, f"the head dimension, {head_dim}")
    vocab_field = f"{kind}.vocab_size"
    if fields.get(vocab_field):
        vocab = fields.count(vocab_field, VOCAB_MAX)
    else:
        vocab = len(fields.strings("tokenizer.ggml.tokens"))
    # An end of turn is an end of text too; files that know it say so in a field of its own.
    stops = fields.token_ids("tokenizer.ggml.eos_token_id", vocab)
    stops += fields.token_ids("tokenizer.ggml.eot_token_id", vocab)
    begins = fields.token_ids("tokenizer.ggml.bos_token_id", vocab)
    return ModelConfig(
        layers=fields.count(f"{kind}.block_count", LAYERS_MAX),
        hidden=hidden,
        heads=heads,
        kv_heads=fields.count(f"{kind}.attention.head_count_kv", HEADS_MAX, default=heads),
        head_dim=head_dim,
        intermediate=fields.count(f"{kind}.feed_forward_length", INTERMEDIATE_MAX),
        vocab=vocab,
        rope_base=fields.number(f"{kind}.rope.freq_base", default=10000.0),
        rope_scaling=_gguf_rope_scaling(fields, kind, rope_factors),
        rms_eps=fields.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        context_tokens_max=fields.count(f"{kind}.context_length", CONTEXT_TOKENS_MAX),
        tied=tied,
        attention_bias=biased or kind == "qwen2",
        bos_token_id=begins[0] if begins else None,
        eos_token_ids=tuple(dict.fromkeys(stops)),
    )
