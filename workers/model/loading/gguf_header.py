"""Parses the header of a GGUF file: metadata, and the place of each tensor. All is checked against the file's size.

The header is parsed here rather than by the gguf library's reader, which takes two seconds for the vocabulary of a
small model, and trusts the file.

Rules: no count, length or offset of the file is used before it is known to lie inside of the file and below a bound; a
refusal names the field or tensor.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from halfmoon.workers.model.loading.errors import ModelBroken, ModelUnsupported

_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT_DEFAULT = 32
_LENGTH = struct.Struct("<Q")

# Bounds of a header, each far above that of any model: within them a header is read in seconds and a few hundred MB.
STRING_BYTES_MAX = 16 << 20
HEADER_BYTES_MAX = 256 << 20
ITEMS_MAX = 1 << 22
FIELDS_MAX = TENSORS_MAX = 1 << 17
DIMENSIONS_MAX = 4
ALIGNMENT_MAX = 1 << 20
TRAILING_BYTES_MAX = 1 << 20

BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84),
    11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 16: (256, 66), 17: (256, 74), 18: (256, 98),
    19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36),
}  # fmt: skip
"""Elements and bytes of one block of each type of tensor that can be dequantised. The library has the same table, but
importing it takes half a second.
"""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` in the order of numpy and torch (rows first); `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    quantization: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Field names to Python values, tensor names to their places."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads forward; `field` is the name of the value that is being read, for errors."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.at, self.field = buffer, 0, "header"
        self.items_left = ITEMS_MAX
        self.end = min(len(buffer), HEADER_BYTES_MAX)

    def broken(self, problem: str) -> ModelBroken:
        return ModelBroken(self.field, f"{problem}, near byte {self.at}")

    def take(self, size: int) -> int:
        """The place of the next `size` bytes."""
        at = self.at
        if at + size > self.end:
            inside = len(self.buffer) > HEADER_BYTES_MAX
            bound = f"{HEADER_BYTES_MAX} bytes of header" if inside else "the file's end"
            raise self.broken(f"reaches beyond {bound}")
        self.at = at + size
        return at

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.buffer, self.take(struct.calcsize(form)))
        return value

    def count(self, most: int, what: str) -> int:
        value: int = self.scalar("<Q")
        if value > most:
            raise self.broken(f"counts {value} {what}; at most {most}")
        return value

    def string(self) -> str:
        (size,) = _LENGTH.unpack_from(self.buffer, self.take(8))
        if size > STRING_BYTES_MAX:
            raise self.broken(f"has a text of {size} bytes; at most {STRING_BYTES_MAX}")
        at = self.take(size)
        try:
            return self.buffer[at : at + size].decode()
        except UnicodeDecodeError:
            raise self.broken("is no UTF-8") from None

    def value(self) -> Any:
        kind = self.scalar("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.broken(f"has type {kind}, which GGUF does not define")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind = self.scalar("<I")
        count = self.count(self.items_left, "items")
        self.items_left -= count
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:  # arrays of arrays too: no model has any
            raise ModelUnsupported(self.field, f"array of type {kind}", "arrays of numbers and of texts")
        form = f"<{count}{_SCALARS[kind].lstrip('<')}"
        return list(struct.unpack_from(form, self.buffer, self.take(struct.calcsize(form))))


def parse_header(buffer: mmap.mmap) -> GgufHeader:
    """Raises `ModelBroken`, `ModelUnsupported`."""
    cursor = _Cursor(buffer)
    if buffer[:4] != b"GGUF":
        raise ModelUnsupported("first four bytes", bytes(buffer[:4]), "GGUF (not GGUF: another kind of file)")
    cursor.at = 4
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise ModelUnsupported("GGUF version", version, "2, 3")
    tensor_count, field_count = cursor.count(TENSORS_MAX, "tensors"), cursor.count(FIELDS_MAX, "fields")
    metadata = _fields(cursor, field_count)
    found = _tensor_table(cursor, tensor_count)
    alignment = metadata.get("general.alignment", _ALIGNMENT_DEFAULT)
    if not isinstance(alignment, int) or not 0 < alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        raise ModelUnsupported("general.alignment", alignment, f"powers of two up to {ALIGNMENT_MAX}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: _placed(name, shape, kind, offset, start, alignment)
        for name, (shape, kind, offset) in found.items()
    }
    _check_places(list(tensors.values()), start, len(buffer))
    return GgufHeader(metadata, tensors)


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(count):
        cursor.field = f"name of field {number}"
        name = cursor.string()
        cursor.field = _label(name)
        if name in metadata:
            raise cursor.broken("occurs twice")
        metadata[name] = cursor.value()
    return metadata


def _tensor_table(cursor: _Cursor, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Name to shape, type and offset, as the file has them."""
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for number in range(count):
        cursor.field = f"name of tensor {number}"
        name = cursor.string()
        cursor.field = f"tensor {_label(name)}"
        if name in found:
            raise cursor.broken("occurs twice")
        dimensions = cursor.scalar("<I")
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            raise cursor.broken(f"has {dimensions} dimensions; 1 to {DIMENSIONS_MAX}")
        shape = tuple(reversed([cursor.scalar("<Q") for _ in range(dimensions)]))
        found[name] = shape, cursor.scalar("<I"), cursor.scalar("<Q")
    return found


def _label(name: str) -> str:
    """A name as an error shows it: on one line, and short."""
    return name[:100] if name and name.isprintable() else repr(name[:100])


def _placed(
    name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int
) -> GgufTensor:
    label = f"tensor {_label(name)}:"
    if kind not in BLOCKS:
        raise ModelUnsupported(f"{label} type", kind, "types that gguf dequantizes")
    elements, size = BLOCKS[kind]
    if min(shape) < 1 or shape[-1] % elements:
        raise ModelBroken(f"{label} shape", f"is {shape}; rows of type {kind} are multiples of {elements}")
    if offset % alignment:
        raise ModelBroken(f"{label} offset", f"is {offset}; it must be a multiple of {alignment}")
    return GgufTensor(name, shape, kind, start + offset, prod(shape) // elements * size)


def _check_places(tensors: list[GgufTensor], start: int, file_size: int) -> None:
    """Raises `ModelBroken` for tensors that overlap or lie outside of the file, and for a file that is far too long."""
    end, before = start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size)):
        label = f"tensor {_label(tensor.name)}:"
        if tensor.offset < end:
            raise ModelBroken(f"{label} offset", f"overlaps {before}, at byte {tensor.offset}")
        end, before = tensor.offset + tensor.size, f"tensor {_label(tensor.name)}"
        if end > file_size:
            raise ModelBroken(f"{label} size", f"needs {end} bytes of file; there are {file_size}")
    if file_size > end + TRAILING_BYTES_MAX:
        raise ModelBroken("size", f"is {file_size} bytes; the last tensor ends at {end}")
