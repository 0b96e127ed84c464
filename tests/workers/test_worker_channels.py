"""Channels that are kept: one for each worker, anew where it listens elsewhere or has hung up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from halfmoon.workers.attention.errors import LenderLost
from halfmoon.workers.attention.worker_channels import WorkerChannels
from tests.store.channel_harness import NAMES, QUERY, accepted, addresses, hello, memory, options
from tests.store.memory_channels import channel_kind, listening


@pytest.fixture(name="channels")
def any_channels(request: pytest.FixtureRequest) -> Iterator[tuple[str, WorkerChannels]]:
    kind = channel_kind(request.node, getattr(request, "param", NAMES[0]))
    one = WorkerChannels(hello("decode-0"), options(kind))
    yield kind, one
    one.close()


@pytest.mark.pure
def test_a_channel_is_kept_until_the_worker_listens_elsewhere(channels: tuple[str, WorkerChannels]) -> None:
    kind, kept = channels
    settings = options(kind)
    with (
        listening(hello("a0"), settings, kind) as before,
        listening(hello("a0"), settings, kind) as after,
        listening(hello("a1"), settings, kind) as other,
    ):
        first = kept.reach("a0", addresses(before, kind))
        with accepted(before), kept.reach("a1", addresses(other, kind)), accepted(other):
            assert kept.reach("a0", addresses(before, kind)) is first
            again = kept.reach("a0", addresses(after, kind))
            with accepted(after) as peer:
                assert again is not first
                assert kept.open["a0"] is again
                again.send(QUERY, memory(4))
                assert peer.receive(lambda header: memory(header.payload_bytes)).op is QUERY.op
                kept.forget("a0")
                assert list(kept.open) == ["a1"]


@pytest.mark.parametrize("channels", NAMES, indirect=True)
def test_a_worker_that_hung_up_is_called_anew_at_the_same_place(channels: tuple[str, WorkerChannels]) -> None:
    kind, kept = channels
    with listening(hello("a0"), options(kind), kind) as listener:
        first = kept.reach("a0", addresses(listener, kind))
        accepted(listener).close()
        again = kept.reach("a0", addresses(listener, kind))
        with accepted(listener):
            assert again is not first
            assert kept.reach("a0", addresses(listener, kind)) is again


@pytest.mark.pure
def test_nobody_there_and_a_cache_of_other_heads_are_lost_lenders(
    channels: tuple[str, WorkerChannels],
) -> None:
    kind, kept = channels
    with listening(hello("a0", head_shares=3), options(kind), kind) as listener:
        found = addresses(listener, kind)
        with pytest.raises(LenderLost, match="head_shares") as lost:
            kept.reach("a0", found)
        assert lost.value.worker_id == "a0"
        kept.reach("a0", found, head_shares=3)
        accepted(listener).close()
    kept.forget("a0")
    with pytest.raises(LenderLost):
        kept.reach("a0", found, head_shares=3)
    assert not kept.open
