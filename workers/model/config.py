"""A model apart from its weights: sizes, rotary embedding, special token ids.

Imports neither torch nor numpy, so that the frontend can ask for a model's limits cheaply. Everything that
the compute engine cannot run is refused here, by name of the field, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


class ModelError(Exception):
    """The model cannot be used: ours to say at start, before anything else runs."""


class ModelNotFound(ModelError):
    """No model of this name, no such file, or a file that the model needs is missing."""


class ModelUnsupported(ModelError):
    """The model exists, but one of its fields has a value that the engine does not compute."""

    def __init__(self, field: str, found: object, supported: str) -> None:
        super().__init__(f"{field} is {found!r}; supported: {supported}")
        self.field = field


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
        if self.heads <= 0 or self.kv_heads <= 0 or self.heads % self.kv_heads:
            raise ModelUnsupported("num_key_value_heads", self.kv_heads, f"a divisor of {self.heads} heads")
        if self.head_dim <= 0 or self.head_dim % 2:
            raise ModelUnsupported("head_dim", self.head_dim, "positive and even (rotary pairs)")


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    assert isinstance(value, list | tuple), value
    return tuple(int(item) for item in value)


def _huggingface_rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not scaling:
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return RopeScaling(kind="linear", factor=float(scaling["factor"]))
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_context_tokens=int(scaling["original_max_position_embeddings"]),
            )
        case _:
            raise ModelUnsupported("rope_scaling.rope_type", kind, "default, linear, llama3")


def from_huggingface(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """From `config.json`, with the end tokens of `generation_config.json` added where it has some.

    Raises `ModelUnsupported` for an architecture or option that the engine does not compute.
    """
    kind = config.get("model_type")
    if kind not in ("llama", "mistral", "qwen2"):
        raise ModelUnsupported("model_type", kind, "llama, mistral, qwen2")
    if kind == "mistral" and config.get("sliding_window") is not None:
        raise ModelUnsupported("sliding_window", config["sliding_window"], "null")
    if kind == "qwen2" and config.get("use_sliding_window"):
        raise ModelUnsupported("use_sliding_window", True, "false")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelUnsupported("hidden_act", config["hidden_act"], "silu")
    if config.get("mlp_bias"):
        raise ModelUnsupported("mlp_bias", True, "false")
    if kind != "qwen2" and config.get("attention_bias"):
        raise ModelUnsupported("attention_bias", True, "false (or model_type qwen2)")
    if config.get("quantization_config"):
        raise ModelUnsupported("quantization_config", config["quantization_config"], "none")
    rope = config.get("rope_parameters") or {}
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    stops = _token_ids(config.get("eos_token_id"))
    stops += tuple(token for token in _token_ids(generation.get("eos_token_id")) if token not in stops)
    begins = _token_ids(config.get("bos_token_id"))
    return ModelConfig(
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=_huggingface_rope_scaling(config),
        rms_eps=float(config["rms_norm_eps"]),
        context_tokens_max=int(config["max_position_embeddings"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=kind == "qwen2",
        bos_token_id=begins[0] if begins else None,
        eos_token_ids=stops,
    )


def from_gguf(metadata: Mapping[str, Any], *, tied: bool, rope_factors: tuple[float, ...]) -> ModelConfig:
    """From the metadata of a GGUF file. `rope_factors` are the values of its `rope_freqs` tensor, if any."""
    kind = metadata.get("general.architecture")
    if kind not in ("llama", "qwen2"):
        raise ModelUnsupported("general.architecture", kind, "llama, qwen2")
    if metadata.get(f"{kind}.expert_count"):
        raise ModelUnsupported(f"{kind}.expert_count", metadata[f"{kind}.expert_count"], "0")

    def field(name: str) -> Any:
        if f"{kind}.{name}" not in metadata:
            raise ModelUnsupported(f"{kind}.{name}", None, "present")
        return metadata[f"{kind}.{name}"]

    scaling: RopeScaling | None = None
    scaling_kind = metadata.get(f"{kind}.rope.scaling.type", "none")
    if rope_factors:
        scaling = RopeScaling(kind="factors", factors=rope_factors)
    elif scaling_kind == "linear":
        scaling = RopeScaling(kind="linear", factor=float(field("rope.scaling.factor")))
    elif scaling_kind != "none":
        raise ModelUnsupported(
            f"{kind}.rope.scaling.type", scaling_kind, "none, linear, or a rope_freqs tensor"
        )
    heads = int(field("attention.head_count"))
    head_dim = int(metadata.get(f"{kind}.attention.key_length") or field("embedding_length") // heads)
    rotary_dims = int(metadata.get(f"{kind}.rope.dimension_count", head_dim))
    if rotary_dims != head_dim:
        raise ModelUnsupported(f"{kind}.rope.dimension_count", rotary_dims, f"the head dimension, {head_dim}")
    # An end of turn is an end of text too; files that know it say so in a field of its own.
    stops = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    return ModelConfig(
        layers=int(field("block_count")),
        hidden=int(field("embedding_length")),
        heads=heads,
        kv_heads=int(metadata.get(f"{kind}.attention.head_count_kv") or heads),
        head_dim=head_dim,
        intermediate=int(field("feed_forward_length")),
        vocab=int(metadata.get(f"{kind}.vocab_size") or len(metadata["tokenizer.ggml.tokens"])),
        rope_base=float(metadata.get(f"{kind}.rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        rms_eps=float(field("attention.layer_norm_rms_epsilon")),
        context_tokens_max=int(field("context_length")),
        tied=tied,
        attention_bias=kind == "qwen2",
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in stops if token is not None)),
    )
