"""Channels to other workers, each kept until it breaks off or the worker listens elsewhere."""

from __future__ import annotations

import select
from collections.abc import Sequence

import msgspec

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.opening import connect
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.errors import ChannelError
from halfmoon.workers.attention.errors import LenderLost


class WorkerChannels:
    """One thread owns it, and the channels. `open`: those that are kept, by worker."""

    def __init__(self, hello: ChannelHello, options: ChannelOptions) -> None:
        self._hello, self._options = hello, options
        self.open: dict[str, WorkerChannel] = {}
        #: Where each worker listened when the channel to it was opened.
        self._reached: dict[str, list[str]] = {}

    def reach(self, worker_id: str, addresses: Sequence[str], *, head_shares: int = 1) -> WorkerChannel:
        """The channel to a worker that listens at `addresses`, opened anew if it has started again since. Its cache has
        one of `head_shares` equal parts of the KV heads. Raises LenderLost.
        """
        channel = self.open.get(worker_id)
        if channel is not None:
            if self._reached[worker_id] == list(addresses) and not hung_up(channel):
                return channel
            self.forget(worker_id)
        hello = msgspec.structs.replace(self._hello, head_shares=head_shares)
        try:
            channel = connect(addresses, hello, self._options, peer=worker_id)
        except ChannelError as problem:
            raise LenderLost(worker_id, str(problem)) from None
        self.open[worker_id], self._reached[worker_id] = channel, list(addresses)
        return channel

    def forget(self, worker_id: str) -> None:
        """Closes the channel to a worker, if there is one: it is opened anew when it is next wanted."""
        channel = self.open.pop(worker_id, None)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        for worker_id in list(self.open):
            self.forget(worker_id)


def hung_up(channel: WorkerChannel) -> bool:
    """The other end has closed it: the worker may have started again, and listen where it did."""
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLRDHUP)
    return bool(poller.poll(0))
