"""From a checked request to what the cluster needs of it: token ids, block keys, how many tokens it may get."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np

from halfmoon.schemas.api.bodies import DetokenizeBody, TokenizeBody
from halfmoon.schemas.api.errors import ApiError
from halfmoon.schemas.api.requests import (
    ApiRequest,
    AskedPrompt,
    chat_rendering,
    plain_messages,
    special_tokens_in_chat,
)
from halfmoon.schemas.keys import chain_keys_packed, pack_decoded, root_key
from halfmoon.schemas.policy import Layout
from halfmoon.schemas.sampling import scored_tokens_max
from halfmoon.schemas.similar import NamedDocument, named_document
from halfmoon.schemas.status import ConductorStatus
from halfmoon.schemas.tokens import carried_tokens
from halfmoon.workers.frontend.config import FrontendConfig, names
from halfmoon.workers.frontend.tenants import ALL_TENANTS
from halfmoon.workers.model.text.control_text import decode_all
from halfmoon.workers.model.text.tokenizer import (
    ChatTemplateError,
    ChatTemplateSlow,
    TextNotEncoded,
    Tokenizer,
)
from halfmoon.workers.sketches import sketch_of

logger = logging.getLogger(__name__)

#: Longer prompts (in characters) are tokenized in a thread, so that the event loop does not stall.
INLINE_CHARACTERS_MAX = 2048

#: A chat template may stall the event loop for so long, once: from then on it is rendered in a thread.
INLINE_TEMPLATE_S = 0.05


class TokenizedPrompt(NamedTuple):
    """`packed`: the token ids as little-endian u32."""

    packed: bytes
    tokens: int
    root_key: bytes
    block_keys: bytes
    max_tokens: int
    #: b"": it is compared with no other prompt.
    sketch: bytes = b""
    #: Of which the keys are.
    weight_version: str = ""
    #: For which KV of other prompts may stand in.
    documents: tuple[NamedDocument, ...] = ()


class PromptReader:
    """`read` and `encode` raise ApiError; `pending` counts the prompts being tokenized in the thread."""

    def __init__(
        self, config: FrontendConfig, tokenizer: Tokenizer, layout: Layout, *, payload_bytes_max: int
    ) -> None:
        """`payload_bytes_max`: of one message between the processes."""
        self.config = config
        self.pending = 0
        #: Of prompt and answer together: the model's context, or what messages have room for, if that is less.
        self._context = min(config.context_tokens, carried_tokens(payload_bytes_max, layout.block_tokens))
        self._payload_bytes_max = payload_bytes_max
        #: The same, or what the cluster can hold of it.
        self.max_model_len = self._context
        self._tokenizer = tokenizer
        self._layout = layout
        self._models = {"", config.model, *config.model_aliases}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        self._inline = tokenizer.quick
        self._similar_tenants = frozenset(names(config.similar_tenants))
        self._root = functools.lru_cache(maxsize=4096)(self._root_key)
        #: Of the newest order that this frontend has heard of.
        self.weight_version = ""

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def learn(self, status: ConductorStatus) -> None:
        """A conductor says what the workers that are there can hold; without workers the last word counts."""
        if status.caught_up and status.request_tokens_max:
            self.max_model_len = min(self._context, status.request_tokens_max)

    def check_model(self, name: str) -> None:
        """ "" means the one there is. Raises ApiError 404."""
        if name not in self._models:
            message = f"the model {name[:80]!r} does not exist; there is {self.config.model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def read(self, ask: ApiRequest, *, max_tokens_default: int | None) -> TokenizedPrompt:
        """`max_tokens_default`: when the request does not say, cut to what the context and the cluster hold; None: all
        of that.
        """
        self.check_model(ask.model)
        asked = ask.prompt
        packed = (
            self._checked(asked.packed)
            if asked.packed is not None
            else pack_decoded(await self.encode(asked))
        )
        if asked.truncate_tokens is not None:
            packed = packed[-4 * self._kept(ask) :]
        tokens = len(packed) // 4
        max_tokens = self._max_tokens(ask, tokens, max_tokens_default)
        if ask.sampling.prompt_logprobs >= 0:
            self._check_scored(ask, tokens)
        weight_version = self.weight_version
        root, keys = self.keys_of(ask, packed, weight_version)
        if ask.kv.allowed and (broken := self._broken_by_similar(ask)):
            name = "similar" if ask.kv.similar else "documents"
            raise ApiError(400, f"kv.{name}: {broken}", param="kv", code="contradiction")
        sketch = sketch_of(root, np.frombuffer(packed, "<u4")) if ask.kv.similar else b""
        documents = await self._documents(ask, root, packed) if ask.kv.documents else ()
        return TokenizedPrompt(packed, tokens, root, keys, max_tokens, sketch, weight_version, documents)

    async def _documents(self, ask: ApiRequest, root: bytes, packed: bytes) -> tuple[NamedDocument, ...]:
        """Those of the request that are in its prompt. Raises ApiError when the tokenizer fails."""
        found = []
        for given in ask.kv.documents:
            if isinstance(given, str):
                encode = functools.partial(
                    self._tokenizer.encode, given, add_special=False, parse_special=not ask.chat
                )
                given = pack_decoded(await self._encode(encode, len(given), param="kv"))
            found.append(named_document(root, packed, given))
        return tuple(one for one in found if one is not None)

    def keys_of(self, ask: ApiRequest, packed: bytes, weight_version: str) -> tuple[bytes, bytes]:
        """The root and the block keys of a prompt that weights of this version compute."""
        root = self._root(ask.tenant, ask.cache_salt, weight_version)
        return root, chain_keys_packed(root, packed, self._layout.block_tokens)

    def as_tenant_has_it(self, ask: ApiRequest) -> ApiRequest:
        """`ask` with its tenant's default for KV of similar prompts, where it says nothing and no promise is broken."""
        if ask.kv.similar is not None or not self._similar_tenants.intersection((ask.tenant, ALL_TENANTS)):
            return ask
        if self._broken_by_similar(ask):
            return ask
        return dataclasses.replace(ask, kv=dataclasses.replace(ask.kv, similar=True))

    def model(self, name: str, created_s: int) -> dict[str, Any]:
        """`/v1/models/{name}`. Raises ApiError 404."""
        self.check_model(name)
        return self._model(name, created_s)

    def models(self, created_s: int) -> dict[str, Any]:
        """`/v1/models`."""
        names = (self.config.model, *self.config.model_aliases)
        return {"object": "list", "data": [self._model(name, created_s) for name in names]}

    def _model(self, name: str, created_s: int) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "halfmoon",
            "max_model_len": self.max_model_len,
            "vocab_size": self._tokenizer.vocab_size,
        }

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """`{"tokens", "count", "max_model_len"}`."""
        self.check_model(body.model or "")
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "exactly one of prompt and messages", param="prompt", code="contradiction")
        messages = plain_messages(body.messages) if body.messages is not None else None
        rendering = chat_rendering(
            body.add_generation_prompt,
            continue_final=bool(body.continue_final_message),
            switches=body.chat_template_kwargs or {},
        )
        if messages is not None and body.add_special_tokens:
            raise special_tokens_in_chat()
        ids: list[int] = []
        if messages or body.prompt:
            prompt = AskedPrompt(
                text=body.prompt,
                messages=messages,
                tools=msgspec.to_builtins(body.tools) if body.tools else None,
                rendering=rendering,
                add_special_tokens=body.add_special_tokens is not False,
            )
            ids = await self.encode(prompt)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}
        return answer | {"token_strs": self._tokenizer.names(ids) if body.return_token_strs else None}

    def detokenize(self, body: DetokenizeBody) -> dict[str, str]:
        """`{"prompt"}`, with control tokens. Raises ApiError."""
        self.check_model(body.model or "")
        if body.tokens and max(body.tokens) >= self._tokenizer.vocab_size:
            message = f"tokens: {max(body.tokens)} is outside the vocabulary of {self._tokenizer.vocab_size}"
            raise ApiError(400, message, param="tokens", code="invalid")
        return {"prompt": decode_all(self._tokenizer, body.tokens)}

    async def encode(self, prompt: AskedPrompt) -> list[int]:
        """The token ids of its text or messages.

        Control tokens in a text are those tokens: who asks for a completion writes all of it. In a chat only the
        template's are.
        """
        messages = prompt.messages
        if messages is not None:
            characters = sum(
                len(message["content"]) + len(message.get("reasoning", "")) for message in messages
            )
            characters += sum(len(str(message.get("tool_calls", ""))) for message in messages)
            characters += len(str(prompt.tools)) if prompt.tools else 0
            token_ids = await self._encode_chat(messages, prompt, characters)
        else:
            text, special = prompt.text or "", prompt.add_special_tokens
            token_ids = await self._encode(
                functools.partial(self._tokenizer.encode, text, add_special=special, parse_special=True),
                len(text),
            )
        if not token_ids:
            raise _empty("messages" if messages is not None else "prompt")
        return token_ids

    async def _encode_chat(
        self, messages: list[dict[str, Any]], prompt: AskedPrompt, characters: int
    ) -> list[int]:
        """Raises ApiError when the chat template refuses the messages, or does not come to an end."""
        rendering = prompt.rendering
        encode = functools.partial(
            self._tokenizer.encode_chat,
            messages,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final=rendering.continue_final,
            switches=rendering.switches,
            tools=prompt.tools,
        )
        try:
            if self._inline and characters <= INLINE_CHARACTERS_MAX:
                begin = time.thread_time()
                try:
                    return encode(seconds_max=INLINE_TEMPLATE_S)
                except ChatTemplateSlow:
                    logger.warning("the chat template is slow; from now on it is rendered in a thread")
                finally:
                    self._inline = time.thread_time() - begin < INLINE_TEMPLATE_S
            return await self._encode(encode, characters)
        except ChatTemplateError as problem:
            raise ApiError(400, str(problem)[:500], param="messages", code="chat_template") from None

    async def _encode(
        self, encode: functools.partial[list[int]], characters: int, *, param: str = "prompt"
    ) -> list[int]:
        """Raises ApiError, of the field `param`, when the tokenizer fails."""
        try:
            if self._inline and characters <= INLINE_CHARACTERS_MAX:
                return encode()
            self.pending += 1
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
            finally:
                self.pending -= 1
        except TextNotEncoded as problem:
            raise ApiError(400, str(problem)[:500], param=param, code="not_encoded") from None

    def _checked(self, packed: bytes) -> bytes:
        """Token ids of the client's own. Raises ApiError 400 where there is none, or one outside the vocabulary."""
        if not packed:
            raise _empty("prompt")
        largest = int(np.frombuffer(packed, "<u4").max())
        if largest >= self._tokenizer.vocab_size:
            message = f"prompt: token id {largest} is outside the vocabulary of {self._tokenizer.vocab_size}"
            raise ApiError(400, message, param="prompt", code="invalid")
        return packed

    def _check_scored(self, ask: ApiRequest, prompt_tokens: int) -> None:
        """Raises ApiError where the log probabilities of so long a prompt do not fit in a message."""
        top = ask.sampling.prompt_logprobs
        if prompt_tokens > (most := scored_tokens_max(self._payload_bytes_max, top)):
            param = "echo" if ask.answer.echo else "prompt_logprobs"
            message = (
                f"{param}: log probabilities, with the {top} most likely tokens of each, are told of prompts of up to "
                f"{most} tokens (max_payload is {self._payload_bytes_max}); this one has {prompt_tokens}"
            )
            raise ApiError(400, message, param=param, code="too_long")

    def _kept(self, ask: ApiRequest) -> int:
        """How many of the last tokens `truncate_tokens` keeps. Raises ApiError 400."""
        keep = ask.prompt.truncate_tokens
        assert keep is not None
        if keep > self._context:
            message = f"truncate_prompt_tokens: {keep} is more than the context of {self._context} tokens"
            raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid")
        if keep < 0:
            keep = max(1, self._context - (ask.max_tokens or 1))
        if keep == 0:
            message = "truncate_prompt_tokens: no token would be left"
            raise ApiError(400, message, param="truncate_prompt_tokens", code="invalid")
        return keep

    def _max_tokens(self, ask: ApiRequest, prompt_tokens: int, default: int | None) -> int:
        """The `max_tokens` asked for, or the default; fits in the context. Raises ApiError 400."""
        context = self._context
        room = context - prompt_tokens
        bound = f"the context of {context} tokens"
        if context < self.config.context_tokens:
            bound = (
                f"the {context} tokens that messages of {self._payload_bytes_max} bytes (max_payload) hold"
            )
        if room < 1:
            param = "messages" if ask.chat else "prompt"
            message = f"{param}: {prompt_tokens} tokens leave no room in {bound}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if ask.max_tokens is None:
            # What the cluster holds changes with its members: whether the request fits is for the conductors to say.
            held = max(1, self.max_model_len - prompt_tokens)
            wanted = held if default is None else min(default, held)
            return min(max(wanted, ask.sampling.min_tokens), room)
        if ask.max_tokens > room:
            asked = f"{prompt_tokens} prompt tokens and {ask.max_tokens} to generate"
            message = f"max_tokens: {asked} are more than {bound}"
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        return ask.max_tokens

    def _broken_by_similar(self, ask: ApiRequest) -> str:
        """The promise that KV of a similar prompt would break; "": none."""
        if self._layout.numerics == "exact":
            return "this cluster has exact numerics, in which no answer depends on other prompts"
        if ask.sampling.prompt_logprobs >= 0:
            return "log probabilities of a prompt are those of computing all of it"
        return ""

    def _root_key(self, tenant: str, cache_salt: str, weight_version: str) -> bytes:
        return root_key(
            model_fingerprint=self._layout.model_fingerprint,
            layout=self._layout.name(),
            dtype=self._layout.dtype,
            # The length keeps (tenant "a", salt "bc") and (tenant "ab", salt "c") apart.
            tenant_salt=f"{len(tenant)}:{tenant}{cache_salt}",
            cluster_secret=self.config.cluster_secret,
            weight_version=weight_version,
        )


def _empty(param: str) -> ApiError:
    return ApiError(400, f"{param}: no token to start from", param=param, code="empty")
