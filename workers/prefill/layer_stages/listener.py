"""The listener of a prefill worker for other workers that have it compute some layers of their prompts.

A thread lets them in and reads their plans, so that one that comes early, while another order has the turn, need not
wait for its hello. A channel that nobody takes is closed when its other end has hung up, or with the listener.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.hello import ChannelHello
from halfmoon.store.channels.listener import ChannelListener
from halfmoon.store.channels.options import ChannelOptions
from halfmoon.store.channels.selector import ChannelSelector
from halfmoon.store.errors import ChannelLost
from halfmoon.workers.attention.worker_channels import hung_up
from halfmoon.workers.prefill.layer_stages.messages import STAGE_S_MAX, StagePlan, receive_plan

log = logging.getLogger(__name__)
WAIT_S = 0.1
PLAN_S_MAX = 5.0


class StageListener:
    """From its making until `close`."""

    def __init__(self, hello: ChannelHello, options: ChannelOptions) -> None:
        """Raises ChannelError: it cannot listen there."""
        self._listener = ChannelListener(hello, options)
        self._came: dict[str, tuple[StagePlan, WorkerChannel]] = {}
        self._changed = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="stages", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        return list(self._listener.addresses)

    def take(self, order_id: str, stopped: Callable[[], bool]) -> tuple[StagePlan, WorkerChannel]:
        """Waits for the channel of an order; it is the caller's from now on. Raises ChannelLost: nobody came, or it was
        stopped.
        """
        deadline_s = time.monotonic() + STAGE_S_MAX
        with self._changed:
            while order_id not in self._came:
                if stopped() or self._over or time.monotonic() > deadline_s:
                    raise ChannelLost("who has the last layers", "no channel came for the order")
                self._changed.wait(WAIT_S)
            return self._came.pop(order_id)

    def drop(self, order_id: str) -> None:
        """Nobody will take the order's channel."""
        with self._changed:
            came = self._came.pop(order_id, None)
        if came is not None:
            came[1].close()

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()
        self._listener.close()
        for order_id in list(self._came):
            self.drop(order_id)

    def _run(self) -> None:
        selector = ChannelSelector()
        selector.add(self._listener)
        while not self._over:
            if not selector.wait(WAIT_S):
                continue
            channel = self._listener.accept()
            if channel is not None:
                self._let_in(channel)
        selector.close()

    def _let_in(self, channel: WorkerChannel) -> None:
        with self._changed:
            gone = [order_id for order_id, (_, known) in self._came.items() if hung_up(known)]
        for order_id in gone:
            self.drop(order_id)
        try:
            plan = receive_plan(channel, PLAN_S_MAX)
        except (ChannelLost, msgspec.DecodeError) as problem:
            log.warning("no plan of a stage came: %s", problem)
            channel.close()
            return
        self.drop(plan.order_id)
        with self._changed:
            self._came[plan.order_id] = plan, channel
            self._changed.notify_all()
