"""Decode with all attention in another process, by turns: two batches one after the other (n = 1), the same two
pipelined (n = 2), all sequences as one batch, and all of it in one process.

    python benchmarks/attention_offloading.py [--rounds N] [--past TOKENS ...] [--save NAME]

The built-in model, f32, one thread a process: one process computes the model, the other one attends. Every mode takes
the same step of 8 sequences, and all give the same bits. At n = 2 the bound is (t_m + t_a) / max(t_m, t_a), where
both processes have a core each; t_m and t_a are what they take of CPU in a pipelined step, which other programs on the
machine change less than they change the time that passes. `model_alone` waits for no answer. The fraction `early` says
of how many layer-steps attention to the cached tokens began before the new token's k and v had come.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from channels import hello
from clusters import finish, parsed, parser, spread
from remote_attention import BLOCK_TOKENS, OPTIONS, SEGMENT, fill

from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import HEADER_BYTES, Op
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.remote_cache import RemoteCache
from halfmoon.workers.attention.server import SegmentServer
from halfmoon.workers.model.attention.exact import CacheElsewhere
from halfmoon.workers.model.attention.kernel import SdpaAttention, Tensor
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model
from halfmoon.workers.model.paged_cache import PagedCache

BATCHES, ROWS = 2, 4
SEQUENCES = BATCHES * ROWS
PASTS = (4000, 1800)
PAST_MAX = 4096
EACH = PAST_MAX // BLOCK_TOKENS + 1
TABLES = [list(range(row * EACH, (row + 1) * EACH)) for row in range(SEQUENCES)]
MODEL, PLACE = "smollm2-135m-instruct", "attention-0"
TOKENS = [5] * SEQUENCES


def attend(words: Connection) -> None:
    """The other process: a cache, and no model; on a core of its own, if there are two."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    config = load_model(MODEL, dtype=torch.float32).config
    cache = PagedCache(config, SEQUENCES * EACH, BLOCK_TOKENS, torch.float32)
    fill(cache)
    attention = SdpaAttention(BLOCK_TOKENS, torch.device("cpu"))
    server = SegmentServer(attention, cache, segment_tokens=SEGMENT, heads=config.heads)
    for number, table in enumerate(TABLES):
        server.holds[number] = HeldSegments(table, PAST_MAX)

    def over() -> bool:
        if not words.poll():
            return False
        asked: bool = words.recv()
        if asked:
            words.send((server.counts.queries, server.counts.early, time.process_time()))
        return not asked

    with ChannelListener(hello(PLACE), OPTIONS) as listener:
        words.send(listener.addresses)
        server.run(listener, over)


class Nobody(CacheElsewhere):
    """Nothing is asked, and nothing awaited: the model's part of a step alone."""

    def ask(self, layer: int, q: Tensor) -> None: ...

    def tell(self, k: Tensor, v: Tensor) -> None: ...

    def collect(self, out: Tensor) -> None: ...

    def abandon(self) -> None: ...


class Modes:
    """The ways to take a step; each returns the logits of all sequences, which have `past` tokens."""

    def __init__(self, address: str) -> None:
        model = load_model(MODEL, dtype=torch.float32)
        self.config, self.past = model.config, 0
        blocks = SEQUENCES * EACH
        self._local = Engine(model, num_blocks=blocks, block_tokens=BLOCK_TOKENS, exact=True)
        fill(self._local.cache)
        self._away = Engine(model, num_blocks=EACH, block_tokens=BLOCK_TOKENS, exact=True, query_first=True)
        self.channels = [connect([address], hello("decode-0"), OPTIONS, peer=PLACE) for _ in range(BATCHES)]
        segment_tokens = self._away.attention.segment_tokens
        self._caches = [
            RemoteCache({PLACE: each}, self.config, torch.float32, segment_tokens) for each in self.channels
        ]

    def _begin(self, number: int, rows: range) -> CacheElsewhere:
        """The same tokens each time: what a step appended before is written anew."""
        held = [[KvPart(worker_id=PLACE, hold=hold)] for hold in rows]
        self._caches[number].begin(held, [self.past] * len(held))
        return self._caches[number]

    def _decode(self, rows: int, caches: Sequence[CacheElsewhere]) -> Tensor:
        tables: list[list[int]] = [[]] * rows
        return self._away.decode(TOKENS[:rows], [self.past] * rows, tables, caches, groups=len(caches))

    def local(self) -> Tensor:
        return self._local.decode(TOKENS, [self.past] * SEQUENCES, TABLES)

    def serial(self) -> Tensor:
        firsts = range(0, SEQUENCES, ROWS)
        return torch.cat([self._decode(ROWS, [self._begin(0, range(at, at + ROWS))]) for at in firsts])

    def pipelined(self) -> Tensor:
        caches = [self._begin(at, range(at * ROWS, (at + 1) * ROWS)) for at in range(BATCHES)]
        return self._decode(SEQUENCES, caches)

    def one_batch(self) -> Tensor:
        return self._decode(SEQUENCES, [self._begin(0, range(SEQUENCES))])

    def model_alone(self) -> Tensor:
        return self._decode(SEQUENCES, [Nobody()] * BATCHES)

    def digests(self, logits: Tensor) -> list[str]:
        return [self._local.logits_digest(row) for row in logits]


def payload(channels: list[WorkerChannel]) -> tuple[int, int]:
    """Payload bytes of all that was asked and answered so far, and messages."""
    size = messages = 0
    for channel in channels:
        for counts, op in (
            (channel.sent, Op.QUERY),
            (channel.sent, Op.KEY_VALUE),
            (channel.received, Op.OUT),
        ):
            size += counts.payload_bytes(op)
            messages += counts.messages(op)
    return size, messages


@dataclass
class Measured:
    """Of each mode, at one length: ms of its steps and ms of CPU of both processes, round by round; of all rounds, the
    layer-steps and how many of them were begun early.
    """

    ms: list[float] = field(default_factory=list)
    model_cpu_ms: list[float] = field(default_factory=list)
    attention_cpu_ms: list[float] = field(default_factory=list)
    asked: int = 0
    early: int = 0


def measure(modes: Modes, words: Connection, rounds: int) -> dict[str, Measured]:
    """All modes by turns."""
    taken: dict[str, Callable[[], Tensor]] = {
        "local": modes.local,
        "serial": modes.serial,
        "pipelined": modes.pipelined,
        "one_batch": modes.one_batch,
        "model_alone": modes.model_alone,
    }
    found = {name: Measured() for name in taken}
    for number in range(rounds + 1):
        digests = {}
        for name, step in taken.items():
            words.send(True)
            before = words.recv()
            started, cpu_s = time.perf_counter(), time.process_time()
            logits = step()
            passed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
            words.send(True)
            asked, early, theirs_s = (now - was for now, was in zip(words.recv(), before, strict=True))
            digests[name] = modes.digests(logits)
            if number:  # the first warms up
                one = found[name]
                one.ms.append(passed_s * 1e3)
                one.model_cpu_ms.append(cpu_s * 1e3)
                one.attention_cpu_ms.append(theirs_s * 1e3)
                one.asked, one.early = one.asked + asked, one.early + early
        del digests["model_alone"]
        assert all(each == digests["local"] for each in digests.values()), "not the same bits"
    return found


def row_of(modes: Modes, found: dict[str, Measured]) -> dict[str, Any]:
    """What was measured at one length; a step's bytes, which are those of the formula."""
    before = payload(modes.channels)
    modes.pipelined()
    size, messages = (after - was for after, was in zip(payload(modes.channels), before, strict=True))
    config = modes.config
    group = config.heads // config.kv_heads
    formula = (2 * group + 2) * 4 * config.heads * config.head_dim * SEQUENCES * config.layers // group
    assert size == formula, (size, formula)

    def ratio(slow: str, fast: str) -> dict[str, float]:
        return spread([a / b for a, b in zip(found[slow].ms, found[fast].ms, strict=True)])

    piped = found["pipelined"]
    cpu = [(a, b) for a, b in zip(piped.model_cpu_ms, piped.attention_cpu_ms, strict=True)]
    return {
        "past_tokens": modes.past,
        "ms_a_step": {name: spread(one.ms) for name, one in found.items()},
        "model_cpu_ms_a_step": {name: spread(one.model_cpu_ms) for name, one in found.items()},
        "attention_cpu_ms_a_step": {name: spread(one.attention_cpu_ms) for name, one in found.items()},
        "tokens_per_s": {
            name: round(SEQUENCES * 1e3 / spread(one.ms)["p50"], 2)
            for name, one in found.items()
            if name != "model_alone"
        },
        "pipelined_over_serial": ratio("serial", "pipelined"),
        "pipelined_over_one_batch": ratio("one_batch", "pipelined"),
        "pipelined_over_local": ratio("local", "pipelined"),
        "bound": spread([(a + b) / max(a, b) for a, b in cpu]),
        "early": {name: round(one.early / one.asked, 3) for name, one in found.items() if one.asked},
        "payload_bytes_a_step": size,
        "messages_a_step": messages,
    }


def lines_of(row: dict[str, Any]) -> list[str]:
    """The same, to read."""
    times, theirs = row["ms_a_step"], row["attention_cpu_ms_a_step"]
    ours = row["model_cpu_ms_a_step"]
    return [
        f"{SEQUENCES} sequences of {row['past_tokens']} tokens:",
        *(
            f"  {n:12} {t['p50']:7.1f} ms a step ({t['min']:.1f} to {t['max']:.1f}), of CPU {ours[n]['p50']:.1f}"
            f" and {theirs[n]['p50']:.1f}"
            for n, t in times.items()
        ),
        f"  two batches pipelined, in tokens/s against one after the other: {row['pipelined_over_serial']['p50']:.2f}"
        f" times ({row['pipelined_over_serial']['min']:.2f} to {row['pipelined_over_serial']['max']:.2f}), bound"
        f" {row['bound']['p50']:.2f}; against all as one batch {row['pipelined_over_one_batch']['p50']:.2f}, against"
        f" one process {row['pipelined_over_local']['p50']:.2f}; the same bits",
        f"  attention began before k and v came: n = 1 {row['early']['serial']:.0%},"
        f" n = 2 {row['early']['pipelined']:.0%}",
        f"  {row['payload_bytes_a_step']:,} bytes of payload a step, as the formula says, in"
        f" {row['messages_a_step']} messages",
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--past", type=int, nargs="*", default=PASTS, help=f"tokens, {PAST_MAX} at most")
    args = parsed(options, rounds=1, past=[1800])
    torch.set_num_threads(1)
    words, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=attend, args=(theirs,))
    process.start()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    modes, rows = Modes(words.recv()[0]), []
    # The longest first: a hold forgets what is beyond the tokens that it is asked for.
    for modes.past in sorted(args.past, reverse=True):
        rows.append(row_of(modes, measure(modes, words, args.rounds)))
    words.send(False)
    process.join()
    result = {
        "channel": modes.channels[0].kind,
        "sequences": SEQUENCES,
        "batches": BATCHES,
        "header_bytes_a_message": HEADER_BYTES,
        "rows": rows,
    }
    finish(args, result, [line for row in rows for line in lines_of(row)])


if __name__ == "__main__":
    main()
