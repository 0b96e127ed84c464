"""Options of a frontend."""

from __future__ import annotations

import socket
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from halfmoon.schemas.types import option


class EdgeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where clients and gateways ask."""

    http_host: str = "127.0.0.1"
    http_port: Annotated[int, option("0: any free one")] = 8000
    ext_proc_port: Annotated[
        int,
        option(
            "where gateways (Envoy's ext_proc) ask which engine a request is for; 0: any free one; -1: nowhere"
        ),
    ] = -1
    api_keys_file: Annotated[
        str, option("keys of HTTP clients, one a line: KEY, TENANT KEY, or * KEY for all tenants", "FILE")
    ] = ""
    http_allowed_hosts: Annotated[
        str,
        option(
            "names that clients may ask for, by commas; *: any (where it listens on loopback: loopback's)",
            "NAMES",
        ),
    ] = ""
    allowed_origins: Annotated[
        str,
        option(
            "pages that may ask from a browser (CORS), by commas: https://chat.example; *: any; default: "
            "none",
            "ORIGINS",
        ),
    ] = ""
    ssl_certfile: Annotated[str, option("serve HTTPS with this certificate", "FILE")] = ""
    ssl_keyfile: Annotated[str, option("its key, where it is a file of its own", "FILE")] = ""
    http_connections_max: Annotated[int, Meta(ge=1)] = 8192
    http_connections_per_address_max: Annotated[int, option("a proxy is one address", ge=1)] = 4096
    http_head_s: Annotated[float, option("how long a request's head may take to come", gt=0)] = 10.0
    http_body_s: Annotated[float, option("and its body after that", gt=0)] = 30.0


class FrontendOptions(EdgeOptions, frozen=True, kw_only=True):
    """Options that `halfmoon up` takes as well."""

    title: ClassVar[str] = "frontend"

    served_model_name: Annotated[
        tuple[str, ...],
        option(
            "the model's name in the API; repeatable: the first is in answers, all are understood", "NAME"
        ),
    ] = ()
    max_model_len: Annotated[int, option("prompt and answer together, at most; 0: the model's context")] = 0
    generation_config: Annotated[
        str,
        option(
            "temperature, top_p, top_k, min_p and repetition_penalty of requests that do not say: auto "
            "(the model's generation_config.json), vllm (none), or a folder with such a file",
            "SOURCE",
        ),
    ] = "auto"
    open_requests_max: Annotated[int, option("beyond this, new requests get 429 `queue_full`")] = 4096
    silence_s: Annotated[
        float,
        option(
            "a request that gets no token for so long fails; twice its TTFT objective, before its first one"
        ),
    ] = 120.0
    #: Proxies end what is silent for 30 to 60 s, and a prompt may take longer; 15 s is what the standard of server-sent
    #: events advises.
    sse_comment_s: Annotated[
        float,
        option(
            "a stream that has nothing to say for so long sends a comment, so that no proxy ends it; 0: never"
        ),
    ] = 15.0
    similar_tenants: Annotated[
        str,
        option(
            "tenants, by commas, of whose requests KV of similar prompts may stand in (kv.similar) unless they "
            "say otherwise; *: all; default: none",
            "TENANTS",
        ),
    ] = ""
    log_free_mib_min: Annotated[int, option("less disk free for the log: no new requests")] = 64
    client_inboxes: Annotated[
        str,
        option(
            "how reply subjects of NATS clients begin, separated by commas; requests with others are dropped",
            "PREFIXES",
        ),
    ] = "_INBOX."


class FrontendProcessOptions(FrontendOptions, frozen=True, kw_only=True):
    """All options of a frontend."""

    id: str = msgspec.field(default_factory=lambda: f"frontend-{socket.gethostname()}")
    log_dir: Annotated[str, option("where nats-server keeps the log, if on this machine", "DIR")] = ""
