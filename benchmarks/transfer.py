"""Measures how fast blocks move, against what the machine can do in the same run: one memcpy, one between two pools'
memory, a plain blocking socket, the same under TLS, and Mooncake's store over TCP.

`python benchmarks/transfer.py [--json] [--rounds N] [--mooncake PYTHON]`. 64 MiB of block-layers (256 KiB each) between
two processes, then single 4 KiB layers, for the latency. Every contender moves once a round, in turn, and
ratios are medians of the rounds' ratios, so that what else the machine does hits all of them alike. A get of
ours is a leased read, over TCP authenticated and verified; a write of ours goes into slots that its order has
reserved; `client_get` copies nothing, it leases blocks where another process put them. CPU seconds are of both
ends (of Mooncake without its master). A memcpy of this size has huge pages, and shared memory has them where /dev/shm
is mounted with them (`huge_pages_of_shm` in the result); `segment_copy` has the same pages as ours.

Mooncake's store takes part when PYTHON (or $MOONCAKE_PYTHON, or the interpreter of this program) has its
wheel:
`python -m venv V && V/bin/pip install mooncake-transfer-engine-non-cuda`, then `--mooncake V/bin/python`. Else its rows
are left out, and named with the reason.
"""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

from clusters import finish, parsed, parser
from transfer_ends import (
    MIB,
    TOTAL,
    Contender,
    Memcpy,
    Mooncake,
    MooncakeGet,
    Ours,
    Plain,
    SegmentCopy,
    huge_pages_of_shm,
    python_with_mooncake,
)
from transfer_in_place import InPlace

Samples = list[tuple[float, float]]
#: Ours, what it is held against, the figure, and what it must be: at least (or at most).
LINES = (
    ("shm_get", "memcpy", "speed", ">=", 0.9),
    ("shm_write", "memcpy", "speed", ">=", 0.9),
    ("shm_get", "segment_copy", "speed", ">=", 0.95),
    ("shm_write", "segment_copy", "speed", ">=", 0.95),
    ("client_get", "memcpy", "speed", ">=", 0.9),
    ("tcp_get", "socket", "speed", ">=", 0.8),
    ("tcp_get", "mooncake_get", "speed", ">=", 1.2),
    ("tcp_get", "mooncake_get", "cpu", "<=", 0.8),
    ("tcp_get_4kib", "mooncake_get_4kib", "time", "<=", 1.0),
    ("tls_get", "socket_tls", "speed", ">=", 0.8),
)


def play(contenders: list[Contender], rounds: int, in_a_row: int = 1) -> dict[str, Samples]:
    """Everybody warms up twice, then moves once a round (or `in_a_row` times)."""
    found: dict[str, Samples] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 2):
        for contender in contenders:
            samples = [contender.go() for _ in range(in_a_row)]
            if number >= 2:
                found[contender.name] += samples
    return found


def summary(samples: Samples, size: int) -> dict[str, float]:
    seconds = [sample[0] for sample in samples]
    low, _, high = statistics.quantiles(seconds, n=4)
    median = statistics.median(seconds)
    return {
        "mib_per_s": round(size / MIB / median, 1),
        "ms_median": round(median * 1e3, 3),
        "ms_iqr": round((high - low) * 1e3, 3),
        "cpu_s_per_gib": round(sum(sample[1] for sample in samples) / (size * len(samples) / 2**30), 3),
    }


def ratio(mine: Samples, theirs: Samples, figure: str) -> float:
    """The median of the rounds' ratios; for CPU, the ratio of the sums."""
    if figure == "cpu":
        return sum(cpu for _, cpu in mine) / sum(cpu for _, cpu in theirs)
    times = [one / other for (one, _), (other, _) in zip(mine, theirs, strict=True)]
    return statistics.median(times) if figure == "time" else 1 / statistics.median(times)


def lines_of(found: dict[str, Samples]) -> list[dict[str, Any]]:
    judged = []
    for mine, theirs, figure, relation, bound in LINES:
        if mine in found and theirs in found:
            value = round(ratio(found[mine], found[theirs], figure), 3)
            holds = value >= bound if relation == ">=" else value <= bound
            judged.append(
                {
                    "of": mine,
                    "against": theirs,
                    "figure": figure,
                    "ratio": value,
                    "must": f"{relation} {bound}",
                    "holds": holds,
                }
            )
    return judged


def skipped_lines(skipped: dict[str, str]) -> list[str]:
    """What was not measured, by name, and why; `skipped` has the reasons of contenders."""
    lines = [f"{name:22}not measured: {reason}" for name, reason in skipped.items()]
    return lines + [
        f"{f'{figure} of {mine} / {theirs}':46}not judged: {theirs} was not measured"
        for mine, theirs, figure, _, _ in LINES
        if theirs in skipped
    ]


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=20, help="of 64 MiB each")
    options.add_argument(
        "--mooncake", metavar="PYTHON", default="", help="an interpreter that has Mooncake's wheel"
    )
    args = parsed(options, rounds=2)
    found: dict[str, Samples] = {}
    sizes: dict[str, int] = {}
    interpreter, reason = python_with_mooncake(args.mooncake)
    skipped = dict.fromkeys((MooncakeGet.BIG, MooncakeGet.SMALL), reason) if reason else {}
    with contextlib.ExitStack() as stack:
        mooncake = Mooncake(interpreter) if interpreter else None
        if mooncake is not None:
            stack.callback(mooncake.close)
        big: list[Contender] = [Memcpy(), SegmentCopy(), Ours("shm"), Ours("shm", writing=True), InPlace()]
        big += [Plain("socket"), Ours("tcp")]
        small: list[Contender] = [Ours(kind, small=True) for kind in ("shm", "tcp", "tls")]
        if mooncake is not None:
            big.append(MooncakeGet(mooncake, "big", TOTAL))
            small.append(MooncakeGet(mooncake, "small", 4096))
        big += [Plain("socket_tls"), Ours("tls")]
        for contenders, in_a_row in ((big, 1), (small, 25)):
            for contender in contenders:
                stack.callback(contender.close)
                sizes[contender.name] = contender.size
            found |= play(contenders, args.rounds, in_a_row)
    rows = {name: summary(samples, sizes[name]) for name, samples in found.items()}
    judged = lines_of(found)
    lines = [f"{'':22}{'MiB/s':>10}{'median ms':>12}{'iqr ms':>10}{'CPU s/GiB':>11}"]
    for name, row in rows.items():
        cells = zip(row.values(), (10, 12, 10, 11), strict=True)
        lines.append(f"{name:22}" + "".join(f"{value:>{width}}" for value, width in cells))
    lines.append("")
    for line in judged:
        verdict = "holds" if line["holds"] else "MISSED"
        against = f"{line['figure']} of {line['of']} / {line['against']}"
        lines.append(f"{against:46}{line['ratio']:>8}   must be {line['must']}   {verdict}")
    lines += skipped_lines(skipped)
    result = {**rows, "lines": judged, "skipped": skipped, "huge_pages_of_shm": huge_pages_of_shm()}
    finish(args, result, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
