"""Kills a store agent between any two lines of put, evict, save, promote, remove and restart, and looks at
what is left (`make crash-points`, `python crash_points.py --points N`).

A child process plays a fixed story on an agent with an SSD tier, with an eye on every line that runs in the
store's own files, in every thread; when one line comes for the n-th time it kills itself. Every line of those
files that the story reaches gets its turn, those of the tier first. Then another agent takes up the file:
every block that it shows must have its own bytes, every block that was known to be saved must be there, and
every slot and record must be accounted for.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))
from store_harness import Cluster, cluster

from halfmoon.bus.embedded import EmbeddedServer
from halfmoon.store.client import StoreClient, key_of
from halfmoon.store.errors import BlockMissing
from halfmoon.store.pool.segment import remove_stale
from halfmoon.store.tiers import ssd
from halfmoon.store.tiers.ssd import SsdTier
from tests.eventually import SCENARIO_S, eventually

BLOCK = 4 * 8192
SLOTS = 4
BLOCKS = 12
KEYS = [key_of(f"crash {number}") for number in range(2 * BLOCKS)]
#: Lines in these files are steps; the tier's come first.
FILES = (
    "tiers/ssd",
    "tiers/ssd_file",
    "agent/tier_load",
    "pool/pool",
    "pool/idle_queues",
    "pool/guard",
    "pool/eviction",
    "agent/context",
    "agent/orders",
    "agent/release",
    "agent/serving/serve_workers",
    "agent/serving/serve_clients",
)
TIER_FILES = 3
#: A line of a file, by the file's place in FILES.
Line = tuple[int, int]


def value(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK, np.uint8)


async def start(here: Cluster, path: str) -> tuple[Any, StoreClient]:
    agent = await here.agent(
        "n1",
        slots=SLOTS,
        eviction="lru",
        ssd=path,
        ssd_bytes=64 * (BLOCK + 64) + 8192,
        ssd_ahead_percent=100,
    )
    client = await StoreClient.connect(here.url, node_id="n1")
    here.stack.push_async_callback(client.close)
    return agent, client


async def saved(tier: SsdTier, key: bytes) -> None:
    await eventually(lambda: tier.find(key) is not None, f"{key.hex()} is saved", every_s=0.001)


async def story(url: str, name: str, path: str, report: Any) -> None:
    """Put, evict, save; promote; remove; stop and start; promote again."""
    async with cluster(url) as here:
        here.name = name
        for half in range(2):
            agent, client = await start(here, path)
            for number in range(half * BLOCKS, (half + 1) * BLOCKS):
                await client.put(KEYS[number], value(number))
                await saved(agent.context.tier, KEYS[number])
                report(b"s%03d" % number)
            for number in range(half * BLOCKS, half * BLOCKS + 5):
                async with await client.get(KEYS[number]) as held:
                    assert held.array.tobytes() == value(number).tobytes()
            report(b"r%03d" % half)
            assert await client.remove(KEYS[half])
            await client.close()
            await agent.stop()


class Steps:
    """Counts lines of the store's files, and kills the process when `last` comes for the `turn`-th time."""

    def __init__(self, last: Line, turn: int) -> None:
        self.counts: Counter[Line] = Counter()
        self._last, self._turn = last, turn
        root = Path(ssd.__file__).parents[1]
        self._files = {str(root / f"{name}.py"): place for place, name in enumerate(FILES)}

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = (self._files[frame.f_code.co_filename], frame.f_lineno)
            self.counts[line] += 1
            if line == self._last and self.counts[line] == self._turn:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._line


def play(url: str, name: str, path: str, last: Line, turn: int) -> tuple[dict[Line, int], list[bytes]]:
    """Plays the story in a child that dies at a line. How often each line came (nothing: it was killed), and
    what it reported."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            steps = Steps(last, turn)
            steps.start()
            asyncio.run(story(url, name, path, lambda what: os.write(writing, what)))
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(b"n" + pickle.dumps(dict(steps.counts)))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    hangs = threading.Timer(SCENARIO_S, os.kill, (pid, signal.SIGUSR1))  # whose default is death
    hangs.start()
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    hangs.cancel()
    said, _, counts = text.partition(b"n")
    assert status != signal.SIGUSR1, "the story hangs"
    assert status in (0, signal.SIGKILL), f"the story failed with {status}"
    told = pickle.loads(counts) if counts else {}  # noqa: S301 (by the child that was forked above)
    return told, [said[at : at + 4] for at in range(0, len(said), 4)]


async def look(url: str, name: str, path: str, said: list[bytes]) -> tuple[int, int]:
    """Blocks found and missing after a restart. Raises AssertionError."""
    saved = {int(at[1:]) for at in said if at[:1] == b"s"}
    # The block that is removed at the end of a half may be there or not.
    saved -= {int(at[1:]) for at in said if at[:1] == b"r"}
    async with cluster(url) as here:
        here.name = name
        agent, client = await start(here, path)
        agent.context.guard.check()
        agent.context.tier.check()
        counts = agent.context.guard.counts()
        assert (counts.free, counts.holds) == (SLOTS, 0), counts
        found = missing = 0
        for number, key in enumerate(KEYS):
            into = bytearray(BLOCK)
            try:
                await client.get_into(key, into)
            except BlockMissing:
                assert number not in saved, f"block {number} was saved and is gone"
                missing += 1
                continue
            assert into == value(number).tobytes(), f"wrong bytes in block {number}"
            found += 1
        assert agent.context.counters["ssd_corrupted"] == 0, "a block was shown that is not what was put"
        agent.context.guard.check()
        agent.context.tier.check()
        counts = agent.context.guard.counts()
        assert (counts.holds, counts.reserved, counts.condemned) == (0, 0, 0), counts
        return found, missing


def run(url: str, directory: Path, points: int, seed: int) -> Iterator[tuple[str, int, int, int]]:
    """(line, lines in all, blocks found, blocks missing) of each kill. Raises AssertionError naming the line."""
    ssd.IDLE_S = 0.002
    counts, said = play(url, f"c{os.getpid()}", str(directory / "whole"), (-1, 0), 0)
    assert len(said) == 2 * BLOCKS + 2, said
    unseen = {*range(len(FILES))} - {place for place, _ in counts}
    assert not unseen, f"the story reaches no line of {[FILES[place] for place in sorted(unseen)]}"
    draw = random.Random(seed)
    lines = sorted(counts)
    draw.shuffle(lines)
    lines.sort(key=lambda line: line[0] >= TIER_FILES)
    for number in range(points):
        last = lines[number % len(lines)]
        turn = draw.randint(1, counts[last])
        where = f"{FILES[last[0]]}.py:{last[1]}, time {turn}"
        path, name = directory / f"tier-{number}", f"c{os.getpid()}-{number}"
        try:
            _, said = play(url, name, str(path), last, turn)
            if path.exists():
                found, missing = asyncio.run(look(url, name, str(path), said))
                path.unlink()
                yield where, len(lines), found, missing
        except AssertionError as problem:
            raise AssertionError(f"killed at {where}: {problem}") from problem
        finally:
            remove_stale(name)  # of an agent that was killed before it had a file to look at


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=300)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    with tempfile.TemporaryDirectory() as directory:
        server = EmbeddedServer.start(Path(directory) / "nats")
        results = []
        try:
            for at in run(server.url, Path(directory), args.points, args.seed):
                results.append(at)
                if len(results) % 25 == 0:
                    print(f"{len(results)} kills, the last at {at[0]}", flush=True)
        except AssertionError as problem:
            print(f"crash points: failed: {problem}", file=sys.stderr)
            return 1
        finally:
            server.stop()
    whole = sum(found for _, _, found, _ in results)
    print(
        f"{len(results)} kills at {results[0][1]} lines: {whole} blocks found, none wrong, nothing saved lost or leaked"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
