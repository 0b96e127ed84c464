"""`python tests/chaos/run.py --seeds 10000`: worlds of chaos, as many at a time as there are processors.

Seeds that fail are printed with their last words; too many of them end the run. `--seed N` plays one again, with its
whole traceback. With `--out FILE` what was played is kept there as JSON, and another run goes on from where that one
ended: after SEEDS more, or a Ctrl-C.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measured import beside, keep
from tests.chaos.world import World

#: Seeds that one process plays before it tells.
PART = 20
PRINT_SEEDS = 500
#: Between two collections of what earlier worlds left.
COLLECT_SEEDS = 5
FAILURES_MAX = 20
#: What a world is made of; a run is not continued by other code.
PLAYED = ("conductor/core", "conductor/live", "schemas", "store", "workers", "tests/chaos")


@dataclass
class Failure:
    """`cause` is the same for failures that are probably one: numbers and ids are left out of it."""

    seed: int
    cause: str
    words: str


@dataclass
class Played:
    """What became of some seeds, all of them."""

    seeds: int = 0
    events: int = 0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Played) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.cpu_s += other.cpu_s
        self.counts += other.counts
        self.failures += other.failures


def play(seeds: range) -> Played:
    """Worlds one after another. A world is one large circle of references, which is collected only now and then."""
    gc.disable()
    played, started_s = Played(), time.process_time()
    for seed in seeds:
        world = World(seed)
        try:
            world.run()
        except Exception as problem:  # whatever it is, this seed has found it
            played.failures.append(Failure(seed, cause_of(problem), traceback.format_exc()))
        played.seeds += 1
        played.events += len(world.log)
        played.counts += world.net.counts
        if seed % COLLECT_SEEDS == 0:
            gc.collect()
    played.cpu_s = time.process_time() - started_s
    return played


def cause_of(problem: Exception) -> str:
    """Its kind, where it was raised, and the first of its words."""
    last = traceback.extract_tb(problem.__traceback__)[-1]
    argument = problem.args[0] if problem.args else ""
    first = argument[0] if isinstance(argument, tuple) and argument else argument
    words = re.sub(r"[0-9]+", "n", str(first))[:120]
    return f"{type(problem).__name__} in {Path(last.filename).name} {last.name}: {words}"


def play_all(seeds: range, processes: int) -> Iterator[Played]:
    """Parts of `seeds`, in their order."""
    parts = [seeds[place : place + PART] for place in range(0, len(seeds), PART)]
    if processes == 1 or len(parts) == 1:
        yield from map(play, parts)
        return
    with multiprocessing.Pool(processes) as pool:
        yield from pool.imap(play, parts)


class Result:
    """What `--out` holds."""

    def __init__(self, path: Path | None, first: int) -> None:
        self.path, self.first, self.played, self.elapsed_s = path, max(0, first), Played(), 0.0
        self.beside = beside(*PLAYED) if path is not None else {}
        if path is not None and path.exists() and first < 0:
            self._go_on(orjson.loads(path.read_bytes()))

    def _go_on(self, before: dict[str, Any]) -> None:
        earlier = before["beside"]
        if any(earlier[name] != self.beside[name] for name in ("modules", "python")):
            raise SystemExit(
                f"{self.path} is of other code, that of {earlier['commit']}: begin anew with --first 0"
            )
        self.first, self.elapsed_s = before["first"], before["elapsed_s"]
        self.played = Played(
            before["seeds"],
            before["events"],
            before["cpu_s"],
            Counter(before["counts"]),
            [Failure(**failure) for failure in before["failures"]],
        )

    @property
    def next(self) -> int:
        return self.first + self.played.seeds

    def save(self, elapsed_s: float) -> None:
        if self.path is None:
            return
        played = self.played
        causes = Counter(failure.cause for failure in played.failures)
        body = {
            "first": self.first,
            "seeds": played.seeds,
            "events": played.events,
            "elapsed_s": round(self.elapsed_s + elapsed_s, 1),
            "cpu_s": round(played.cpu_s, 1),
            "failures_by_cause": dict(causes),
            "failures": played.failures,
            "counts": dict(sorted(played.counts.items())),
            "beside": self.beside,
        }
        keep(self.path, body)


def play_range(seeds: range, processes: int, result: Result) -> int:
    started, played, told = time.monotonic(), result.played, result.played.seeds
    for part in play_all(seeds, processes):
        played.add(part)
        for failure in part.failures:
            print(f"{failure.words}seed {failure.seed} fails; again: make chaos SEED={failure.seed}")
        elapsed_s = time.monotonic() - started
        result.save(elapsed_s)
        if played.seeds // PRINT_SEEDS > told // PRINT_SEEDS:
            told = played.seeds
            print(f"{told:,} seeds, {played.events:,} events, {elapsed_s:.0f} s", flush=True)
        if len(played.failures) >= FAILURES_MAX:
            break
    failed = len(played.failures)
    how = f"{failed} fail" if failed else "none fails"
    print(f"{played.seeds:,} seeds, {played.events:,} events, {time.monotonic() - started:.0f} s: {how}")
    for what, count in sorted(played.counts.items()):
        print(f"  {what:<24} {count:>12,}")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument(
        "--first",
        type=int,
        default=-1,
        help="the first of them (default: 0, or where the run in --out ended)",
    )
    parser.add_argument("--seed", type=int, default=-1, help="only this one")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep what was played there, as JSON")
    args = parser.parse_args()
    if args.seed >= 0:
        return play_range(range(args.seed, args.seed + 1), 1, Result(None, args.seed))
    result = Result(args.out, args.first)
    return play_range(range(result.next, result.next + args.seeds), args.processes, result)


if __name__ == "__main__":
    sys.exit(main())
