"""Memory of a GPU as RDMA memory, so that KV could move from GPU to GPU without a stop in the pool.

UNTESTED on hardware, and called by tests only: it was never run with a GPU and an RDMA device in one machine, and
`RdmaTransport` registers the host's memory alone. It stays for the GPU tier, which needs both ways.

Two ways, the first that there is:

- *dma-buf*: the driver exports a range of its memory as a file descriptor, the kernel's RDMA core imports it
  (Linux 5.12, CUDA 11.7, a device whose driver can).
- *peer memory*: NVIDIA's `nvidia_peermem` module lets device addresses be registered as if they were the
  host's.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from halfmoon.store.transports.rdma.device import SYSFS, RdmaAbsent

PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
#: CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED of the CUDA driver's interface.
DMA_BUF_FD, DMA_BUF_SUPPORTED = 1, 124


def register(pv: Any, domain: Any, access: int, *, address: int, size: int, sysfs: Path = SYSFS) -> Any:
    """A memory region of `size` bytes at a device address, both multiples of the host's page size.

    `pv`: the module of `verbs.load`. Raises RdmaAbsent, naming the missing part of either way.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    if address % page or size % page:
        raise RdmaAbsent(f"GPU memory at {address:#x}, {size} bytes: not on the borders of pages of {page}")
    reasons = []
    try:
        fd = export_dma_buf(address, size)
    except RdmaAbsent as problem:
        reasons.append(f"dma-buf: {problem}")
    else:
        try:
            return pv.mr.DmaBufMR(domain, size, access, dmabuf=fd, offset=0)
        except pv.Error as problem:
            reasons.append(f"dma-buf: {problem}")
        finally:
            # The region has its own reference to the memory.
            os.close(fd)
    if loaded := peer_module(sysfs):
        try:
            return pv.mr.MR(domain, size, access, address=address)
        except pv.Error as problem:
            reasons.append(f"{loaded}: {problem}")
    else:
        reasons.append(f"peer memory: none of {', '.join(PEER_MODULES)} is loaded")
    raise RdmaAbsent("; ".join(reasons))


def peer_module(sysfs: Path = SYSFS) -> str:
    """Name of the module that registers device addresses, "" when there is none."""
    return next((name for name in PEER_MODULES if (sysfs / "module" / name).is_dir()), "")


def export_dma_buf(address: int, size: int) -> int:
    """A file descriptor of that range of device memory, for the caller to close. Raises RdmaAbsent."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        export = cuda.cuMemGetHandleForAddressRange
    except (OSError, AttributeError) as problem:
        raise RdmaAbsent(f"no CUDA driver that exports memory: {problem}") from None
    device, able = ctypes.c_int(), ctypes.c_int()
    if code := cuda.cuCtxGetDevice(ctypes.byref(device)):
        raise RdmaAbsent(f"this thread has no CUDA context (error {code})")
    if code := cuda.cuDeviceGetAttribute(ctypes.byref(able), DMA_BUF_SUPPORTED, device):
        raise RdmaAbsent(f"CUDA does not say whether device {device.value} exports memory (error {code})")
    if not able.value:
        raise RdmaAbsent(f"CUDA device {device.value} does not export memory")
    fd = ctypes.c_int(-1)
    arguments = (
        ctypes.c_uint64(address),
        ctypes.c_size_t(size),
        ctypes.c_int(DMA_BUF_FD),
        ctypes.c_ulonglong(0),
    )
    if code := export(ctypes.byref(fd), *arguments):
        raise RdmaAbsent(
            f"CUDA device {device.value} does not export {size} bytes at {address:#x} (error {code})"
        )
    return fd.value
