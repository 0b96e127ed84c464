"""The SSD tier against `fio` in the same directory, in the same run: blocks in sequence, direct I/O, as many
under way. The tier joins neighbours up to 4 MiB. Its figure includes what every load pays: into the pool's
memory, from the event loop; the last one also compares the checksum of every block.

Rounds alternate between the three, so that a disk whose speed changes is the same for all; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from clusters import finish, parsed, parser

from halfmoon.schemas.policy import Layout
from halfmoon.store.config import StoreConfig
from halfmoon.store.pool.checksums import block_sum, slots_sums
from halfmoon.store.pool.guard import PoolGuard
from halfmoon.store.pool.pool import Pool
from halfmoon.store.pool.segment import Segment, segment_name
from halfmoon.store.pool.slots import Owner
from halfmoon.store.tiers.base import Move
from halfmoon.store.tiers.ssd import SsdTier
from halfmoon.store.tiers.ssd_file import PAGE_BYTES
from halfmoon.store.transports.base import Call

MIB = 1 << 20
BLOCKS = 256
LAYERS = 8
#: Blocks that one load asks for: what the conductor orders for one prompt.
LOAD = 32


def layout(block_bytes: int) -> Layout:
    layer = block_bytes // LAYERS
    return Layout(
        model="ssd",
        model_fingerprint="f",
        layers=LAYERS,
        kv_heads=1,
        head_dim=layer // 2 // 4 // 16,
        block_tokens=16,
        dtype="float32",
    )


def fio(directory: Path, block_bytes: int, threads: int, write: bool) -> float:
    """Bytes a second."""
    command = [
        "fio",
        "--name=halfmoon",
        f"--filename={directory / 'fio'}",
        "--direct=1",
        "--ioengine=libaio",
        f"--iodepth={threads}",
        f"--bs={block_bytes}",
        f"--size={BLOCKS * block_bytes}",
        f"--rw={'write' if write else 'read'}",
        "--output-format=json",
        "--invalidate=1",
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["write" if write else "read"]["bw_bytes"])


async def rounds(
    directory: Path, block_bytes: int, threads: int, count: int, with_fio: bool
) -> dict[str, list[float]]:
    """Bytes a second of each round; none of fio without it."""
    name = f"ssd-{uuid.uuid4().hex[:8]}"
    config = StoreConfig(
        cluster=name,
        node_id="n1",
        layout=layout(block_bytes),
        slots=BLOCKS,
        cluster_secret="benchmark",
        ssd=str(directory / "tier"),
        ssd_bytes=(BLOCKS + 1) * (block_bytes + 64) + 3 * PAGE_BYTES,
        ssd_threads=threads,
        ssd_stop_s=0.0,
    )
    assert config.layout.block_bytes == block_bytes, config.layout.block_bytes
    segment = await asyncio.to_thread(Segment.create, segment_name(name, "n1"), config.geometry)
    segment.view.blocks[:] = np.random.default_rng(1).integers(
        0, 256, segment.view.blocks.shape[1:], np.uint8
    )
    options = config.ssd_options
    assert options is not None
    guard = PoolGuard(Pool(BLOCKS), ttl_ns=10**12, grace_ns=0, announce=lambda _: None)
    tier = SsdTier(
        options,
        guard,
        view=lambda: segment.view,
        announce=lambda _: None,
        counters=Counter(),
        lost=sys.exit,
    )
    await tier._open()
    owner, keys = Owner("o", "w"), [number.to_bytes(16, "big") for number in range(BLOCKS)]
    hold = guard.open_put(owner, keys, BLOCKS, writer="w")
    sums = slots_sums(segment.view, hold.slots)
    guard.commit(owner, {i: block_sum(some) for i, some in enumerate(sums)})
    guard.release(owner, writers=["w"])
    found: dict[str, list[float]] = {
        "fio_write": [],
        "fio_read": [],
        "tier_write": [],
        "tier_read": [],
        "tier_load": [],
    }
    started = time.perf_counter()
    while await tier._save_some(2 * BLOCKS):
        pass
    found["tier_write"].append(len(tier) * block_bytes / (time.perf_counter() - started))
    if with_fio:
        found["fio_write"].append(fio(directory, block_bytes, threads, write=True))
    saved = tier.keys()
    records = {key: tier.lend([key])[0] for key in saved}
    order = sorted(saved, key=lambda key: records[key].record)
    for _ in range(count):
        for verified in (False, True):
            started = time.perf_counter()
            for first in range(0, len(order), LOAD):
                some = order[first : first + LOAD]
                moves = [Move(records[key].record, slot, 0, LAYERS) for slot, key in enumerate(some, first)]
                await tier.read(moves, Call("o", "w", time.monotonic_ns() + 10**11))
                if verified:
                    found_sums = await asyncio.to_thread(slots_sums, segment.view, [at.slot for at in moves])
                    for key, layer_sums in zip(some, found_sums, strict=True):
                        assert block_sum(layer_sums) == records[key].entry.checksum
            took = time.perf_counter() - started
            found["tier_load" if verified else "tier_read"].append(len(order) * block_bytes / took)
        if with_fio:
            found["fio_read"].append(await asyncio.to_thread(fio, directory, block_bytes, threads, False))
    await asyncio.to_thread(tier._threads.shutdown)
    tier._retire()
    segment.close()
    return found


def main() -> None:
    arguments: argparse.ArgumentParser = parser(__doc__ or "")
    arguments.add_argument(
        "--directory", default="", help="on the disk to measure (default: a temporary one)"
    )
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--kib", type=int, nargs="+", default=[256, 1024, 4096], help="of a block")
    args = parsed(arguments, rounds=1, kib=[256])
    with_fio = shutil.which("fio") is not None
    if not with_fio and not args.brief:
        sys.exit("ssd: fio is not installed: apt-get install fio")
    rows: list[dict[str, Any]] = []
    lines = [] if with_fio else ["fio: not measured: it is not installed"]
    lines += [
        f"{'block':>8} {'threads':>7} {'fio':>8} {'tier':>8} {'of fio':>7} {'verified':>9}   MiB/s, direct, medians"
    ]
    threads = 4
    for block_kib in args.kib:
        with tempfile.TemporaryDirectory(dir=args.directory or None) as directory:
            found = asyncio.run(rounds(Path(directory), block_kib * 1024, threads, args.rounds, with_fio))
        median = {name: statistics.median(values) / MIB for name, values in found.items() if values}
        row = {
            "block_kib": block_kib,
            "threads": threads,
            **{f"{k}_mib_s": round(v) for k, v in median.items()},
        }
        if with_fio:
            row["read_of_fio"] = round(median["tier_read"] / median["fio_read"], 3)
            row["load_of_fio"] = round(median["tier_load"] / median["fio_read"], 3)
        rows.append(row)
        lines.append(
            f"{block_kib:>4} KiB {threads:>7} {row.get('fio_read_mib_s', '-'):>8} {row['tier_read_mib_s']:>8} "
            f"{row.get('read_of_fio', '-'):>7} {row['tier_load_mib_s']:>9}"
        )
    finish(args, {"rows": rows}, lines)


if __name__ == "__main__":
    main()
