"""Work of a kernel that the threads of OpenMP share."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from halfmoon.workers.model.kernels.code import I32, I64, Code, Compiled

_OF_A_THREAD = ("omp_get_thread_num", "omp_get_num_threads")
_MULTIPLY_ADDS_MIN = 1 << 20
"""Of work that is worth waking other threads for."""
OF_WORK = ("thread", "first", "end")
"""What a function of shared work is told last: which thread it is, and its units."""


def threads_for(multiply_adds: int) -> int:
    return torch.get_num_threads() if multiply_adds >= _MULTIPLY_ADDS_MIN else 1


class SharedWork:
    """Units of work, each on one thread. `work` is a function of a module, of `addresses`, `numbers` and `OF_WORK`."""

    def __init__(
        self, module: ir.Module, work: Code, addresses: Sequence[str], numbers: Sequence[str]
    ) -> None:
        name, self._openmp = work.function.name, openmp()
        self._whole = whole = Code(module, f"{name}_whole", addresses, (*numbers, "units"))
        none = whole.number(0)
        whole.run(work, {**whole.given, "thread": none, "first": none, "end": whole.given["units"]})
        whole.ended()
        # Names functions that have to be there.
        self._share = _share(module, work, whole) if self._openmp is not None else None

    def compiled(self, compiled: Compiled) -> Callable[..., None]:
        """`(threads, ...)`: with the arguments of `work` up to `OF_WORK`, and the number of units."""
        whole, parallel = compiled.function(self._whole), self._openmp
        if self._share is None:
            return lambda threads, *arguments: whole(*arguments)
        share = compiled.address(self._share)

        def run(threads: int, *arguments: int) -> None:
            if threads == 1:
                whole(*arguments)
            else:
                told = (ctypes.c_int64 * len(arguments))(*arguments)
                parallel(share, ctypes.addressof(told), threads, 0)

        return run


def _share(module: ir.Module, work: Code, whole: Code) -> Code:
    """The part of one thread. Gets the address of the arguments of `whole`."""
    code = Code(module, f"{work.function.name}_share", ("arguments",), ())
    given = {
        name: code.load(code.at(code.given["arguments"], 8 * i), argument.type)
        for i, (name, argument) in enumerate(whole.given.items())
    }
    thread, threads = (code.builder.zext(code.call(name, I32), I64) for name in _OF_A_THREAD)
    first, end = (
        code.builder.udiv(code.multiply(given["units"], each), threads)
        for each in (thread, code.add(thread, 1))
    )
    code.run(work, {**given, "thread": thread, "first": first, "end": end})
    return code.ended()


@cache
def openmp() -> Any:
    """`GOMP_parallel` of the library whose threads PyTorch uses: a second pool would contend with them. None where
    PyTorch has another one; one thread then does all.
    """
    try:
        found = re.search(r"/.*/libgomp[^/\n]*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        if found is None:
            return None
        library = ctypes.CDLL(found[0])
    except OSError:
        return None
    for name in _OF_A_THREAD:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    parallel = library.GOMP_parallel
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return parallel
