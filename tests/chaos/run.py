"""`python tests/chaos/run.py --seeds 10000`: worlds of chaos one after another; the first seed that fails is
printed.

`--seed N` plays one again, with its whole traceback.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conductor"))
sys.path.insert(0, str(Path(__file__).parent))

from world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, default=-1, help="only this one")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed >= 0 else range(args.first, args.first + args.seeds)
    started, counts, played, events = time.monotonic(), Counter[str](), 0, 0
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except Exception:  # whatever it is, this seed has found it
            traceback.print_exc()
            print(f"seed {seed} fails; again: make chaos SEED={seed}")
            return 1
        played += 1
        events += len(world.log)
        counts += world.counts
        if played % 500 == 0:
            print(f"{played:,} seeds, {events:,} events, {time.monotonic() - started:.0f} s", flush=True)
    print(f"{played:,} seeds, {events:,} events, {time.monotonic() - started:.0f} s: none fails")
    for what, count in sorted(counts.items()):
        print(f"  {what:<24} {count:>12,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
