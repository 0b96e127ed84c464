"""The first message of each end: its identity and its model. Ends that differ part, by the name of the field."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from halfmoon.store.errors import ChannelRefused

HELLO_BYTES_MAX = 4096
#: Messages of data that may be on their way to an end, and the longest of them.
WINDOW_MAX = 1024
MESSAGE_BYTES_MAX = 256 * 1024 * 1024
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=1, le=2**20)]


class ChannelHello(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One end of a channel. All but `worker_id`, `window` and `message_bytes_max` must be alike on both."""

    worker_id: Name
    #: The cluster's, and the release that both run.
    cluster: Name
    version: Name
    #: Fingerprint of the weights and their configuration.
    model: Name
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    #: Numerics: whether results are the same bits wherever they are computed, tokens of a canonical segment, the dtype.
    exact: bool
    segment_tokens: Count
    dtype: Name
    #: Workers that the heads are split over; 1: each has all of them.
    head_shares: Count = 1
    #: Messages that may be on their way to this end, which stores them where it sends meanwhile; bytes of the longest.
    window: Annotated[int, Meta(ge=2, le=WINDOW_MAX)] = 8
    message_bytes_max: Annotated[int, Meta(ge=1024, le=MESSAGE_BYTES_MAX)] = 16 * 1024 * 1024

    def check(self) -> None:
        """Raises ChannelRefused for heads that cannot be split so."""
        if self.heads % self.kv_heads:
            raise ChannelRefused(f"kv_heads: {self.kv_heads} do not divide {self.heads} heads")
        if self.kv_heads % self.head_shares:
            raise ChannelRefused(f"head_shares: {self.head_shares} do not divide {self.kv_heads} KV heads")


OWN_FIELDS = {"worker_id", "window", "message_bytes_max"}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChannelHello)


def encode_hello(hello: ChannelHello) -> bytes:
    return _encoder.encode(hello)


def decode_hello(raw: bytes | memoryview) -> ChannelHello:
    """Raises ChannelRefused, naming the field."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise ChannelRefused(f"hello: {problem}") from None


def compare(mine: ChannelHello, theirs: ChannelHello) -> None:
    """Raises ChannelRefused, naming the first field in which the ends differ."""
    theirs.check()
    for field in ChannelHello.__struct_fields__:
        if field not in OWN_FIELDS and getattr(mine, field) != getattr(theirs, field):
            raise ChannelRefused(
                f"{field}: {getattr(theirs, field)!r} at {theirs.worker_id!r},"
                f" {getattr(mine, field)!r} at {mine.worker_id!r}"
            )
