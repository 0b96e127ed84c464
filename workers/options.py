"""Options of a worker process. Most are one role's; a worker of another takes no notice of them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from halfmoon.schemas.policy import ElasticMode
from halfmoon.schemas.types import EncryptionOption, option

#: Each group has channels of its own.
DECODE_GROUPS_MAX = 64
PREFILL_GROUP_MAX = 64
AUTO: Literal["auto"] = "auto"


def elastic_mode(text: str) -> str:
    """The mode that is meant; containers have switched it by 1 and 0."""
    word = text.lower()
    return {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}.get(word, word)


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that conductors and workers both read."""

    title: ClassVar[str] = "pools"

    elastic: Annotated[
        ElasticMode,
        Meta(
            description="prefill and decode workers take each other's role: when halfmoon role says so, and status "
            "says when the load asks for it (advise), or also by themselves, by load (on, or no value)",
            extra={"type": elastic_mode, "nargs": "?", "const": "on", "metavar": "off|advise|on"},
        ),
    ] = "off"
    prefill_group: Annotated[
        int,
        option(
            "so many idle prefill workers compute a long prompt together, each some layers, where that "
            "pays; 1: each computes its own alone",
            "N",
            ge=1,
            le=PREFILL_GROUP_MAX,
        ),
    ] = 1


class WorkerOptions(PoolOptions, frozen=True, kw_only=True):
    """Options that `halfmoon up` takes as well, for all workers."""

    title: ClassVar[str] = "worker"

    kv_blocks: Annotated[int, option("blocks of the worker's own cache; 0: by its role")] = 0
    batch_max: Annotated[int, option("sequences in one decode batch")] = 16
    threads: Annotated[int, option("torch threads", ge=1)] = 1
    attention_kernel: Literal["auto", "sdpa", "flash"] = "auto"
    chunk_tokens: Annotated[int, option("of a prefill chunk; exact: blocks that divide a segment")] = 1024
    no_stream_layers: Annotated[bool, option("push KV after the last layer, to compare")] = False
    lend: Annotated[
        bool,
        option(
            "decode: hold parts of requests that are too long for another worker's cache, and have them held"
        ),
    ] = False
    decode_attention: Annotated[
        Literal["auto", "local", "remote"],
        option(
            "decode: keep KV itself, or at attention workers; auto: local, in `up` with --attention remote"
        ),
    ] = "auto"
    decode_groups: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=DECODE_GROUPS_MAX)],
        option(
            "decode: with remote attention, so many parts of a batch are computed in turn, one while "
            "others attend; auto: as many as make a step short, by the measured cost",
            "N",
        ),
    ] = AUTO
    token_budget: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1)],
        option(
            "mixed: tokens of prompts and answers in one iteration; auto: as many as keep the TBT objective "
            "by the profile",
            "N",
        ),
    ] = AUTO
    channel_bind: Annotated[
        str, option('where it listens for other workers\' channels; "": for workers of this host alone')
    ] = "127.0.0.1"
    channel_port: Annotated[int, option("its port (`up`: of the first node); 0: any free one")] = 0
    channel_advertise: Annotated[str, option("address that others use, when it is not --channel-bind")] = ""
    encryption: EncryptionOption = "auto"


class WorkerProcessOptions(WorkerOptions, frozen=True, kw_only=True):
    """All options of a worker; `halfmoon up` decides on the further ones."""

    node: Annotated[str, option("name of the node whose pool it maps")]
    id: Annotated[str, option("default: the node's name")] = ""
    attention_parts: Annotated[
        int,
        option("attention: hold an equal part of the KV heads, of N, by the number that the id ends in", "N"),
    ] = 1
    attention_segments: Annotated[
        bool,
        option(
            "attention: also hold part of a sequence, in whole segments, where no such worker has room "
            "for all"
        ),
    ] = False
    iteration_ms: Annotated[
        int, option("mixed: time between tokens that an iteration keeps, where --token-budget is auto")
    ] = 1_000
