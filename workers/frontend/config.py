"""Configuration of a frontend process."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from halfmoon.bus.edge.http_server import HttpLimits
from halfmoon.bus.wire import CLIENT_INBOXES, is_subject
from halfmoon.schemas import subjects
from halfmoon.schemas.numbers import SECOND_NS


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Read once, passed down. Raises ValueError when two fields contradict each other."""

    #: One token of a NATS subject; two frontends of a cluster must differ.
    frontend_id: str
    #: The model's name in the API, and other names that mean it too.
    model: str
    model_aliases: tuple[str, ...] = ()
    http_host: str = "127.0.0.1"
    #: 0: any free port; -1: no HTTP.
    http_port: int = 8000
    #: Serve the NATS API (`halfmoon.v1...`).
    nats_api: bool = True
    #: How the reply subjects of clients begin; a request with another is dropped.
    client_inboxes: tuple[str, ...] = CLIENT_INBOXES
    #: Names, or names with ports, that HTTP clients may ask for beside the loopback's; "*": any. See `Origins`.
    http_allowed_hosts: tuple[str, ...] = ()
    #: Origins whose pages may ask from a browser (CORS), `scheme://host[:port]`; "*": any. Empty: none but our own.
    allowed_origins: tuple[str, ...] = ()
    #: Serve HTTPS.
    http_tls: ssl.SSLContext | None = field(default=None, repr=False)
    http_limits: HttpLimits = field(default_factory=HttpLimits)
    #: Key -> tenant that its requests belong to (`tenants.ALL_TENANTS`: as the request says). Empty: HTTP asks for no
    #: key. Clients on NATS are known by their NATS credentials.
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    #: Goes into every block key, so that keys of two clusters never meet.
    cluster_secret: str = field(default="", repr=False)
    #: Prompt and answer together, of one request.
    context_tokens: int = 8192
    #: What the model's makers draw by, for requests that do not say; by name, of `requests.MODEL_DEFAULTS`.
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    #: Of a generate request that does not say `max_tokens` (cut to the context); a chat may take all the context.
    max_tokens_default: int = 256
    #: Of an OpenAI completion that does not say; 16 is OpenAI's.
    completion_max_tokens_default: int = 16
    #: Beyond this, new requests get 429 `queue_full` before they are looked at.
    open_requests_max: int = 4096
    heartbeat_ns: int = SECOND_NS
    #: After this silence the decode worker is asked whether something got lost.
    resend_after_ns: int = 2 * SECOND_NS
    #: A request that no order was heard of for so long is named in the heartbeats: was it refused?
    silent_after_ns: int = 5 * SECOND_NS
    #: How often a client on NATS is made sure of.
    alive_ns: int = SECOND_NS * 2 // 5
    #: A request that gets no token and no order for so long is failed, even if its worker knows it.
    silence_ns_max: int = 120 * SECOND_NS
    #: A stream over HTTP that has nothing to say for so long says so in a comment; 0: never. Proxies end what is silent
    #: for 30 to 60 s, and a prompt may take longer; 15 s is what the standard of server-sent events advises.
    comment_ns: int = 15 * SECOND_NS
    #: A fact that is not stored for so long: the log takes nothing, and new requests are refused until it does.
    unstored_ns_max: int = 10 * SECOND_NS
    #: Where nats-server keeps the log, when that is on this machine: less free there than `log_free_bytes_min`, and
    #: new requests are refused before the disk is full. "": not known.
    log_directory: str = ""
    log_free_bytes_min: int = 64 << 20
    #: When stopping: how long open requests may take to finish.
    drain_ns_max: int = 30 * SECOND_NS

    def __post_init__(self) -> None:
        if self.context_tokens < 2:
            raise ValueError("context_tokens must be at least 2: one of prompt, one of answer")
        if self.silence_ns_max <= 2 * self.resend_after_ns:
            raise ValueError("silence_ns_max must be more than twice resend_after_ns")
        if self.comment_ns < 0:
            raise ValueError("comment_ns must be at least 0")
        if self.unstored_ns_max < SECOND_NS or self.log_free_bytes_min < 0:
            raise ValueError("unstored_ns_max must be at least a second, log_free_bytes_min at least 0")
        if self.open_requests_max < 1:
            raise ValueError("open_requests_max must be at least 1")
        for origin in self.allowed_origins:
            scheme, _, place = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not place or "/" in place):
                raise ValueError(f"allowed_origins: {origin!r} is no origin, like https://chat.example:8443")
        for prefix in self.client_inboxes:
            ours = f"{subjects.ROOT}."
            if not is_subject(f"{prefix}x") or prefix.startswith(("$", ours)) or ours.startswith(prefix):
                raise ValueError(f"client_inboxes: {prefix!r} is not how the inboxes of clients begin")
