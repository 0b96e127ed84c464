"""Opens a GGUF file: its metadata, its table of tensors, and single tensors as f32.

`gguf_header` parses; the quantised formats are the gguf library's.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from halfmoon.workers.model.loading.config import ModelConfig, from_gguf
from halfmoon.workers.model.loading.errors import ModelBroken, ModelUnsupported, in_file
from halfmoon.workers.model.loading.gguf_header import parse_header

ROPE_FACTORS = "rope_freqs.weight"
_F32, _F16 = 0, 1


class GgufFile:
    """An open file. `metadata` maps field names to Python values; `tensors` maps tensor names to their
    place. All of it was checked: no tensor reaches beyond the file.

    Raises `ModelBroken`, `ModelUnsupported`, `ModelNotFound`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with in_file(path):
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < 4:
                    raise ModelBroken("size", "is below four bytes; it is no GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            try:
                header = parse_header(self._map)
            except BaseException:
                self._map.close()
                raise
        self.metadata, self.tensors = header.metadata, header.tensors

    def tensor_f32(self, name: str) -> NDArray[np.float32]:
        """A fresh, writable f32 copy of one tensor."""
        tensor = self.tensors[name]
        row_bytes = tensor.size // math.prod(tensor.shape[:-1])
        raw = np.frombuffer(self._map, dtype=np.uint8, count=tensor.size, offset=tensor.offset)
        raw = raw.reshape(*tensor.shape[:-1], row_bytes)
        if tensor.quantization == _F32:
            values = raw.view(np.float32).reshape(tensor.shape).copy()
        elif tensor.quantization == _F16:
            values = raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
        else:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            kind = GGMLQuantizationType(tensor.quantization)
            # A scale that is not finite gives NaN, which is refused by name when the weights are complete.
            with in_file(self.path), np.errstate(all="ignore"):
                try:
                    values = np.array(dequantize(raw, kind), dtype=np.float32).reshape(tensor.shape)
                except NotImplementedError as error:
                    raise ModelUnsupported(
                        f"tensor {name}: type", kind.name, "types that gguf dequantizes"
                    ) from error
        return values

    def config(self) -> ModelConfig:
        """Raises `ModelBroken`, `ModelUnsupported`."""
        with in_file(self.path):
            tied = "output.weight" not in self.tensors
            biased = "blk.0.attn_q.bias" in self.tensors
            return from_gguf(self.metadata, tied=tied, rope_factors=self._rope_factors(), biased=biased)

    def _rope_factors(self) -> tuple[float, ...]:
        tensor = self.tensors.get(ROPE_FACTORS)
        if tensor is None:
            return ()
        if len(tensor.shape) != 1 or tensor.quantization != _F32 or tensor.shape[0] > 1 << 16:
            raise ModelUnsupported(ROPE_FACTORS, (tensor.shape, tensor.quantization), "one row of f32")
        factors = tuple(float(value) for value in self.tensor_f32(ROPE_FACTORS))
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise ModelBroken(ROPE_FACTORS, "holds a value that is not finite or not above 0")
        return factors

    def close(self) -> None:
        self._map.close()


def unpermute_rotary(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes the row order that the converter gives q and k of llama models, `[heads * head_dim, hidden]`.

    GGUF pairs dimension 2i with 2i+1; our rotary embedding, as Hugging Face's, pairs i with i + head_dim/2.
    """
    half = weight.shape[0] // heads // 2
    paired = weight.reshape(heads, half, 2, *weight.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(weight.shape)
