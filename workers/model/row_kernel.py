"""Products of rows with packed weights, compiled for this CPU.

Each element of a result is one chain of fused multiply-adds over the inputs, in their order, in f32, that begins with
the bias. So its bits depend on its own row and weights alone: not on the rows beside it, on how many there are, on the
tile in which it is computed, on the number of threads, or on the width of the CPU's vectors. That is what exact
numerics ask of a product, and no library promises it.

Weights lie in *panels* of `LANES` outputs: behind each other the inputs, and of each the weights of these outputs. A
*tile* is a few rows times a few panels, whose sums stay in registers while the inputs go by. Panels are read once, in
the order in which they lie, and the tiles of one panel share the reading of the next from memory. So a step of a small
batch takes as long as memory does. Source of panels and tiles: Goto and van de Geijn, Anatomy of High-Performance
Matrix Multiplication (2008). Neither packed activations nor a division of the inputs gained anything here.

bf16 and f16 weights are widened in registers, which loses nothing and reads half the bytes. A word of 32 bits holds the
bf16 weights of two outputs, half a panel apart, which a shift and a mask widen.

LLVM compiles text in its own language, in a tenth of a second for each dtype. What compiles Python's functions
vectorises as it sees fit; here the text says which vectors are multiplied and added.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import torch

Tensor = torch.Tensor

LANES = 16
"""Outputs of a panel: a cache line of f32, one vector of AVX-512 and two of AVX2."""
_LINE_BYTES = 64
_MULTIPLY_ADDS_MIN = 1 << 20
"""Of a product that is worth waking other threads for."""
_TILES = {16: {1: 6, 2: 3, 3: 2, 4: 1}, 32: {1: 12, 2: 8, 4: 4}}
"""By the CPU's registers of a vector (32 of AVX-512): the most rows of a tile of so many panels. Its sums, weights of
one input and an activation fit in the registers."""


class KernelUnavailable(Exception):
    """Nothing can be compiled here, for the reason given."""


class PackedRows:
    """The weight `[outputs, inputs]` of a product, f32, bf16 or f16, on the CPU. Raises `KernelUnavailable`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._multiply = _multiply_of(weight.dtype)
        self._outputs, self._inputs = weight.shape
        self._panels = -(-self._outputs // LANES)
        self._weights = _in_panels(weight)
        self._bias = torch.zeros(self._panels * LANES)
        if bias is not None:
            self._bias[: self._outputs] = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias` in f32, for `x` `[rows, inputs]`."""
        assert x.shape[1] == self._inputs, (x.shape, self._inputs)
        x = x.float().contiguous()
        rows, width = len(x), self._panels * LANES
        out = torch.empty(rows, width)
        if rows == 0:
            return out[:, : self._outputs]
        product = _Product(
            x=x.data_ptr(),
            x_row=4 * self._inputs,
            weights=self._weights.data_ptr(),
            panel=self._weights[0].nbytes,
            bias=self._bias.data_ptr(),
            out=out.data_ptr(),
            out_row=4 * width,
            inputs=self._inputs,
            rows=rows,
            panels=self._panels,
        )
        worth_threads = rows * width * self._inputs >= _MULTIPLY_ADDS_MIN
        self._multiply(product, torch.get_num_threads() if worth_threads else 1)
        return out if width == self._outputs else out[:, : self._outputs].contiguous()


def _in_panels(weight: Tensor) -> Tensor:
    """`[panels, inputs, LANES]`, from a cache line on; of bf16 `[panels, inputs, LANES / 2, 2]`."""
    missing = -len(weight) % LANES
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
    panels = weight.reshape(-1, LANES, weight.shape[1]).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        # The lower half of a word comes first.
        panels = panels.reshape(*panels.shape[:2], 2, LANES // 2).transpose(2, 3)
    room = torch.empty(weight.numel() * weight.itemsize + _LINE_BYTES, dtype=torch.uint8)
    skipped = -room.data_ptr() % _LINE_BYTES
    aligned = room[skipped : skipped + weight.numel() * weight.itemsize].view(weight.dtype)
    return aligned.view(panels.shape).copy_(panels)


_ADDRESSES = ("x", "weights", "bias", "out")
_FIELDS = (*_ADDRESSES, "x_row", "out_row", "panel", "inputs", "rows", "panels")


class _Product(ctypes.Structure):
    """Addresses; bytes from one row or panel to the next; numbers."""

    _fields_ = [(name, ctypes.c_int64) for name in _FIELDS]


class _Multiply:
    """The kernel for weights of one dtype: called with a product and a number of threads."""

    def __init__(self, dtype: torch.dtype) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = llvm.get_host_cpu_features()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
        )
        module = llvm.parse_assembly(_source(dtype, _TILES[32 if features.get("avx512f") else 16]))
        module.verify()
        # The code lives as long as this.
        self._compiled = llvm.create_mcjit_compiler(module, machine)
        self._compiled.finalize_object()
        address = self._compiled.get_function_address
        self._whole = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Product))(address("whole"))
        self._share = ctypes.c_void_p(address("share"))
        self._parallel = _openmp()

    def __call__(self, product: _Product, threads: int) -> None:
        if threads == 1 or self._parallel is None:
            self._whole(product)
        else:
            self._parallel(self._share, ctypes.byref(product), threads, 0)


@cache
def _multiply_of(dtype: torch.dtype) -> _Multiply:
    # Without the instruction each multiply-add would be a call.
    if llvm.get_host_cpu_features().get("fma") is False:
        raise KernelUnavailable("the CPU has no fused multiply-add")
    try:
        return _Multiply(dtype)
    except (RuntimeError, OSError) as error:
        raise KernelUnavailable(f"LLVM does not compile here: {' '.join(str(error).split())}") from None


@cache
def _openmp() -> ctypes._NamedFuncPointer | None:
    """`GOMP_parallel` of the library whose threads PyTorch uses: a second pool would contend with them. None where
    PyTorch has another one; products are then computed by one thread.
    """
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    found = re.search(r"/\S*libgomp\S*", mapped)
    if found is None:
        return None
    library = ctypes.CDLL(found[0])
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    parallel = library.GOMP_parallel
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Product), ctypes.c_uint, ctypes.c_uint]
    return parallel


# The kernel's text. Names that begin with a capital letter below are its types.
_Vector = f"<{LANES} x float>"
_Words = f"<{LANES // 2} x i32>"
_Index = f"<{LANES} x i32>"
_STRIDED = "ptr %x, i64 %x_row, ptr %w, i64 %panel, ptr %bias, ptr %out, i64 %out_row, i64 %inputs"
"""Arguments of a part of a product: its first row, panel and bias."""


def _source(dtype: torch.dtype, tiles: dict[int, int]) -> str:
    """LLVM's text of `whole(product)`, and of `share(product)` for one of several threads of OpenMP."""
    parts = [
        f"declare {_Vector} @llvm.fma.v{LANES}f32({_Vector}, {_Vector}, {_Vector})",
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "declare i32 @omp_get_thread_num()",
        "declare i32 @omp_get_num_threads()",
    ]
    for panels, rows_max in tiles.items():
        parts += [_tile(dtype, rows, panels) for rows in range(1, rows_max + 1)]
        parts.append(_column(dtype, panels, rows_max))
    return "\n".join([*parts, _panels(tiles), _ENTRIES])


def _tile(dtype: torch.dtype, rows: int, panels: int) -> str:
    """`rows` times `panels`: their sums go through all inputs in registers.

    With each input a part of what lies `ahead` is asked for, so that it is in the second cache when its turn comes.
    """
    places = [(row, panel) for row in range(rows) for panel in range(panels)]
    text = []
    for panel in range(panels):
        text += [
            f"%w_skip{panel} = mul i64 %panel, {panel}",
            f"%w{panel} = getelementptr i8, ptr %w, i64 %w_skip{panel}",
            f"%bias_at{panel} = getelementptr float, ptr %bias, i64 {LANES * panel}",
            f"%bias{panel} = load {_Vector}, ptr %bias_at{panel}, align 4",
        ]
    for row in range(rows):
        text += [
            f"%x_skip{row} = mul i64 %x_row, {row}",
            f"%x{row} = getelementptr i8, ptr %x, i64 %x_skip{row}",
            f"%out_skip{row} = mul i64 %out_row, {row}",
            f"%out{row} = getelementptr i8, ptr %out, i64 %out_skip{row}",
        ]
    text += ["br label %loop", "loop:", "%input = phi i64 [0, %entry], [%next, %loop]"]
    text += [
        f"%sum{row}_{panel} = phi {_Vector} [%bias{panel}, %entry], [%added{row}_{panel}, %loop]"
        for row, panel in places
    ]
    text += [
        "%ahead_skip = mul i64 %input, %ahead_step",
        "%ahead_at = getelementptr i8, ptr %ahead, i64 %ahead_skip",
        "call void @llvm.prefetch.p0(ptr %ahead_at, i32 0, i32 2, i32 1)",
        f"%skip = mul i64 %input, {LANES * dtype.itemsize}",
    ]
    for panel in range(panels):
        text += [f"%at{panel} = getelementptr i8, ptr %w{panel}, i64 %skip", *_widened(dtype, panel)]
    for row in range(rows):
        text += [
            f"%x_at{row} = getelementptr float, ptr %x{row}, i64 %input",
            f"%one{row} = load float, ptr %x_at{row}, align 4",
            f"%first{row} = insertelement {_Vector} poison, float %one{row}, i32 0",
            f"%all{row} = shufflevector {_Vector} %first{row}, {_Vector} poison, {_Index} zeroinitializer",
        ]
    text += [
        f"%added{row}_{panel} = call {_Vector} @llvm.fma.v{LANES}f32("
        f"{_Vector} %all{row}, {_Vector} %wide{panel}, {_Vector} %sum{row}_{panel})"
        for row, panel in places
    ]
    text += [
        "%next = add i64 %input, 1",
        "%more = icmp ult i64 %next, %inputs",
        "br i1 %more, label %loop, label %end",
        "end:",
    ]
    for row, panel in places:
        text += [
            f"%to{row}_{panel} = getelementptr float, ptr %out{row}, i64 {LANES * panel}",
            f"store {_Vector} %added{row}_{panel}, ptr %to{row}_{panel}, align 4",
        ]
    head = f"define internal void @tile_{rows}_{panels}({_STRIDED}, ptr %ahead, i64 %ahead_step) {{"
    return "\n".join([head, "entry:", *text, "ret void", "}"])


def _widened(dtype: torch.dtype, panel: int) -> list[str]:
    """`%wide`, in f32: the weights of one input."""
    if dtype == torch.float32:
        return [f"%wide{panel} = load {_Vector}, ptr %at{panel}, align {_LINE_BYTES}"]
    if dtype == torch.float16:
        halves = f"<{LANES} x half>"
        return [
            f"%narrow{panel} = load {halves}, ptr %at{panel}, align {_LINE_BYTES // 2}",
            f"%wide{panel} = fpext {halves} %narrow{panel} to {_Vector}",
        ]
    assert dtype == torch.bfloat16, dtype
    in_order = ", ".join(f"i32 {lane}" for lane in range(LANES))
    return [
        f"%words{panel} = load {_Words}, ptr %at{panel}, align {_LINE_BYTES // 2}",
        f"%low{panel} = shl {_Words} %words{panel}, splat (i32 16)",
        f"%high{panel} = and {_Words} %words{panel}, splat (i32 -65536)",
        f"%bits{panel} = shufflevector {_Words} %low{panel}, {_Words} %high{panel}, {_Index} <{in_order}>",
        f"%wide{panel} = bitcast {_Index} %bits{panel} to {_Vector}",
    ]


def _column(dtype: torch.dtype, panels: int, rows_max: int) -> str:
    """All rows times `panels`, in as few tiles as there can be, whose heights differ by one at most: a tile of one or
    two rows computes at half of the speed. Each asks for its part of the next panels.
    """
    heights = range(1, rows_max + 1)
    cases = " ".join(f"i64 {rows}, label %rows{rows}" for rows in heights)
    passed = _STRIDED.replace("%x,", "%x_now,").replace("%out,", "%out_now,")
    calls = "\n".join(
        f"rows{rows}:\n"
        f"call void @tile_{rows}_{panels}({passed}, ptr %ahead_now, i64 %ahead_step)\n"
        "br label %done"
        for rows in heights
    )
    return f"""
define internal void @column_{panels}({_STRIDED}, i64 %rows) {{
entry:
%filled = add i64 %rows, {rows_max - 1}
%tiles = udiv i64 %filled, {rows_max}
%low = udiv i64 %rows, %tiles
%higher_tiles = urem i64 %rows, %tiles
%ahead_skip = mul i64 %panel, {panels}
%ahead = getelementptr i8, ptr %w, i64 %ahead_skip
%shared = add i64 %tiles, {LANES * dtype.itemsize * panels - 1}
%ahead_step = udiv i64 %shared, %tiles
%ahead_tile = mul i64 %ahead_step, %inputs
br label %tile
tile:
%tile_now = phi i64 [0, %entry], [%tile_next, %done]
%x_now = phi ptr [%x, %entry], [%x_next, %done]
%out_now = phi ptr [%out, %entry], [%out_next, %done]
%ahead_now = phi ptr [%ahead, %entry], [%ahead_next, %done]
%is_higher = icmp ult i64 %tile_now, %higher_tiles
%more_rows = zext i1 %is_higher to i64
%height = add i64 %low, %more_rows
switch i64 %height, label %done [{cases}]
{calls}
done:
%x_skip = mul i64 %x_row, %height
%x_next = getelementptr i8, ptr %x_now, i64 %x_skip
%out_skip = mul i64 %out_row, %height
%out_next = getelementptr i8, ptr %out_now, i64 %out_skip
%ahead_next = getelementptr i8, ptr %ahead_now, i64 %ahead_tile
%tile_next = add i64 %tile_now, 1
%more = icmp ult i64 %tile_next, %tiles
br i1 %more, label %tile, label %end
end:
ret void
}}"""


def _panels(tiles: dict[int, int]) -> str:
    """All rows times some panels: as many at once as a tile has room for with all rows, or with the most rows."""
    loads = "\n".join(
        f"%{name}_at = getelementptr i64, ptr %product, i64 {i}\n"
        f"%{name} = load {'ptr' if name in _ADDRESSES else 'i64'}, ptr %{name}_at"
        for i, name in enumerate(_FIELDS)
    )
    tallest, *others = sorted(tiles, key=lambda panels: -tiles[panels])
    chosen, choice = str(tallest), []
    for panels in others:
        choice.append(f"%fits{panels} = icmp ule i64 %rows, {tiles[panels]}")
        choice.append(f"%chosen{panels} = select i1 %fits{panels}, i64 {panels}, i64 {chosen}")
        chosen = f"%chosen{panels}"
    passed = _STRIDED.replace("%w,", "%w_now,").replace("%bias,", "%bias_now,").replace("%out,", "%out_now,")
    cases = " ".join(f"i64 {panels}, label %of{panels}" for panels in tiles)
    calls = "\n".join(
        f"of{panels}:\ncall void @column_{panels}({passed}, i64 %rows)\nbr label %done" for panels in tiles
    )
    return f"""
define internal void @panels(ptr %product, i64 %first, i64 %end) {{
entry:
{loads}
{chr(10).join(choice)}
%none = icmp uge i64 %first, %end
br i1 %none, label %return, label %column
column:
%now = phi i64 [%first, %entry], [%after, %done]
%left = sub i64 %end, %now
%enough = icmp uge i64 %left, {chosen}
%taken = select i1 %enough, i64 {chosen}, i64 1
%w_skip = mul i64 %panel, %now
%w_now = getelementptr i8, ptr %weights, i64 %w_skip
%skip = mul i64 %now, {4 * LANES}
%bias_now = getelementptr i8, ptr %bias, i64 %skip
%out_now = getelementptr i8, ptr %out, i64 %skip
switch i64 %taken, label %done [{cases}]
{calls}
done:
%after = add i64 %now, %taken
%more = icmp ult i64 %after, %end
br i1 %more, label %column, label %return
return:
ret void
}}"""


_ENTRIES = f"""
define void @whole(ptr %product) {{
%at = getelementptr i64, ptr %product, i64 {_FIELDS.index("panels")}
%all = load i64, ptr %at
call void @panels(ptr %product, i64 0, i64 %all)
ret void
}}
define void @share(ptr %product) {{
%at = getelementptr i64, ptr %product, i64 {_FIELDS.index("panels")}
%all = load i64, ptr %at
%thread = call i32 @omp_get_thread_num()
%threads = call i32 @omp_get_num_threads()
%mine = zext i32 %thread to i64
%of = zext i32 %threads to i64
%next = add i64 %mine, 1
%before = mul i64 %all, %mine
%until = mul i64 %all, %next
%first = udiv i64 %before, %of
%end = udiv i64 %until, %of
call void @panels(ptr %product, i64 %first, i64 %end)
ret void
}}"""
"""The whole product, and the calling thread's share of its panels."""
