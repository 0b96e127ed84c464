"""Serves each request exactly once; a repeat gets the cached reply.

A repeat is known by its reply subject: an inbox of its own for each request (`halfmoon.bus.requests`). A request whose
reply subject is no inbox is dropped: nobody would hear the answer, or a process that did not ask. A message with no
reply subject was published: it is heard where that is allowed, and not answered.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from halfmoon.bus.client import DirectClient
from halfmoon.bus.errors import PeerError
from halfmoon.bus.wire import reply_subject
from halfmoon.schemas.codec import MessageInvalid, decode, encode
from halfmoon.schemas.contract.authors import names_itself
from halfmoon.schemas.tokens import ProcessError
from halfmoon.schemas.types import Message

Answerer = Callable[[Any], "Awaitable[Message] | Message"]

#: Far more than come within the second after which a question is repeated; and what their answers may take
#: together.
ANSWERS_MAX = 4096
ANSWERS_BYTES_MAX = 8 << 20


class ReplyCache:
    """The replies to the latest requests of one subject, by the inbox that each was sent to."""

    def __init__(self) -> None:
        self._under_way: set[str] = set()
        self._answers: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def begin(self, reply: str) -> bool:
        """False when this question was seen: it is being answered, or `answer` has its reply."""
        if reply in self._under_way or reply in self._answers:
            return False
        self._under_way.add(reply)
        return True

    def answer(self, reply: str) -> bytes | None:
        """The reply that a question got; None while it is being answered."""
        return self._answers.get(reply)

    def end(self, reply: str, answer: bytes) -> None:
        """Answered."""
        self._under_way.discard(reply)
        self._answers[reply] = answer
        self._bytes += len(answer)
        while self._bytes > ANSWERS_BYTES_MAX or len(self._answers) > ANSWERS_MAX:
            _, oldest = self._answers.popitem(last=False)
            self._bytes -= len(oldest)


class Responder:
    """One served subject; `receive` is for `DirectClient.subscribe_raw`.

    `spawn` runs the coroutine of an asynchronous handler, as a task; `invalid` is called for a message that is no
    `kind`, or names in the field `author` another process than its subject ends with. `published`: a message with no
    reply subject is for the handler too, which then is no coroutine function.
    """

    def __init__(
        self,
        nc: DirectClient,
        kind: Any,
        handler: Answerer,
        *,
        spawn: Callable[[Awaitable[None]], None],
        invalid: Callable[[], None],
        author: str = "",
        published: bool = False,
    ) -> None:
        self._author = author
        self._published = published
        self._nc = nc
        self._kind = kind
        self._handler = handler
        self._spawn = spawn
        self._invalid = invalid
        self._replies = ReplyCache()

    def receive(self, subject: bytes, reply: bytes, payload: bytes, _: bytes | None) -> None:
        inbox = reply_subject(reply)
        if not inbox:
            if reply or not self._published:
                self._invalid()
            else:
                self._hear(subject, payload)
            return
        if not self._replies.begin(inbox):
            if (known := self._replies.answer(inbox)) is not None:
                self._nc.send(inbox, known)
            return
        try:
            result = self._handler(self._question(subject, payload))
        except MessageInvalid as problem:
            self._invalid()
            self._answer(inbox, ProcessError(code="invalid_request", message=str(problem)[:500]))
        except PeerError as problem:
            self._answer(inbox, _refusal(problem))
        else:
            if inspect.isawaitable(result):
                self._spawn(self._answer_later(inbox, result))
            else:
                self._answer(inbox, result)

    def _hear(self, subject: bytes, payload: bytes) -> None:
        try:
            self._handler(self._question(subject, payload))
        except (MessageInvalid, PeerError):
            self._invalid()

    def _question(self, subject: bytes, payload: bytes) -> Any:
        question = decode(payload, self._kind)
        if self._author and not names_itself(subject.decode(), question, self._author):
            raise MessageInvalid(f"{self._author}: asked on the subject of another process")
        return question

    async def _answer_later(self, inbox: str, result: Awaitable[Message]) -> None:
        try:
            answer = await result
        except PeerError as problem:
            answer = _refusal(problem)
        self._answer(inbox, answer)

    def _answer(self, inbox: str, answer: Message) -> None:
        """Not sent while the connection is away: then the question comes again."""
        payload = encode(answer)
        if len(payload) > self._nc.max_payload:
            message = f"the answer is {len(payload)} bytes, more than the server's max_payload"
            payload = encode(ProcessError(code="answer_too_large", message=message))
        self._replies.end(inbox, payload)
        self._nc.send(inbox, payload)


def _refusal(problem: PeerError) -> ProcessError:
    return ProcessError(code=problem.code, message=problem.message[:500])
