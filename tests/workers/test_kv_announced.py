"""When an order has heard of all of its KV, copied or not: the rest is missing. And what is told again."""

from __future__ import annotations

import numpy as np
import pytest

from halfmoon.schemas.kv import KvReady, TransferOpened
from halfmoon.store.kv_arrival import KvArrival
from halfmoon.workers.decode.actions import CopyLayers
from halfmoon.workers.decode.cache_copies import copy_in, copy_layers, copy_out

LAYERS = 3
ORDER = {"order_id": "1-1", "request_id": "r1"}


def opened(blocks: int) -> TransferOpened:
    return TransferOpened(**ORDER, slots=list(range(7, 7 + blocks)), epochs=[1] * blocks, present=[])


def ready(layer: int, first_block: int = 0, blocks: int = 1) -> KvReady:
    return KvReady(**ORDER, layer=layer, first_block=first_block, blocks=blocks)


def arrival(*messages: TransferOpened | KvReady) -> KvArrival:
    made = KvArrival(LAYERS)
    for message in messages:
        made.note(message)
    return made


def test_before_the_transfer_was_opened_everything_is_missing() -> None:
    kv = arrival(*(ready(layer) for layer in range(LAYERS)))
    assert not kv.announced
    assert not kv.complete


def test_what_waits_for_room_is_not_missing() -> None:
    kv = arrival(opened(2), *(ready(layer, 0, 2) for layer in range(LAYERS)))
    assert kv.announced
    assert not kv.complete


def test_a_layer_that_nobody_told_of_is_missing_however_often_others_were_told() -> None:
    kv = arrival(opened(2), ready(0, 0, 2))
    kv.start()
    for message in (ready(0), ready(1), ready(1, 1), ready(2), ready(2), ready(2, 7), ready(9)):
        kv.note(message)
    assert not kv.announced
    kv.note(ready(2, 1))
    assert kv.announced


def test_blocks_that_the_pool_had_already_are_readable_in_every_layer() -> None:
    kv = arrival(TransferOpened(**ORDER, slots=[7, 8], epochs=[1, 1], present=[1]))
    assert kv.start() == [(layer, 1) for layer in range(LAYERS)]


@pytest.mark.parametrize("again_after", [1, 2, LAYERS, LAYERS + 1])
def test_kv_that_is_told_again_is_copied_once_and_is_complete(again_after: int) -> None:
    """A server of the bus dies: from some place on all is told twice, while the copies of the first time go
    on.
    """
    told = [opened(2), *(ready(layer, 0, 2) for layer in range(LAYERS))]
    kv, begun = arrival(), []
    for message in told[:again_after] + told:
        kv.note(message)
        places = kv.start()
        begun += places
        kv.copied += len(places)
    assert sorted(begun) == [(layer, block) for layer in range(LAYERS) for block in range(2)]
    assert kv.complete
    assert kv.announced


def test_what_was_taken_back_is_copied_again_with_what_came_meanwhile() -> None:
    kv = arrival(opened(2), ready(0, 0, 2), ready(1, 1))
    kv.copied += len(kv.start())
    kv.take_back()
    kv.note(ready(2))
    assert kv.copied == 0
    assert kv.start() == [(0, 0), (0, 1), (1, 1), (2, 0)]


class Bytes:
    """A cache or a pool: 4 bytes for each layer of each block."""

    layers, layer_block_bytes = LAYERS, 4

    def __init__(self, blocks: int) -> None:
        self.held = np.random.default_rng(blocks).integers(0, 256, (LAYERS, blocks, 4), dtype=np.uint8)

    def require_unchanged(self, slots: tuple[int, ...], epochs: tuple[int, ...]) -> None:
        assert (slots, epochs) == ((7, 8), (1, 2))

    def layer_block(self, slot: int, layer: int) -> np.ndarray:
        return self.held[layer, slot]

    def read_block(self, layer: int, block: int, destination: np.ndarray, tokens: int = 0) -> None:
        destination[:] = self.held[layer, block]

    def write_block(self, layer: int, block: int, source: np.ndarray, tokens: int = 0) -> None:
        self.held[layer, block] = source


def test_each_copy_takes_its_layer_from_its_slot_to_its_block() -> None:
    cache, pool = Bytes(5), Bytes(9)
    before = cache.held.copy()
    order = CopyLayers(1, ((0, 7, 3), (2, 8, 4)), ((7, 1), (8, 2)))
    assert copy_layers(cache, pool, order) == ""  # type: ignore[arg-type]
    before[0, 3], before[2, 4] = pool.held[0, 7], pool.held[2, 8]
    assert np.array_equal(cache.held, before)


def test_what_was_swapped_out_comes_back_into_other_blocks_as_it_was() -> None:
    cache = Bytes(6)
    was = cache.held[:, [4, 1]].copy()
    held = copy_out(cache, [4, 1])
    cache.held[:] = 0
    copy_in(cache, [2, 5], held)
    assert np.array_equal(cache.held[:, [2, 5]], was)
    assert not cache.held[:, [0, 1, 3, 4]].any()
