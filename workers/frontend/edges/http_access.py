"""Refuses requests of web pages that are not ours, before anybody looks at a body.

A browser sends requests for any page that it shows. A page can have a name point at 127.0.0.1 (DNS rebinding: the Host
is then the page's own), or post forms and texts across origins without asking (the Origin is then the page's). So a
frontend on loopback is asked by a loopback name only, no foreign Origin is answered anywhere, and a body must be
declared to be JSON, which a browser does not send across origins unless it is allowed to.
"""

from __future__ import annotations

import functools
import ipaddress
import re

from aiohttp import web

from halfmoon.bus.addresses import is_address
from halfmoon.schemas.api.errors import ApiError

OPTION = "--http-allowed-hosts"
#: Headers of an answer that a page may read.
_EXPOSED = "x-request-id, retry-after, retry-after-ms, x-should-retry"


class Origins:
    """`check` raises ApiError. `allowed`: names beside those that always are; with "*" any is."""

    def __init__(self, listens_at: str, allowed: tuple[str, ...], pages: tuple[str, ...] = ()) -> None:
        """`pages`: origins whose pages may ask."""
        self._pages = {page.lower() for page in pages}
        self._any = "*" in allowed
        self._allowed = {name.lower() for name in allowed}
        self._local = _is_loopback(listens_at)
        #: A frontend for other machines is asked by names that it cannot know: its operator may list them.
        self._names_matter = self._local or bool(allowed)

    def check(self, request: web.BaseRequest) -> None:
        """Raises ApiError 400, 403."""
        hosts = request.headers.getall("host", [])
        if len(hosts) > 1 or (not hosts and request.version >= (1, 1)):
            raise ApiError(400, "host: exactly one", code="bad_request")
        host = hosts[0].strip().lower() if hosts else ""
        if hosts and not self._any and self._names_matter and not self._is_ours(host):
            raise ApiError(
                403, f"host: not a name of this frontend ({OPTION} adds names)", code="foreign_host"
            )
        origin = request.headers.get("origin")
        if origin is not None and not self._any and not self._is_known(origin.strip().lower(), host):
            raise ApiError(
                403, f"origin: a page of another site ({OPTION} adds names)", code="foreign_origin"
            )
        site, mode = request.headers.get("sec-fetch-site", ""), request.headers.get("sec-fetch-mode", "")
        if site == "cross-site" and origin is None and not (mode == "navigate" and request.method == "GET"):
            raise ApiError(403, "sec-fetch-site: a page of another site", code="foreign_origin")

    def cors_headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Headers that let a page of an allowed origin read the answer; nothing where no page was allowed."""
        origin = request.headers.get("origin", "").strip()
        if not self._pages or not origin:
            return {}
        if not self._is_page(origin.lower()):
            return {"vary": "origin"}
        return {
            "access-control-allow-origin": origin,
            "access-control-expose-headers": _EXPOSED,
            "vary": "origin",
        }

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a browser that asks whether a page may ask; None: it is no such request, or of no such page."""
        asked = request.headers.get("access-control-request-method")
        origin = request.headers.get("origin", "").strip().lower()
        if request.method != "OPTIONS" or asked is None or not self._is_page(origin):
            return None
        headers = request.headers.get("access-control-request-headers", "")
        if not re.fullmatch(r"[A-Za-z0-9 ,_-]{0,1024}", headers):
            return None
        return web.Response(
            status=204,
            headers={
                "access-control-allow-methods": "GET, POST, OPTIONS",
                "access-control-allow-headers": headers,
                "access-control-max-age": "600",
            },
        )

    def _is_page(self, origin: str) -> bool:
        return bool(origin) and ("*" in self._pages or origin in self._pages)

    def _is_known(self, origin: str, host: str) -> bool:
        return self._is_page(origin) or self._is_same(origin, host)

    def _is_ours(self, host: str) -> bool:
        name = _name(host)
        if name in self._allowed or host in self._allowed or _is_loopback(name):
            return True
        return not self._local and is_address(name)  # an address cannot be made to point elsewhere

    def _is_same(self, origin: str, host: str) -> bool:
        scheme, _, place = origin.partition("://")
        if scheme not in ("http", "https") or not place:
            return False
        return place == host or place in self._allowed or _name(place) in self._allowed


def check_json(request: web.BaseRequest) -> None:
    """Raises ApiError 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "content-type: application/json", code="unsupported_media_type")


def _name(host: str) -> str:
    """Without the port: "localhost:8000", "[::1]:8000"."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


@functools.lru_cache(256)
def _is_loopback(name: str) -> bool:
    name = name.rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
