"""The tensors that a model's files must hold: their names, their shapes, and whether they are there.

Reads headers only, and imports no torch: a model that cannot be served is refused before its weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from halfmoon.workers.model.loading.config import ModelConfig
from halfmoon.workers.model.loading.errors import (
    ModelBroken,
    ModelNotComputed,
    ModelUnsupported,
    in_file,
    shown,
)
from halfmoon.workers.model.loading.gguf import GgufFile

TENSORS_MAX = 1 << 17
_GGUF_PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_GGUF_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_UNUSED = {
    r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.(inv_freq|cos_cached|sin_cached)": "config.json says the same",
    r"rope_freqs\.weight": "is part of the configuration",
}
"""Tensors that files have and the engine leaves out, and why that changes no answer. Any other would."""
_DTYPES = ("F32", "F16", "BF16", "F64")


def part_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the engine needs, by its Hugging Face name."""
    hidden, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    for i in range(config.layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        for letter, rows in (("q", query), ("k", key), ("v", key)):
            shapes[f"{layer}.self_attn.{letter}_proj.weight"] = (rows, hidden)
            if config.attention_bias:
                shapes[f"{layer}.self_attn.{letter}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, query)
        shapes[f"{layer}.mlp.gate_proj.weight"] = (config.intermediate, hidden)
        shapes[f"{layer}.mlp.up_proj.weight"] = (config.intermediate, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, config.intermediate)
    return shapes


def weight_elements(config: ModelConfig) -> int:
    """Elements of all weights together."""
    return sum(prod(shape) for shape in part_shapes(config).values())


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a tensor with this Hugging Face name."""
    if name in _GGUF_WHOLE:
        return _GGUF_WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_PARTS[module]}.{leaf}"


def check_gguf(file: GgufFile, config: ModelConfig) -> None:
    """Raises `ModelUnsupported` for a tensor that is missing or has another shape than in the metadata,
    `ModelNotComputed` for one that the engine does not compute with.
    """
    with in_file(file.path):
        shapes = {gguf_name(name): shape for name, shape in part_shapes(config).items()}
        for name, shape in shapes.items():
            tensor = file.tensors.get(name)
            _check(name, None if tensor is None else tensor.shape, shape)
        for name in file.tensors:
            if name not in shapes:
                _check_unused(name)


def check_huggingface(files: Sequence[Path], config: ModelConfig) -> None:
    """Raises `ModelUnsupported` for a tensor that is missing, or has another shape than by config.json or a dtype
    that is no float; `ModelNotComputed` for one that the engine does not compute with; `ModelBroken` for a file that is
    no safetensors, and for a tensor that two files hold.
    """
    expected = part_shapes(config)
    places: dict[str, Path] = {}
    for file in files:
        with in_file(file), open_safetensors(file, "np") as opened:
            names = list(opened.keys())
            if len(names) > TENSORS_MAX:
                raise ModelBroken("header", f"names {len(names)} tensors; at most {TENSORS_MAX}")
            for name in names:
                if name in places:
                    raise ModelBroken(f"tensor {shown(name)}", f"is in {places[name].name} too")
                places[name] = file
                if name not in expected:
                    if not (config.tied and name == "lm_head.weight"):  # tied, it is the embedding once more
                        _check_unused(name)
                    continue
                header = opened.get_slice(name)
                _check(name, tuple(header.get_shape()), expected[name])
                if header.get_dtype() not in _DTYPES:
                    raise ModelUnsupported(f"tensor {name}: dtype", header.get_dtype(), ", ".join(_DTYPES))
    with in_file(files[0].parent):
        for name, shape in expected.items():
            if name not in places:
                _check(name, None, shape)


def open_safetensors(file: Path, framework: str) -> Any:
    """`safe_open`, whose words become ours. Raises `ModelBroken`, which names no file."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework=framework)
    except SafetensorError as error:
        raise ModelBroken("header", f"is no safetensors header: {str(error)[:200]}") from None


def _check_unused(name: str) -> None:
    """An answer without a tensor that its model was trained with is no answer of the model."""
    if not any(re.fullmatch(pattern, name) for pattern in _UNUSED):
        problem = "is in the file, and the engine does not compute with it"
        raise ModelNotComputed(f"tensor {shown(name)}", problem)


def _check(name: str, found: tuple[int, ...] | None, wanted: tuple[int, ...]) -> None:
    if found is None:
        raise ModelUnsupported(f"tensor {name}", None, "present")
    if found != wanted:
        raise ModelUnsupported(f"tensor {name}: shape", found, f"{wanted}, by the model's config")
