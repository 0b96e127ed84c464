"""Dequantised weights as safetensors in the cache folder, so that the second start takes half a second.

Rules: one process parses and the others wait for it; a file that is cut short or altered (by its digest) is parsed
again; a folder that cannot be written costs time, not correctness.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from halfmoon.workers.model.loading.cache_files import cache_folder, held_lock, replace_file

_FORMAT = "2"  # raised when the names or the layout of the weights change


def cached_weights_path(fingerprint: str, dtype: torch.dtype) -> Path:
    return (
        cache_folder("weights") / f"{fingerprint}-{str(dtype).removeprefix('torch.')}-{_FORMAT}.safetensors"
    )


def load_or_parse(
    fingerprint: str, dtype: torch.dtype, parse: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The weights of the model with this fingerprint, from the cache, or from `parse` and then cached."""
    path = cached_weights_path(fingerprint, dtype)
    weights = _read(path)
    if weights is not None:
        return weights
    with held_lock(path.with_suffix(".lock")):
        weights = _read(path)  # another process may have parsed it while this one waited
        if weights is None:
            weights = parse()
            labels = {"digest": _digest(weights)}
            replace_file(path, lambda place: _save(weights, place, labels))
    return weights


def _save(weights: dict[str, torch.Tensor], place: Path, labels: dict[str, str]) -> None:
    """Raises OSError."""
    try:
        save_file(weights, place, metadata=labels)
    except SafetensorError as error:  # a full disk, in the library's words
        raise OSError(str(error)) from None


def _read(path: Path) -> dict[str, torch.Tensor] | None:
    """None when the file is absent, cut short or altered."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            labels = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    except (SafetensorError, OSError):
        return None
    return weights if labels.get("digest") == _digest(weights) else None


def _digest(weights: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(weights):
        weight = weights[name]
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\0".encode())
        digest.update(weight.contiguous().view(torch.uint8).view(-1).numpy().data)
    return digest.hexdigest()
