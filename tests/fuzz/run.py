"""`python tests/fuzz/run.py [TARGET ...] --seconds 60`: inputs drawn from seeds, played until the time or their number
is over.

One line of JSON a target: how many inputs, what came of them, and what each process held (memory, files, threads) when
it was warm and at the end. An input that finds something goes to the corpus, and ends its process's part. `--seed N`
plays one input again; `--show N` writes it to the standard output.

`--part 0.002` plays that part of the inputs that are meant for each target, and looks at no clock: the same inputs on
every machine.

With `--out FILE` figures of each target are kept there, and another run goes on from where this one ended, with other
seeds. `--whole` goes on in turns of `--seconds` until every target has had the inputs that are meant for it: ten
million in all. SIGTERM and Ctrl-C end it with the turn under way, which counts.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzz.accumulated import Accumulated
from tests.fuzz.frame import Found, Target, load, played, target_names
from tests.fuzz.parts import Turn, play_turn


def play_again(target: Target, seed: int) -> int:
    with played(target) as play:
        try:
            print(play(target.input_of(seed)))
        except Found as found:
            print(found)
            return 1
    return 0


def stopped_by_signals() -> Event:
    """Set by the first SIGTERM or SIGINT; a second one ends this process at once."""
    stop = multiprocessing.get_context("spawn").Event()

    def end(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    return stop


def in_turn(targets: list[Target], kept: Accumulated | None, whole: bool) -> Iterator[Target]:
    """Each once; with `whole` the one that lacks most, until none lacks anything."""
    if not whole or kept is None:
        yield from targets
        return
    while (target := kept.next_of(targets)) is not None:
        yield target


def problems(turn: Turn) -> list[str]:
    """What was found, each in words, with the command that plays it again."""
    return [
        f"{turn.target}: {each['problem']}"
        + (f"\nagain: python tests/fuzz/run.py {turn.target} --seed {each['seed']}" if "seed" in each else "")
        for each in turn.found
    ]


def play_targets(args: argparse.Namespace) -> int:
    """1 when something was found: it stands at the end, where a log is read first."""
    kept = Accumulated(args.out) if args.out is not None else None
    stop, found = stopped_by_signals(), list[str]()
    seconds = math.inf if args.part else args.seconds
    for target in in_turn([load(name) for name in args.targets or target_names()], kept, args.whole):
        first = args.first if args.first >= 0 else kept.of(target).next_seed if kept is not None else 0
        inputs = max(1, int(target.inputs_meant * args.part)) if args.part else args.inputs
        if args.whole and kept is not None:
            inputs = min(inputs, target.inputs_meant - kept.of(target).inputs)
        turn = play_turn(
            target, first=first, inputs=inputs, seconds=seconds, processes=args.processes, stop=stop
        )
        if kept is not None:
            kept.add(target, turn)
        print(json.dumps(turn.line()), flush=True)
        found += problems(turn)
        if stop.is_set():
            break
    print("\n".join(found or ["nothing was found"]), file=sys.stderr if found else sys.stdout, flush=True)
    return bool(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(target_names())} (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--inputs", type=int, default=1 << 40, help="at most so many for each target")
    parser.add_argument(
        "--part", type=float, default=0.0, help="so much of what is meant for each target; no time ends it"
    )
    parser.add_argument(
        "--first", type=int, default=-1, help="the first seed (default: 0, or where the run in --out ended)"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=-1, help="play only this one, of one target")
    parser.add_argument("--show", type=int, default=-1, help="write this one's input, of one target")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="keep the figures there, and go on from them"
    )
    parser.add_argument("--whole", action="store_true", help="with --out: until each target has its inputs")
    args = parser.parse_args()
    if args.whole and args.out is None:
        parser.error("--whole goes with --out")
    if args.show >= 0:
        sys.stdout.buffer.write(load(args.targets[0]).input_of(args.show))
        return 0
    if args.seed >= 0:
        return play_again(load(args.targets[0]), args.seed)
    return play_targets(args)


if __name__ == "__main__":
    sys.exit(main())
