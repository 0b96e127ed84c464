"""One open request in the frontend: tokens come in from whichever worker decodes it, text goes out to its
listener.

No I/O and no clock in here. The rules:

1. Only the newest order counts. `take` notes it; an order is "<sequence>-<number>" and a larger one is newer.
2. Tokens are accepted in order of their index. What is there already is dropped; a gap changes nothing and is
   told.
3. The text that the listener gets does not depend on how deliveries were cut, repeated or resumed.
4. Nothing is accepted after the end. The frontend decides about stop strings: a hit is an end like any other.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

import msgspec

from halfmoon.bus.telemetry.tracing import OpenSpan
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import ApiRequest
from halfmoon.schemas.events import RequestArrived
from halfmoon.schemas.keys import pack_tokens, unpack_last_first
from halfmoon.schemas.roles import ROLES
from halfmoon.schemas.sampling import SampledToken, Sampling, packed_bytes
from halfmoon.schemas.tokens import Delivery, TakeReply, TakeRequest, Timing
from halfmoon.workers.frontend.prompts import TokenizedPrompt
from halfmoon.workers.model.text.control_text import ControlAsText
from halfmoon.workers.model.text.detokenizer import TokenBytes
from halfmoon.workers.model.text.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer


class Piece(NamedTuple):
    """The text and tokens that one delivery added. `finish_reason` is "" but on the last piece: "stop" or "length"."""

    text: str
    #: Index of the first of `tokens` among the output tokens.
    first: int
    tokens: list[SampledToken]
    finish_reason: str


class Listener(Protocol):
    """An edge's end of a request. Called from the event loop; must not block. After the end it is called no
    more.
    """

    def on_piece(self, request: OpenRequest, piece: Piece) -> None: ...

    def on_error(self, request: OpenRequest, error: ApiError) -> None: ...


class RequestOrigin(NamedTuple):
    """When a request came, by the monotonic clock, and its traces: the client's, and this frontend's span."""

    at_ns: int
    traceparent: str = ""
    span: OpenSpan | None = None


class Progress(enum.Enum):
    """The meaning of a delivery for its request."""

    NOTHING = enum.auto()
    MORE = enum.auto()
    GAP = enum.auto()
    FINISHED = enum.auto()
    #: A stop string was hit: the worker does not know, and must be told to end.
    STOPPED = enum.auto()
    #: There will be no answer: `failure` says why.
    FAILED = enum.auto()


class OpenRequest:
    """See the module. Times are of the frontend's monotonic clock, in ns."""

    __slots__ = (
        "alias",
        "answered_elsewhere",
        "arrived",
        "arrived_at_ns",
        "ask",
        "decode_worker",
        "detokenizer",
        "end_ids",
        "failure",
        "finish_reason",
        "first_at_ns",
        "heard_at_ns",
        "intervals_ns",
        "keep_samples",
        "last_at_ns",
        "listener",
        "order_id",
        "order_rank",
        "output_ids",
        "packed_prompt",
        "polled_at_ns",
        "prefill_worker",
        "progress_at_ns",
        "resending",
        "root_key",
        "samples",
        "seen_tokens",
        "span",
        "stop_checker",
        "stop_text",
        "text_parts",
        "text_tokens",
        "timing",
        "traceparent",
        "unknown_count",
    )

    def __init__(
        self,
        ask: ApiRequest,
        arrived: RequestArrived,
        prompt: TokenizedPrompt,
        tokenizer: Tokenizer,
        listener: Listener,
        origin: RequestOrigin,
    ) -> None:
        now_ns = origin.at_ns
        self.ask = ask
        self.arrived = arrived
        self.packed_prompt = prompt.packed
        self.root_key = prompt.root_key
        self.listener = listener
        #: As the client sent it; ours is the span's.
        self.traceparent = origin.traceparent
        self.span = origin.span
        self.alias = ask.request_id
        self.arrived_at_ns = now_ns
        self.first_at_ns = 0
        self.last_at_ns = 0
        self.heard_at_ns = now_ns
        #: When it last came on: a token, or an order.
        self.progress_at_ns = now_ns
        self.polled_at_ns = now_ns
        #: Between tokens; of tokens that came together, equal parts.
        self.intervals_ns: list[int] = []
        #: Its client hears an engine through a gateway, whose end is told: no tokens here are no silence.
        self.answered_elsewhere = False
        self.order_id = ""
        self.order_rank = (-1, -1)
        #: Of the newest order, as a conductor named them.
        self.prefill_worker = ""
        self.decode_worker = ""
        self.output_ids: list[int] = []
        #: One past the largest token index that any delivery of the newest order mentioned.
        self.seen_tokens = 0
        sampling = ask.sampling
        self.keep_samples = sampling.logprobs >= 0 or sampling.prompt_logprobs >= 0 or sampling.logits_digest
        self.samples: list[SampledToken] = []
        self.text_parts: list[str] = []
        self.finish_reason = ""
        self.failure: ApiError | None = None
        #: The stop string that ended it.
        self.stop_text = ""
        self.timing: Timing | None = None
        self.resending = False
        #: Redelivery in a row that the worker answered with "I have no such order".
        self.unknown_count = 0
        self.end_ids = frozenset(tokenizer.eos_ids).union(sampling.stop_token_ids)
        #: The bytes that each token adds to the text.
        self.text_tokens: TokenBytes = (
            tokenizer if ask.answer.skip_special_tokens else ControlAsText(tokenizer)
        )
        self.detokenizer = self.new_detokenizer()
        self.stop_checker = StopChecker(ask.stops) if ask.stops else None

    def new_detokenizer(self) -> IncrementalDetokenizer:
        """Makes text of the answer's tokens from the first one on."""
        return IncrementalDetokenizer(self.text_tokens, unpack_last_first(self.packed_prompt))

    @property
    def request_id(self) -> str:
        return self.arrived.request_id

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string, or the one of `stop_token_ids`, that ended it; None: its length, or the model's own end."""
        if self.stop_text:
            return self.stop_text
        last = self.output_ids[-1] if self.output_ids and self.finish_reason == "stop" else None
        return last if last in self.ask.sampling.stop_token_ids else None

    @property
    def prompt_logprobs(self) -> bytes:
        """Packed (`halfmoon.schemas.sampling`); b"": not asked for, of one token, or not here yet."""
        return self.samples[0].prompt_logprobs if self.samples else b""

    def take(self, request: TakeRequest) -> TakeReply:
        """A worker wants the tokens. `gone` when a newer order has the request."""
        rank = order_rank(request.order_id)
        if rank < self.order_rank or self.finish_reason:
            return TakeReply(gone=True)
        if rank > self.order_rank:
            self.order_rank = rank
            self.order_id = request.order_id
            self.decode_worker = ""
            self.seen_tokens = len(self.output_ids)
            self.unknown_count = 0
        if "batch" in ROLES[request.role].duties:  # it will deliver
            self.decode_worker = request.worker_id
        return TakeReply(
            token_ids=self.packed_prompt,
            block_keys=self.arrived.block_keys,
            root_key=self.root_key,
            tenant=self.arrived.tenant,
            output_ids=pack_tokens(self.output_ids) if self.output_ids else b"",
            sampling=self._sampling(),
            max_tokens=self.arrived.max_tokens,
            traceparent=self.arrived.traceparent,
            choices=self.ask.n,
            weight_version=self.arrived.weight_version,
            forwarded=self.ask.answer.forwarded,
            retain_percent=self.ask.kv.retain_percent,
        )

    def rekey(self, root_key: bytes, block_keys: bytes, weight_version: str) -> None:
        """Its next order is computed with weights of another version."""
        self.root_key = root_key
        self.arrived = msgspec.structs.replace(
            self.arrived, block_keys=block_keys, sketch=b"", documents=[], weight_version=weight_version
        )

    def _sampling(self) -> Sampling:
        """As it is given to workers: what came with the first token is not computed again."""
        sampling = self.ask.sampling
        if self.output_ids and sampling.prompt_logprobs >= 0:
            return msgspec.structs.replace(sampling, prompt_logprobs=-1)
        return sampling

    def accept(self, delivery: Delivery, now_ns: int) -> Progress:
        """Take in a delivery and tell the listener what it added."""
        if delivery.order_id != self.order_id or self.finish_reason:
            return Progress.NOTHING
        self.heard_at_ns = now_ns
        self.unknown_count = 0
        have = len(self.output_ids)
        index = delivery.index
        tokens = delivery.tokens
        self.seen_tokens = max(self.seen_tokens, index + len(tokens))
        if index > have:
            return Progress.GAP
        if delivery.timing is not None and self.timing is None:
            self.timing = delivery.timing
        if index < have:
            tokens = tokens[have - index :]
        if delivery.finish_reason == "abort" or not (tokens or delivery.finish_reason):
            return Progress.NOTHING  # what becomes of an aborted order is for the conductors to say
        if tokens and not have and not self._scored(tokens[0]):
            # A worker of another release does not know that it is asked.
            message = "the worker did not tell how likely the prompt's tokens are"
            self.failure = ApiError(500, message, code="failed")
            return Progress.FAILED
        text, tokens, reason = self._read(tokens, delivery.finish_reason)
        if tokens:
            self.last_at_ns = self.progress_at_ns = now_ns
            if not self.first_at_ns:
                self.first_at_ns = now_ns
            if self.keep_samples:
                self.samples += tokens
        if text:
            self.text_parts.append(text)
        self.finish_reason = reason
        self.listener.on_piece(self, Piece(text, have, tokens, reason))
        if not reason:
            return Progress.MORE
        return Progress.FINISHED if delivery.finish_reason else Progress.STOPPED

    def _scored(self, first: SampledToken) -> bool:
        """Whether the first token has what was asked to be told of the prompt."""
        top = self.ask.sampling.prompt_logprobs
        return top < 0 or len(first.prompt_logprobs) == packed_bytes(self.arrived.prompt_tokens, top)

    def _read(self, tokens: list[SampledToken], finish_reason: str) -> tuple[str, list[SampledToken], str]:
        """The new text, the tokens that it took (fewer when a stop string hit), and how the answer ends, if
        it does.
        """
        ids = [sampled.token_id for sampled in tokens]
        shown = ids
        ended = bool(tokens) and (finish_reason == "stop" or tokens[-1].cut)
        if ended and ids[-1] in self.end_ids and not self.ask.answer.include_stop:
            shown = ids[:-1]  # the mark of the end is no text
        if self.stop_checker is None:
            self.output_ids += ids
            text = self.detokenizer.push(shown)
            return (text + self.detokenizer.flush() if finish_reason else text), tokens, finish_reason
        checker = self.stop_checker
        text = ""
        for position, token_id in enumerate(shown):
            self.output_ids.append(token_id)
            piece = self.detokenizer.push((token_id,))
            if len(self.output_ids) > self.ask.sampling.min_tokens:
                piece, hit = checker.push(piece)
                if hit is not None:
                    return text + piece + self._stop(hit), tokens[: position + 1], "stop"
            text += piece
        self.output_ids += ids[len(shown) :]
        if finish_reason:
            piece, hit = checker.push(self.detokenizer.flush())
            text += piece
            text += checker.flush() if hit is None else self._stop(hit)
        return text, tokens, finish_reason

    def _stop(self, hit: str) -> str:
        """The stop string, where it is to be part of the answer."""
        self.stop_text = hit
        return hit if self.ask.answer.include_stop else ""


def order_rank(order_id: str) -> tuple[int, int]:
    """Orders by age: "<sequence of its cause>-<number>". A name of another form is older than all."""
    sequence, _, number = order_id.partition("-")
    try:
        return int(sequence), int(number or 0)
    except ValueError:
        return -1, 0
