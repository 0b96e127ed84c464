"""One order of a prefill worker on its way: from its tokens to the last layer pushed. Pure, as its machine.

::

    queued ─ taking ─ awaiting prefix ─ opening put ─ prepared ─ opening push ─ computing ─ drawing ─ closing ─ ended
                                            │ ↺ pause               │ ↺ pause      │  ↑
                                            └ fetch, while it waits and computes   └ awaiting fetch

An event that the stage does not wait for changes nothing. An order can end from every stage.
"""

# The drawing is the machine. The paper's prefill overlaps loading, computing and storing layer by layer; so one order
# has a fetch, a computation and a push at the same time, and each can fail while the others go on. A stage names the
# one thing that the order waits for; `fetching`, `paused` and `cancelled` are the few things beside it.
#
# Turned down: waiting for the fetch before computing, which would be one line of stages; a long prefix arrives while
# its first layers are computed over. In doubt: `pushed_wrong`. A fetch found wrong at its end costs a whole placement.

from __future__ import annotations

from typing import assert_never

from halfmoon.schemas.decisions import StartPrefill
from halfmoon.schemas.keys import share_block, token_array
from halfmoon.schemas.kv import PrefillResult
from halfmoon.schemas.sampling import SampledToken
from halfmoon.schemas.similar import SimilarReuse
from halfmoon.schemas.tokens import TakeReply
from halfmoon.schemas.types import KEY_BYTES
from halfmoon.workers.machines import Report, TakeTokens, TokensTaken, refusal
from halfmoon.workers.prefill import actions
from halfmoon.workers.prefill.actions import Actions
from halfmoon.workers.prefill.answers import end_of, failed_of, finished_of, result_of
from halfmoon.workers.prefill.events import (
    BlocksFetched,
    ChunkStored,
    ComputingStopped,
    FetchFailed,
    FirstTokenDrawn,
    LayersFetched,
    LayerStored,
    LoadFailed,
    OfReference,
    OpenPushFailed,
    PauseEnded,
    PrefixLayerLoaded,
    PromptComputed,
    PushClosed,
    PushFailed,
    PushOpened,
    ReserveSlotsFailed,
    SlotsReserved,
    StageEnded,
    StageLost,
    StepOfOrder,
)
from halfmoon.workers.prefill.first_tokens import FirstTokenAnswer, answered
from halfmoon.workers.prefill.layer_runs import LayerRun, LayerRuns
from halfmoon.workers.prefill.prompt_chunks import prompt_to_compute, shared_keys, streams_layers
from halfmoon.workers.prefill.reference_job import reference_of
from halfmoon.workers.prefill.stages import WAITING_STAGES, JobRules, PrefillStage, patience_ns


class Job:
    """One StartPrefill order. Times are monotonic ns unless a comment names another clock.

    `prepare`, `reserve`, `begin_turn`, `step` and `cancel` append their actions to `out`.
    """

    def __init__(self, order: StartPrefill, rules: JobRules, at_ns: int) -> None:
        self.order = order
        self.order_id = order.order_id
        self.rules = rules
        self.stage = PrefillStage.QUEUED
        self.cancelled = False
        self.arrived_ns = at_ns
        self.reply = TakeReply()
        self.token_ids = token_array(b"")
        #: Time of the stage's first question to the store; and whether the question is repeated after a pause.
        self.asked_ns = 0
        self.paused = False
        self.slots: list[int] = []
        self.present: list[int] = []
        self.put_ns = 0
        #: Blocks of the prefix: held here before anything was fetched, and fetched behind them.
        self.cached_blocks = 0
        self.fetched_blocks = 0
        self.fetching = False
        self.fetch_node_id = ""
        self.fetched_layer = -1
        #: Layers of a wrong fetch may have been pushed, and a decode worker does not copy a layer twice.
        self.pushed_wrong = False
        self.fetched_bytes = self.fetch_ns = 0
        self.started_ns = self.compute_ns = self.stage_wait_ns = 0
        self.kept = False
        #: Wall clock.
        self.finished_at_ns = 0
        #: To be pushed; where layers are not streamed, after the last one.
        self.runs = LayerRuns(rules.layout, order.prompt_tokens)
        self.result: PrefillResult | None = None
        #: Workers and their layers; []: this worker computes all of them.
        self.stages = order.stages
        #: A similar prompt, and what it stood in for.
        self.reference = reference_of(order, rules)
        self.similar: SimilarReuse | None = None
        #: Its KV goes to a decode node's pool. Else the worker may answer the request: the answer, once it is drawn.
        self.pushes = rules.has_store and not order.answers
        self.answer: FirstTokenAnswer | None = None

    @property
    def blocks(self) -> int:
        return self.rules.layout.blocks(self.order.prompt_tokens)

    @property
    def prefix_blocks(self) -> int:
        return self.cached_blocks + self.fetched_blocks

    @property
    def usable_blocks(self) -> int:
        """Cached blocks that can save computing: the last token is always computed, for its logits. All tokens are
        where the prompt's own log probabilities are wanted, though a second try may find blocks of the first one.
        """
        if self.reply.sampling.prompt_logprobs >= 0:
            return 0
        return (self.order.prompt_tokens - 1) // self.rules.layout.block_tokens

    def prepare(self, out: Actions) -> None:
        """Its tokens, its slots, its fetch."""
        assert self.stage is PrefillStage.QUEUED, self.stage
        self.stage = PrefillStage.TAKING
        order = self.order
        out.append(
            TakeTokens(order_id=order.order_id, request_id=order.request_id, frontend_id=order.frontend_id)
        )

    def begin_turn(self, at_ns: int, out: Actions) -> None:
        """No other order computes until this one has drawn its first token, or ended."""
        assert self.stage is PrefillStage.PREPARED, self.stage
        if self.pushes:
            self.stage, self.asked_ns = PrefillStage.OPENING_PUSH, at_ns
            self._open_push(out)
        else:
            self.started_ns = at_ns
            self._compute(out)

    def cancel(self, out: Actions) -> None:
        """One that waits ends at once; one that computes stops before its next layer."""
        if self.cancelled:
            return
        self.cancelled = True
        if self.stage in WAITING_STAGES or self.stage is PrefillStage.AWAITING_FETCH or self.paused:
            self.fail("cancelled", out, retryable=False)
        elif self.stage is PrefillStage.COMPUTING:
            out.append(actions.StopComputing(order_id=self.order_id))
        # Else something is under way that cannot be taken back: the order ends with it.

    def step(self, event: StepOfOrder, out: Actions) -> None:
        """Something that was under way went on, or ended."""
        if isinstance(event, OfReference):
            if self.reference is not None:
                self.reference.step(event, out, computing=self.stage is PrefillStage.COMPUTING)
            return
        match event:
            case LayerStored():
                self._layer_stored(event, out)
            case PrefixLayerLoaded():
                self._prefix_layer_loaded(event.layer, out)
            case ChunkStored():
                self._chunk_stored(event, out)
            case TokensTaken():
                self._tokens_taken(event.reply, out)
            case SlotsReserved():
                self._put_opened(event, out)
            case ReserveSlotsFailed():
                self._retry_store(PrefillStage.OPENING_PUT, "own store", event, out)
            case OpenPushFailed():
                where = f"decode node {self.order.decode_node_id}"
                self._retry_store(PrefillStage.OPENING_PUSH, where, event, out)
            case PauseEnded():
                self._pause_ended(out)
            case LayersFetched():
                # The last one counts only once the fetch was found right: nothing is drawn or shared before that.
                self._layers_fetched(min(event.layer, self.rules.layout.layers - 2), out)
            case BlocksFetched():
                self._blocks_fetched(event, out)
            case FetchFailed():
                self._fetch_failed(event, out)
            case PushOpened():
                self._push_opened(event.at_ns, out)
            case PromptComputed():
                self._prompt_computed(event, out)
            case LoadFailed():
                self._load_failed(event.reason, out)
            case ComputingStopped():
                self._computing_stopped(out)
            case StageLost():
                self._stage_lost(event, out)
            case StageEnded():
                pass  # of a part of another worker's prompt
            case FirstTokenDrawn():
                self._first_token_drawn(event.first, out)
            case PushClosed():
                self._push_closed(event.moved_bytes, event.elapsed_ns, out)
            case PushFailed():
                self._push_failed(event.reason, out)
            case _:
                assert_never(event)

    # --- preparing ------------------------------------------------------------------------------------------

    def _tokens_taken(self, reply: TakeReply | None, out: Actions) -> None:
        if self.stage is not PrefillStage.TAKING:
            return
        if reply is None or reply.gone:
            self.fail(refusal(reply), out, retryable=reply is None)
            return
        self.reply = reply
        if reply.traceparent:
            out.append(
                actions.BeginSpan(
                    order_id=self.order_id,
                    request_id=self.order.request_id,
                    prompt_tokens=self.order.prompt_tokens,
                    traceparent=reply.traceparent,
                    arrived_ns=self.arrived_ns,
                )
            )
        self.token_ids = token_array(reply.token_ids)
        if len(self.token_ids) != self.order.prompt_tokens:
            self.fail("the frontend's tokens are not those of the order", out, retryable=False)
        elif (most := self.rules.prompt_blocks_max) is not None and self.blocks > most:
            reason = f"the prompt's {self.blocks} blocks do not fit the worker's cache of {most}"
            self.fail(reason, out, retryable=True)
        elif self.rules.has_store:
            self.stage = PrefillStage.AWAITING_PREFIX
        else:
            self.stage = PrefillStage.PREPARED

    def brings_for(self, other: Job) -> bool:
        """Whether it is to compute, or fetches, blocks that `other`, behind it, can use."""
        keys = shared_keys(self.order, self.reply), shared_keys(other.order, other.reply)
        present = self.cached_blocks if self.fetching else self.prefix_blocks
        return other.usable_blocks > present and share_block(*keys, present)

    def reserve(self, at_ns: int, out: Actions) -> None:
        """Its slots. Which blocks are present is seen now, and not again."""
        assert self.stage is PrefillStage.AWAITING_PREFIX, self.stage
        self.stage, self.asked_ns = PrefillStage.OPENING_PUT, at_ns
        self._open_put(out)

    def _open_put(self, out: Actions) -> None:
        out.append(
            actions.ReserveSlots(
                order_id=self.order_id,
                block_keys=shared_keys(self.order, self.reply),
                blocks=self.blocks,
                tenant=self.reply.tenant,
                token_ids=self.reply.token_ids,
            )
        )

    def _put_opened(self, event: SlotsReserved, out: Actions) -> None:
        if self.stage is not PrefillStage.OPENING_PUT or self.paused:
            return
        self.stage = PrefillStage.PREPARED
        self.put_ns = event.at_ns - self.asked_ns
        self.slots, self.present = event.slots, event.present
        present, usable = dict.fromkeys(event.present), self.usable_blocks
        while self.cached_blocks < usable and self.cached_blocks in present:
            self.cached_blocks += 1
        self._fetch(usable, out)
        if self.reference is not None:
            self.reference.reserve(self.reply.tenant, out)

    def _fetch(self, usable: int, out: Actions) -> None:
        """Order the first fetch that continues the blocks held here; blocks that are here already are not fetched."""
        for ordered in self.order.fetches:
            if (fetch := ordered.clipped(self.cached_blocks, usable)) is not None:
                self.fetching, self.fetched_blocks, self.fetch_node_id = True, fetch.blocks, fetch.node_id
                out.append(
                    actions.StartFetch(
                        order_id=self.order_id,
                        source_node_id=fetch.node_id,
                        first_block=fetch.first_block,
                        blocks=fetch.blocks,
                        replicas=fetch.replicas,
                    )
                )
                return

    def _layers_fetched(self, layer: int, out: Actions) -> None:
        if not self.fetching or layer <= self.fetched_layer:
            return
        self.fetched_layer = layer
        if self.stage is PrefillStage.COMPUTING:
            out.append(actions.LoadLayers(order_id=self.order_id, layer=layer))

    def _blocks_fetched(self, event: BlocksFetched, out: Actions) -> None:
        if not self.fetching:
            return
        self._layers_fetched(self.rules.layout.layers - 1, out)
        self.fetching = False
        self.fetch_node_id = event.source_node_id or self.fetch_node_id
        self.fetched_bytes, self.fetch_ns = event.moved_bytes, event.elapsed_ns
        if self.stage is PrefillStage.AWAITING_FETCH:
            self._compute_without_fetch("", out)

    def _fetch_failed(self, event: FetchFailed, out: Actions) -> None:
        """A failed fetch costs computing from the blocks held here, nothing else, unless wrong layers were pushed."""
        if not self.fetching:
            return
        self.fetching = False
        self.pushed_wrong = event.corrupted and self.fetched_layer >= 0
        if self.stage is PrefillStage.COMPUTING:
            # LoadFailed answers, once the computation has left the layers that it waits for.
            out.append(actions.FailLoads(order_id=self.order_id, reason=event.reason))
        elif self.stage is PrefillStage.AWAITING_FETCH:
            self._compute_without_fetch(event.reason, out)
        elif self.stage in (PrefillStage.PREPARED, PrefillStage.OPENING_PUSH):
            self.fetched_blocks = 0

    def _retry_store(
        self, stage: PrefillStage, where: str, event: ReserveSlotsFailed | OpenPushFailed, out: Actions
    ) -> None:
        """Ask again while a store is full of leased blocks, or its agent is just coming back."""
        if self.stage is not stage or self.paused:
            return
        if self.cancelled:
            self.fail("cancelled", out, retryable=False)
        elif event.at_ns - self.asked_ns > patience_ns(full=event.full):
            self.fail(f"{where}: {event.reason}", out, retryable=True)
        else:
            self.paused = True
            out.append(actions.PauseOrder(order_id=self.order_id))

    def _pause_ended(self, out: Actions) -> None:
        if not self.paused:
            return
        self.paused = False
        if self.stage is PrefillStage.OPENING_PUT:
            self._open_put(out)
        else:
            self._open_push(out)

    # --- computing ------------------------------------------------------------------------------------------

    def _open_push(self, out: Actions) -> None:
        order = self.order
        out.append(
            actions.StartPush(
                order_id=order.order_id,
                request_id=order.request_id,
                target_node_id=order.decode_node_id,
                decode_worker_id=order.decode_worker_id,
                prompt_tokens=order.prompt_tokens,
            )
        )

    def _push_opened(self, at_ns: int, out: Actions) -> None:
        if self.stage is not PrefillStage.OPENING_PUSH or self.paused:
            return
        if self.cancelled:
            self.fail("cancelled", out, retryable=False)
            return
        self.started_ns = at_ns
        self._compute(out)

    def _compute(self, out: Actions) -> None:
        self.stage = PrefillStage.COMPUTING
        self.runs.begin(streamed=streams_layers(self))
        out.append(prompt_to_compute(self))

    def _compute_without_fetch(self, reason: str, out: Actions) -> None:
        if self.pushed_wrong:
            self.fail(f"cached layers: {reason}", out, retryable=True)
            return
        # Other stages may hold layers of the prefix that failed, so this worker computes all layers alone.
        self.fetched_blocks, self.stages = 0, []
        self._compute(out)

    def _prefix_layer_loaded(self, layer: int, out: Actions) -> None:
        last = self.rules.layout.layers - 1
        if self.runs.streamed:
            self._push(self.runs.add(layer, 0, self.prefix_blocks), out)
        elif layer == last:
            self._push([LayerRun(every, 1, 0, self.prefix_blocks) for every in range(last + 1)], out)

    def _layer_stored(self, event: LayerStored, out: Actions) -> None:
        self._push(self.runs.add(event.layer, event.first_block, event.blocks), out)

    def _push(self, runs: list[LayerRun], out: Actions) -> None:
        if self.pushes and not self.cancelled:
            for run in runs:
                out.append(actions.SendLayer(order_id=self.order_id, **run._asdict()))

    def _chunk_stored(self, event: ChunkStored, out: Actions) -> None:
        # The last block has no key when it is not full: nobody could ask for it.
        keyed = len(shared_keys(self.order, self.reply)) // KEY_BYTES
        blocks = min(event.first_block + event.blocks, keyed) - event.first_block
        if blocks > 0 and not self.cancelled:
            out.append(
                actions.CommitPrompt(order_id=self.order_id, first_block=event.first_block, blocks=blocks)
            )

    def _prompt_computed(self, event: PromptComputed, out: Actions) -> None:
        if self.stage is not PrefillStage.COMPUTING:
            return
        if self.cancelled:
            self.fail("cancelled", out, retryable=False)
            return
        self._push(self.runs.rest(), out)
        self.stage = PrefillStage.DRAWING
        self.compute_ns = event.at_ns - self.started_ns
        self.stage_wait_ns, self.kept, self.similar = event.stage_wait_ns, event.kept, event.similar
        self.finished_at_ns = event.finished_at_ns
        out.append(
            actions.DrawFirstToken(
                order_id=self.order_id, sampling=self.reply.sampling, token_ids=self.token_ids
            )
        )

    def _load_failed(self, reason: str, out: Actions) -> None:
        if self.stage is not PrefillStage.COMPUTING:
            return
        if self.cancelled:
            self.fail("cancelled", out, retryable=False)
        elif not self.fetched_blocks:
            # Blocks that this node had already cannot be loaded: another try here would find the same.
            self.fail(f"cached layers: {reason}", out, retryable=True)
        elif self.fetching:
            # It still writes to slots that the computation is going to write.
            self.stage = PrefillStage.AWAITING_FETCH
        else:
            self._compute_without_fetch(reason, out)

    def _computing_stopped(self, out: Actions) -> None:
        if self.stage is PrefillStage.COMPUTING and self.cancelled:
            self.fail("cancelled", out, retryable=False)

    def _stage_lost(self, event: StageLost, out: Actions) -> None:
        if self.stage is PrefillStage.COMPUTING:
            self.fail(event.reason, out, retryable=True, stage_id=event.stage_id)

    # --- ending ---------------------------------------------------------------------------------------------

    def _first_token_drawn(self, first: SampledToken, out: Actions) -> None:
        if self.stage is not PrefillStage.DRAWING:
            return
        if self.cancelled:
            self.fail("cancelled", out, retryable=False)
            return
        self._push(self.runs.rest(), out)
        self.result = result_of(self, first)
        if self.order.answers:
            self.answer = answered(self, self.result, out)
            self._finish(0, 0, out)
            return
        # The decode worker need not wait for the end of the push: it hears of every layer.
        out.append(actions.SendResult(decode_worker_id=self.order.decode_worker_id, result=self.result))
        self.stage = PrefillStage.CLOSING
        if self.pushes:
            out.append(actions.EndPush(order_id=self.order_id))
        else:
            self._push_closed(0, 0, out)

    def _push_closed(self, moved_bytes: int, elapsed_ns: int, out: Actions) -> None:
        if self.stage is not PrefillStage.CLOSING:
            return
        if self.cancelled:
            self.fail("cancelled", out, retryable=False)
            return
        self._finish(moved_bytes, elapsed_ns, out)

    def end_computed(
        self, first: SampledToken, compute_ns: int, wall_ns: int, out: Actions, *, decodes: bool
    ) -> PrefillResult:
        """A mixed worker has computed the prompt from its turn on, and keeps its KV: nothing is pushed."""
        assert self.stage is PrefillStage.PREPARED, self.stage
        self.compute_ns, self.finished_at_ns = compute_ns, wall_ns
        self.result = result_of(self, first)
        self._finish(0, 0, out, decodes=decodes)
        return self.result

    def _finish(self, pushed_bytes: int, push_ns: int, out: Actions, *, decodes: bool = False) -> None:
        out.append(Report(event=finished_of(self, pushed_bytes, push_ns, decodes=decodes)))
        self._end("", out)

    def _push_failed(self, reason: str, out: Actions) -> None:
        if self.stage is PrefillStage.CLOSING:
            self.fail(f"push to {self.order.decode_node_id}: {reason}", out, retryable=True)

    def fail(self, reason: str, out: Actions, *, retryable: bool, stage_id: str = "") -> None:
        """It ends without a result; one that was cancelled is not answered. `stage_id`: for whose sake."""
        if not self.cancelled:
            out.append(Report(event=failed_of(self, reason, retryable=retryable, stage_id=stage_id)))
        self._end("cancelled" if self.cancelled else reason, out)

    def _end(self, error: str, out: Actions) -> None:
        self.stage, self.paused, self.fetching = PrefillStage.ENDED, False, False
        out.append(end_of(self, error))
