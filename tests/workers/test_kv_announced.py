"""When a waiting sequence has heard of all of its KV, loaded or not: the rest is missing."""

from __future__ import annotations

import numpy as np

from halfmoon.schemas.decisions import StartDecode
from halfmoon.workers.sequence import Sequence

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
