"""Products of one layer's weights, by the row kernel and by the libraries, beside what bounds them: the speed at which
one core reads memory, and the products that it adds a second. All by turns in one run, on one thread.

Weights are cold: those of many layers take turns, as in a step. `of_bound` is the time that the bound allows over the
time taken: 1 where no product could be faster. What reads and what multiplies is compiled as the kernels are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from clusters import finish, parsed, parser, spread
from llvmlite import ir

from halfmoon.workers.model import linear
from halfmoon.workers.model.kernels.code import LANES, LINE_BYTES, VECTOR, Code, Compiled, Value
from halfmoon.workers.model.kernels.tiles import multiplies_pairs

#: Outputs and inputs of the built-in model's gate and up, and of its down.
SHAPES = ((3072, 576), (576, 1536))
ROWS = (1, 4, 8, 16, 256)
LAYERS = 30
READ_BYTES = 128 << 20
READ_AHEAD_BYTES = 4096
"""Are asked for, as a kernel's next panels are."""
CHAINS = 6
"""Of multiply-adds that do not wait for each other: two vectors of AVX2 each."""
MULTIPLY_ADDS = 50_000_000


def reading() -> Callable[[], float]:
    """Measures the bytes read a second."""
    module = ir.Module()
    read = Code(module, "read", ("from", "out"), ("lines",))

    def line(index: Value, sums: list[Value]) -> list[Value]:
        start = read.at(read.given["from"], read.multiply(index, LINE_BYTES * len(sums)))
        for i in range(len(sums)):
            read.prefetch(read.at(start, READ_AHEAD_BYTES + LINE_BYTES * i))
        return [
            read.builder.fadd(each, read.load(read.at(start, LINE_BYTES * i), VECTOR))
            for i, each in enumerate(sums)
        ]

    for each in read.loop(read.given["lines"], [read.constant(0.0)] * 4, line):
        read.store(each, read.given["out"])
    read.ended()
    reads = Compiled(module).function(read)
    memory, out = torch.ones((READ_BYTES + READ_AHEAD_BYTES) // 4), torch.zeros(LANES)

    def bytes_per_s() -> float:
        return READ_BYTES / taken(
            lambda: reads(memory.data_ptr(), out.data_ptr(), READ_BYTES // (4 * LINE_BYTES))
        )

    return bytes_per_s


def multiplying(*, pairs: bool) -> Callable[[], float]:
    """Measures the products added a second, of all lanes."""
    module = ir.Module()
    add = Code(module, "add", ("out",), ("steps",))
    factor = add.load(add.given["out"], VECTOR)

    def chains(_: Value, sums: list[Value]) -> list[Value]:
        combine = add.pairs_added if pairs else add.fma
        return [combine(factor, factor, so_far) for so_far in sums]

    for total in add.loop(add.given["steps"], [factor] * CHAINS, chains):
        add.store(total, add.given["out"])
    add.ended()
    adds, out = Compiled(module).function(add), torch.zeros(LANES)
    of_step = LANES * CHAINS * (2 if pairs else 1)
    steps = MULTIPLY_ADDS // of_step

    def adds_per_s() -> float:
        return steps * of_step / taken(lambda: adds(out.data_ptr(), steps))

    return adds_per_s


def taken(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def layers_of(weights: list[torch.Tensor], *, compiled: bool) -> list[linear.Linear]:
    by_rows = linear._by_rows
    if not compiled:
        linear._by_rows = lambda *_: None
    try:
        return [linear.Linear(weight) for weight in weights]
    finally:
        linear._by_rows = by_rows


def through(layers: list[linear.Linear], x: torch.Tensor) -> None:
    for layer in layers:
        layer(x)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--layers", type=int, default=LAYERS)
    args = parsed(options, rounds=1, layers=2)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    bytes_per_s = reading()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            adds_per_s = multiplying(pairs=dtype == torch.bfloat16 and multiplies_pairs())
            for outputs, inputs in SHAPES:
                weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(args.layers)]
                kinds = {name: layers_of(weights, compiled=name == "rows") for name in ("rows", "library")}
                for count in ROWS:
                    x = torch.randn(count, inputs).to(dtype)
                    work = {name: partial(through, layers, x) for name, layers in kinds.items()}
                    found: dict[str, list[float]] = {
                        "rows_us": [],
                        "library_us": [],
                        "ratio": [],
                        "of_bound": [],
                    }
                    for run in work.values():
                        run()
                    for _ in range(args.rounds):
                        took = {name: taken(run) / args.layers for name, run in work.items()}
                        bound = max(
                            outputs * inputs * dtype.itemsize / bytes_per_s(),
                            count * outputs * inputs / adds_per_s(),
                        )
                        found["rows_us"].append(took["rows"] * 1e6)
                        found["library_us"].append(took["library"] * 1e6)
                        found["ratio"].append(took["rows"] / took["library"])
                        found["of_bound"].append(bound / took["rows"])
                    rows.append(
                        {
                            "dtype": str(dtype).removeprefix("torch."),
                            "shape": [outputs, inputs],
                            "rows": count,
                            "kernels": {name: layers[0].kernel for name, layers in kinds.items()},
                            **{name: spread(values) for name, values in found.items()},
                        }
                    )
    lines = [
        f"{row['dtype']:>9} {' x '.join(map(str, row['shape'])):<11} {row['rows']:>4} rows: "
        f"{row['rows_us']['p50']:9.0f} us, "
        f"{row['kernels']['library']} {row['library_us']['p50']:9.0f}, ratio {row['ratio']['p50']:.2f} "
        f"({row['ratio']['min']:.2f} to {row['ratio']['max']:.2f}), of the bound {row['of_bound']['p50']:.2f} "
        f"({row['of_bound']['min']:.2f} to {row['of_bound']['max']:.2f})"
        for row in rows
    ]
    finish(args, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
