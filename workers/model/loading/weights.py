"""Reads a model's tensors from its files, and joins those that are multiplied together.

Weights, rows first, all of one dtype (`q`, `kv` are heads * head_dim, kv_heads * head_dim)::

    embed                     [vocab, hidden]
    layers.{i}.attention_norm [hidden]
    layers.{i}.qkv            [q + 2 * kv, hidden]      query, key and value in one product
    layers.{i}.qkv_bias       [q + 2 * kv]              only with config.attention_bias
    layers.{i}.out            [hidden, q]
    layers.{i}.ffn_norm       [hidden]
    layers.{i}.gate_up        [2 * intermediate, hidden]
    layers.{i}.down           [hidden, intermediate]
    norm                      [hidden]
    head                      [vocab, hidden]           only without config.tied
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from halfmoon.workers.model.loading.config import ModelConfig
from halfmoon.workers.model.loading.errors import ModelBroken, in_file
from halfmoon.workers.model.loading.gguf import GgufFile, unpermute_rotary
from halfmoon.workers.model.loading.weight_table import gguf_name, open_safetensors


def parse_gguf(path: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights, dequantised. Raises `ModelBroken`, `ModelUnsupported`."""
    file = GgufFile(path)
    permuted = {"attn_q": config.heads, "attn_k": config.kv_heads}
    if file.metadata["general.architecture"] != "llama":
        permuted = {}  # only the converter of llama models reorders rows

    def part(name: str) -> torch.Tensor:
        theirs = gguf_name(name)
        values: Any = file.tensor_f32(theirs)
        heads = permuted.get(theirs.split(".")[-2])
        if heads is not None:
            values = unpermute_rotary(values, heads)
        return _finite(theirs, torch.from_numpy(values).to(dtype))

    try:
        with in_file(path):
            return _fuse(config, part)
    finally:
        file.close()


def parse_huggingface(
    files: Sequence[Path], config: ModelConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The weights. Raises `ModelBroken`."""
    with ExitStack() as stack:
        places: dict[str, tuple[Path, Any]] = {}
        for file in files:
            with in_file(file):
                opened = stack.enter_context(open_safetensors(file, "pt"))
            places |= {name: (file, opened) for name in opened.keys()}  # noqa: SIM118 not a dict

        def part(name: str) -> torch.Tensor:
            file, opened = places[name]
            with in_file(file):
                return _finite(name, opened.get_tensor(name).to(dtype))

        return _fuse(config, part)


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """One NaN would make every logit NaN, which nothing after this would notice."""
    if not bool(torch.isfinite(tensor).all()):
        raise ModelBroken(f"tensor {name}", f"holds values that are not finite in {tensor.dtype}")
    return tensor


def _fuse(config: ModelConfig, part: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Asks `part` for each weight by its Hugging Face name, and joins those that are multiplied together."""
    weights = {"embed": part("model.embed_tokens.weight"), "norm": part("model.norm.weight")}
    if not config.tied:
        weights["head"] = part("lm_head.weight")
    for i in range(config.layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        projections = [f"{theirs}.self_attn.{letter}_proj" for letter in "qkv"]
        weights[f"{ours}.attention_norm"] = part(f"{theirs}.input_layernorm.weight")
        weights[f"{ours}.qkv"] = torch.cat([part(f"{name}.weight") for name in projections])
        if config.attention_bias:
            weights[f"{ours}.qkv_bias"] = torch.cat([part(f"{name}.bias") for name in projections])
        weights[f"{ours}.out"] = part(f"{theirs}.self_attn.o_proj.weight")
        weights[f"{ours}.ffn_norm"] = part(f"{theirs}.post_attention_layernorm.weight")
        weights[f"{ours}.gate_up"] = torch.cat(
            [part(f"{theirs}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        )
        weights[f"{ours}.down"] = part(f"{theirs}.mlp.down_proj.weight")
    return weights
