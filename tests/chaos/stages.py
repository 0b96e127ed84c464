"""Prompts that two prefill workers compute together, in some worlds: the channel between them, and what each does.

The channel brings everything in order, until an end hangs up, dies, or is waited for too long; then the other one is
lost to it. Who has the first layer may be slow, or come late. What it hands on is a mark of the residual, and nobody
computes from another chunk's; marks of KV are checked as anywhere.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from halfmoon.conductor.core.state.core_state import State
from halfmoon.schemas.decisions import Decision, StartPrefill, StartStage
from halfmoon.schemas.policy import GroupFrom
from halfmoon.workers.prefill import actions as prefill_actions
from halfmoon.workers.prefill import events as prefill_events
from tests.chaos.texts import BLOCK_TOKENS, LAYERS, Text
from tests.conductor.conductor_scripts import MS, S

if TYPE_CHECKING:
    from tests.chaos.prefill_workers import Computation, PrefillWorker
    from tests.chaos.world import World

#: Of the worlds in which it can be, and of those whose workers change roles.
STAGES, STAGES_ELASTIC = 0.4, 0.2
#: Longer than this nobody waits for the other end.
STAGE_NS_MAX = 4 * S
#: The one stage beside that of who has the last layer.
FIRST_LAYER = 0


class StageGroups:
    """See the module. `on`: they are drawn in this world."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.draw = random.Random(f"stages {seed}")
        can = not (world.null or world.lending or world.attention or world.mixed)
        share = STAGES_ELASTIC if world.elastic else STAGES
        self.on = can and world.wishes.drawn("stages", self.draw.random() < share)
        self.group_from = random.Random(f"groups {seed}").choice(get_args(GroupFrom))

    def policy(self) -> dict[str, int | str]:
        if not self.on:
            return {}
        return {
            "prefill_group": self.world.wishes.some("stages", self.draw.choice([0, 2, 2, 4]), 2) or 1,
            "group_gain_percent": self.draw.choice([1, 10]),
            "group_from": self.group_from,
        }

    def prompt_tokens(self, tokens: int) -> int:
        """Many prompts are so long that two workers pay."""
        return self.draw.choice([60, 150, 300]) if self.on and self.draw.random() < 0.6 else tokens

    def addresses(self, worker_id: str) -> list[str]:
        return [f"stage:{worker_id}"] if self.on else []

    def check(self, state: State, decisions: Sequence[Decision]) -> None:
        """After a step of a core: parts meet without gap or overlap, and go to workers that had nothing before."""
        parts = [one for one in decisions if isinstance(one, StartStage)]
        for order in decisions:
            if not isinstance(order, StartPrefill) or not order.stages:
                continue
            ends = [(one.first_layer, one.first_layer + one.layers) for one in order.stages]
            assert [0, *(end for _, end in ends)] == [*(first for first, _ in ends), LAYERS], (
                "I94 layers",
                order,
            )
            told = [one.stage for one in parts if one.order_id == order.order_id]
            assert [*told, order.stages[-1]] == order.stages, (
                "I94 parts that nobody was told of",
                order,
                parts,
            )
            for one in order.stages:
                held = list(state.workers[one.worker_id].orders)
                assert held[0] == order.order_id, ("I94 a stage of one that is busy", order, one, held)
            self.world.net.counts["prompts given to two"] += 1


class StageChannel:
    """From `near`, which has the last layer, to `far`; `to_near` and `to_far` hold what has come, in order."""

    def __init__(
        self, near: PrefillWorker, far: PrefillWorker, action: prefill_actions.ComputePrompt
    ) -> None:
        self.net = near.net
        self.near_id, self.action = near.process_id, action
        self._lives = [(near, near.life), (far, far.life)]
        self._closed = False
        self._until_ns = 0
        self.to_near: deque[Any] = deque()
        self.to_far: deque[Any] = deque()

    @property
    def lost(self) -> bool:
        return self._closed or any(end.life != life for end, life in self._lives)

    def close(self) -> None:
        self._closed = True

    def send(self, box: deque[Any], message: Any) -> None:
        net = self.net
        if net.chance(net.loss / 2):
            net.counts["stage channels lost"] += 1
            self.close()
        self._until_ns = max(self._until_ns + 1, net.now_ns + net.lag_ns())
        net.at(self._until_ns, lambda: box.append(message))


class StageCaller:
    """The other worker, for a computation that has the last layer: `poll` again and again, `close` at the end."""

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self.worker, self.action = computation.worker, computation.action
        stage = self.action.stages[0]
        assert [one.worker_id for one in self.action.stages[1:]] == [self.worker.process_id], self.action
        self.stage_id = stage.worker_id
        self.channel: StageChannel | None = None
        self.problem = ""
        #: Chunks whose residual has come.
        self.rows = 0
        self._fed = False
        self._heard_ns = self.worker.net.now_ns
        self._over = False
        self.worker.later(self.worker.net.lag_ns(), self._connect)

    def _connect(self) -> None:
        net, far = self.worker.net, self.worker.world.worker(self.stage_id)
        if self._over:
            return
        if not far.alive or far.role != "prefill" or net.chance(net.loss):
            self.problem = "nobody listens there"
            return
        channel = self.channel = StageChannel(self.worker, far, self.action)  # type: ignore[arg-type]
        far.came[self.action.order_id] = channel  # type: ignore[attr-defined]

    def poll(self) -> None:
        """Take what has come, send what can be sent."""
        net, channel = self.worker.net, self.channel
        if channel is not None and not self._fed and self.computation.fetched_layer >= FIRST_LAYER:
            self._fed = True
            if self.action.prefix_blocks:
                marks = [
                    self.computation.held(block, FIRST_LAYER) for block in range(self.action.prefix_blocks)
                ]
                channel.send(channel.to_far, marks)
                self.computation.tell(prefill_events.PrefixLayerLoaded, layer=FIRST_LAYER)
        while channel is not None and channel.to_near and not channel.lost:
            self._heard_ns = net.now_ns
            self._take(*channel.to_near.popleft())
        if channel is not None and channel.lost:
            self.problem = self.problem or "it hung up"
        elif net.now_ns - self._heard_ns > STAGE_NS_MAX:
            self.problem = self.problem or "nothing came"

    def _take(self, number: int, marks: list[bytes]) -> None:
        assert number == self.rows, ("I95 another chunk's residual", self.action.order_id, number, self.rows)
        chunk = self.action.chunks[number]
        first = chunk.start // BLOCK_TOKENS
        for block, mark in enumerate(marks, first):
            self.computation.store(block, FIRST_LAYER, mark)
        self.computation.tell(
            prefill_events.LayerStored, layer=FIRST_LAYER, first_block=first, blocks=len(marks)
        )
        self.rows += 1

    def close(self) -> None:
        self._over = True
        if self.channel is not None:
            self.channel.close()


class StageRun:
    """The first layer of another worker's prompt, on the compute thread."""

    def __init__(self, worker: PrefillWorker, action: prefill_actions.ComputeStage, text: Text) -> None:
        assert (action.first_layer, action.layers) == (FIRST_LAYER, 1), action
        self.worker, self.action, self.text = worker, action, text
        self.order_id = action.order_id
        self.stopped = False
        self.channel: StageChannel | None = None
        self.cache: dict[int, bytes] = {}
        self._waits_ns = worker.net.now_ns
        draw = worker.world.stages.draw
        self.pace_ns = draw.choice([1 * MS, draw.randrange(1, 60 * MS), draw.randrange(1, 3 * S)])
        worker.later(self.pace_ns, self._begin)

    def steer(self, action: Any) -> None:
        assert isinstance(action, prefill_actions.StopComputing), ("a part of a prompt loads nothing", action)
        self.stopped = True
        if self.channel is not None:
            self.channel.close()

    def _end(self, reason: str) -> None:
        if self.channel is not None:
            self.channel.close()
        self.worker.net.counts["stages computed" if not reason else "stages ended early"] += 1
        self.worker.hear(
            prefill_events.StageEnded, order_id=self.order_id, elapsed_ns=1, compute_ns=1, reason=reason
        )

    def _waited(self) -> bool:
        return self.worker.net.now_ns - self._waits_ns > STAGE_NS_MAX

    def _begin(self) -> None:
        if self.stopped:
            self._end("it was stopped")
            return
        self.channel = self.worker.came.pop(self.order_id, None)
        if self.channel is None and self._waited():
            self._end("no channel came")
        elif self.channel is None:
            self.worker.later(10 * MS, self._begin)
        else:
            channel = self.channel
            assert channel.near_id == self.action.prefill_worker_id, (channel.action, self.action)
            self._waits_ns = self.worker.net.now_ns
            self._compute(channel, 0)

    def _compute(self, channel: StageChannel, number: int) -> None:
        plan = channel.action
        if number == len(plan.chunks):
            self._finish(channel)
        elif self.stopped or channel.lost or self._waited():
            self._end("it was stopped" if self.stopped else "the other end is gone")
        elif len(self.cache) < plan.prefix_blocks and not channel.to_far:
            self.worker.later(10 * MS, lambda: self._compute(channel, number))
        else:
            if len(self.cache) < plan.prefix_blocks:
                self.cache = dict(enumerate(channel.to_far.popleft()))
            chunk = plan.chunks[number]
            first, end = chunk.start // BLOCK_TOKENS, -(-chunk.stop // BLOCK_TOKENS)
            known = [self.cache.get(block) for block in range(first)]
            wanted = [self.text.mark(block) for block in range(first)]
            assert known == wanted, ("I96 attends to other bytes", self.order_id, number, known, wanted)
            self.cache |= {block: self.text.mark(block) for block in range(first, end)}
            channel.send(channel.to_near, (number, [self.cache[block] for block in range(first, end)]))
            self._waits_ns = self.worker.net.now_ns
            self.worker.later(self.pace_ns, lambda: self._compute(channel, number + 1))

    def _finish(self, channel: StageChannel) -> None:
        """A channel that is closed before all was taken would take it along."""
        if channel.lost or self.stopped or self._waited():
            self._end("")
        else:
            self.worker.later(10 * MS, lambda: self._finish(channel))
