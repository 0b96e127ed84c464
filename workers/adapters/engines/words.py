"""One order in the words of an engine's `/v1/completions`: vLLM's, and SGLang's, which has most of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from halfmoon.schemas.kv import KV_ORDER
from halfmoon.schemas.sampling import Sampling


class Unanswerable(ValueError):
    """The engine lacks something that a request asks for; the text names the field. `param`: where it is one alone."""

    def __init__(self, text: str, param: str) -> None:
        super().__init__(text)
        self.param = param


class EngineWords:
    """As far as they are alike. `model`: its name at the engine. `salt` keeps blocks of a tenant apart; `known` are
    tokens of the answer that the client has already, and are part of the prompt.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    def body(
        self, salt: str, prompt: Sequence[int], known: Sequence[int], max_tokens: int, sampling: Sampling
    ) -> dict[str, Any]:
        """The request's body. Raises Unanswerable."""
        self.check(sampling)
        body: dict[str, Any] = {
            "prompt": [*prompt, *known],
            "max_tokens": max_tokens - len(known),
            "stream": True,
            **self.forwarded(salt),
            # All are named: the engine takes an unnamed one from the model's own generation_config.json.
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "min_tokens": max(0, sampling.min_tokens - len(known)),
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

    def body(
        self, salt: str, prompt: Sequence[int], known: Sequence[int], max_tokens: int, sampling: Sampling
    ) -> dict[str, Any]:
        body = super().body(salt, prompt, known, max_tokens, sampling)
        if sampling.allowed_token_ids:
            body["allowed_token_ids"] = sampling.allowed_token_ids
        if sampling.logprobs >= 0:
            body["return_tokens_as_token_ids"] = True
        return body

    def prefill_body(
        self, salt: str, prompt: Sequence[int], known: Sequence[int], sampling: Sampling, kv_name: str
    ) -> dict[str, Any]:
        """The request that has the engine compute the prompt and keep its KV for another one, under this name where it
        knows names ("": its own). Raises Unanswerable.
        """
        # Its token goes to nobody. But older releases keep KV for another engine only where the length has ended an
        # answer, so nothing else may end it.
        drawn = msgspec.structs.replace(
            sampling, ignore_eos=True, stop_token_ids=[], min_tokens=0, logprobs=-1
        )
        return self.body(salt, prompt, known, len(known) + 1, drawn) | {
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
            | ({KV_ORDER: kv_name} if kv_name else {}),
        }


class SglangWords(EngineWords):
    """SGLang's. Of `logprobs` it gives those of the drawn tokens: others it names by their text, which several may
    have.
    """

    def body(
        self, salt: str, prompt: Sequence[int], known: Sequence[int], max_tokens: int, sampling: Sampling
    ) -> dict[str, Any]:
        body = super().body(salt, prompt, known, max_tokens, sampling)
        # No limit is -1 there, and 0 a mistake.
        body["top_k"] = sampling.top_k if sampling.top_k > 0 else -1
        return body

    def check(self, sampling: Sampling) -> None:
        super().check(sampling)
        if sampling.allowed_token_ids:
            raise lacking("allowed_token_ids", "allowed_token_ids")
        if sampling.logprobs > 0:
            raise lacking("log probabilities of other tokens than the drawn one (top_logprobs)", "logprobs")
