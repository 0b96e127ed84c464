"""Kernels that a start may find, for `make test-kernels`: other machines' choices are tried on this one.

HALFMOON_TEST_KERNEL names one of `KERNELS`, which every process of a run then has. Exact numerics promise the same bits
however a request is served whichever it is; the bits of two kernels are different ones.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from halfmoon_after_import import after_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Changes = dict[str, Callable[[ModuleType], None]]

CODE, LINEAR = "halfmoon.workers.model.kernels.code", "halfmoon.workers.model.linear"
TILES = "halfmoon.workers.model.kernels.tiles"


def _nothing_compiles(module: Any) -> None:
    def unable(*_: object) -> None:
        raise module.KernelUnavailable("not in this test")

    module.Compiled.__init__ = unable


def _plain(module: Any) -> None:
    module._by_onednn = lambda *_: None


def _in_f32(module: Any) -> None:
    import torch

    module.multiplies = lambda dtype: dtype == torch.float32


def _without_pairs(module: Any) -> None:
    module.multiplies_pairs = lambda: False


def _narrow_by_libraries(module: Any) -> None:
    import torch

    module._faster_by_libraries = lambda dtype: dtype != torch.float32


def _public(module: Any) -> None:
    make = module.SdpaAttention.__init__

    def without_private_operator(*args: Any, private_op: bool = True) -> None:
        make(*args, private_op=False)

    module.SdpaAttention.__init__ = without_private_operator


def _whole_groups(module: Any) -> None:
    module.invariant_row_counts = lambda engine: (engine.group_rows,)


def _instructions(capability: str, isa: str) -> dict[str, str]:
    """What the libraries use at most of the CPU."""
    return {"ATEN_CPU_CAPABILITY": capability, "ONEDNN_MAX_CPU_ISA": isa}


#: Variables of the environment, and changes to modules.
KERNELS: dict[str, tuple[dict[str, str], Changes]] = {
    # LLVM compiles nothing.
    "onednn": ({}, {CODE: _nothing_compiles}),
    # And a torch without oneDNN's packed products.
    "plain": ({}, {CODE: _nothing_compiles, LINEAR: _plain}),
    # A CPU without instructions for bf16.
    "f32": ({}, {LINEAR: _in_f32, TILES: _without_pairs}),
    # One with AMX.
    "amx": ({}, {LINEAR: _narrow_by_libraries}),
    # Nor a torch with the private operator of attention.
    "public": ({}, {CODE: _nothing_compiles, "halfmoon.workers.model.attention.kernel": _public}),
    # No smaller number of rows has a whole group's bits.
    "whole": ({}, {CODE: _nothing_compiles, "halfmoon.workers.model.self_test": _whole_groups}),
    # Older CPUs.
    "avx2": (_instructions("avx2", "AVX2"), {TILES: _without_pairs}),
    "sse": (_instructions("default", "SSE41"), {TILES: _without_pairs}),
}

_variables, _changes = KERNELS[os.environ["HALFMOON_TEST_KERNEL"]]
os.environ.update(_variables)
after_import(_changes)
