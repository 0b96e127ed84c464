"""`python tests/chaos/run.py --seeds 10000`: worlds of chaos, as many at a time as there are processors.

Each seed that fails is printed with its last words; the first ends the run. `--seed N` plays one again, with its
whole traceback.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.chaos.world import World

#: Seeds that one process plays before it tells.
PART = 20
PRINT_SEEDS = 500

Played = tuple[int, int, Counter[str], str]


def play(seeds: range) -> Played:
    """Worlds and events played, what happened in them, and the traceback of the first that fails."""
    counts, played, events = Counter[str](), 0, 0
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except Exception:  # whatever it is, this seed has found it
            return (
                played,
                events,
                counts,
                f"{traceback.format_exc()}seed {seed} fails; again: make chaos SEED={seed}",
            )
        played += 1
        events += len(world.log)
        counts += world.net.counts
    return played, events, counts, ""


def play_all(seeds: range, processes: int) -> Iterator[Played]:
    """Parts of `seeds`, in the order in which they end."""
    parts = [seeds[place : place + PART] for place in range(0, len(seeds), PART)]
    if processes == 1 or len(parts) == 1:
        yield from map(play, parts)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap_unordered(play, parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, default=-1, help="only this one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time")
    args = parser.parse_args()
    seeds = range(args.seed, args.seed + 1) if args.seed >= 0 else range(args.first, args.first + args.seeds)
    started, total, played, events = time.monotonic(), Counter[str](), 0, 0
    for some, these, counts, failure in play_all(seeds, args.processes):
        if failure:
            print(failure)
            return 1
        before = played
        played, events, total = played + some, events + these, total + counts
        if played // PRINT_SEEDS > before // PRINT_SEEDS:
            print(f"{played:,} seeds, {events:,} events, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{played:,} seeds, {events:,} events, {time.monotonic() - started:.0f} s: none fails")
    for what, count in sorted(total.items()):
        print(f"  {what:<24} {count:>12,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
