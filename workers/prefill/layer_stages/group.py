"""The other workers that compute a prompt's first layers, as the one that has the last layers sees them.

It has a channel to each, and two threads: one sends a stage's inputs, one takes its results. KV goes to the slots of
the own node's pool, from where it is pushed and committed as if it had been computed here; the residual goes on to the
next stage, or to the compute thread. Compared with one worker the group costs one more hop of KV; a pipeline whose
stages push KV themselves would pay it towards the node where whole blocks are committed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from halfmoon.schemas.decisions import LayerStage
from halfmoon.store.channels.channel import WorkerChannel
from halfmoon.store.channels.opening import connect
from halfmoon.store.errors import ChannelError, OrderUnknown
from halfmoon.workers.model.attention.kernel import Tensor
from halfmoon.workers.prefill.actions import ComputePrompt
from halfmoon.workers.prefill.cache_window import PromptMemory
from halfmoon.workers.prefill.events import LayerStored, PrefixLayerLoaded, StepOfOrder
from halfmoon.workers.prefill.layer_progress import LayerLoads, LayersMissing, StageGone
from halfmoon.workers.prefill.layer_stages.messages import (
    StagePlan,
    blocks_of,
    receive_activation,
    receive_block,
    send_activation,
    send_block,
    send_done,
    send_plan,
)

if TYPE_CHECKING:
    from halfmoon.workers.worker import ChannelConfig

#: Residuals of chunks that lie between two stages; a stage that is ahead waits.
AHEAD_MAX = 8


class Handover:
    """Residuals of one chunk after another, from one thread to another."""

    def __init__(self) -> None:
        self._rows: deque[Tensor] = deque()
        self._problem: StageGone | None = None
        self._changed = threading.Condition()

    def put(self, rows: Tensor) -> None:
        """Raises StageGone."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem or len(self._rows) < AHEAD_MAX)
            self._check()
            self._rows.append(rows)
            self._changed.notify_all()

    def take(self) -> Tensor:
        """Raises StageGone."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem or self._rows)
            self._check()
            self._changed.notify_all()
            return self._rows.popleft()

    def end(self, problem: StageGone) -> None:
        """Every wait, of now and of later, raises the problem; the first one counts."""
        with self._changed:
            self._problem = self._problem or problem
            self._changed.notify_all()

    def _check(self) -> None:
        if self._problem is not None:
            raise self._problem


class StageGroup:
    """`begin`, then `rows` for each chunk, and `close`, which may come at any time."""

    def __init__(
        self,
        prompt: ComputePrompt,
        memory: PromptMemory,
        *,
        loads: LayerLoads,
        channels: ChannelConfig,
        tell: Callable[[StepOfOrder], None],
    ) -> None:
        self._prompt, self._loads, self._tell = prompt, loads, tell
        self._engine, self._pool, self._layout = memory.engine, memory.pool, memory.layout
        self._hello, self._options = channels.hello, channels.options
        self._others: Sequence[LayerStage] = prompt.stages[:-1]
        self._chunks = [(chunk.start, chunk.stop) for chunk in prompt.chunks]
        self._present = frozenset(prompt.present)
        #: To each stage but the first, and to the compute thread.
        self._handovers = [Handover() for _ in self._others]
        self._channels: dict[int, WorkerChannel] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._over: StageGone | None = None

    def begin(self) -> None:
        for place, stage in enumerate(self._others):
            self._spawn(place, partial(self._feed, place, stage))

    def rows(self) -> Tensor:
        """The residual before the own layers of the next chunk, `[rows, hidden]`; all KV of the chunk's earlier layers
        is in the pool. Raises StageGone.
        """
        return self._handovers[-1].take()

    def end(self, problem: StageGone | None = None) -> None:
        """Nothing more is taken or sent; from any thread, and soon."""
        with self._lock:
            # Other stages' failures follow from the first one.
            self._over = over = self._over or problem or StageGone("", "nobody asks for more")
            channels = list(self._channels.values())
        for handover in self._handovers:
            handover.end(over)
        for channel in channels:
            channel.close()

    def close(self) -> None:
        """Returns when no thread of it writes to the pool any more."""
        self.end()
        for thread in list(self._threads):
            thread.join()

    def _spawn(self, place: int, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except StageGone as gone:
                self.end(gone)
            except (ChannelError, LayersMissing, OrderUnknown) as problem:
                self.end(StageGone(self._others[place].worker_id, str(problem)))

        thread = threading.Thread(target=run, name=f"stage-{place}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _feed(self, place: int, stage: LayerStage) -> None:
        """Sends a stage its inputs."""
        channel = connect(stage.addresses, self._hello, self._options, peer=stage.worker_id)
        with self._lock:
            self._channels[place] = channel
            over = self._over
        if over is not None:
            channel.close()
            raise over
        prompt = self._prompt
        plan = StagePlan(
            order_id=prompt.order_id,
            token_ids=[] if place else list(prompt.token_ids),
            chunks=self._chunks,
            prefix_blocks=prompt.prefix_blocks,
        )
        send_plan(channel, plan)
        self._spawn(place, partial(self._hear, place, stage, channel))
        if prompt.prefix_blocks:
            for layer in range(stage.first_layer, stage.first_layer + stage.layers):
                self._loads.wait_fetched(layer)
                for block in range(prompt.prefix_blocks):
                    held = self._pool.layer_block(prompt.slots[block], layer)
                    send_block(channel, layer, block, memoryview(held).cast("B"))
                self._say(PrefixLayerLoaded, layer=layer)
        if place:
            for number in range(len(self._chunks)):
                send_activation(channel, number, self._handovers[place - 1].take())

    def _hear(self, place: int, stage: LayerStage, channel: WorkerChannel) -> None:
        """Takes a stage's results, chunk by chunk."""
        memory = memoryview(bytearray(self._layout.layer_block_bytes))
        for number, chunk in enumerate(self._chunks):
            blocks = blocks_of(chunk, self._layout.block_tokens)
            for layer in range(stage.first_layer, stage.first_layer + stage.layers):
                for block in blocks:
                    receive_block(channel, layer, block, memory)
                    self._store(layer, block, memory)
                self._say(LayerStored, layer=layer, first_block=blocks.start, blocks=len(blocks))
            rows = self._engine.activation(chunk[1] - chunk[0])
            receive_activation(channel, number, rows)
            self._handovers[place].put(rows)
        with contextlib.suppress(ChannelError):  # it has done its part, and may be gone
            send_done(channel)

    def _store(self, layer: int, block: int, memory: memoryview) -> None:
        """Committed blocks stay as they are. Raises OrderUnknown: the slot was given away meanwhile."""
        if block in self._present:
            return
        slot = self._prompt.slots[block]
        with self._pool.writing(slot, self._prompt.order_id):
            memoryview(self._pool.layer_block(slot, layer)).cast("B")[:] = memory

    def _say(self, kind: Any, **fields: Any) -> None:
        self._tell(kind(at_ns=time.monotonic_ns(), order_id=self._prompt.order_id, **fields))
