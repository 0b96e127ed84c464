"""Tensors as payload of messages."""

from __future__ import annotations

import numpy as np
import torch

from halfmoon.store.channels.header import Dtype
from halfmoon.workers.model.attention.kernel import Tensor

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.float16: Dtype.F16}


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, of any dtype."""
    if not tensor.numel():
        return memoryview(bytearray())
    raw: np.ndarray = tensor.view(torch.uint8).numpy()
    return raw.data.cast("B")
