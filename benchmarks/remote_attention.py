"""A decode step whose KV lies partly at another worker, against the same step with all of it here: time of a step,
bytes both ways, and that the logits are the same bits; and how fast KV is pushed there.

    python benchmarks/remote_attention.py [--rounds N] [--save NAME]

The built-in model, f32, one thread an engine. The other worker is a process of its own with a cache of random KV that
both have alike; it attends to half of the segments of every sequence. Steps go in turn, so that what else the machine
does hits both alike. On as many cores as processes the other worker's part is hidden behind the own one; on fewer it
is not, and a step takes as long as both.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from channels import hello
from clusters import finish, parsed, parser, spread

from halfmoon.schemas.lending import KvPart
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.header import Op
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.options import ChannelOptions, channel_secret
from halfmoon.workers.attention.held import HeldSegments
from halfmoon.workers.attention.push import push_tokens
from halfmoon.workers.attention.remote_segments import RemoteSegments
from halfmoon.workers.attention.server import SegmentServer
from halfmoon.workers.model.attention.kernel import SdpaAttention
from halfmoon.workers.model.engine import Engine
from halfmoon.workers.model.loading.files import load_model
from halfmoon.workers.model.paged_cache import PagedCache
from halfmoon.workers.model.segments import AWAY, segment_tokens

BLOCK_TOKENS, BATCH, CONTEXT_TOKENS = 256, 4, 4100
SEGMENT = segment_tokens(BLOCK_TOKENS)
EACH = SEGMENT // BLOCK_TOKENS
SEGMENTS = CONTEXT_TOKENS // SEGMENT
BLOCKS = BATCH * (CONTEXT_TOKENS // BLOCK_TOKENS + 1)
OPTIONS = ChannelOptions(secret=channel_secret("bench"), timeout_s=60.0)


def fill(cache: PagedCache) -> None:
    """The same KV in every process."""
    generator = torch.Generator().manual_seed(7)
    cache.k.normal_(generator=generator)
    cache.v.normal_(generator=generator)


def hold(words: Connection) -> None:
    """The other worker: the whole cache, and a hold of the first half of each sequence."""
    torch.set_num_threads(1)
    model = load_model("smollm2-135m-instruct", dtype=torch.float32)
    cache = PagedCache(model.config, BLOCKS, BLOCK_TOKENS, torch.float32)
    fill(cache)
    attention = SdpaAttention(BLOCK_TOKENS, torch.device("cpu"))
    server = SegmentServer(attention, cache, segment_tokens=SEGMENT, heads=model.config.heads)
    for row, table in enumerate(tables()):
        half = SEGMENTS // 2
        server.holds[row] = HeldSegments(table[: half * EACH], half * SEGMENT)
        # Nobody asks for what lies in the rest of the blocks: there is room for pushes.
        server.holds[BATCH + row] = HeldSegments(table[half * EACH :], 0, expected=half * SEGMENT)
    with ChannelListener(hello("attention-0"), OPTIONS) as listener:
        words.send(listener.addresses)
        server.run(listener, words.poll)


def tables() -> list[list[int]]:
    need = BLOCKS // BATCH
    return [list(range(row * need, (row + 1) * need)) for row in range(BATCH)]


def push_mib_per_s(channel: WorkerChannel, cache: PagedCache, row: int) -> float:
    """The first half of a sequence's tokens."""
    started, half = time.perf_counter(), SEGMENTS // 2
    size = push_tokens(channel, BATCH + row, cache, tables()[row][: half * EACH], 0, half * SEGMENT)
    return size / 2**20 / (time.perf_counter() - started)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=12)
    args = parsed(options, rounds=1)
    torch.set_num_threads(1)
    words, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=hold, args=(theirs,))
    process.start()
    model = load_model("smollm2-135m-instruct", dtype=torch.float32)
    engine = Engine(model, num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS, exact=True)
    fill(engine.cache)
    addresses = words.recv()
    half = SEGMENTS // 2
    away = [[AWAY] * (half * EACH) + table[half * EACH :] for table in tables()]
    parts = [[KvPart(worker_id="attention-0", segments=half, hold=row)] for row in range(BATCH)]
    rows: list[dict[str, Any]] = []
    for kind, address in enumerate(addresses):
        with connect([address], hello("decode-0"), OPTIONS, peer="attention-0") as channel:
            remote = RemoteSegments({"attention-0": channel}, model.config, torch.float32)
            remote.begin(parts)
            local_ms, remote_ms = [], []
            for number in range(args.rounds + 1):
                remote.step = number
                times, digests = [], []
                for found, elsewhere in ((tables(), []), (away, [remote])):
                    started = time.perf_counter()
                    logits = engine.decode([5] * BATCH, [CONTEXT_TOKENS - 1] * BATCH, found, elsewhere)
                    times.append((time.perf_counter() - started) * 1e3)
                    digests.append([engine.logits_digest(row) for row in logits])
                assert digests[0] == digests[1], "not the same bits"
                if number:  # the first warms up
                    local_ms.append(times[0])
                    remote_ms.append(times[1])
            steps = args.rounds + 1
            rows.append(
                {
                    "channel": channel.kind,
                    "local_ms": spread(local_ms),
                    "remote_ms": spread(remote_ms),
                    "ratio": spread([r / m for r, m in zip(remote_ms, local_ms, strict=True)]),
                    "query_bytes_a_step": channel.sent.payload_bytes(Op.QUERY) // steps,
                    "partial_bytes_a_step": channel.received.payload_bytes(Op.PARTIAL) // steps,
                    "push_mib_per_s": round(push_mib_per_s(channel, engine.cache, kind)),
                }
            )
    words.send(None)
    process.join()
    what = f"{BATCH} sequences of {CONTEXT_TOKENS} tokens, half elsewhere"
    lines = [
        f"{row['channel']:>5}: {what}: {row['remote_ms']['p50']:.1f} ms a step,"
        f" all here {row['local_ms']['p50']:.1f} ms,"
        f" ratio {row['ratio']['p50']:.2f} ({row['ratio']['min']:.2f} to {row['ratio']['max']:.2f}), the same bits;"
        f" {row['query_bytes_a_step']:,} bytes up, {row['partial_bytes_a_step']:,} down;"
        f" KV pushed at {row['push_mib_per_s']:,} MiB/s"
        for row in rows
    ]
    finish(
        args,
        {"batch": BATCH, "context_tokens": CONTEXT_TOKENS, "segment_tokens": SEGMENT, "rows": rows},
        lines,
    )


if __name__ == "__main__":
    main()
