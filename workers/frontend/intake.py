"""Makes an open request of what a client asks: its tokens, how they are sampled, its id, its span."""

from __future__ import annotations

import dataclasses
import os
import time

import msgspec

from halfmoon.bus.telemetry.tracing import Tracing
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.policy import Layout
from halfmoon.workers.frontend.config import FrontendConfig
from halfmoon.workers.frontend.open_request import Listener, OpenRequest, RequestOrigin
from halfmoon.workers.frontend.prompts import PromptReader, TokenizedPrompt
from halfmoon.workers.frontend.sampling_reader import SamplingReader
from halfmoon.workers.frontend.spans import begin_request, refused_request
from halfmoon.workers.model.text.tokenizer import Tokenizer


class RequestIntake:
    """`read`, then `request`; of one that is turned away, `refused`."""

    def __init__(
        self, config: FrontendConfig, tokenizer: Tokenizer, layout: Layout, *, payload_bytes_max: int
    ) -> None:
        """`payload_bytes_max`: of one message between the processes."""
        self.prompts = PromptReader(config, tokenizer, layout, payload_bytes_max=payload_bytes_max)
        #: OpenTelemetry, where it is switched on.
        self.tracing: Tracing | None = None
        self._config, self._tokenizer = config, tokenizer
        self._sampling = SamplingReader(tokenizer, config.sampling_defaults)

    def close(self) -> None:
        """Ends its threads."""
        self.prompts.close()
        self._sampling.close()

    async def read(
        self, ask: ApiRequest, max_tokens_default: int | None
    ) -> tuple[ApiRequest, TokenizedPrompt]:
        """The request with its sampling as the cluster does it, and its prompt. Raises ApiError.

        `max_tokens_default` of one that does not say; None: of a chat all that the context has left, else the
        configuration's.
        """
        if max_tokens_default is None:
            max_tokens_default = None if ask.chat else self._config.max_tokens_default
        ask = self.prompts.as_tenant_has_it(ask)
        prompt = await self.prompts.read(ask, max_tokens_default=max_tokens_default)
        sampling = await self._sampling.read(ask)
        if sampling is not ask.sampling:
            ask = dataclasses.replace(ask, sampling=sampling)
        return ask, prompt

    def request(
        self, ask: ApiRequest, prompt: TokenizedPrompt, listener: Listener, *, now_ns: int, traceparent: str
    ) -> OpenRequest:
        """`now_ns`: when it came, by the monotonic clock. `traceparent`: the client's."""
        arrived = RequestArrived(
            request_id=new_request_id(),
            frontend_id=self._config.frontend_id,
            prompt_tokens=prompt.tokens,
            max_tokens=prompt.max_tokens,
            block_keys=prompt.block_keys,
            ttft_slo_ns=ask.ttft_slo_ns,
            tbt_slo_ns=ask.tbt_slo_ns,
            tenant=ask.tenant,
            priority=ask.priority,
            sketch=prompt.sketch,
            documents=list(prompt.documents),
            weight_version=prompt.weight_version,
        )
        span = None
        if self.tracing is not None:
            span = begin_request(self.tracing, ask, arrived, self._config.model, traceparent, now_ns)
            if span is not None:
                arrived = msgspec.structs.replace(arrived, traceparent=span.traceparent)
        origin = RequestOrigin(now_ns, traceparent, span)
        return OpenRequest(ask, arrived, prompt, self._tokenizer, listener, origin)

    def refused(self, error: ApiError, began_ns: int, *, chat: bool, traceparent: str) -> None:
        """An edge took no request in, or `open` raised: it has a span all the same, where there are traces."""
        if self.tracing is not None:
            operation = "chat" if chat else "text_completion"
            refused_request(self.tracing, self._config, operation, traceparent, began_ns, error)


def new_request_id() -> str:
    """26 characters that sort by time (ms), as hexadecimal."""
    return f"{time.time_ns() // 1_000_000:012x}{os.urandom(7).hex()}"
