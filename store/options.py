"""Options of a store agent."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from halfmoon.schemas.events import TransportName
from halfmoon.schemas.types import EncryptionOption, option
from halfmoon.store.pool.eviction import EvictionName


class StoreOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that `halfmoon up` takes as well, for all nodes."""

    title: ClassVar[str] = "store"

    pool_mib: Annotated[int, option("size of the node's KV pool in shared memory")] = 512
    eviction: Annotated[EvictionName, option("which block goes first")] = "s3fifo"
    ssd: Annotated[str, option("SSD tier: a file, or a directory to make it in", "PATH")] = ""
    ssd_bytes: Annotated[int, option("size of that file", "N")] = 16 << 30
    ssd_hits: Annotated[int, option("only blocks that were hit so often", "K")] = 0
    kv_events: Annotated[
        str,
        option(
            "publish KV events (ZMQ, as vLLM does); `up`: of the first node, the others next to it", "ADDRESS"
        ),
    ] = ""
    kv_events_replay: Annotated[str, option("answer requests for past ones", "ADDRESS")] = ""
    kv_events_topic: Annotated[str, option("first frame of each of their messages", "TOPIC")] = ""
    kv_events_tokens: Annotated[
        bool,
        option(
            "they tell tokens and parents of blocks: routers need them, and whoever reads them reads all "
            "prompts"
        ),
    ] = False
    #: KV events name every block and have no authentication: both addresses are on loopback or are no sockets of a
    #: network, unless this option opens them to everybody on the network.
    kv_events_public: Annotated[
        bool, option("let KV events, which ask for no key, be read from other hosts")
    ] = False
    quota: Annotated[
        tuple[Annotated[str, Meta(pattern="^.+=[0-9]+$")], ...],
        option("of a pool; repeatable", "TENANT=BYTES"),
    ] = ()
    bind: Annotated[str, option("address of the TCP data plane; with several NICs: A,B")] = "127.0.0.1"
    stripes: Annotated[int, option("slices of a transfer at once; 0: by the number of cores")] = 0
    topology: Annotated[str, option("TOML: NUMA nodes of memory and NICs, over sysfs", "FILE")] = ""
    #: -1: no TCP at all (a single host).
    data_port: Annotated[int, option("its port (`up`: of the first node); 0: any free one")] = 0
    advertise: Annotated[str, option("address that other nodes use, when it is not --bind")] = ""
    transport: Annotated[
        Literal["auto", TransportName],
        option("auto: shared memory within a host, between hosts RDMA where there is some, else TCP"),
    ] = "auto"
    rdma: Annotated[str, option("RDMA port; auto, or off", "DEVICE[:PORT[:GID]]")] = "auto"
    encryption: EncryptionOption = "auto"


class StoreProcessOptions(StoreOptions, frozen=True, kw_only=True):
    """All options of a store agent."""

    node: Annotated[str, option("name of the node")]
    block_bytes: Annotated[
        int, option("hold another engine's blocks of N bytes, a multiple of 4096; no model is read then", "N")
    ] = 0
    block_layers: Annotated[
        int,
        option("with --block-bytes: each block has so many layers, of equal length, which move one by one"),
    ] = 1
