"""Measures what a push of a short prompt moves: the tokens of the block that it ends in, or all of that block, as
agents are sent it that do not take parts.

`python benchmarks/pushes.py [--json] [--rounds N] [--tokens N,N,…]`. KV of the built-in model in float32 (30 layers,
blocks of 256 tokens) between two processes, over shared memory, TCP, and TCP with TLS, a layer at a time as while it
is computed. Both forms of each prompt move once a round, in turn. Ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
from typing import Any

from clusters import finish, parsed, parser
from transfer import play, ratio, summary
from transfer_ends import ENCRYPTION, Push


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--tokens", default="2,128,259", help="lengths of prompts")
    args = parsed(options, rounds=2, tokens="2")
    rows: list[dict[str, Any]] = []
    for kind in ENCRYPTION:
        for tokens in map(int, args.tokens.split(",")):
            with contextlib.ExitStack() as stack:
                pair = [Push(kind, tokens, whole=whole) for whole in (True, False)]
                for one in pair:
                    stack.callback(one.close)
                whole, part = pair
                found = play([whole, part], args.rounds)
            rows.append(
                {
                    "transport": kind,
                    "tokens": tokens,
                    "whole_bytes": whole.size,
                    "bytes": part.size,
                    "whole_ms": summary(found[whole.name], whole.size)["ms_median"],
                    "ms": summary(found[part.name], part.size)["ms_median"],
                    "ms_iqr": summary(found[part.name], part.size)["ms_iqr"],
                    "time_ratio": round(ratio(found[part.name], found[whole.name], "time"), 3),
                    "cpu_ratio": round(ratio(found[part.name], found[whole.name], "cpu"), 3),
                }
            )
    columns = (9, 8, 14, 12, 11, 9, 9, 12, 11)
    lines = ["".join(f"{name:>{width}}" for name, width in zip(rows[0], columns, strict=True))]
    lines += [
        "".join(f"{value:>{width}}" for value, width in zip(row.values(), columns, strict=True))
        for row in rows
    ]
    finish(args, {"rows": rows}, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
