"""Configuration of a frontend process."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from msgspec import field

from halfmoon.bus.edge.http_server import HttpLimits
from halfmoon.bus.wire import is_subject
from halfmoon.schemas import subjects
from halfmoon.schemas.numbers import SECOND_NS
from halfmoon.workers.frontend.options import FrontendOptions


class FrontendConfig(FrontendOptions, frozen=True, kw_only=True):
    """Read once, passed down; a port of -1: that edge is not there. Raises ValueError when two fields contradict."""

    #: One token of a NATS subject; two frontends of a cluster must differ.
    frontend_id: str
    #: The model's name in the API, and other names that mean it too.
    model: str
    model_aliases: tuple[str, ...] = ()
    #: Serve the NATS API (`halfmoon.v1...`).
    nats_api: bool = True
    #: Serve HTTPS.
    http_tls: ssl.SSLContext | None = None
    http_limits: HttpLimits = HttpLimits()
    #: Serve gateways by TLS: the key and the certificates, PEM.
    ext_proc_tls: tuple[bytes, bytes] | None = None
    #: Key -> tenant that its requests belong to (`tenants.ALL_TENANTS`: as the request says). Empty: HTTP asks for no
    #: key. Clients on NATS are known by their NATS credentials.
    api_keys: Mapping[str, str] = field(default_factory=dict)
    #: Goes into every block key, so that keys of two clusters never meet.
    cluster_secret: str = ""
    #: Prompt and answer together, of one request.
    context_tokens: int = 8192
    #: What the model's makers draw by, for requests that do not say; by name, of `requests.MODEL_DEFAULTS`.
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    #: Of a generate request that does not say `max_tokens` (cut to the context); a chat may take all the context.
    max_tokens_default: int = 256
    #: Of an OpenAI completion that does not say; 16 is OpenAI's.
    completion_max_tokens_default: int = 16
    heartbeat_ns: int = SECOND_NS
    #: After this silence the decode worker is asked whether something got lost.
    resend_after_ns: int = 2 * SECOND_NS
    #: A request that no order was heard of for so long is named in the heartbeats: was it refused?
    silent_after_ns: int = 5 * SECOND_NS
    #: How often a client on NATS is made sure of.
    alive_ns: int = SECOND_NS * 2 // 5
    #: A fact that is not stored for so long: the log takes nothing, and new requests are refused until it does.
    unstored_ns_max: int = 10 * SECOND_NS
    #: Where nats-server keeps the log, when that is on this machine: less than `log_free_mib_min` free there, and new
    #: requests are refused before the disk is full. "": not known.
    log_directory: str = ""
    #: When stopping: how long open requests may take to finish.
    drain_ns_max: int = 30 * SECOND_NS

    def __post_init__(self) -> None:
        if self.context_tokens < 2:
            raise ValueError("context_tokens must be at least 2: one of prompt, one of answer")
        if self.silence_s * SECOND_NS <= 2 * self.resend_after_ns:
            raise ValueError("silence_s must be more than twice resend_after_ns")
        if self.sse_comment_s < 0:
            raise ValueError("sse_comment_s must be at least 0")
        if self.unstored_ns_max < SECOND_NS or self.log_free_mib_min < 0:
            raise ValueError("unstored_ns_max must be at least a second, log_free_mib_min at least 0")
        if self.open_requests_max < 1:
            raise ValueError("open_requests_max must be at least 1")
        for origin in names(self.allowed_origins):
            scheme, _, place = origin.partition("://")
            if origin != "*" and (scheme not in ("http", "https") or not place or "/" in place):
                raise ValueError(f"allowed_origins: {origin!r} is no origin, like https://chat.example:8443")
        for prefix in self.inbox_prefixes:
            ours = f"{subjects.ROOT}."
            if not is_subject(f"{prefix}x") or prefix.startswith(("$", ours)) or ours.startswith(prefix):
                raise ValueError(f"client_inboxes: {prefix!r} is not how the inboxes of clients begin")

    def __repr__(self) -> str:
        """Without the keys and the secret."""
        return f"FrontendConfig({self.frontend_id})"

    @property
    def inbox_prefixes(self) -> tuple[str, ...]:
        return tuple(self.client_inboxes.split(","))


def names(text: str) -> tuple[str, ...]:
    """The names in an option's text, which are separated by commas."""
    return tuple(name for each in text.split(",") if (name := each.strip()))
