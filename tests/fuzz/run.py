"""`python tests/fuzz/run.py [TARGET ...] --seconds 60`: inputs drawn from seeds, played until the time or their number
is over.

One line of JSON a target: how many inputs, what came of them, memory and open files of each process after the first
inputs and at the end. An input that finds something goes to the corpus, and ends its process's part. `--seed N` plays
one input again; `--show N` writes it to the standard output.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fuzz.frame import Found, Target, load, played, target_names

#: Memory and files are first counted after so many inputs of a process: caches have filled by then.
WARM_INPUTS = 2000
#: By how much memory may grow after that, whatever the number of inputs.
GROWTH_BYTES_MAX = 64 << 20
STOP_S = 20.0
#: A process that has been at one input for longer than its deadline and this does not hear the alarm.
STUCK_S = 60.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def play_part(name: str, seeds: range, seconds: float, at: Synchronized[int], answers: Connection) -> None:
    """One process's part of a target: plays `seeds` in turn, tells what came of them. `at`: the seed that is played."""
    began, counts, target = time.monotonic(), Counter[str](), load(name)
    warm, problem, count = (0, 0), "", 0
    try:
        with played(target) as play:
            for seed in seeds:
                at.value = seed
                counts[play(target.input_of(seed))] += 1
                count += 1
                if count == min(WARM_INPUTS, len(seeds) // 2):
                    warm = resident_bytes(), open_files()
                if time.monotonic() - began > seconds:
                    break
            end = resident_bytes(), open_files()
            at.value = -1
    except Found as found:
        problem, end = str(found), (resident_bytes(), open_files())
        if found.content is not None:
            problem, at.value = f"{target.keep(found.content)}: {problem}", -1
    if not problem and all(warm):
        if end[0] - warm[0] > GROWTH_BYTES_MAX:
            problem = f"memory grew from {warm[0]} to {end[0]} bytes"
        elif end[1] > warm[1] + 8:  # what is under way at either moment
            problem = f"open files grew from {warm[1]} to {end[1]}"
    answers.send((counts, warm, end, problem, time.monotonic() - began))


def run(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """All processes' parts, as the line to print."""
    context = multiprocessing.get_context("spawn")
    parts = []
    share = -(-args.inputs // args.processes)
    for number in range(args.processes):
        seeds = range(args.first + number * share, args.first + (number + 1) * share)
        at: Any = context.Value("q", seeds.start)
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=play_part, args=(target.name, seeds, args.seconds, at, there))
        process.start()
        there.close()
        parts.append((process, at, here))
    line: dict[str, Any] = {"target": target.name, "inputs": 0, "seconds": 0.0, "first_seed": args.first}
    counts, memory, found = Counter[str](), [], []
    for process, at, here in parts:
        some, warm, end, problem, seconds = _answer(process, at, here, target.deadline_s + STUCK_S)
        counts += some
        line["seconds"] = round(max(line["seconds"], seconds), 1)
        if all(warm):
            memory.append({"rss_mib": [warm[0] >> 20, end[0] >> 20], "files": [warm[1], end[1]]})
        if problem:
            found.append(_found(target, at.value, problem))
    line["inputs"] = counts.total()
    line["inputs_per_s"] = round(counts.total() / max(line["seconds"], 0.001))
    return {**line, "outcomes": dict(sorted(counts.items())), "processes": memory, "found": found}


def _answer(process: Any, at: Any, here: Connection, stuck_s: float) -> Any:
    """What `play_part` sends; its own end in place of that, where it does not come to it."""
    played, since = at.value, time.monotonic()
    while not here.poll(0.5):
        if at.value != played:
            played, since = at.value, time.monotonic()
        elif time.monotonic() - since > stuck_s:
            process.kill()
            break
    try:
        answer = here.recv()
    except EOFError:
        process.join()
        answer = Counter[str](), (0, 0), (0, 0), f"the process ended with status {process.exitcode}", 0.0
    process.join(STOP_S)
    return answer


def _found(target: Target, seed: int, problem: str) -> dict[str, Any]:
    if seed < 0:  # seen at the end: no one input's
        return {"problem": problem}
    file = target.keep(target.input_of(seed))
    return {"seed": seed, "kept": str(file), "problem": problem}


def play_again(target: Target, seed: int) -> int:
    with played(target) as play:
        try:
            print(play(target.input_of(seed)))
        except Found as found:
            print(found)
            return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(target_names())} (default: all)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--inputs", type=int, default=1 << 40, help="at most so many for each target")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=-1, help="play only this one, of one target")
    parser.add_argument("--show", type=int, default=-1, help="write this one's input, of one target")
    parser.add_argument("--out", metavar="FILE", default="", help="append the lines to this file too")
    args = parser.parse_args()
    targets = [load(name) for name in args.targets or target_names()]
    if args.show >= 0:
        sys.stdout.buffer.write(targets[0].input_of(args.show))
        return 0
    if args.seed >= 0:
        return play_again(targets[0], args.seed)
    status = 0
    for target in targets:
        line = run(target, args)
        status |= bool(line["found"])
        text = json.dumps(line)
        print(text, flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(text + "\n")
        for each in line["found"]:
            again = (
                f"\nagain: python tests/fuzz/run.py {target.name} --seed {each['seed']}"
                if "seed" in each
                else ""
            )
            print(f"{target.name}: {each['problem']}{again}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
