"""Reads a GGUF file: its metadata, its table of tensors, and single tensors as f32.

The header is parsed here rather than by the gguf library's reader, which takes two seconds for the vocabulary
of a small model; the quantised formats are that library's.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfmoon.workers.model.config import ModelConfig, ModelUnsupported, from_gguf

_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT_DEFAULT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` in the order of numpy and torch (rows first); `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    quantization: int
    offset: int


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.at = buffer, 0

    def scalar(self, form: str) -> Any:
        size = struct.calcsize(form)
        (value,) = struct.unpack_from(form, self.buffer, self.at)
        self.at += size
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        raw = self.buffer[self.at : self.at + size]
        self.at += size
        return raw.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, count = self.scalar("<I"), self.scalar("<Q")
        if item_kind in (_STRING, _ARRAY):
            return [self.value(item_kind) for _ in range(count)]
        form = _SCALARS[item_kind].lstrip("<")
        size = struct.calcsize(f"<{count}{form}")
        items = list(struct.unpack_from(f"<{count}{form}", self.buffer, self.at))
        self.at += size
        return items


class GgufFile:
    """An open file. `metadata` maps field names to Python values; `tensors` maps tensor names to their
    place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelUnsupported(f"{path.name}: first four bytes", "not GGUF", "a GGUF file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._map)
        try:
            self._parse(cursor)
        except (struct.error, KeyError, IndexError) as error:
            raise ModelUnsupported(
                f"{path.name}: header", f"broken near byte {cursor.at}", "GGUF v2 or v3"
            ) from error

    def _parse(self, cursor: _Cursor) -> None:
        cursor.at = 4
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise ModelUnsupported("GGUF version", version, "2, 3")
        tensor_count, field_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(field_count):
            name = cursor.string()
            self.metadata[name] = cursor.value(cursor.scalar("<I"))
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensor_count):
            name = cursor.string()
            dims = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
            found.append((name, tuple(reversed(dims)), cursor.scalar("<I"), cursor.scalar("<Q")))
        self.header_bytes = cursor.at
        alignment = int(self.metadata.get("general.alignment", _ALIGNMENT_DEFAULT))
        start = -(-cursor.at // alignment) * alignment
        self.tensors = {
            name: GgufTensor(name, shape, quantization, start + offset)
            for name, shape, quantization, offset in found
        }

    def tensor_f32(self, name: str) -> NDArray[np.float32]:
        """A fresh, writable f32 copy of one tensor."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.quantization)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError) as error:
            raise ModelUnsupported(
                f"{name}: type", tensor.quantization, "types that gguf dequantizes"
            ) from error
        *rows, columns = tensor.shape
        row_bytes = columns // block_elements * block_bytes
        count = int(np.prod(rows, dtype=np.int64)) * row_bytes
        if tensor.offset + count > len(self._map):
            raise ModelUnsupported(
                f"{self.path.name}: size", len(self._map), f"at least {tensor.offset + count} bytes"
            )
        raw = np.frombuffer(self._map, dtype=np.uint8, count=count, offset=tensor.offset).reshape(
            *rows, row_bytes
        )
        if kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape).copy()
        if kind == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
        try:
            return np.array(dequantize(raw, kind), dtype=np.float32).reshape(tensor.shape)
        except NotImplementedError as error:
            raise ModelUnsupported(f"{name}: type", kind.name, "types that gguf dequantizes") from error

    def config(self) -> ModelConfig:
        factors: tuple[float, ...] = ()
        if "rope_freqs.weight" in self.tensors:
            factors = tuple(float(value) for value in self.tensor_f32("rope_freqs.weight"))
        return from_gguf(self.metadata, tied="output.weight" not in self.tensors, rope_factors=factors)

    def close(self) -> None:
        self._map.close()


def unpermute_rotary(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes the row order that the converter gives q and k of llama models, `[heads * head_dim, hidden]`.

    GGUF pairs dimension 2i with 2i+1; our rotary embedding, as Hugging Face's, pairs i with i + head_dim/2.
    """
    half = weight.shape[0] // heads // 2
    paired = weight.reshape(heads, half, 2, *weight.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(weight.shape)
