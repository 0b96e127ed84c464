"""When a waiting sequence has heard of all of its KV, loaded or not: the rest is missing. And what is told
again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halfmoon.schemas.decisions import StartDecode
from halfmoon.schemas.kv import KvReady, TransferOpened
from halfmoon.workers.decode.kv_loader import KvLoading
from halfmoon.workers.decode.sequence import Sequence

LAYERS = 3


def sequence() -> Sequence:
    order = StartDecode(
        order_id="1-1",
        request_id="r1",
        frontend_id="f1",
        worker_id="d0",
        prefill_worker_id="p0",
        prompt_tokens=10,
        max_tokens=5,
        tbt_slo_ns=1,
    )
    return Sequence(order, 0)


def opened(blocks: int) -> Sequence:
    one = sequence()
    one.slots = list(range(blocks))
    one.arrived = np.zeros((LAYERS, blocks), dtype=bool)
    return one


def test_before_the_transfer_was_opened_everything_is_missing() -> None:
    one = sequence()
    one.to_load = [(layer, 0) for layer in range(LAYERS)]
    assert not one.kv_announced(LAYERS)


def test_what_waits_for_room_is_not_missing() -> None:
    one = opened(2)
    one.to_load = [(layer, block) for layer in range(LAYERS) for block in range(2)]
    assert one.kv_announced(LAYERS)
    assert not one.kv_complete(LAYERS)


def test_a_layer_that_nobody_told_of_is_missing_however_often_others_were_told() -> None:
    one = opened(2)
    assert one.arrived is not None
    one.arrived[0, :] = True
    one.to_load = [(0, 0), (1, 0), (1, 1), (2, 0), (2, 0), (2, 7)]
    assert not one.kv_announced(LAYERS)
    one.to_load.append((2, 1))
    assert one.kv_announced(LAYERS)


@pytest.mark.parametrize("again_after", [1, 2, LAYERS, LAYERS + 1])
async def test_kv_that_is_told_again_is_copied_once_and_is_complete(again_after: int) -> None:
    """A server of the bus dies: from some place on all is told twice, while the copies of the first time go
    on.
    """
    copied: list[tuple[int, int, Any]] = []
    engine = SimpleNamespace(
        cache=SimpleNamespace(write_block=lambda layer, block, held: copied.append((layer, block, held))),
        allocator=SimpleNamespace(can_allocate=lambda _: True, allocate=lambda count: range(50, 50 + count)),
    )
    pool: Any = SimpleNamespace(layer_block=lambda slot, layer: (slot, layer))
    names = {"order_id": "1-1", "request_id": "r1"}
    told: list[TransferOpened | KvReady] = [TransferOpened(**names, slots=[7, 8], present=[])]
    told += [KvReady(**names, layer=layer, first_block=0, blocks=2) for layer in range(LAYERS)]
    one = sequence()
    with ThreadPoolExecutor(1) as copies:
        loading = KvLoading(engine, pool, copies, LAYERS, lambda _: None)
        for message in told[:again_after] + told:
            loading.note(one, message)
            loading.load(one)
            while one.loading:
                await asyncio.sleep(0.001)
    assert sorted(copied) == [(layer, 50 + at, (7 + at, layer)) for layer in range(LAYERS) for at in range(2)]
    assert one.kv_complete(LAYERS)
    assert one.kv_announced(LAYERS)
