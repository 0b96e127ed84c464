"""Options of an adapter of another's engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

#: Where vLLM publishes KV events unless it is told otherwise.
EVENTS_PORT = 5557


class AdapterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All options of an adapter. What begins with `engine` is the engine's own."""

    url: Annotated[str, Meta(description="where the engine listens: http://127.0.0.1:8000")]
    id: Annotated[str, Meta(description="name of the worker, and of its node")]
    role: Annotated[
        Literal["prefill", "decode", "mixed"],
        Meta(description="mixed: it computes prompts and answers; other roles are not built for engines"),
    ] = "mixed"
    events: Annotated[
        str,
        Meta(
            description=f"its KV events (ZMQ); default: as the engine says, or port {EVENTS_PORT} of its host",
            extra={"metavar": "ADDRESS"},
        ),
    ] = ""
    events_replay: Annotated[
        str, Meta(description="where it answers requests for past ones", extra={"metavar": "ADDRESS"})
    ] = ""
    events_topic: Annotated[
        str, Meta(description="first frame of each of them", extra={"metavar": "TOPIC"})
    ] = ""
    engine_model: Annotated[
        str, Meta(description="the model's name there; default: its first", extra={"metavar": "NAME"})
    ] = ""
    engine_key_file: Annotated[str, Meta(description="its --api-key", extra={"metavar": "FILE"})] = ""
    engine_batch_max: Annotated[int, Meta(description="its --max-num-seqs", ge=1)] = 256
    engine_token_budget: Annotated[int, Meta(description="its --max-num-batched-tokens", ge=1)] = 2048
    engine_wait_s: Annotated[float, Meta(description="how long it may take to answer, at the start")] = 600.0
