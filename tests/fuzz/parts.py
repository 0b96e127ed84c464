"""One turn of a target: its inputs played by several processes at once, each watched for what it holds on to."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec

from tests.eventually import Late
from tests.fuzz.frame import TIMES_WAITED, Found, Target, load, played

#: What a process holds is first counted after so many inputs, or half of its time: caches have filled by then.
WARM_INPUTS = 2000
#: By how much each may grow after that, whatever the number of inputs: files and threads by what is under way.
GROWTH_MAX = {"rss_bytes": 64 << 20, "files": 8, "threads": 40}
#: What is under way comes and goes from input to input: connections that nobody reads yet. So the most of the last
#: samples before counts as warm, and the least of the last ones as the end.
SAMPLED_INPUTS, SAMPLES = 25, 32
STOP_S = 20.0
#: A process that has been at one input for longer than its deadline and this does not hear the alarm.
STUCK_S = 60.0


class Part(msgspec.Struct):
    """What came of one process's inputs. `warm` and `end`: what it held, by the names in GROWTH_MAX."""

    outcomes: dict[str, int]
    warm: dict[str, int]
    end: dict[str, int]
    problem: str
    seconds: float
    cpu_s: float


@dataclass
class Turn:
    """What came of one turn. `last`: the highest seed that was begun; `found`: as it is printed."""

    target: str
    first: int
    last: int
    seconds: float = 0.0
    cpu_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    held: list[dict[str, list[int]]] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        return self.outcomes.total()

    def line(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "inputs": self.inputs,
            "seconds": round(self.seconds, 1),
            "inputs_per_s": round(self.inputs / max(self.seconds, 0.001)),
            "first_seed": self.first,
            "last_seed": self.last,
            "outcomes": dict(sorted(self.outcomes.items())),
            "held": self.held,
            "found": self.found,
        }


def held() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss_bytes": pages * os.sysconf("SC_PAGESIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def each_of(choose: Callable[[Iterable[int]], int], samples: list[dict[str, int]]) -> dict[str, int]:
    return {name: choose(sample[name] for sample in samples) for name in samples[0]}


def grown(warm: dict[str, int], end: dict[str, int]) -> str:
    """What has grown by too much, in words; "" for nothing."""
    names = [name for name in warm if end[name] - warm[name] > GROWTH_MAX[name]]
    return ", ".join(f"{name} grew from {warm[name]} to {end[name]}" for name in names)


def play_part(
    name: str, seeds: range, seconds: float, at: Synchronized[int], stop: Event, answers: Connection
) -> None:
    """Plays `seeds` in turn until `seconds` are over or `stop` is set. `at`: the seed that is played; -1: none is."""
    # Who started this process says when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    target = load(name)
    began, counts, problem = time.monotonic(), Counter[str](), ""
    warm: dict[str, int] = {}
    end: dict[str, int] = {}
    samples: deque[dict[str, int]] = deque(maxlen=SAMPLES)
    try:
        with played(target) as play:
            # A cluster may take longer to start than its inputs have.
            playing_since = time.monotonic()
            for count, seed in enumerate(seeds, start=1):
                at.value = seed
                counts[play(target.input_of(seed))] += 1
                passed_s = time.monotonic() - playing_since
                if not warm and (count == min(WARM_INPUTS, len(seeds) // 2) or passed_s > seconds / 2):
                    warm = each_of(max, [*samples, held()])
                    samples.clear()
                if count % SAMPLED_INPUTS == 0:
                    samples.append(held())
                if passed_s > seconds or stop.is_set():
                    break
            end = each_of(min, [*samples, held()])
            at.value = -1
    except Found as found:
        problem, end = str(found), held()
        if found.content is not None:
            problem, at.value = f"{target.keep(found.content)}: {problem}", -1
    except Late as late:  # as a rule on leaving the target, when its inputs are over
        problem, end = f"late: {late}", held()
    if not problem:
        problem = grown(warm, end)
    part = Part(counts, warm, end, problem, time.monotonic() - began, time.process_time())
    answers.send_bytes(msgspec.msgpack.encode(part))


class _Process:
    """A process that plays its share, and what is heard of it."""

    def __init__(self, target: Target, seeds: range, seconds: float, stop: Event) -> None:
        context = multiprocessing.get_context("spawn")
        self._stuck_s = TIMES_WAITED * target.deadline_s + STUCK_S
        self._at: Any = context.Value("q", seeds.start)
        self._here, there = context.Pipe(duplex=False)
        self._process = context.Process(
            target=play_part, args=(target.name, seeds, seconds, self._at, stop, there)
        )
        self._process.start()
        there.close()
        #: The seed that it played last, as far as was seen here.
        self.last = seeds.start

    @property
    def at(self) -> int:
        return int(self._at.value)

    def answer(self) -> Part:
        """What it sends; its own end in place of that, where it does not come to it."""
        since = time.monotonic()
        while not self._here.poll(0.5):
            if self.at != self.last and self.at >= 0:
                self.last, since = self.at, time.monotonic()
            elif time.monotonic() - since > self._stuck_s:
                self._process.kill()
                break
        try:
            part: Part = msgspec.msgpack.decode(self._here.recv_bytes(), type=Part)
        except EOFError:
            self._process.join()
            problem = f"the process ended with status {self._process.exitcode}"
            part = Part({}, {}, {}, problem, 0.0, 0.0)
        self._process.join(STOP_S)
        return part


def play_turn(
    target: Target, *, first: int, inputs: int, seconds: float, processes: int, stop: Event
) -> Turn:
    """Seeds from `first` on, process by process in turn: `inputs` of them at most."""
    every = range(first, first + inputs)
    players = [
        _Process(target, every[number::processes], seconds, stop) for number in range(min(processes, inputs))
    ]
    turn = Turn(target.name, first, first)
    for number, player in enumerate(players):
        part = player.answer()
        count = sum(part.outcomes.values())
        turn.outcomes.update(part.outcomes)
        turn.seconds, turn.cpu_s = max(turn.seconds, part.seconds), turn.cpu_s + part.cpu_s
        # One more: that which found something, or ended the process, is not counted.
        turn.last = max(turn.last, player.last, first + number + count * processes)
        if part.warm and part.end:
            turn.held.append({name: [part.warm[name], part.end[name]] for name in part.warm})
        if part.problem:
            turn.found.append(_found(target, player.at, part.problem))
    return turn


def _found(target: Target, seed: int, problem: str) -> dict[str, Any]:
    if seed < 0:  # seen at the end: no one input's
        return {"problem": problem}
    file = target.keep(target.input_of(seed))
    return {"seed": seed, "kept": str(file), "problem": problem}
