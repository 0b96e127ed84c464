"""One order in the words of an engine's `/v1/completions`: vLLM's, and SGLang's, which has most of them. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
import xxhash

from halfmoon.schemas.kv import KV_ORDER
from halfmoon.schemas.sampling import Sampling
from halfmoon.workers.adapters.engines.completion import named_place

#: Fields by which engines of SGLang find each other.
BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM = "bootstrap_host", "bootstrap_port", "bootstrap_room"
#: A host that has an engine of SGLang do its half alone, with no KV from anywhere (its FAKE_BOOTSTRAP_HOST).
_NOBODY = "2.2.2.2"


class Unanswerable(ValueError):
    """The engine lacks something that a request asks for; the text names the field. `param`: where it is one alone."""

    def __init__(self, text: str, param: str) -> None:
        super().__init__(text)
        self.param = param


class EngineCompletion(NamedTuple):
    """A request. `salt` keeps blocks of a tenant apart. `known` are tokens of the answer that the client has already:
    part of the engine's prompt, and among `max_tokens`.
    """

    salt: str
    prompt: Sequence[int]
    known: Sequence[int]
    max_tokens: int
    sampling: Sampling


class EngineWords(ABC):
    """As far as they are alike. `model`: its name at the engine.

    Between a prefill engine and a decode engine, `place` is where the first one's KV is, by itself; with a name for one
    prompt's it makes `kv_params`, which the second one is told.
    """

    #: A prefill engine begins when the decode engine has been asked, and no decode engine computes a prompt.
    both_at_once: ClassVar[bool]
    #: Of this prefill engine, as it was at the start; {}: it does not tell before it has computed a prompt.
    place: dict[str, Any]

    def __init__(self, model: str) -> None:
        self.model = model
        self.place = {}

    def body(self, asked: EngineCompletion) -> dict[str, Any]:
        """The request's body. Raises Unanswerable."""
        known, sampling = len(asked.known), asked.sampling
        self.check(sampling)
        body: dict[str, Any] = {
            "prompt": [*asked.prompt, *asked.known],
            "max_tokens": asked.max_tokens - known,
            "stream": True,
            **self.forwarded(asked.salt),
            # All are named: the engine takes an unnamed one from the model's own generation_config.json.
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": max(0, sampling.min_tokens - known),
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": sampling.stop_token_ids,
        }
        if sampling.temperature:
            body["seed"] = sampling.seed
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if sampling.logprobs >= 0:
            body["logprobs"] = sampling.logprobs
        return body

    def forwarded(self, salt: str) -> dict[str, Any]:
        """Fields that are set in a client's own request, which a gateway sends: the engine tells the tokens, and counts
        its blocks as the cluster's.
        """
        return {"model": self.model, "cache_salt": salt, "return_token_ids": True}

    def alone(self, name: str) -> dict[str, Any]:
        """Fields that have an engine of one half answer without another one. `name`: of this request."""
        return {}

    @abstractmethod
    def prefill_body(self, asked: EngineCompletion, name: str) -> dict[str, Any]:
        """The request that has the engine compute the prompt and keep its KV for another one, under this name ("": the
        engine's own). Raises Unanswerable.
        """

    @abstractmethod
    def place_after(self, said: str) -> dict[str, Any]:
        """The place, after the engine has told `said` of a prompt's KV (JSON)."""

    @abstractmethod
    def kv_params(self, place: dict[str, Any], name: str) -> dict[str, Any]:
        """Where the KV of this name is."""

    @abstractmethod
    def decode_fields(self, kv_params: dict[str, Any]) -> dict[str, Any] | None:
        """Fields that tell the decode engine where a prompt's KV is; None: nowhere that it can have it from."""

    def check(self, sampling: Sampling) -> None:
        """Raises Unanswerable for a field that the engine's API takes as text alone, or not at all."""
        if sampling.grammar:
            raise lacking("a grammar (response_format, tools)", "")
        for field, wanted in (
            ("bad_words", bool(sampling.bad_words)),
            ("prompt_logprobs", sampling.prompt_logprobs >= 0),
            ("logits_digest", sampling.logits_digest),
        ):
            if wanted:
                raise lacking(field, field)


def lacking(what: str, param: str) -> Unanswerable:
    return Unanswerable(f"{what}: not over an engine behind an adapter", param)


class VllmWords(EngineWords):
    """vLLM's."""

    both_at_once = False

    def body(self, asked: EngineCompletion) -> dict[str, Any]:
        body, sampling = super().body(asked), asked.sampling
        if sampling.allowed_token_ids:
            body["allowed_token_ids"] = sampling.allowed_token_ids
        if sampling.logprobs >= 0:
            body["return_tokens_as_token_ids"] = True
        return body

    def prefill_body(self, asked: EngineCompletion, name: str) -> dict[str, Any]:
        # Its token goes to nobody. But older releases keep KV for another engine only where the length has ended an
        # answer, so nothing else may end it.
        drawn = msgspec.structs.replace(
            asked.sampling, ignore_eos=True, stop_token_ids=[], min_tokens=0, logprobs=-1
        )
        return self.body(asked._replace(max_tokens=len(asked.known) + 1, sampling=drawn)) | {
            # Lines of a stream have no kv_transfer_params.
            "stream": False,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            }
            | ({KV_ORDER: name} if name else {}),
        }

    def place_after(self, said: str) -> dict[str, Any]:
        return named_place(said)

    def kv_params(self, place: dict[str, Any], name: str) -> dict[str, Any]:
        return place | {KV_ORDER: name}

    def decode_fields(self, kv_params: dict[str, Any]) -> dict[str, Any] | None:
        if BOOTSTRAP_ROOM in kv_params:
            return None
        return {"kv_transfer_params": kv_params} if kv_params else {}


class SglangWords(EngineWords):
    """SGLang's. Of `logprobs` it gives those of the drawn tokens: others it names by their text, which several may
    have.

    A prefill engine computes a prompt when a decode engine has asked it for the KV of a room, at its bootstrap server,
    and draws the first token, which the decode engine gets with the KV. Both are sent the same request.

    `halved`: the engine does one half of each request. `host` and `bootstrap_port`: of a prefill engine's server, as
    decode engines reach it.
    """

    both_at_once = True

    def __init__(self, model: str, *, halved: bool = False, host: str = "", bootstrap_port: int = 0) -> None:
        super().__init__(model)
        self._halved = halved
        if bootstrap_port:
            self.place = {BOOTSTRAP_HOST: host, BOOTSTRAP_PORT: bootstrap_port}

    def body(self, asked: EngineCompletion) -> dict[str, Any]:
        body, top_k = super().body(asked), asked.sampling.top_k
        # No limit is -1 there, and 0 a mistake.
        body["top_k"] = top_k if top_k > 0 else -1
        return body

    def alone(self, name: str) -> dict[str, Any]:
        if not self._halved:
            return {}
        return {BOOTSTRAP_HOST: _NOBODY, BOOTSTRAP_ROOM: _room(name)}

    def prefill_body(self, asked: EngineCompletion, name: str) -> dict[str, Any]:
        return self.body(asked) | self.kv_params(self.place, name) | {"stream": False}

    def place_after(self, said: str) -> dict[str, Any]:
        return self.place

    def kv_params(self, place: dict[str, Any], name: str) -> dict[str, Any]:
        return place | {BOOTSTRAP_ROOM: _room(name)}

    def decode_fields(self, kv_params: dict[str, Any]) -> dict[str, Any] | None:
        wanted = ((BOOTSTRAP_HOST, str), (BOOTSTRAP_PORT, int), (BOOTSTRAP_ROOM, int))
        if not all(isinstance(kv_params.get(field), kind) for field, kind in wanted):
            return None
        return {field: kv_params[field] for field, _ in wanted}

    def check(self, sampling: Sampling) -> None:
        super().check(sampling)
        if sampling.allowed_token_ids:
            raise lacking("allowed_token_ids", "allowed_token_ids")
        if sampling.logprobs > 0:
            raise lacking("log probabilities of other tokens than the drawn one (top_logprobs)", "logprobs")


def _room(name: str) -> int:
    """A number for a name: 63 bits, as SGLang's router draws them. 0 is no room there."""
    return (xxhash.xxh3_64_intdigest(name.encode()) >> 1) or 1
