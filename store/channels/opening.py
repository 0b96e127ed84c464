"""Connects to another worker's channel port, over the best of its addresses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.kinds import KINDS, ChannelKind
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelLost, ChannelRefused
from halfmoon.store.transports.tcp.streams import ConnectionBroken


def connect(
    addresses: Sequence[str],
    hello: ChannelHello,
    options: ChannelOptions,
    *,
    peer: str,
    timeout_s: float | None = None,
) -> WorkerChannel:
    """A channel to the worker `peer`, which listens at `addresses` (of its `ChannelListener`). Raises ChannelRefused,
    naming the field in which the ends differ, and ChannelLost: it does not answer.
    """
    hello.check()
    deadline_s = time.monotonic() + (options.timeout_s if timeout_s is None else timeout_s)
    kind, address = _best(addresses, options, peer)
    try:
        stream = kind.connect(address, options, deadline_s)
    except (ConnectionBroken, OSError) as problem:
        raise ChannelLost(peer, f"{address}: {problem}") from None
    channel = WorkerChannel(stream, hello, options.timeout_s)
    try:
        channel.greet(first=True, deadline_s=deadline_s)
        if channel.peer.worker_id != peer:
            raise ChannelRefused(f"worker_id: {channel.peer.worker_id!r} at {address}, not {peer!r}")
    except BaseException:
        channel.close()
        raise
    return channel


def _best(addresses: Sequence[str], options: ChannelOptions, peer: str) -> tuple[ChannelKind, str]:
    for kind in KINDS:
        for address in addresses:
            if kind.reaches(address, options):
                return kind, address
    raise ChannelRefused(
        f"encryption: {options.encryption!r} here, and {peer} is reached at {', '.join(addresses) or 'no address'}"
    )
