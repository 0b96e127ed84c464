"""A few requests to an engine before it joins: whether its KV events come, and the costs of its work.

The conductor refits the costs by the times of orders; these are its first ones. Prompts are of their own, under salts
that nobody else has. An engine of SGLang's that does one half of a request tells the costs of that half alone.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass

from halfmoon.schemas.cost_profile import CostProfile
from halfmoon.schemas.keys import chain_keys
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.adapters.engine_blocks import salt_of
from halfmoon.workers.adapters.engines.api import EngineApi, EngineFacts, EngineUnfit
from halfmoon.workers.adapters.engines.completion import EngineRefused
from halfmoon.workers.adapters.engines.words import EngineCompletion
from halfmoon.workers.adapters.mirror import EngineMirror

#: For the events of a prompt that was computed; the engine may publish them with its next step.
EVENTS_S = 10.0
_SHORT_TOKENS, _DRAWN, _ROWS = 16, 8, 4
#: Of one short prompt after another the least counts: whatever else the machine does only adds.
_TRIES = 3
_LOOK_S = 0.05


@dataclass(frozen=True)
class _Took:
    """ns to the first token, and from one to the next."""

    first_ns: int
    step_ns: int


class Probe:
    """`vocabulary`: of the model; token ids below it are asked for."""

    def __init__(self, api: EngineApi, facts: EngineFacts, *, block_tokens: int, vocabulary: int) -> None:
        self._api, self._facts = api, facts
        self._words = api.words_of(facts)
        self._block_tokens, self._vocabulary = block_tokens, vocabulary
        self._asked = 0

    async def run(self, mirror: EngineMirror) -> CostProfile:
        """Raises EngineAway, EngineUnfit."""
        long = min(2 * self._block_tokens + 1, self._facts.context_tokens - _DRAWN)
        if long <= self._block_tokens:
            raise EngineUnfit(
                f"--block-tokens {self._block_tokens}: the engine takes {self._facts.context_tokens} tokens at most"
            )
        short = min(_SHORT_TOKENS, long // 2)
        try:
            await self._ask(short, uuid.uuid4().bytes)  # the first one warms it up
            root = uuid.uuid4().bytes
            one_long = await self._ask(long, root)
            if self._facts.caches:
                await self._events_of(mirror, self._prompt(long, self._asked), root)
            tries = [await self._ask(short, uuid.uuid4().bytes) for _ in range(_TRIES)]
            one_short = _Took(min(one.first_ns for one in tries), min(one.step_ns for one in tries))
            several = await asyncio.gather(*(self._ask(short, uuid.uuid4().bytes) for _ in range(_ROWS)))
        except EngineRefused as problem:
            raise EngineUnfit(f"--url {self._api.url}: it refuses a prompt of ours: {problem}") from None
        token_ns = max(1, (one_long.first_ns - one_short.first_ns) // (long - short))
        rows_ns = max(took.step_ns for took in several)
        row_ns = max(0, rows_ns - one_short.step_ns) // (_ROWS - 1)
        context_ns = max(0, one_long.step_ns - one_short.step_ns)
        return CostProfile(
            prefill_base_ns=max(0, one_short.first_ns - token_ns * short),
            prefill_per_token_ps=token_ns * 1_000,
            decode_base_ns=max(1, one_short.step_ns - row_ns),
            decode_per_sequence_ns=row_ns,
            decode_per_context_token_ps=context_ns * 1_000 // (long - short),
        )

    def _prompt(self, tokens: int, number: int) -> list[int]:
        """Another one for each number."""
        # Any ids do; the first hundred are often special.
        least = min(100, self._vocabulary // 2)
        span = self._vocabulary - least
        return [least + (number * 7919 + place * 31) % span for place in range(tokens)]

    async def _ask(self, tokens: int, root: bytes) -> _Took:
        self._asked += 1
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        prompt = self._prompt(tokens, self._asked)
        body = self._words.body(EngineCompletion(salt_of(root), prompt, [], _DRAWN, sampling))
        body |= self._words.alone(root.hex())
        began_ns, first_ns, last_ns, drawn = time.monotonic_ns(), 0, 0, 0
        async for heard in self._api.complete(body, self._vocabulary):
            if heard.tokens:
                last_ns = time.monotonic_ns()
                first_ns, drawn = first_ns or last_ns, drawn + len(heard.tokens)
        if not drawn:
            raise EngineUnfit(
                f"--url {self._api.url}: it answers without token_ids; vLLM knows return_token_ids since 0.10.2, "
                "SGLang 0.5.23 does"
            )
        return _Took(first_ns - began_ns, (last_ns - first_ns) // max(1, drawn - 1))

    async def _events_of(self, mirror: EngineMirror, prompt: list[int], root: bytes) -> None:
        """Returns when the engine has announced the prompt's blocks. Raises EngineUnfit."""
        keys = chain_keys(root, prompt, self._block_tokens)
        until = time.monotonic() + EVENTS_S
        while mirror.blocks.leading(keys) * 16 < len(keys):
            if mirror.unfit.done():
                raise EngineUnfit(mirror.unfit.result())
            if time.monotonic() > until:
                raise EngineUnfit(self._silence(mirror))
            await asyncio.sleep(_LOOK_S)

    def _silence(self, mirror: EngineMirror) -> str:
        counts, passed = mirror.reader.counts, mirror.blocks.passed_over
        if not counts["batches"] and not counts["malformed"]:
            return (
                f"--events: no KV event came within {EVENTS_S:.0f} s of a prompt; start the engine with "
                f"{self._api.events_options}"
            )
        if passed["of_others"]:
            return "--events: the engine's events do not tell the cache salt (vLLM's extra_keys, SGLang's cache_salt)"
        return (
            f"--events: the events that came do not tell of the prompt's blocks ({dict(counts)}, "
            f"passed over: {dict(passed)}); are they those of --url?"
        )
