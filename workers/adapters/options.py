"""Options of an adapter of another's engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from halfmoon.schemas.types import option

#: The engines that have an adapter, and what they are called.
ENGINE_TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
#: The default port of vLLM and SGLang for KV events.
EVENTS_PORT = 5557
#: vLLM's defaults, which does not tell its own.
BATCH_MAX, TOKEN_BUDGET = 256, 2048


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All options of an adapter. Names that begin with `engine` are the engine's own."""

    url: Annotated[str, option("where the engine listens: http://127.0.0.1:8000")]
    id: Annotated[str, option("name of the worker, and of its node")]
    role: Annotated[
        Literal["prefill", "decode", "mixed"],
        option(
            "mixed: it computes prompts and answers; prefill: prompts, whose KV an engine of role decode gets by "
            "itself (vLLM's kv_transfer_params, SGLang's --disaggregation-mode)"
        ),
    ] = "mixed"
    events: Annotated[
        str,
        option(
            f"its KV events (ZMQ); default: as the engine says, or port {EVENTS_PORT} of its host", "ADDRESS"
        ),
    ] = ""
    events_replay: Annotated[str, option("where it answers requests for past ones", "ADDRESS")] = ""
    events_topic: Annotated[str, option("first frame of each of them", "TOPIC")] = ""
    engine_model: Annotated[str, option("the model's name there; default: its first", "NAME")] = ""
    engine_key_file: Annotated[str, option("its --api-key", "FILE")] = ""
    engine_reached_at: Annotated[
        str,
        option(
            "where gateways (--ext-proc-port) and, of a prefill SGLang, decode engines reach it; default: where "
            "--url says",
            "HOST:PORT",
        ),
    ] = ""
    engine_batch_max: Annotated[
        int, option(f"its --max-num-seqs; 0: as the engine says, or {BATCH_MAX}", ge=0)
    ] = 0
    engine_token_budget: Annotated[
        int, option(f"its --max-num-batched-tokens; 0: as the engine says, or {TOKEN_BUDGET}", ge=0)
    ] = 0
    engine_wait_s: Annotated[float, option("how long it may take to answer, at the start")] = 600.0
