"""Products of one layer's weights, by the row kernel and by the libraries, beside what bounds them: the speed at which
one core reads memory, and its fused multiply-adds a second. All by turns in one run, on one thread.

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
from halfmoon.workers.model.kernels.code import LINE_BYTES, VECTOR, Code, Compiled, Value

#: Outputs and inputs of the built-in model's gate and up, and of its down.
SHAPES = ((3072, 576), (576, 1536))
ROWS = (1, 4, 8, 16, 256)
LAYERS = 30
READ_BYTES = 128 << 20
CHAINS = 6
"""Of multiply-adds that do not wait for each other: two vectors of AVX2 each."""
MULTIPLY_ADDS = 50_000_000


def bounds() -> tuple[Callable[[], float], Callable[[], float]]:
    """Measure the bytes read a second, and the multiply-adds of one lane a second."""
    module = ir.Module()
    read = Code(module, "read", ("from", "out"), ("lines",))

    def line(index: Value, sums: list[Value]) -> list[Value]:
        start = read.at(read.given["from"], read.multiply(index, LINE_BYTES * len(sums)))
        return [
            read.builder.fadd(each, read.load(read.at(start, LINE_BYTES * i), VECTOR))
            for i, each in enumerate(sums)
        ]

    for each in read.loop(read.given["lines"], [read.constant(0.0)] * 4, line):
        read.store(each, read.given["out"])
    read.ended()
    add = Code(module, "add", ("out",), ("steps",))
    factor = add.load(add.given["out"], VECTOR)

    def chains(_: Value, sums: list[Value]) -> list[Value]:
        return [add.fma(factor, factor, so_far) for so_far in sums]

    for total in add.loop(add.given["steps"], [factor] * CHAINS, chains):
        add.store(total, add.given["out"])
    add.ended()
    compiled = Compiled(module)
    reads, adds = compiled.function(read), compiled.function(add)
    memory, out = torch.ones(READ_BYTES // 4), torch.zeros(16)

    def bytes_per_s() -> float:
        return READ_BYTES / taken(
            lambda: reads(memory.data_ptr(), out.data_ptr(), READ_BYTES // (4 * LINE_BYTES))
        )

    def adds_per_s() -> float:
        out.zero_()
        steps = MULTIPLY_ADDS // (16 * CHAINS)
        return steps * 16 * CHAINS / taken(lambda: adds(out.data_ptr(), steps))

    return bytes_per_s, adds_per_s


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
    bytes_per_s, adds_per_s = bounds()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
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
