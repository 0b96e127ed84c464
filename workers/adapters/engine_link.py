"""The adapter's way to its engine: requests to it, looks at its health, and the mirror of its cache.

Answers become events of the adapter's machine, which `hear` gets. An engine that does not answer any more is `lost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from halfmoon.bus.errors import PeerError
from halfmoon.schemas.decisions import EngineRefusal
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.schemas.weights import PrefixCacheReset
from halfmoon.workers.adapters.actions import AskEngine
from halfmoon.workers.adapters.engines.api import EngineApi, EngineAway, EngineUnfit
from halfmoon.workers.adapters.engines.completion import EngineRefused
from halfmoon.workers.adapters.engines.words import EngineWords
from halfmoon.workers.adapters.events import AnswerBroke, EngineAsked, EngineLooked, Event, TokensHeard
from halfmoon.workers.adapters.mirror import EngineMirror
from halfmoon.workers.adapters.relayed import RelayedAnswers

LOOK_S, LOOK_AGAIN_S = 1.0, 0.2
#: An engine that has not answered this many times in a row is gone.
AWAY_MAX = 2


class EngineLink:
    """`words`: the kind of request that the engine takes. `vocabulary`: token ids of the engine's model. `hear` and
    `relayed` must be set before anything is asked.
    """

    hear: Callable[[Event], None]
    relayed: RelayedAnswers

    def __init__(self, api: EngineApi, words: EngineWords, mirror: EngineMirror, vocabulary: int) -> None:
        self.api, self.words, self.mirror = api, words, mirror
        self.vocabulary = vocabulary
        #: Gets why the engine cannot be used any more.
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        #: When it last gave a token.
        self._answered_ns = 0
        self._look = asyncio.Event()
        #: Callers that wait for the next look at the engine to find it there.
        self._lookers: list[asyncio.Future[None]] = []

    async def ask(self, action: AskEngine) -> None:
        """One request, to its end."""
        order_id = action.order_id
        cached = self.mirror.blocks.leading(action.block_keys)
        self.hear(EngineAsked(at_ns=time.monotonic_ns(), order_id=order_id, cached_blocks=cached))
        sent = (
            self.relayed.answer(action)
            if action.gateway_of
            else self.api.complete(action.body, self.vocabulary)
        )
        try:
            async for heard in sent:
                now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
                self._answered_ns = now_ns
                self.hear(
                    TokensHeard(
                        at_ns=now_ns,
                        wall_ns=wall_ns,
                        order_id=order_id,
                        tokens=heard.tokens,
                        finish_reason=heard.finish_reason,
                        kv_params=heard.kv_params,
                        whole=heard.whole,
                    )
                )
        except EngineRefused as problem:
            # What a gateway has sent is sent once.
            retryable = problem.retryable and not action.gateway_of
            self._broke(order_id, str(problem), retryable=retryable, refusal=problem.refusal)
        except EngineAway as problem:
            await self._look_now()
            self._broke(order_id, str(problem), retryable=True)

    def _broke(
        self, order_id: str, reason: str, *, retryable: bool, refusal: EngineRefusal | None = None
    ) -> None:
        self.hear(
            AnswerBroke(
                at_ns=time.monotonic_ns(),
                order_id=order_id,
                reason=reason,
                retryable=retryable,
                refusal=refusal,
            )
        )

    async def reset_prefix_cache(self) -> PrefixCacheReset:
        """Raises PeerError: the engine is away, or cannot do it."""
        blocks = len(self.mirror.keys())
        try:
            await self.api.reset_prefix_cache()
        except EngineUnfit as problem:
            raise PeerError("no_reset", f"{problem}; {self.api.reset_needs}") from None
        except EngineAway as problem:
            raise PeerError("engine_away", str(problem)) from None
        # An engine that computes nothing publishes no event of it yet.
        self.mirror.forget()
        return PrefixCacheReset(blocks=blocks)

    # --- whether it is there --------------------------------------------------------------------------------

    async def _look_now(self) -> None:
        """Returns when the engine turns out to be there. Where it is not, the worker leaves: orders that failed one by
        one would be placed here again, and again, until then.
        """
        there = asyncio.get_running_loop().create_future()
        self._lookers.append(there)
        self._look.set()
        await there

    async def look_after(self) -> None:
        """Returns when the engine is lost."""
        away = 0
        while not self.lost.done():
            self._look.clear()
            lookers, self._lookers = self._lookers, []
            silent_ns = time.monotonic_ns() - self._answered_ns
            try:
                # An engine that gives tokens is there.
                if lookers or silent_ns > LOOK_S * SECOND_NS:
                    await self.api.healthy()
                used = await self.api.cache_percent()
            except EngineUnfit:
                used = 0.0  # it answers: that is enough
            except EngineAway as problem:
                away += 1
                if away >= AWAY_MAX:
                    self.lost.set_result(f"the engine is away: {problem}")
                    return
                self._lookers += lookers
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            away = 0
            for each in lookers:
                if not each.done():
                    each.set_result(None)
            self.hear(EngineLooked(at_ns=time.monotonic_ns(), cache_percent=min(100.0, max(0.0, used))))
            if self.mirror.unfit.done():
                self.lost.set_result(self.mirror.unfit.result())
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK_S)

    def why_lost(self) -> str:
        """Empty while it is not."""
        return self.lost.result() if self.lost.done() and not self.lost.cancelled() else ""
